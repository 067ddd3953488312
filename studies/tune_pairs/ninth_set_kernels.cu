// Twenty programs before and after one change, the third set for judging `wattcast lab tune` from `ncu --set full`
// (measure_full_set.py --set ninth). Algorithms are others than in the sets before. Every kernel takes ``a`` (n floats
// in [0, 1)), ``b`` (the same numbers in double precision), an output, room for what passes hand on, and n.
// ninth_set_pairs.csv says which kernels make a pair.

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

// gemv: a matrix of 262144 x 128 times a vector, a row a thread; stored by rows, or by columns.
KERNEL(gemv__prepare)
{
  const int rows = n / 128;
  for (int k = 0; k < 128; ++k) room[(size_t)k * rows + INDEX] = a[128 * (size_t)INDEX + k];
}
KERNEL(gemv__before)
{
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < 128; ++k) sum += a[128 * (size_t)INDEX + k] * a[k];
  out[INDEX] = sum;
}
KERNEL(gemv__coalescing)
{
  const int rows = n / 128;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < 128; ++k) sum += room[(size_t)k * rows + INDEX] * a[k];
  out[INDEX] = sum;
}

// prefixes: running sums of stretches of eight numbers, a stretch a thread, in shared memory as they come or with one
// place in 32 left free.
template <int FREE> __device__ __forceinline__ void prefixes(ARGUMENTS)
{
  __shared__ float values[2048 + 64 * FREE];
  const float *from = a + (size_t)blockIdx.x * 2048;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int i = k * 256 + threadIdx.x;
    values[i + FREE * (i >> 5)] = from[i];
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int i = threadIdx.x * 8 + k;
    sum += values[i + FREE * (i >> 5)];
    values[i + FREE * (i >> 5)] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int i = k * 256 + threadIdx.x;
    out[(size_t)blockIdx.x * 2048 + i] = values[i + FREE * (i >> 5)];
  }
}
KERNEL(prefixes__before) { prefixes<0>(a, b, out, room, n); }
KERNEL(prefixes__bank_conflicts) { prefixes<1>(a, b, out, room, n); }

// materials: four kinds of elements, each with a law of its own in 40 steps; neighbours differ in kind, or warps do.
__device__ __forceinline__ void materials(const float *a, float *out, word i)
{
  const float x = a[i];
  float y = 0.5f;
  switch (i & 3u) {
  case 0u:
#pragma unroll 4
    for (int k = 0; k < 40; ++k) y = y - 0.2f * (y * y - x);
    break;
  case 1u:
#pragma unroll 4
    for (int k = 0; k < 40; ++k) y = 0.5f * fmaxf(y, 0.25f) + x * 0.25f;
    break;
  case 2u:
#pragma unroll 4
    for (int k = 0; k < 40; ++k) y = y * (1.0f - 0.1f * x * y) + 0.01f;
    break;
  default:
#pragma unroll 4
    for (int k = 0; k < 40; ++k) y = fabsf(x - 0.75f * y) * 0.9f;
  }
  out[i] = y;
}
KERNEL(materials__before) { materials(a, out, INDEX); }
KERNEL(materials__divergence)
{
  materials(a, out, (INDEX & ~255u) + ((threadIdx.x & 63u) << 2) + (threadIdx.x >> 6));
}

// gas: the pressure of a real gas by a series of 24 terms with constants that are double, or single.
template <typename T> __device__ __forceinline__ float pressure(float x)
{
  const T density = (T)x;
  T sum = (T)0;
#pragma unroll
  for (int k = 24; k > 0; --k) sum = sum * density * (T)0.7 + (T)0.123 / (T)(k + 1);
  return (float)(density * ((T)1 + sum));
}
KERNEL(gas__before) { out[INDEX] = pressure<double>(a[INDEX]); }
KERNEL(gas__fp64) { out[INDEX] = pressure<float>(a[INDEX]); }

