// Twenty programs before and after one change, the second set for judging `wattcast lab tune` from `ncu --set full`
// (measure_full_set.py --set eighth). Algorithms are others than in the sets before. Every kernel takes ``a`` (n floats
// in [0, 1)), ``b`` (the same numbers in double precision), an output, room for what passes hand on, and n.
// eighth_set_pairs.csv says which kernels make a pair.

typedef unsigned int word;
#define ARGUMENTS const float *a, const double *b, float *out, float *room, int n
#define KERNEL(name) extern "C" __global__ void name(ARGUMENTS)
#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

__device__ __forceinline__ word scramble(word x)
{
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Input: random numbers in both precisions. Not measured.
KERNEL(fill_inputs)
{
  const float x = (float)(scramble(INDEX) >> 8) * 5.9604645e-8f;
  ((float *)a)[INDEX] = x;
  ((double *)b)[INDEX] = x;
}

// sparse: a sparse matrix with 16 entries a row times a vector of 65536, one thread a row; the entries of a row lie
// together, or those of one place in all rows do. 1048576 rows.
KERNEL(sparse__prepare)
{
  const int rows = n / 16;
  for (int k = 0; k < 16; ++k) room[k * rows + INDEX] = a[16 * (size_t)INDEX + k];
}
__device__ __forceinline__ int sparse_column(word row, int k) { return (row + (k - 8) * (k * 37 + 11)) & 65535; }
KERNEL(sparse__before)
{
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < 16; ++k) sum += a[16 * (size_t)INDEX + k] * a[sparse_column(INDEX, k)];
  out[INDEX] = sum;
}
KERNEL(sparse__coalescing)
{
  const int rows = n / 16;
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < 16; ++k) sum += room[k * rows + INDEX] * a[sparse_column(INDEX, k)];
  out[INDEX] = sum;
}

// complex: a transposition of 4096 x 4096 complex numbers through a tile, with a pitch of 32 or of 33.
template <int PITCH> __device__ __forceinline__ void complex_tile(ARGUMENTS)
{
  __shared__ float2 tile[32 * PITCH];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int left = blockIdx.x % 128 * 32, top = blockIdx.x / 128 * 32;
  const float2 *from = (const float2 *)a;
#pragma unroll
  for (int k = 0; k < 32; k += 8) tile[(y + k) * PITCH + x] = from[(top + y + k) * 4096 + left + x];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 32; k += 8) {
    const float2 value = tile[x * PITCH + y + k];
    ((float2 *)out)[(left + y + k) * 4096 + top + x] = make_float2(value.x, -value.y);
  }
}
KERNEL(complex__before) { complex_tile<32>(a, b, out, room, n); }
KERNEL(complex__bank_conflicts) { complex_tile<33>(a, b, out, room, n); }

// active: an eighth of the elements, scattered, needs 48 steps; every thread its own element, or a block's active ones
// are listed first and handed to neighbouring threads.
__device__ __forceinline__ float relax(float x)
{
  float y = 0.5f;
#pragma unroll 4
  for (int k = 0; k < 48; ++k) y = y * (1.5f - 0.5f * (x + 1.0f) * y * y);
  return y;
}
KERNEL(active__before)
{
  const float x = a[INDEX];
  out[INDEX] = x < 0.125f ? relax(x) : x;
}
KERNEL(active__divergence)
{
  __shared__ float values[1024];
  __shared__ word places[1024];
  __shared__ word count;
  if (threadIdx.x == 0) count = 0u;
  __syncthreads();
  const word first = blockIdx.x * 1024;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const word place = k * 256 + threadIdx.x;
    const float x = a[first + place];
    if (x < 0.125f) {
      const word slot = atomicAdd(&count, 1u);
      values[slot] = x;
      places[slot] = place;
    } else {
      out[first + place] = x;
    }
  }
  __syncthreads();
  for (word slot = threadIdx.x; slot < count; slot += 256) out[first + places[slot]] = relax(values[slot]);
}

