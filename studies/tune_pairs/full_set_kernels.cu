// Twenty programs before and after one change, for judging `wattcast lab tune` from `ncu --set full`
// (measure_full_set.py). Every kernel takes ``a`` (n floats in [0, 1)), ``b`` (the same numbers in double
// precision), an output, room for what passes hand on, and n. full_set_pairs.csv says which kernels make a pair.

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

template <typename T> __device__ __forceinline__ T warp_sum(T x)
{
#pragma unroll
  for (int far = 16; far > 0; far >>= 1) x += __shfl_xor_sync(0xffffffffu, x, far);
  return x;
}

// particles: kinetic energies of structs of eight floats, or of eight arrays. 4194304 particles.
KERNEL(particles__prepare)
{
  const int count = n / 8;
  for (int k = 0; k < 8; ++k) room[k * count + INDEX] = a[8 * INDEX + k];
}
KERNEL(particles__before)
{
  const float *p = a + 8 * (size_t)INDEX;
  out[INDEX] = 0.5f * p[6] * (p[3] * p[3] + p[4] * p[4] + p[5] * p[5]);
}
KERNEL(particles__coalescing)
{
  const int count = n / 8;
  const float u = room[3 * count + INDEX], v = room[4 * count + INDEX], w = room[5 * count + INDEX];
  out[INDEX] = 0.5f * room[6 * count + INDEX] * (u * u + v * v + w * w);
}

// mixing: two tracks of 16-bit samples, one sample a thread, or eight.
__device__ __forceinline__ short mix(short x, short y) { return (short)((3 * x + 5 * y) >> 3); }
__device__ __forceinline__ int mix_two(int x, int y)
{
  const int low = mix((short)(x & 0xffff), (short)(y & 0xffff)) & 0xffff;
  return low | ((int)mix((short)(x >> 16), (short)(y >> 16)) << 16);
}
KERNEL(mixing__before)
{
  ((short *)out)[INDEX] = mix(((const short *)a)[INDEX], ((const short *)b)[INDEX]);
}
KERNEL(mixing__access_size)
{
  const int4 x = ((const int4 *)a)[INDEX], y = ((const int4 *)b)[INDEX];
  ((int4 *)out)[INDEX] = make_int4(mix_two(x.x, y.x), mix_two(x.y, y.y), mix_two(x.z, y.z), mix_two(x.w, y.w));
}

// heads: batched products of 32 x 32 matrices, the second one transposed, in shared memory. 8192 pairs.
template <int PITCH> __device__ __forceinline__ void heads(ARGUMENTS)
{
  __shared__ float left[32 * PITCH], right[32 * PITCH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float *from = a + (size_t)blockIdx.x * 1024;
  const float *other = from + n / 2;
#pragma unroll
  for (int row = warp; row < 32; row += 8) {
    left[row * PITCH + lane] = from[row * 32 + lane];
    right[row * PITCH + lane] = other[row * 32 + lane];
  }
  __syncthreads();
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int k = 0; k < 32; ++k) {
    const float y = right[lane * PITCH + k];
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += left[(warp + 8 * j) * PITCH + k] * y;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) out[(size_t)blockIdx.x * 1024 + (warp + 8 * j) * 32 + lane] = sum[j];
}
KERNEL(heads__before) { heads<32>(a, b, out, room, n); }
KERNEL(heads__bank_conflicts) { heads<33>(a, b, out, room, n); }

// newton: every fourth element needs 64 steps and the others none; neighbours differ, or warps do.
__device__ __forceinline__ void newton(const float *a, float *out, word i)
{
  const float x = a[i];
  float y = 0.5f;
  if ((i & 3u) == 0u) {
#pragma unroll 8
    for (int k = 0; k < 64; ++k) y = y - 0.25f * (y * y - x);
  } else {
    y = 0.5f * x;
  }
  out[i] = y;
}
KERNEL(newton__before) { newton(a, out, INDEX); }
KERNEL(newton__divergence) { newton(a, out, (INDEX & ~255u) + ((threadIdx.x & 63) << 2) + (threadIdx.x >> 6)); }