// periodic: the energy of a particle with 16 others in a box that repeats; the nearest image of each by rounding, with
// an instruction or with two additions.
template <bool BY_ADDING> __device__ __forceinline__ float to_whole(float x)
{
  return BY_ADDING ? __fadd_rn(__fadd_rn(x, 12582912.0f), -12582912.0f) : rintf(x);
}
template <bool BY_ADDING> __device__ __forceinline__ void periodic(ARGUMENTS)
{
  const float x = a[INDEX], y = a[n + INDEX];
  float sum = 0.0f;
#pragma unroll
  for (int k = 1; k <= 16; ++k) {
    float right = 1.5f * (x - 0.0587f * k), up = 1.5f * (y - 0.0411f * k);
    right -= to_whole<BY_ADDING>(right);
    up -= to_whole<BY_ADDING>(up);
    const float square = right * right + up * up;
    sum += (1.0f - square) * (0.7f - square * square);
  }
  out[INDEX] = sum;
}
KERNEL(periodic__before) { periodic<false>(a, b, out, room, n); }
KERNEL(periodic__conversions) { periodic<true>(a, b, out, room, n); }

// springs: 160 steps of a damped oscillator for every element; the launch asks for much shared memory, or for none.
KERNEL(springs)
{
  float place = a[INDEX], speed = 0.0f;
#pragma unroll 1
  for (int k = 0; k < 160; ++k) {
    speed += 0.05f * (-4.0f * place - 0.3f * speed);
    place += 0.05f * speed;
  }
  out[INDEX] = place + 2.0f;
}

// bonds: the value of four bonds with 8192 payments for each of 16896 threads, one after the other or at once.
KERNEL(bonds__before)
{
  const int step = gridDim.x * blockDim.x;
  for (int j = 0; j < 4; ++j) {
    const float factor = 0.99f - 0.1f * a[j * step + INDEX];
    float value = 100.0f;
#pragma unroll 4
    for (int k = 0; k < 8192; ++k) value = __fmul_rn(__fadd_rn(value, 5.0f), factor);
    out[j * step + INDEX] = value;
  }
}
KERNEL(bonds__parallelism)
{
  const int step = gridDim.x * blockDim.x;
  float factor[4], value[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    factor[j] = 0.99f - 0.1f * a[j * step + INDEX];
    value[j] = 100.0f;
  }
#pragma unroll 4
  for (int k = 0; k < 8192; ++k)
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = __fmul_rn(__fadd_rn(value[j], 5.0f), factor[j]);
#pragma unroll
  for (int j = 0; j < 4; ++j) out[j * step + INDEX] = value[j];
}

// halves: a weighted sum of two vectors of 16-bit floats, one number a thread, or eight.
KERNEL(halves__prepare)
{
  for (int i = INDEX; i < 2 * n; i += gridDim.x * blockDim.x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(a[i & (n - 1)] + (i < n ? 0.5f : 1.0f)));
    ((unsigned short *)room)[i] = bits;
  }
}
KERNEL(halves__before)
{
  const unsigned short *x = (const unsigned short *)room, *y = x + n;
  unsigned short result;
  asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(result) : "h"(x[INDEX]), "h"((unsigned short)0x3e00), "h"(y[INDEX]));
  ((unsigned short *)out)[INDEX] = result;
}
__device__ __forceinline__ word weigh_two(word x, word y)
{
  word result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(0x3e003e00u), "r"(y));
  return result;
}
KERNEL(halves__access_size)
{
  const uint4 x = ((const uint4 *)room)[INDEX], y = ((const uint4 *)room)[n / 8 + INDEX];
  ((uint4 *)out)[INDEX] =
    make_uint4(weigh_two(x.x, y.x), weigh_two(x.y, y.y), weigh_two(x.z, y.z), weigh_two(x.w, y.w));
}

// product: matrices of 1024 x 512 and 512 x 1024, one element of the result a thread, or four by four in registers.
#define EDGE 1024
#define LONG 512
KERNEL(product__before)
{
  const int column = blockIdx.x % 64 * 16 + threadIdx.x % 16, row = blockIdx.x / 64 * 16 + threadIdx.x / 16;
  const float *from = a, *other = a + EDGE * LONG;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < LONG; ++k) sum += from[row * LONG + k] * other[k * EDGE + column];
  out[row * EDGE + column] = sum;
}
KERNEL(product__register_tiles)
{
  const int column = blockIdx.x % 16 * 64 + threadIdx.x % 16, row = blockIdx.x / 16 * 64 + threadIdx.x / 16 * 4;
  const float *from = a, *other = a + EDGE * LONG;
  float sum[4][4] = {};
#pragma unroll 4
  for (int k = 0; k < LONG; ++k) {
    float u[4], v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u[j] = from[(row + j) * LONG + k];
      v[j] = other[k * EDGE + column + 16 * j];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += u[i] * v[j];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) out[(row + i) * EDGE + column + 16 * j] = sum[i][j];
}