// distances: great circles between neighbouring pairs of places, in double precision or in single.
__device__ __forceinline__ double sine(double x) { return sin(x); }
__device__ __forceinline__ float sine(float x) { return sinf(x); }
__device__ __forceinline__ double cosine(double x) { return cos(x); }
__device__ __forceinline__ float cosine(float x) { return cosf(x); }
__device__ __forceinline__ double arc_sine(double x) { return asin(x); }
__device__ __forceinline__ float arc_sine(float x) { return asinf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
template <typename T> __device__ __forceinline__ float distance(float u, float v)
{
  const T north = (T)0.3 + (T)u, other = (T)0.5 * (T)v - (T)0.6;
  const T rise = sine((T)0.5 * (north - other)), turn = sine((T)0.5 * ((T)u * (T)v + (T)0.4));
  const T half = rise * rise + cosine(north) * cosine(other) * turn * turn;
  return (float)((T)12742 * arc_sine(root(half)));
}
KERNEL(distances__before) { out[INDEX] = distance<double>(a[INDEX], a[INDEX ^ 1]); }
KERNEL(distances__fp64) { out[INDEX] = distance<float>(a[INDEX], a[INDEX ^ 1]); }

// octaves: a sum of saw teeth of 24 frequencies; the whole part is rounded away by an instruction, or by two additions.
template <bool BY_ADDING> __device__ __forceinline__ void octaves(ARGUMENTS)
{
  const float x = a[INDEX] + 1.0f;
  float sum = 0.0f;
#pragma unroll
  for (int k = 1; k <= 24; ++k) {
    const float phase = x * (1.37f * k);
    const float whole = BY_ADDING ? __fadd_rn(__fadd_rn(phase, 12582912.0f), -12582912.0f) : rintf(phase);
    const float part = phase - whole;
    sum += part * part;
  }
  out[INDEX] = sum;
}
KERNEL(octaves__before) { octaves<false>(a, b, out, room, n); }
KERNEL(octaves__conversions) { octaves<true>(a, b, out, room, n); }

// rotations: 96 dependent steps of a rotation for every element; the launch asks for much shared memory, or for none.
KERNEL(rotations)
{
  const float angle = a[INDEX];
  float x = 1.0f, y = angle, z = 0.5f * angle;
#pragma unroll 1
  for (int k = 0; k < 96; ++k) {
    const float turned = x - 0.125f * y;
    y = y + 0.125f * turned * z;
    z = z - 0.0625f * y;
    x = turned * 0.984375f;
  }
  out[INDEX] = x + y + z;
}

// hashes: of strings of 256 words, four for each of 16896 threads, one after the other or at once.
KERNEL(hashes__before)
{
  const int step = gridDim.x * blockDim.x;
  const word *text = (const word *)a;
  for (int j = 0; j < 4; ++j) {
    word hash = 2166136261u;
#pragma unroll 4
    for (int k = 0; k < 256; ++k) {
      const word letter = text[(j * 256 + k) * step + INDEX];
#pragma unroll
      for (int part = 0; part < 32; part += 8) hash = (hash ^ (letter >> part & 255u)) * 16777619u;
    }
    ((word *)out)[j * step + INDEX] = hash >> 8;
  }
}
KERNEL(hashes__parallelism)
{
  const int step = gridDim.x * blockDim.x;
  const word *text = (const word *)a;
  word hash[4] = {2166136261u, 2166136261u, 2166136261u, 2166136261u};
#pragma unroll 4
  for (int k = 0; k < 256; ++k) {
    word letter[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) letter[j] = text[(j * 256 + k) * step + INDEX];
#pragma unroll
    for (int part = 0; part < 32; part += 8)
#pragma unroll
      for (int j = 0; j < 4; ++j) hash[j] = (hash[j] ^ (letter[j] >> part & 255u)) * 16777619u;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) ((word *)out)[j * step + INDEX] = hash[j] >> 8;
}

// quantize: floats to bytes, one or four a thread.
__device__ __forceinline__ word to_byte(float x) { return (word)fminf(x * 255.0f + 0.5f, 255.0f); }
KERNEL(quantize__before) { ((unsigned char *)out)[INDEX] = (unsigned char)to_byte(a[INDEX]); }
KERNEL(quantize__access_size)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((word *)out)[INDEX] = to_byte(x.x) | to_byte(x.y) << 8 | to_byte(x.z) << 16 | to_byte(x.w) << 24;
}