// options: prices of calls by Black and Scholes in double precision where single would do.
__device__ __forceinline__ double natural_log(double x) { return log(x); }
__device__ __forceinline__ float natural_log(float x) { return logf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float exponential(float x) { return expf(x); }
template <typename T> __device__ __forceinline__ T normal_share(T d)
{
  const T size = d < (T)0 ? -d : d;
  const T k = (T)1 / ((T)1 + (T)0.2316419 * size);
  const T poly = k * ((T)0.31938153
                      + k * ((T)-0.356563782 + k * ((T)1.781477937 + k * ((T)-1.821255978 + k * (T)1.330274429))));
  const T tail = (T)0.39894228 * exponential((T)-0.5 * d * d) * poly;
  return d > (T)0 ? (T)1 - tail : tail;
}
template <typename T> __device__ __forceinline__ float price_call(float x)
{
  const T spot = (T)50, strike = (T)40 + (T)20 * (T)x, rate = (T)0.02, spread = (T)0.3;
  const T first = (natural_log(spot / strike) + rate + (T)0.5 * spread * spread) / spread;
  const T second = first - spread;
  return (float)(spot * normal_share(first) - strike * exponential(-rate) * normal_share(second));
}
KERNEL(options__before) { out[INDEX] = price_call<double>(a[INDEX]); }
KERNEL(options__fp64) { out[INDEX] = price_call<float>(a[INDEX]); }

// scales: the smallest error of 16 scales of 8-bit numbers; rounded by conversions, or by adding 1.5 * 2^23.
KERNEL(scales__before)
{
  const float x = a[INDEX] - 0.5f;
  float best = 1e9f;
#pragma unroll
  for (int k = 1; k <= 16; ++k) {
    const float scale = 24.0f * k;
    const int rounded = min(max(__float2int_rn(x * scale), -127), 127);
    const float error = (float)rounded * (1.0f / scale) - x;
    best = fminf(best, error * error + 1e-3f * k);
  }
  out[INDEX] = best;
}
KERNEL(scales__conversions)
{
  const float x = a[INDEX] - 0.5f;
  float best = 1e9f;
#pragma unroll
  for (int k = 1; k <= 16; ++k) {
    const float scale = 24.0f * k;
    const float rounded = fminf(fmaxf(__fadd_rn(__fadd_rn(x * scale, 12582912.0f), -12582912.0f), -127.0f), 127.0f);
    const float error = rounded * (1.0f / scale) - x;
    best = fminf(best, error * error + 1e-3f * k);
  }
  out[INDEX] = best;
}

// simpson: an integral in 128 steps for every thread; the launch asks for much shared memory, or for none.
KERNEL(simpson)
{
  const float width = a[INDEX] + 0.5f, step = width / 128.0f;
  float sum = 0.0f, x = 0.0f;
#pragma unroll 1
  for (int k = 0; k < 128; ++k) {
    const float weight = (k & 1) ? 4.0f : 2.0f;
    sum += weight * __fdividef(x, 1.0f + x * x);
    x += step;
  }
  out[INDEX] = sum * step / 3.0f;
}

// inner: a product of two vectors with one sum a thread, or four.
KERNEL(inner__before)
{
  const int step = gridDim.x * blockDim.x;
  float sum = 0.0f;
#pragma unroll 1
  for (int i = INDEX; i < n; i += step) sum += a[i] * a[n - 1 - i];
  out[INDEX] = sum;
}
KERNEL(inner__parallelism)
{
  const int step = gridDim.x * blockDim.x;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  int i = INDEX;
#pragma unroll 1
  for (; i + 3 * step < n; i += 4 * step)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += a[i + j * step] * a[n - 1 - i - j * step];
#pragma unroll 1
  for (; i < n; i += step) sum[0] += a[i] * a[n - 1 - i];
  out[INDEX] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// depthwise: 7 x 7 filters of an image of 4096 columns, one output a thread, or eight from values in registers.
#define SIDE 4096
KERNEL(depthwise__before)
{
  const int x = INDEX % SIDE, y = INDEX / SIDE;
  float sum = 0.0f;
#pragma unroll
  for (int dy = 0; dy < 7; ++dy)
#pragma unroll
    for (int dx = 0; dx < 7; ++dx)
      sum += a[((y + dy - 3) & (SIDE - 1)) * SIDE + ((x + dx - 3) & (SIDE - 1))] * (0.01f * (dy * 7 + dx + 1));
  out[INDEX] = sum;
}
KERNEL(depthwise__caching)
{
  const int x = INDEX % SIDE, y = INDEX / SIDE * 8;
  float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int row = 0; row < 14; ++row)
#pragma unroll
    for (int dx = 0; dx < 7; ++dx) {
      const float value = a[((y + row - 3) & (SIDE - 1)) * SIDE + ((x + dx - 3) & (SIDE - 1))];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int dy = row - j;
        if (dy >= 0 && dy < 7) sum[j] += value * (0.01f * (dy * 7 + dx + 1));
      }
    }
#pragma unroll
  for (int j = 0; j < 8; ++j) out[(y + j) * SIDE + x] = sum[j];
}