// systems: 2097152 systems of five equations, solved by Cholesky's decomposition, a system a thread; in arrays that
// loops index, or in registers.
#define PLACE(i, j) ((i) * ((i) + 1) / 2 + (j))
KERNEL(systems__before)
{
  const int step = gridDim.x * blockDim.x;
  float m[15], x[5];
#pragma unroll 1
  for (int i = 0; i < 5; ++i)
#pragma unroll 1
    for (int j = 0; j <= i; ++j) m[PLACE(i, j)] = a[(size_t)PLACE(i, j) * step + INDEX] + (i == j ? 6.0f : 0.0f);
#pragma unroll 1
  for (int i = 0; i < 5; ++i)
#pragma unroll 1
    for (int j = 0; j <= i; ++j) {
      float sum = m[PLACE(i, j)];
#pragma unroll 1
      for (int k = 0; k < j; ++k) sum -= m[PLACE(i, k)] * m[PLACE(j, k)];
      m[PLACE(i, j)] = i == j ? sqrtf(sum) : sum / m[PLACE(j, j)];
    }
#pragma unroll 1
  for (int i = 0; i < 5; ++i) {
    float sum = 1.0f + i;
#pragma unroll 1
    for (int k = 0; k < i; ++k) sum -= m[PLACE(i, k)] * x[k];
    x[i] = sum / m[PLACE(i, i)];
  }
  float size = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 5; ++i) size += x[i] * x[i];
  out[INDEX] = size;
}
KERNEL(systems__spills)
{
  const int step = gridDim.x * blockDim.x;
  float m[15], x[5];
#pragma unroll
  for (int i = 0; i < 5; ++i)
#pragma unroll
    for (int j = 0; j <= i; ++j) m[PLACE(i, j)] = a[(size_t)PLACE(i, j) * step + INDEX] + (i == j ? 6.0f : 0.0f);
#pragma unroll
  for (int i = 0; i < 5; ++i)
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      float sum = m[PLACE(i, j)];
#pragma unroll
      for (int k = 0; k < j; ++k) sum -= m[PLACE(i, k)] * m[PLACE(j, k)];
      m[PLACE(i, j)] = i == j ? sqrtf(sum) : sum / m[PLACE(j, j)];
    }
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    float sum = 1.0f + i;
#pragma unroll
    for (int k = 0; k < i; ++k) sum -= m[PLACE(i, k)] * x[k];
    x[i] = sum / m[PLACE(i, i)];
  }
  float size = 0.0f;
#pragma unroll
  for (int i = 0; i < 5; ++i) size += x[i] * x[i];
  out[INDEX] = size;
}

// sales: sums of amounts by one of 1024 keys, added in memory, or in the block's shared memory first.
__device__ __forceinline__ word key(word i) { return i * 2654435761u >> 22; }
KERNEL(sales__before)
{
  const word first = blockIdx.x * 32768u;
  for (word i = first + threadIdx.x; i < first + 32768u; i += 512u)
    atomicAdd((word *)out + key(i), (word)(a[i] * 100.0f));
}
KERNEL(sales__atomics)
{
  __shared__ word sums[1024];
  for (int k = threadIdx.x; k < 1024; k += 512) sums[k] = 0u;
  __syncthreads();
  const word first = blockIdx.x * 32768u;
  for (word i = first + threadIdx.x; i < first + 32768u; i += 512u) atomicAdd(sums + key(i), (word)(a[i] * 100.0f));
  __syncthreads();
  for (int k = threadIdx.x; k < 1024; k += 512) atomicAdd((word *)out + k, sums[k]);
}

// decay: a step of gradient descent with decay of the weights, in two passes or in one. 16777216 weights.
KERNEL(decay__before_1) { room[INDEX] = a[INDEX] - 0.5f + 0.01f * a[n + INDEX]; }
KERNEL(decay__before_2) { out[INDEX] = a[n + INDEX] - 0.1f * room[INDEX]; }
KERNEL(decay__fusion)
{
  const float weight = a[n + INDEX];
  out[INDEX] = weight - 0.1f * (a[INDEX] - 0.5f + 0.01f * weight);
}