// similarity: sums of absolute differences between all of 1024 and 1024 rows of 256, one pair of rows a thread, or
// four by four with rows in shared memory and registers. The second rows are stored by columns.
#define ROWS 1024
#define LONG 256
KERNEL(similarity__before)
{
  const int column = blockIdx.x % 64 * 16 + threadIdx.x % 16, row = blockIdx.x / 64 * 16 + threadIdx.x / 16;
  const float *from = a, *other = a + ROWS * LONG;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < LONG; ++k) sum += fabsf(from[row * LONG + k] - other[k * ROWS + column]);
  out[row * ROWS + column] = sum;
}
KERNEL(similarity__register_tiles)
{
  __shared__ float left[16][65], right[16][64];
  const float *from = a, *other = a + ROWS * LONG;
  const int row = blockIdx.x / 16 * 64, column = blockIdx.x % 16 * 64;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float sum[4][4] = {};
  for (int k = 0; k < LONG; k += 16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      left[x][y + 16 * j] = from[(row + y + 16 * j) * LONG + k + x];
      right[threadIdx.x / 64 + 4 * j][threadIdx.x % 64] =
        other[(k + threadIdx.x / 64 + 4 * j) * ROWS + column + threadIdx.x % 64];
    }
    __syncthreads();
#pragma unroll
    for (int deep = 0; deep < 16; ++deep) {
      float u[4], v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u[j] = left[deep][y * 4 + j];
        v[j] = right[deep][x + 16 * j];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += fabsf(u[i] - v[j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) out[(row + y * 4 + i) * ROWS + column + x + 16 * j] = sum[i][j];
}

// median: the middle of 15 numbers of a thread by exchanges of neighbours, in an array that loops index, or in
// registers.
KERNEL(median__before)
{
  const int step = gridDim.x * blockDim.x;
  float value[16];
#pragma unroll 1
  for (int k = 0; k < 15; ++k) value[k] = a[(size_t)k * step + INDEX];
#pragma unroll 1
  for (int round = 0; round < 15; ++round)
#pragma unroll 1
    for (int k = round & 1; k < 14; k += 2) {
      const float low = fminf(value[k], value[k + 1]), high = fmaxf(value[k], value[k + 1]);
      value[k] = low;
      value[k + 1] = high;
    }
  out[INDEX] = value[7];
}
KERNEL(median__spills)
{
  const int step = gridDim.x * blockDim.x;
  float value[16];
#pragma unroll
  for (int k = 0; k < 15; ++k) value[k] = a[(size_t)k * step + INDEX];
#pragma unroll
  for (int round = 0; round < 15; ++round)
#pragma unroll
    for (int k = round & 1; k < 14; k += 2) {
      const float low = fminf(value[k], value[k + 1]), high = fmaxf(value[k], value[k + 1]);
      value[k] = low;
      value[k + 1] = high;
    }
  out[INDEX] = value[7];
}

// degrees: how many edges end at each of 4096 nodes, few nodes much more often than others; counted in memory, or in
// the block's shared memory first.
__device__ __forceinline__ word node(float x) { return (word)(x * x * x * 4096.0f); }
KERNEL(degrees__before)
{
  const float *from = a + (size_t)blockIdx.x * 32768;
  for (int k = threadIdx.x; k < 32768; k += 512) atomicAdd((word *)out + node(from[k]), 1u);
}
KERNEL(degrees__atomics)
{
  __shared__ word counts[4096];
  for (int k = threadIdx.x; k < 4096; k += 512) counts[k] = 0u;
  __syncthreads();
  const float *from = a + (size_t)blockIdx.x * 32768;
  for (int k = threadIdx.x; k < 32768; k += 512) atomicAdd(counts + node(from[k]), 1u);
  __syncthreads();
  for (int k = threadIdx.x; k < 4096; k += 512)
    if (counts[k]) atomicAdd((word *)out + k, counts[k]);
}

// optimizer: momentum, the mean of squares and the step of Adam in three passes, or in one. 8388608 weights.
#define GRADIENT (a[INDEX] - 0.5f)
KERNEL(optimizer__before_1) { room[INDEX] = 0.9f * a[n + INDEX] + 0.1f * GRADIENT; }
KERNEL(optimizer__before_2) { room[n + INDEX] = 0.99f * a[2 * n + INDEX] + 0.01f * GRADIENT * GRADIENT; }
KERNEL(optimizer__before_3)
{
  out[INDEX] = a[3 * n + INDEX] - 1e-2f * room[INDEX] * rsqrtf(room[n + INDEX] + 1e-6f);
}
KERNEL(optimizer__fusion)
{
  const float gradient = GRADIENT;
  const float momentum = 0.9f * a[n + INDEX] + 0.1f * gradient;
  const float square = 0.99f * a[2 * n + INDEX] + 0.01f * gradient * gradient;
  room[INDEX] = momentum;
  room[n + INDEX] = square;
  out[INDEX] = a[3 * n + INDEX] - 1e-2f * momentum * rsqrtf(square + 1e-6f);
}

// extremes: the largest of each 512 numbers; by a tree in shared memory with a barrier a level, or by shuffles.
KERNEL(extremes__before)
{
  __shared__ float values[512];
  values[threadIdx.x] = a[INDEX];
  __syncthreads();
#pragma unroll 1
  for (int far = 256; far > 0; far >>= 1) {
    if (threadIdx.x < far) values[threadIdx.x] = fmaxf(values[threadIdx.x], values[threadIdx.x + far]);
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = values[0];
}
KERNEL(extremes__barriers)
{
  __shared__ float values[16];
  float x = a[INDEX];
#pragma unroll
  for (int far = 16; far > 0; far >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, far));
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 32) {
    x = values[threadIdx.x % 16];
#pragma unroll
    for (int far = 8; far > 0; far >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, far));
    if (threadIdx.x == 0) out[blockIdx.x] = x;
  }
}