// largest: the eight largest of 64 numbers of a thread, in an array that loops index, or in registers.
KERNEL(largest__before)
{
  const int step = gridDim.x * blockDim.x;
  float best[8];
#pragma unroll 1
  for (int j = 0; j < 8; ++j) best[j] = -1.0f;
#pragma unroll 1
  for (int k = 0; k < 64; ++k) {
    float value = a[(size_t)k * step + INDEX];
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      const float other = best[j];
      best[j] = fmaxf(value, other);
      value = fminf(value, other);
    }
  }
  float sum = 0.0f;
#pragma unroll 1
  for (int j = 0; j < 8; ++j) sum = 0.5f * sum + best[j];
  out[INDEX] = sum;
}
KERNEL(largest__spills)
{
  const int step = gridDim.x * blockDim.x;
  float best[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) best[j] = -1.0f;
#pragma unroll 1
  for (int k = 0; k < 64; ++k) {
    float value = a[(size_t)k * step + INDEX];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float other = best[j];
      best[j] = fmaxf(value, other);
      value = fminf(value, other);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum = 0.5f * sum + best[j];
  out[INDEX] = sum;
}

// centres: sums of 64 clusters, added in memory for every number, or in the block's own first.
KERNEL(centres__before)
{
  const float *from = a + (size_t)blockIdx.x * 16384;
  for (int k = threadIdx.x; k < 16384; k += 256)
    atomicAdd((word *)out + (word)(from[k] * 64.0f), (word)(from[k] * 1024.0f));
}
KERNEL(centres__atomics)
{
  __shared__ word sums[64];
  if (threadIdx.x < 64) sums[threadIdx.x] = 0u;
  __syncthreads();
  const float *from = a + (size_t)blockIdx.x * 16384;
  for (int k = threadIdx.x; k < 16384; k += 256)
    atomicAdd(sums + (word)(from[k] * 64.0f), (word)(from[k] * 1024.0f));
  __syncthreads();
  if (threadIdx.x < 64) atomicAdd((word *)out + threadIdx.x, sums[threadIdx.x]);
}

// activation: bias and GELU in one pass and the residual in the next, or all in one.
__device__ __forceinline__ float gelu(float x)
{
  const float inner = 0.7978846f * (x + 0.044715f * x * x * x);
  return x / (1.0f + __expf(-2.0f * inner));
}
KERNEL(activation__before_1) { room[INDEX] = gelu(a[INDEX] + a[INDEX & 1023u]); }
KERNEL(activation__before_2) { out[INDEX] = room[INDEX] + a[INDEX]; }
KERNEL(activation__fusion)
{
  const float x = a[INDEX];
  out[INDEX] = gelu(x + a[INDEX & 1023u]) + x;
}

// rows: rows of 2048 are divided by their norm; one thread adds the sums of all others, or warps do.
template <bool ALONE> __device__ __forceinline__ void rows(ARGUMENTS)
{
  __shared__ float sums[256];
  __shared__ float total;
  const float *from = a + (size_t)blockIdx.x * 2048;
  float value[8], sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    value[k] = from[k * 256 + threadIdx.x];
    sum += value[k] * value[k];
  }
  if (ALONE) {
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float all = 0.0f;
#pragma unroll 1
      for (int k = 0; k < 256; ++k) all += sums[k];
      total = all;
    }
  } else {
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
      const float all = warp_sum(threadIdx.x < 8 ? sums[threadIdx.x] : 0.0f);
      if (threadIdx.x == 0) total = all;
    }
  }
  __syncthreads();
  const float scale = rsqrtf(total / 2048.0f + 1e-5f);