// scan: running sums of each 256 numbers, in shared memory with two barriers a level, or by shuffles.
KERNEL(scan__before)
{
  __shared__ float values[256];
  float sum = a[INDEX];
  values[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll 1
  for (int far = 1; far < 256; far <<= 1) {
    const float other = threadIdx.x >= far ? values[threadIdx.x - far] : 0.0f;
    __syncthreads();
    sum += other;
    values[threadIdx.x] = sum;
    __syncthreads();
  }
  out[INDEX] = sum;
}
KERNEL(scan__barriers)
{
  __shared__ float totals[8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = a[INDEX];
#pragma unroll
  for (int far = 1; far < 32; far <<= 1) {
    const float other = __shfl_up_sync(0xffffffffu, sum, far);
    if (lane >= far) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  float before = 0.0f;
#pragma unroll
  for (int k = 0; k < 7; ++k) before += k < warp ? totals[k] : 0.0f;
  out[INDEX] = before + sum;
}

// weather: 8192 steps of two coupled values; a loop over a stretch of 4096 steps, or over one of 16.
#define FOUR(x) x x x x
#define STEP(constant) \
  warm = __fadd_rn(__fmul_rn(warm, factor), constant); \
  wet = __fadd_rn(__fmul_rn(wet, 0.5f), __fmul_rn(warm, 0.25f));
#define STEPS_4(first) STEP(first) STEP(first + 0.001f) STEP(first + 0.002f) STEP(first + 0.003f)
#define STEPS_16 STEPS_4(0.000f) STEPS_4(0.004f) STEPS_4(0.008f) STEPS_4(0.012f)
#define STEPS_1024 FOUR(FOUR(FOUR(STEPS_16)))
KERNEL(weather__before)
{
  const float factor = 0.9f * a[INDEX];
  float warm = 1.0f, wet = 0.5f;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) { FOUR(STEPS_1024) }
  out[INDEX] = warm + wet;
}
KERNEL(weather__instruction_cache)
{
  const float factor = 0.9f * a[INDEX];
  float warm = 1.0f, wet = 0.5f;
#pragma unroll 1
  for (int turn = 0; turn < 512; ++turn) { STEPS_16 }
  out[INDEX] = warm + wet;
}

// peaks: the largest of each of 64 signals of 524288 numbers, a block a signal, or 33.
template <int PARTS> __device__ __forceinline__ void peaks(ARGUMENTS)
{
  __shared__ word highest[16];
  const int signal = blockIdx.x / PARTS, part = blockIdx.x % PARTS, size = 524288;
  const float *from = a + (size_t)signal * size;
  float most = 0.0f;
#pragma unroll 4
  for (int i = part * 512 + threadIdx.x; i < size; i += PARTS * 512) most = fmaxf(most, from[i]);
  word high = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) highest[threadIdx.x / 32] = high;
  __syncthreads();
  if (threadIdx.x < 32) {
    high = __reduce_max_sync(0xffffffffu, highest[threadIdx.x % 16]);
    if (threadIdx.x == 0) atomicMax((word *)out + signal, high);
  }
}
KERNEL(peaks__before) { peaks<1>(a, b, out, room, n); }
KERNEL(peaks__small_grid) { peaks<33>(a, b, out, room, n); }

// cooling: 2048 steps of a value for 163840 elements; in 160 blocks of 1024 threads of which one fits on a
// multiprocessor, or in 1280 of 128 threads.
KERNEL(cooling)
{
  const float rate = 0.5f * a[INDEX];
  float heat = 80.0f, flow = 1.0f;
#pragma unroll 16
  for (int k = 0; k < 2048; ++k) {
    heat = heat - rate * (heat - 20.0f) * 0.125f;
    flow = flow * rate + 0.5f;
  }
  out[INDEX] = heat + flow;
}

// voxels: a volume of 480 x 320 x 160 weighed with the distance from its middle; the edges from the launch, or known
// when compiled.
__device__ __forceinline__ void voxels(const float *a, float *out, word wide, word high)
{
  const word i = INDEX, x = i % wide, y = i / wide % high, z = i / (wide * high);
  const int right = (int)x - 240, up = (int)y - 160, deep = (int)z - 80;
  out[i] = a[i] * (float)(right * right + up * up + deep * deep);
}
KERNEL(voxels__before)
{
  const word unit = (word)n / 24576000u;
  voxels(a, out, 480u * unit, 320u * unit);
}
KERNEL(voxels__integer_division) { voxels(a, out, 480u, 320u); }

// scores: products of 256 vectors of 128 with 256 others, for 128 heads, in fp32 on tiles of 64 x 64, or on tensor
// cores.
#define WIDTH 128
#define TOKENS 256
KERNEL(scores__before)
{
  __shared__ float left[64][33], right[64][33];
  const int head = blockIdx.x / 16, row = blockIdx.x / 4 % 4 * 64, column = blockIdx.x % 4 * 64;
  const float *from = a + (size_t)head * TOKENS * WIDTH, *other = a + (size_t)(128 + head) * TOKENS * WIDTH;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum[4][4] = {};
  for (int k = 0; k < WIDTH; k += 32) {
#pragma unroll
    for (int j = 0; j < 64; j += 8) {
      left[warp + j][lane] = from[(row + warp + j) * WIDTH + k + lane];
      right[warp + j][lane] = other[(column + warp + j) * WIDTH + k + lane];
    }
    __syncthreads();
#pragma unroll 8
    for (int deep = 0; deep < 32; ++deep) {
      float u[4], v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u[j] = left[y + 16 * j][deep];
        v[j] = right[x + 16 * j][deep];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += u[i] * v[j];
    }
    __syncthreads();
  }
  float *to = out + (size_t)head * TOKENS * TOKENS;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) to[(row + y + 16 * i) * TOKENS + column + x + 16 * j] = sum[i][j];
}
__device__ __forceinline__ word to_tf32(float x)
{
  word bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
KERNEL(scores__tensor_cores)
{
  __shared__ word left[64][36], right[64][36];
  const int head = blockIdx.x / 16, row = blockIdx.x / 4 % 4 * 64, column = blockIdx.x % 4 * 64;
  const float *from = a + (size_t)head * TOKENS * WIDTH, *other = a + (size_t)(128 + head) * TOKENS * WIDTH;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
  const int down = warp % 4 * 16, across = warp / 4 * 32;
  float sum[4][4] = {};
  for (int k = 0; k < WIDTH; k += 32) {
#pragma unroll
    for (int j = 0; j < 64; j += 8) {
      left[warp + j][lane] = to_tf32(from[(row + warp + j) * WIDTH + k + lane]);
      right[warp + j][lane] = to_tf32(other[(column + warp + j) * WIDTH + k + lane]);
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
  float *to = out + (size_t)head * TOKENS * TOKENS;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float *at = to + (row + down + group) * TOKENS + column + across + 8 * j + 2 * place;
    at[0] = sum[j][0];
    at[1] = sum[j][1];
    at[8 * TOKENS] = sum[j][2];
    at[8 * TOKENS + 1] = sum[j][3];
  }
}

// reversal: a vector backwards, four numbers a thread, which is as fast as memory is, or eight.
__device__ __forceinline__ float4 turn_around(float4 x) { return make_float4(x.w, x.z, x.y, x.x); }
KERNEL(reversal__before)
{
  ((float4 *)out)[n / 4 - 1 - (int)INDEX] = turn_around(((const float4 *)a)[INDEX]);
}
KERNEL(reversal__parallelism)
{
  const float4 *from = (const float4 *)a;
  const int i = blockIdx.x * 512 + threadIdx.x;
  const float4 x = from[i], y = from[i + 256];
  ((float4 *)out)[n / 4 - 1 - i] = turn_around(x);
  ((float4 *)out)[n / 4 - 257 - i] = turn_around(y);
}

// julia: 256 steps of two points of the plane a thread, which multiply-adds alone set the time of; in blocks of 128 or
// of 512 threads.
KERNEL(julia)
{
  const float c = 0.25f * a[INDEX], d = 0.1f;
  float x = 0.1f, y = 0.2f, u = 0.2f, v = 0.1f;
#pragma unroll 8
  for (int k = 0; k < 256; ++k) {
    const float z = 0.5f * x * x - 0.5f * y * y + c;
    y = x * y + d;
    x = z;
    const float w = 0.5f * u * u - 0.5f * v * v + c;
    v = u * v + d;
    u = w;
  }
  out[INDEX] = x + y + u + v + 4.0f;
}