// recurrence: 24576 steps of a recurrence with two terms; a loop over a stretch of 4096 steps, or over one of 16.
#define FOUR(x) x x x x
#define STEP(constant) \
  next = __fadd_rn(__fmul_rn(factor, now), __fmul_rn(-0.75f, last)) + constant; \
  last = now; \
  now = next;
#define STEPS_4(first) STEP(first) STEP(first + 0.001f) STEP(first + 0.002f) STEP(first + 0.003f)
#define STEPS_16 STEPS_4(0.000f) STEPS_4(0.004f) STEPS_4(0.008f) STEPS_4(0.012f)
#define STEPS_4096 FOUR(FOUR(FOUR(FOUR(STEPS_16))))
KERNEL(recurrence__before)
{
  const float factor = 1.5f * (a[INDEX] - 0.5f);
  float last = 1.0f, now = factor, next;
#pragma unroll 1
  for (int turn = 0; turn < 6; ++turn) { STEPS_4096 }
  out[INDEX] = now;
}
KERNEL(recurrence__instruction_cache)
{
  const float factor = 1.5f * (a[INDEX] - 0.5f);
  float last = 1.0f, now = factor, next;
#pragma unroll 1
  for (int turn = 0; turn < 1536; ++turn) { STEPS_16 }
  out[INDEX] = now;
}

// channels: sums of 48 channels of 524288 numbers, a block a channel, or 44.
template <int PARTS> __device__ __forceinline__ void channels(ARGUMENTS)
{
  const int channel = blockIdx.x / PARTS, part = blockIdx.x % PARTS, size = 524288;
  const float4 *from = (const float4 *)(a + (size_t)channel * size);
  word sum = 0u;
#pragma unroll 2
  for (int i = part * 512 + threadIdx.x; i < size / 4; i += PARTS * 512) {
    const float4 x = from[i];
    sum += (word)(x.x * 256.0f) + (word)(x.y * 256.0f) + (word)(x.z * 256.0f) + (word)(x.w * 256.0f);
  }
#pragma unroll
  for (int far = 16; far > 0; far >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, far);
  if (threadIdx.x % 32 == 0) atomicAdd((word *)out + channel, sum);
}
KERNEL(channels__before) { channels<1>(a, b, out, room, n); }
KERNEL(channels__small_grid) { channels<44>(a, b, out, room, n); }

// growth: 1024 steps of two values for 153600 elements; in 300 blocks of 512 threads of which two fit on a
// multiprocessor, or in blocks of 64 of which ten fit.
KERNEL(growth)
{
  const float x = 0.9f * a[INDEX];
  float y = 0.25f, z = 0.5f;
#pragma unroll 16
  for (int k = 0; k < 1024; ++k) {
    y = y * x + 0.125f;
    z = z * x + 0.0625f;
  }
  out[INDEX] = y + z;
}

// broadcast: a sum of a tensor with four axes and one that lacks two of these; the axes' lengths from the launch, or
// known when compiled. 40 x 48 x 64 x 200.
__device__ __forceinline__ void broadcast(const float *a, float *out, word second, word third, word fourth)
{
  const word i = INDEX, x = i % fourth, rest = i / fourth, y = rest % third, high = rest / third;
  const word z = high % second, w = high / second;
  out[i] = a[i] + a[z * fourth + x] * a[w * third + y];
}
KERNEL(broadcast__before)
{
  const word unit = (word)n / 24576000u;
  broadcast(a, out, 48u * unit, 64u * unit, 200u * unit);
}
KERNEL(broadcast__integer_division) { broadcast(a, out, 48u, 64u, 200u); }