#pragma unroll
  for (int k = 0; k < 8; ++k) out[(size_t)blockIdx.x * 2048 + k * 256 + threadIdx.x] = value[k] * scale;
}
KERNEL(rows__before) { rows<true>(a, b, out, room, n); }
KERNEL(rows__barriers) { rows<false>(a, b, out, room, n); }

// images: sums of 16 images of 2097152 numbers, a block an image, or 66 blocks.
template <int PARTS> __device__ __forceinline__ void images(ARGUMENTS)
{
  const int image = blockIdx.x / PARTS, part = blockIdx.x % PARTS, size = n / 16;
  const float *from = a + (size_t)image * size;
  word sum = 0u;
#pragma unroll 4
  for (int i = part * 1024 + threadIdx.x; i < size; i += PARTS * 1024) sum += (word)(from[i] * 256.0f);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) atomicAdd((word *)out + image, sum);
}
KERNEL(images__before) { images<1>(a, b, out, room, n); }
KERNEL(images__small_grid) { images<66>(a, b, out, room, n); }

// pieces: 6336 pieces of 1024 threads with 256 steps each, in 144 blocks of which one fits on a multiprocessor, or in
// 1584.
template <int PIECES> __device__ __forceinline__ void pieces(ARGUMENTS)
{
#pragma unroll 1
  for (int piece = 0; piece < PIECES; ++piece) {
    const int i = (blockIdx.x * PIECES + piece) * 1024 + threadIdx.x;
    const float x = a[i];
    float y = 0.5f;
#pragma unroll 32
    for (int k = 0; k < 256; ++k) y = y * x + 0.25f;
    out[i] = y;
  }
}
KERNEL(pieces__before) { pieces<44>(a, b, out, room, n); }
KERNEL(pieces__tail_wave) { pieces<4>(a, b, out, room, n); }

// lattice: means of four neighbours on a torus of 1000 columns; divisors from the launch, or known when compiled.
__device__ __forceinline__ void lattice(const float *a, float *out, word width, word height)
{
  const word i = INDEX, x = i % width, y = i / width;
  const word west = (x + width - 1u) % width, east = (x + 1u) % width;
  const word north = (y + height - 1u) % height, south = (y + 1u) % height;
  out[i] = 0.25f * (a[y * width + west] + a[y * width + east] + a[north * width + x] + a[south * width + x]);
}
KERNEL(lattice__before) { lattice(a, out, (word)n >> 14, ((word)n >> 10) + 384u); }
KERNEL(lattice__integer_division) { lattice(a, out, 1000u, 16384u); }

// dense: a product of matrices of 2048 x 2048 in fp32, tiles of 64 x 64 out of shared memory, or on tensor cores.
#define WIDE 2048
KERNEL(dense__before)
{
  __shared__ float left[16][64], right[16][64];
  const float *from = a, *other = a + 2 * WIDE * WIDE;
  const int row = blockIdx.x / 32 * 64, column = blockIdx.x % 32 * 64;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  float sum[4][4] = {};
  for (int k = 0; k < WIDE; k += 16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      left[x][y + 16 * j] = from[(row + y + 16 * j) * WIDE + k + x];
      right[threadIdx.x / 64 + 4 * j][threadIdx.x % 64] =
        other[(k + threadIdx.x / 64 + 4 * j) * WIDE + column + threadIdx.x % 64];
    }
    __syncthreads();
#pragma unroll
    for (int deep = 0; deep < 16; ++deep) {
      float u[4], v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u[j] = left[deep][y * 4 + j];
        v[j] = right[deep][x * 4 + j];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += u[i] * v[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) out[(row + y * 4 + i) * WIDE + column + x * 4 + j] = sum[i][j];
}
__device__ __forceinline__ word to_tf32(float x)
{
  word bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
KERNEL(dense__tensor_cores)
{
  __shared__ float left[64][20], right[16][72];
  const float *from = a, *other = a + 2 * WIDE * WIDE;
  const int row = blockIdx.x / 32 * 64, column = blockIdx.x % 32 * 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
  const int down = warp % 4 * 16, across = warp / 4 * 32;
  float sum[4][4] = {};
  for (int k = 0; k < WIDE; k += 16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int y = threadIdx.x / 16 + 16 * j, x = threadIdx.x % 16;
      left[y][x] = from[(row + y) * WIDE + k + x];
      right[threadIdx.x / 64 + 4 * j][threadIdx.x % 64] =
        other[(k + threadIdx.x / 64 + 4 * j) * WIDE + column + threadIdx.x % 64];
    }
    __syncthreads();
#pragma unroll
    for (int deep = 0; deep < 16; deep += 8) {
      const word u0 = to_tf32(left[down + group][deep + place]);
      const word u1 = to_tf32(left[down + group + 8][deep + place]);
      const word u2 = to_tf32(left[down + group][deep + place + 4]);
      const word u3 = to_tf32(left[down + group + 8][deep + place + 4]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const word v0 = to_tf32(right[deep + place][across + 8 * j + group]);
        const word v1 = to_tf32(right[deep + place + 4][across + 8 * j + group]);
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
    float *to = out + (row + down + group) * WIDE + column + across + 8 * j + 2 * place;
    to[0] = sum[j][0];
    to[1] = sum[j][1];
    to[8 * WIDE] = sum[j][2];
    to[8 * WIDE + 1] = sum[j][3];
  }
}

// series: 16384 steps with constants that repeat every four, as one stretch of code, or as a loop over 256 of them.
#define FOUR(x) x x x x
#define STEP(constant) "fma.rn.f32 %0, %0, %1, " constant ";\n\t"
#define STEPS_4 STEP("0f3E800000") STEP("0f3E000000") STEP("0f3EC00000") STEP("0f3D800000")
#define STEPS_256 FOUR(FOUR(FOUR(STEPS_4)))
#define STEPS_16384 FOUR(FOUR(FOUR(STEPS_256)))
KERNEL(series__before)
{
  const float x = 0.5f * a[INDEX];
  float y = 0.5f;
  asm volatile(STEPS_16384 : "+f"(y) : "f"(x));
  out[INDEX] = y;
}
KERNEL(series__instruction_cache)
{
  const float x = 0.5f * a[INDEX];
  float y = 0.5f;
#pragma unroll 1
  for (int turn = 0; turn < 64; ++turn) asm volatile(STEPS_256 : "+f"(y) : "f"(x));
  out[INDEX] = y;
}

// triad: four numbers a thread, which is as fast as memory is, or eight.
__device__ __forceinline__ float4 triad(float4 x, float4 y)
{
  return make_float4(1.5f * x.x + y.x, 1.5f * x.y + y.y, 1.5f * x.z + y.z, 1.5f * x.w + y.w);
}
KERNEL(triad__before)
{
  const float4 *from = (const float4 *)a;
  ((float4 *)out)[INDEX] = triad(from[INDEX], from[INDEX + n / 8]);
}
KERNEL(triad__parallelism)
{
  const float4 *from = (const float4 *)a;
  const int i = blockIdx.x * 512 + threadIdx.x;
  const float4 x = from[i], y = from[i + n / 8], u = from[i + 256], v = from[i + 256 + n / 8];
  ((float4 *)out)[i] = triad(x, y);
  ((float4 *)out)[i + 256] = triad(u, v);
}

// quartet: four chains of multiply-adds a thread, blocks of 256 or 1024 threads.
KERNEL(quartet)
{
  const float x = 0.9f * a[INDEX];
  float y[4] = {0.1f, 0.2f, 0.3f, 0.4f};
#pragma unroll 8
  for (int k = 0; k < 512; ++k)
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = y[j] * x + 0.25f;
  out[INDEX] = (y[0] + y[1]) + (y[2] + y[3]);
}