// gram: products of all pairs of 1536 rows of 1024, by multiply-adds in fp32 on tiles of 64 x 64, or on tensor cores.
#define TALL 1536
#define DEEP 1024
KERNEL(gram__before)
{
  __shared__ float left[32][68], right[32][68];
  const int row = blockIdx.x / 24 * 64, column = blockIdx.x % 24 * 64;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const int deep_lane = threadIdx.x % 8, line = threadIdx.x / 8;
  float sum[4][4] = {};
  for (int k = 0; k < DEEP; k += 32) {
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const int deep = part % 4 * 8 + deep_lane, at = part / 4 * 32 + line;
      left[deep][at] = a[(row + at) * DEEP + k + deep];
      right[deep][at] = a[(column + at) * DEEP + k + deep];
    }
    __syncthreads();
#pragma unroll 8
    for (int deep = 0; deep < 32; ++deep) {
      const float4 u = *(const float4 *)&left[deep][4 * y], v = *(const float4 *)&right[deep][4 * x];
      const float us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += us[i] * vs[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *(float4 *)(out + (row + 4 * y + i) * TALL + column + 4 * x) =
      make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
}
__device__ __forceinline__ word to_tf32(float x)
{
  word bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
KERNEL(gram__tensor_cores)
{
  __shared__ word left[64][36], right[64][36];
  const int row = blockIdx.x / 24 * 64, column = blockIdx.x % 24 * 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
  const int down = warp % 4 * 16, across = warp / 4 * 32;
  float sum[4][4] = {};
  for (int k = 0; k < DEEP; k += 32) {
#pragma unroll
    for (int j = 0; j < 64; j += 8) {
      left[warp + j][lane] = to_tf32(a[(row + warp + j) * DEEP + k + lane]);
      right[warp + j][lane] = to_tf32(a[(column + warp + j) * DEEP + k + lane]);
    }
    __syncthreads();
#pragma unroll
    for (int deep = 0; deep < 32; deep += 8) {
      const word u0 = left[down + group][deep + place], u1 = left[down + group + 8][deep + place];
      const word u2 = left[down + group][deep + place + 4], u3 = left[down + group + 8][deep + place + 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const word v0 = right[across + 8 * j + group][deep + place];
        const word v1 = right[across + 8 * j + group][deep + place + 4];
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
                     : "r"(u0), "r"(u1), "r"(u2), "r"(u3), "r"(v0), "r"(v1));
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float *to = out + (row + down + group) * TALL + column + across + 8 * j + 2 * place;
    to[0] = sum[j][0];
    to[1] = sum[j][1];
    to[8 * TALL] = sum[j][2];
    to[8 * TALL + 1] = sum[j][3];
  }
}

// norms: sums of squares of 4096 numbers each, four at a time, which is as fast as memory is; 256 threads or 512.
template <int THREADS> __device__ __forceinline__ void norms(ARGUMENTS)
{
  __shared__ float parts[THREADS / 32];
  const float4 *from = (const float4 *)a + (size_t)blockIdx.x * 1024;
  float sum = 0.0f;
#pragma unroll
  for (int k = threadIdx.x; k < 1024; k += THREADS) {
    const float4 x = from[k];
    sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  }
#pragma unroll
  for (int far = 16; far > 0; far >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, far);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.0f;
#pragma unroll
    for (int k = 0; k < THREADS / 32; ++k) all += parts[k];
    out[blockIdx.x] = all;
  }
}
KERNEL(norms__before) { norms<256>(a, b, out, room, n); }
KERNEL(norms__parallelism) { norms<128>(a, b, out, room, n); }

// mixes: 128 rounds of shifts and exclusive ors for every element, which the integer units alone set the time of; in
// blocks of 256 or of 512 threads.
KERNEL(mixes)
{
  word x = ((const word *)a)[INDEX], y = x ^ 0x9e3779b9u;
#pragma unroll 16
  for (int k = 0; k < 128; ++k) {
    x ^= x << 13;
    y ^= y >> 7;
    x ^= y >> 17;
    y ^= x << 5;
  }
  ((word *)out)[INDEX] = (x ^ y) >> 8;
}
