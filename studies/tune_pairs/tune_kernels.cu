// Small kernels before and after one change, or two, for judging `wattcast lab tune` (measure_tune_pairs.py).
// Every kernel takes ``a`` (n floats in [0, 1)), ``b`` (the same numbers in double precision), an output, room for
// what passes hand on, and n. tune_pairs.csv says which kernels make a pair.

typedef unsigned char byte;
typedef unsigned int word;
#define ARGUMENTS const float *a, const double *b, float *out, float *room, int n
#define KERNEL(name) extern "C" __global__ void name(ARGUMENTS)
#define BOUNDED(threads, blocks, name) extern "C" __global__ void __launch_bounds__(threads, blocks) name(ARGUMENTS)
#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

__device__ __forceinline__ word scramble(word x)
{
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Input: random numbers in both precisions. Not measured.
KERNEL(fill_inputs)
{
  const float x = (float)(scramble(INDEX) >> 8) * 5.9604645e-8f;
  ((float *)a)[INDEX] = x;
  ((double *)b)[INDEX] = x;
}

// horner: a polynomial of degree 48 in double precision where single would do.
template <typename T> __device__ __forceinline__ T horner(T x)
{
  T sum = (T)0.02;
#pragma unroll
  for (int k = 47; k >= 0; --k) sum = sum * x + (T)(1.0 / (k + 1));
  return sum;
}
KERNEL(horner__before) { out[INDEX] = (float)horner((double)a[INDEX]); }
KERNEL(horner__fp64) { out[INDEX] = horner(a[INDEX]); }
template <typename T> __device__ __forceinline__ void horner_four(ARGUMENTS)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((float4 *)out)[INDEX] =
    make_float4((float)horner((T)x.x), (float)horner((T)x.y), (float)horner((T)x.z), (float)horner((T)x.w));
}
KERNEL(horner__access_size) { horner_four<double>(a, b, out, room, n); }
KERNEL(horner__both) { horner_four<float>(a, b, out, room, n); }

// scale: a stream stored in double precision.
KERNEL(scale__before) { ((double *)out)[INDEX] = 1.5 * b[INDEX] + 0.25; }
KERNEL(scale__fp64) { out[INDEX] = 1.5f * a[INDEX] + 0.25f; }
KERNEL(scale__access_size)
{
  const double2 x = ((const double2 *)b)[INDEX];
  ((double2 *)out)[INDEX] = make_double2(1.5 * x.x + 0.25, 1.5 * x.y + 0.25);
}

// literals: constants without an f draw a chain in single precision into double.
KERNEL(literals__before)
{
  float x = a[INDEX];
#pragma unroll 8
  for (int k = 0; k < 32; ++k) x = x * 0.75 + 0.125;
  out[INDEX] = x;
}
KERNEL(literals__fp64)
{
  float x = a[INDEX];
#pragma unroll 8
  for (int k = 0; k < 32; ++k) x = x * 0.75f + 0.125f;
  out[INDEX] = x;
}

// box: 5 x 5 sums over an image of 4096 columns. L1 bypassed, through the L1, or out of a tile of shared memory.
#define SIDE 4096
template <typename T, bool CACHED> __device__ __forceinline__ void box(ARGUMENTS)
{
  const int x = INDEX % SIDE, y = INDEX / SIDE, rows = n / SIDE;
  T sum = 0;
#pragma unroll
  for (int dy = -2; dy <= 2; ++dy)
#pragma unroll
    for (int dx = -2; dx <= 2; ++dx) {
      const int u = min(max(x + dx, 0), SIDE - 1), v = min(max(y + dy, 0), rows - 1);
      const float value = CACHED ? __ldg(a + v * SIDE + u) : __ldcg(a + v * SIDE + u);
      sum += (T)value * (T)(0.01 * (5 * dy + dx + 13));
    }
  out[INDEX] = (float)sum;
}
template <typename T> __device__ __forceinline__ void box_tile(ARGUMENTS)
{
  __shared__ float tile[12][68];  // 64 x 8 outputs of a block of 512 threads
  const int tiles = SIDE / 64, rows = n / SIDE;
  const int x0 = blockIdx.x % tiles * 64, y0 = blockIdx.x / tiles * 8;
  for (int i = threadIdx.x; i < 12 * 68; i += 512) {
    const int u = min(max(x0 + i % 68 - 2, 0), SIDE - 1), v = min(max(y0 + i / 68 - 2, 0), rows - 1);
    tile[i / 68][i % 68] = a[v * SIDE + u];
  }
  __syncthreads();
  const int x = threadIdx.x % 64, y = threadIdx.x / 64;
  T sum = 0;
#pragma unroll
  for (int dy = 0; dy < 5; ++dy)
#pragma unroll
    for (int dx = 0; dx < 5; ++dx) sum += (T)tile[y + dy][x + dx] * (T)(0.01 * (5 * (dy - 2) + dx + 11));
  out[(y0 + y) * SIDE + x0 + x] = (float)sum;
}
KERNEL(box_uncached__before) { box<float, false>(a, b, out, room, n); }
KERNEL(box_uncached__caching) { box<float, true>(a, b, out, room, n); }
KERNEL(box_plain__shared_memory) { box_tile<float>(a, b, out, room, n); }
KERNEL(box_double__before) { box<double, false>(a, b, out, room, n); }
KERNEL(box_double__caching) { box<double, true>(a, b, out, room, n); }

// transpose of 4096 x rows: stores strided; through a tile whose columns share a bank; through a padded tile.
template <int PITCH> __device__ __forceinline__ void transpose(ARGUMENTS)
{
  __shared__ float tile[32][PITCH];
  const int rows = n / SIDE, tiles = SIDE / 32, lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int x0 = blockIdx.x % tiles * 32, y0 = blockIdx.x / tiles * 32;
  for (int y = line; y < 32; y += 8) tile[y][lane] = a[(y0 + y) * SIDE + x0 + lane];
  __syncthreads();
  for (int y = line; y < 32; y += 8) out[(x0 + y) * rows + y0 + lane] = tile[lane][y];
}
KERNEL(transpose__before)
{
  const int rows = n / SIDE, tiles = SIDE / 32, lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int x0 = blockIdx.x % tiles * 32, y0 = blockIdx.x / tiles * 32;
  for (int y = line; y < 32; y += 8) out[(x0 + lane) * rows + y0 + y] = a[(y0 + y) * SIDE + x0 + lane];
}
KERNEL(transpose__coalescing) { transpose<33>(a, b, out, room, n); }
KERNEL(transpose_tile__before) { transpose<32>(a, b, out, room, n); }

// strides: each thread copies 8 neighbouring elements, or every 256th of its block's.
template <bool INTERLEAVED> __device__ __forceinline__ void strides(ARGUMENTS)
{
  const int first = blockIdx.x * blockDim.x * 8 + (INTERLEAVED ? threadIdx.x : threadIdx.x * 8);
  for (int k = 0; k < 8; ++k) {
    const int i = first + (INTERLEAVED ? k * blockDim.x : k);
    __stcg(out + i, 0.5f * __ldcg(a + i));  // one by one: neighbours are not joined
  }
}
KERNEL(strides__before) { strides<false>(a, b, out, room, n); }
KERNEL(strides__coalescing) { strides<true>(a, b, out, room, n); }

// chunks_double: each thread works in double precision on 16 neighbouring elements, or every 256th of its block's.
template <typename T, bool INTERLEAVED> __device__ __forceinline__ void chunks(ARGUMENTS)
{
  const int first = blockIdx.x * blockDim.x * 16 + (INTERLEAVED ? threadIdx.x : threadIdx.x * 16);
  for (int k = 0; k < 16; ++k) {
    const int i = first + (INTERLEAVED ? k * blockDim.x : k);
    T x = a[i];
#pragma unroll
    for (int j = 0; j < 12; ++j) x = x * (T)0.75 + (T)0.125;
    out[i] = (float)x;
  }
}
KERNEL(chunks_double__before) { chunks<double, false>(a, b, out, room, n); }
KERNEL(chunks_double__fp64) { chunks<float, false>(a, b, out, room, n); }
KERNEL(chunks_double__coalescing) { chunks<double, true>(a, b, out, room, n); }
KERNEL(chunks_double__both) { chunks<float, true>(a, b, out, room, n); }

// fields: one field of records of eight floats is read by every thread, or the field from an array of its own.
KERNEL(fields__before) { out[INDEX] = sqrtf(a[8 * INDEX + 3] + 1.0f); }
KERNEL(fields_packed) { room[INDEX] = a[8 * INDEX + 3]; }  // not measured
KERNEL(fields__coalescing) { out[INDEX] = sqrtf(room[INDEX] + 1.0f); }

// columns: rounds of sums down the columns of a tile; a pitch of 32 words puts a warp's reads into one bank.
template <int PITCH, bool WHOLE> __device__ __forceinline__ void columns(ARGUMENTS)
{
  __shared__ float tile[32 * PITCH];
  int *numbers = (int *)tile;
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  for (int y = line; y < 32; y += 8) {
    const float value = a[blockIdx.x * 1024 + y * 32 + lane];
    if (WHOLE) numbers[y * PITCH + lane] = (int)(value * 1000.0f);
    else tile[y * PITCH + lane] = (float)(int)(value * 1000.0f);
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 1
  for (int round = 0; round < 8; ++round)
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int at = lane * PITCH + ((line * 4 + k * 5 + round) & 31);
      sum = sum * 0.5f + (WHOLE ? (float)numbers[at] : tile[at]);
    }
  out[INDEX] = sum;
}
KERNEL(columns__before) { columns<32, false>(a, b, out, room, n); }
KERNEL(columns__bank_conflicts) { columns<33, false>(a, b, out, room, n); }
KERNEL(columns_whole__before) { columns<32, true>(a, b, out, room, n); }
KERNEL(columns_whole__bank_conflicts) { columns<33, true>(a, b, out, room, n); }

// kinds: four kinds of element, each with its own formula; neighbours differ, or a warp takes one kind.
__device__ __forceinline__ float formula(int kind, float x)
{
  float y = x;
  if (kind == 0) {
#pragma unroll 1
    for (int k = 0; k < 24; ++k) y = y * x + 0.5f;
  } else if (kind == 1) {
#pragma unroll 1
    for (int k = 0; k < 24; ++k) y = (y - x) * 0.25f + 0.125f * y;
  } else if (kind == 2) {
#pragma unroll 1
    for (int k = 0; k < 24; ++k) y = fabsf(y - 0.75f) * x + y * 0.5f;
  } else {
#pragma unroll 1
    for (int k = 0; k < 24; ++k) y = y * y * 0.5f + x * 0.25f;
  }
  return y;
}
KERNEL(kinds__before) { out[INDEX] = formula(INDEX & 3, a[INDEX]); }
KERNEL(kinds__divergence)
{
  const int i = blockIdx.x * 128 + threadIdx.x % 32 * 4 + threadIdx.x / 32;
  out[i] = formula(i & 3, a[i]);
}

// trips: a loop that lasts as long as the element wants; lanes of a warp differ, or agree.
__device__ __forceinline__ float loop(int i, float x)
{
  const int trips = 4 + ((i & 31) * 37 & 31) * 4;
  float y = x;
#pragma unroll 1
  for (int k = 0; k < trips; ++k) y = y * 0.75f + x * 0.125f;
  return y;
}
KERNEL(trips__before) { out[INDEX] = loop(INDEX, a[INDEX]); }
KERNEL(trips__divergence)
{
  __shared__ float held[1024];
  const int first = blockIdx.x * 1024, mine = threadIdx.x % 32 * 32 + threadIdx.x / 32;
  held[threadIdx.x] = a[first + threadIdx.x];
  __syncthreads();
  const float y = loop(mine, held[mine]);
  __syncthreads();
  held[mine] = y;
  __syncthreads();
  out[first + threadIdx.x] = held[threadIdx.x];
}

// gather: chains of dependent reads at random places; a large reservation of shared memory keeps other blocks away.
template <int KEPT> __device__ __forceinline__ void gather(ARGUMENTS)
{
  __shared__ float kept[KEPT];
  if (threadIdx.x < KEPT) kept[threadIdx.x] = 0.001f * threadIdx.x;
  __syncthreads();
  word place = scramble(INDEX);
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    const float x = a[place & (n - 1)];
    sum += x + kept[threadIdx.x % KEPT];
    place = scramble(place + (word)(x * 16777216.0f));
  }
  out[INDEX] = sum;
}
KERNEL(gather__before) { gather<11520>(a, b, out, room, n); }
KERNEL(gather__occupancy) { gather<128>(a, b, out, room, n); }

// table: roots through a table in shared memory; the launch asks for so much of it that few blocks fit, or for little.
KERNEL(table)
{
  extern __shared__ float held[];
  held[threadIdx.x] = 0.001f * threadIdx.x;
  __syncthreads();
  for (int turn = 0; turn < 16; ++turn) {
    const int i = (blockIdx.x * 16 + turn) * blockDim.x + threadIdx.x;
    float x = a[i];
#pragma unroll 1
    for (int k = 0; k < 16; ++k) x = sqrtf(x * 0.5f + held[(int)(x * 64.0f) & 127]);
    out[i] = x;
  }
}

// spills: 64 values of a thread are kept, in 32 registers or in as many as it takes.
__device__ __forceinline__ void keep(ARGUMENTS)
{
  float held[64], x = a[INDEX];
#pragma unroll
  for (int k = 0; k < 64; ++k) held[k] = x = x * 0.75f + 0.01f * k;
#pragma unroll 1
  for (int round = 0; round < 4; ++round)
#pragma unroll
    for (int k = 0; k < 64; ++k) held[k] = held[k] * 0.5f + held[(k * 29 + 17) & 63] * 0.25f;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 64; ++k) sum += held[k];
  out[INDEX] = sum;
}
BOUNDED(256, 8, spills__before) { keep(a, b, out, room, n); }
BOUNDED(256, 1, spills__spills) { keep(a, b, out, room, n); }

// pixels: bytes one by one, or sixteen at a time.
__device__ __forceinline__ word brighten(word x) { return min(255u, (x * 5u + 3u) >> 2); }
__device__ __forceinline__ word brighten_four(word x)
{
  return brighten(x & 255u) | brighten(x >> 8 & 255u) << 8 | brighten(x >> 16 & 255u) << 16 | brighten(x >> 24) << 24;
}
KERNEL(pixels__before) { ((byte *)out)[INDEX] = (byte)brighten(((const byte *)a)[INDEX]); }
KERNEL(pixels__access_size)
{
  const uint4 x = ((const uint4 *)a)[INDEX];
  ((uint4 *)out)[INDEX] = make_uint4(brighten_four(x.x), brighten_four(x.y), brighten_four(x.z), brighten_four(x.w));
}

// stream: a sum of two streams, four bytes or sixteen at a time.
KERNEL(stream__before) { out[INDEX] = a[INDEX] * 0.5f + ((const float *)b)[INDEX]; }
KERNEL(stream__access_size)
{
  const float4 x = ((const float4 *)a)[INDEX], y = ((const float4 *)b)[INDEX];
  ((float4 *)out)[INDEX] = make_float4(x.x * 0.5f + y.x, x.y * 0.5f + y.y, x.z * 0.5f + y.z, x.w * 0.5f + y.w);
}

// passes: three elementwise passes, or one.
KERNEL(passes__before_1) { room[INDEX] = a[INDEX] * 1.25f + 0.5f; }
KERNEL(passes__before_2) { room[n + INDEX] = sqrtf(room[INDEX]); }
KERNEL(passes__before_3) { out[INDEX] = room[n + INDEX] / (1.0f + room[n + INDEX]); }
KERNEL(passes__fusion)
{
  const float x = sqrtf(a[INDEX] * 1.25f + 0.5f);
  out[INDEX] = x / (1.0f + x);
}

// rows: normalise rows of 1024 in three passes, or in one that keeps its row. 256 threads a row.
__device__ __forceinline__ float total(float x)
{
  __shared__ float parts[8];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) sum += parts[k];
  return sum;
}
KERNEL(rows__before_1)
{
  float sum = 0.0f;
  for (int k = threadIdx.x; k < 1024; k += 256) sum += a[blockIdx.x * 1024 + k];
  sum = total(sum);
  if (threadIdx.x == 0) room[2 * blockIdx.x] = sum / 1024.0f;
}
KERNEL(rows__before_2)
{
  const float mean = room[2 * blockIdx.x];
  float sum = 0.0f;
  for (int k = threadIdx.x; k < 1024; k += 256) {
    const float d = a[blockIdx.x * 1024 + k] - mean;
    sum += d * d;
  }
  sum = total(sum);
  if (threadIdx.x == 0) room[2 * blockIdx.x + 1] = rsqrtf(sum / 1024.0f + 1e-5f);
}
KERNEL(rows__before_3)
{
  const float mean = room[2 * blockIdx.x], scale = room[2 * blockIdx.x + 1];
  for (int k = threadIdx.x; k < 1024; k += 256)
    out[blockIdx.x * 1024 + k] = (a[blockIdx.x * 1024 + k] - mean) * scale;
}
KERNEL(rows__fusion)
{
  float x[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = a[blockIdx.x * 1024 + k * 256 + threadIdx.x];
  const float mean = total(x[0] + x[1] + x[2] + x[3]) / 1024.0f;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) sum += (x[k] - mean) * (x[k] - mean);
  const float scale = rsqrtf(total(sum) / 1024.0f + 1e-5f);
#pragma unroll
  for (int k = 0; k < 4; ++k) out[blockIdx.x * 1024 + k * 256 + threadIdx.x] = (x[k] - mean) * scale;
}

// weights: whole weights, or weights in double precision, are converted for every element that they meet, or once for a block.
__device__ const int WEIGHTS[64] = {
  3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5,
  0, 2, 8, 8, 4, 1, 9, 7, 1, 6, 9, 3, 9, 9, 3, 7, 5, 1, 0, 5, 8, 2, 0, 9, 7, 4, 9, 4, 4, 5, 9, 2};
template <typename T> __device__ __forceinline__ void weigh(ARGUMENTS)
{
  __shared__ T weights[64];
  if (threadIdx.x < 64) weights[threadIdx.x] = (T)WEIGHTS[threadIdx.x];
  __syncthreads();
  const float x = a[INDEX];
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < 64; k += 8)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = sum * 0.5f + x * (float)weights[k + j];
  out[INDEX] = sum;
}
KERNEL(weights__before) { weigh<int>(a, b, out, room, n); }
KERNEL(weights__conversions) { weigh<float>(a, b, out, room, n); }
KERNEL(weights_double__before) { weigh<double>(a, b, out, room, n); }

// histogram: every element adds to one of 256 counts in memory, or to the block's own first.
KERNEL(histogram__before)
{
  for (int k = 0; k < 16; ++k)
    atomicAdd((word *)out + (word)(a[blockIdx.x * 4096 + k * 256 + threadIdx.x] * 256.0f), 1u);
}
KERNEL(histogram__atomics)
{
  __shared__ word counts[256];
  counts[threadIdx.x] = 0u;
  __syncthreads();
  for (int k = 0; k < 16; ++k)
    atomicAdd(counts + (word)(a[blockIdx.x * 4096 + k * 256 + threadIdx.x] * 256.0f), 1u);
  __syncthreads();
  atomicAdd((word *)out + threadIdx.x, counts[threadIdx.x]);
}

// segments: sums of stretches of 65536; every thread adds to its stretch, or every block once.
KERNEL(segments__before) { atomicAdd(out + INDEX / 65536, a[INDEX]); }
KERNEL(segments__atomics)
{
  const float sum = total(a[INDEX]);
  if (threadIdx.x == 0) atomicAdd(out + INDEX / 65536, sum);
}

// product: 1024 x 1024 matrices; operands from memory for every product, or from tiles in shared memory.
#define WIDE 1024
KERNEL(product__before)
{
  const int column = INDEX % WIDE, row = INDEX / WIDE;
  const float *other = a + WIDE * WIDE;
  float sum = 0.0f;
  for (int k = 0; k < WIDE; ++k) sum += a[row * WIDE + k] * other[k * WIDE + column];
  out[INDEX] = sum;
}
KERNEL(product__shared_memory)
{
  __shared__ float left[32][32], right[32][32];
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int x0 = blockIdx.x % (WIDE / 32) * 32, y0 = blockIdx.x / (WIDE / 32) * 32;
  const float *other = a + WIDE * WIDE;
  float sum = 0.0f;
  for (int k0 = 0; k0 < WIDE; k0 += 32) {
    left[line][lane] = a[(y0 + line) * WIDE + k0 + lane];
    right[line][lane] = other[(k0 + line) * WIDE + x0 + lane];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; ++k) sum += left[line][k] * right[k][lane];
    __syncthreads();
  }
  out[(y0 + line) * WIDE + x0 + lane] = sum;
}

// dots: few threads read a stream one element after another; eight at once, more threads, or both.
template <int AT_ONCE> __device__ __forceinline__ void dots(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x, slots = 16384;  // a slot's elements belong to one output
  float *sums = out + INDEX % slots;
  float sum[AT_ONCE];
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) sum[j] = 0.0f;
#pragma unroll 1
  for (int i = INDEX; i < n; i += AT_ONCE * step)
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) sum[j] += a[i + j * step] * 0.5f;
#pragma unroll
  for (int j = 1; j < AT_ONCE; ++j) sum[0] += sum[j];
  atomicAdd(sums, sum[0]);
}
KERNEL(dots__before) { dots<1>(a, b, out, room, n); }
KERNEL(dots__parallelism) { dots<8>(a, b, out, room, n); }

// series: a long dependent sum in few threads; in four parts, or with more threads that take less each.
template <int PARTS> __device__ __forceinline__ void series(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int i = INDEX; i < n; i += PARTS * step) {
    float x[PARTS], y[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) y[j] = x[j] = a[i + j * step];
#pragma unroll 8
    for (int k = 0; k < 256; ++k)
#pragma unroll
      for (int j = 0; j < PARTS; ++j) y[j] = y[j] * 0.75f + x[j];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) out[i + j * step] = y[j];
  }
}
KERNEL(series__before) { series<1>(a, b, out, room, n); }
KERNEL(series__parallelism) { series<4>(a, b, out, room, n); }

// The second set of programs, written after `tune` had been judged on the first and mended by it.

// logistic: 64 steps of a map that settles, in double precision.
template <typename T> __device__ __forceinline__ void logistic(ARGUMENTS)
{
  T x = (T)a[INDEX] * (T)0.5 + (T)0.25;
#pragma unroll 4
  for (int k = 0; k < 64; ++k) x = (T)2.5 * x * ((T)1.0 - x);
  out[INDEX] = (float)x;
}
KERNEL(logistic__before) { logistic<double>(a, b, out, room, n); }
KERNEL(logistic__fp64) { logistic<float>(a, b, out, room, n); }

// sums: 16 numbers in double precision to one, each thread its own stretch, or every 256th of the block's.
template <typename T, bool INTERLEAVED> __device__ __forceinline__ void sums(const T *from, ARGUMENTS)
{
  __shared__ T held[256];
  const int first = blockIdx.x * 4096 + (INTERLEAVED ? threadIdx.x : threadIdx.x * 16);
  T sum = 0;
  for (int k = 0; k < 16; ++k) sum += from[first + (INTERLEAVED ? k * 256 : k)] * (T)0.5;
  held[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 128; step > 0; step >>= 1) {
    if (threadIdx.x < step) held[threadIdx.x] += held[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = (float)held[0];
}
KERNEL(sums__before) { sums<double, false>(b, a, b, out, room, n); }
KERNEL(sums__fp64) { sums<float, false>(a, a, b, out, room, n); }
KERNEL(sums__coalescing) { sums<double, true>(b, a, b, out, room, n); }
KERNEL(sums__both) { sums<float, true>(a, a, b, out, room, n); }

// heat: seven points of a volume of 256 x 256 planes, past the L1 or through it.
template <bool CACHED> __device__ __forceinline__ float point(const float *p) { return CACHED ? __ldg(p) : __ldcg(p); }
template <bool CACHED> __device__ __forceinline__ void heat(ARGUMENTS)
{
  const int plane = 65536, i = INDEX, mask = n - 1;
  float sum = point<CACHED>(a + i) * 0.4f;
  sum += 0.1f * (point<CACHED>(a + ((i + 1) & mask)) + point<CACHED>(a + ((i - 1) & mask)));
  sum += 0.1f * (point<CACHED>(a + ((i + 256) & mask)) + point<CACHED>(a + ((i - 256) & mask)));
  sum += 0.1f * (point<CACHED>(a + ((i + plane) & mask)) + point<CACHED>(a + ((i - plane) & mask)));
  out[i] = sum;
}
KERNEL(heat__before) { heat<false>(a, b, out, room, n); }
KERNEL(heat__caching) { heat<true>(a, b, out, room, n); }

// taps: a filter of 33 taps from the L1, or from a tile of shared memory.
KERNEL(taps__before)
{
  float sum = 0.0f;
#pragma unroll
  for (int k = -16; k <= 16; ++k) sum += a[(INDEX + k) & (n - 1)] * (0.01f * (k + 17));
  out[INDEX] = sum;
}
KERNEL(taps__shared_memory)
{
  __shared__ float tile[256 + 32];
  for (int i = threadIdx.x; i < 288; i += 256) tile[i] = a[(blockIdx.x * 256 + i - 16) & (n - 1)];
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 33; ++k) sum += tile[threadIdx.x + k] * (0.01f * (k + 1));
  out[INDEX] = sum;
}

// matvec: rows of 1024; a thread walks along its row, or a warp takes a row together.
KERNEL(matvec__before)
{
  float sum = 0.0f;
  for (int k = 0; k < 1024; ++k) sum += a[(size_t)INDEX * 1024 + k] * a[k];
  out[INDEX] = sum;
}
KERNEL(matvec__coalescing)
{
  const int row = INDEX / 32, lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int k = lane; k < 1024; k += 32) sum += a[(size_t)row * 1024 + k] * a[k];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) out[row] = sum;
}

// butterfly: rounds of exchanges at a stride of 16 words, or with one word of padding after every 16.
template <bool PADDED> __device__ __forceinline__ void butterfly(ARGUMENTS)
{
  __shared__ float held[4096 + 256];
  const int t = threadIdx.x;
  for (int k = 0; k < 16; ++k) held[t * 16 + k + (PADDED ? t : 0)] = a[blockIdx.x * 4096 + k * 256 + t];
  float sum = 0.0f;
  __syncthreads();
#pragma unroll 1
  for (int round = 0; round < 4; ++round)
#pragma unroll
    for (int k = 0; k < 16; ++k) sum = sum * 0.5f + held[t * 16 + ((k + round) & 15) + (PADDED ? t : 0)];
  out[INDEX] = sum;
}
KERNEL(butterfly__before) { butterfly<false>(a, b, out, room, n); }
KERNEL(butterfly__bank_conflicts) { butterfly<true>(a, b, out, room, n); }

// functions: two special functions by turns; neighbours differ, or a warp agrees.
__device__ __forceinline__ float special(int kind, float x)
{
  if (kind == 0) {
#pragma unroll 1
    for (int k = 0; k < 12; ++k) x = __sinf(x) * 0.5f + 0.25f;
  } else {
#pragma unroll 1
    for (int k = 0; k < 12; ++k) x = __expf(-x) * 0.75f + 0.125f;
  }
  return x;
}
KERNEL(functions__before) { out[INDEX] = special(INDEX & 1, a[INDEX]); }
KERNEL(functions__divergence)
{
  const int i = blockIdx.x * 256 + threadIdx.x / 64 * 64 + threadIdx.x % 32 * 2 + threadIdx.x / 32 % 2;
  out[i] = special(i & 1, a[i]);
}

// walk: dependent reads within four megabytes that stay in the L2; the launch asks for much shared memory, or for none.
KERNEL(walk)
{
  extern __shared__ float unused[];
  word place = scramble(INDEX) & 1048575u;
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < 16; ++k) {
    const float x = a[place];
    sum += x;
    place = (place + 1u + (word)(x * 4096.0f) * 32u) & 1048575u;
  }
  out[INDEX] = sum;
}

// newton: inverse roots, few threads with one number at a time, or four, or more threads.
template <int PARTS> __device__ __forceinline__ void newton(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int i = INDEX; i < n; i += PARTS * step) {
    float x[PARTS], y[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) { x[j] = a[i + j * step] + 0.5f; y[j] = 0.8f; }
#pragma unroll 4
    for (int k = 0; k < 32; ++k)
#pragma unroll
      for (int j = 0; j < PARTS; ++j) y[j] = y[j] * (1.5f - 0.5f * x[j] * y[j] * y[j]);
#pragma unroll
    for (int j = 0; j < PARTS; ++j) out[i + j * step] = y[j];
  }
}
KERNEL(newton__before) { newton<1>(a, b, out, room, n); }
KERNEL(newton__parallelism) { newton<4>(a, b, out, room, n); }

// halves: numbers of two bytes, one by one or eight at a time.
__device__ __forceinline__ word twice(word x) { return (x * 2u + 1u & 0xffffu); }
KERNEL(halves__before)
{
  ((unsigned short *)out)[INDEX] = (unsigned short)twice(((const unsigned short *)a)[INDEX]);
}
KERNEL(halves__access_size)
{
  const uint4 x = ((const uint4 *)a)[INDEX];
#define BOTH(w) (twice(w & 0xffffu) | twice(w >> 16) << 16)
  ((uint4 *)out)[INDEX] = make_uint4(BOTH(x.x), BOTH(x.y), BOTH(x.z), BOTH(x.w));
}

// blend: three streams to one, four bytes or sixteen at a time.
KERNEL(blend__before) { out[INDEX] = a[INDEX] * 0.25f + ((const float *)b)[INDEX] - ((const float *)b)[n + INDEX]; }
KERNEL(blend__access_size)
{
  const float4 x = ((const float4 *)a)[INDEX], y = ((const float4 *)b)[INDEX], z = ((const float4 *)b)[n / 4 + INDEX];
  ((float4 *)out)[INDEX] = make_float4(
    x.x * 0.25f + y.x - z.x, x.y * 0.25f + y.y - z.y, x.z * 0.25f + y.z - z.z, x.w * 0.25f + y.w - z.w);
}

// steps: two elementwise passes, or one.
KERNEL(steps__before_1) { room[INDEX] = __expf(a[INDEX]); }
KERNEL(steps__before_2) { out[INDEX] = room[INDEX] * room[INDEX] + 1.0f; }
KERNEL(steps__fusion)
{
  const float x = __expf(a[INDEX]);
  out[INDEX] = x * x + 1.0f;
}

// scaled: rows of 4096 divided by their length, in two passes or in one. 256 threads a row.
KERNEL(scaled__before_1)
{
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const float x = a[blockIdx.x * 4096 + k * 256 + threadIdx.x];
    sum += x * x;
  }
  sum = total(sum);
  if (threadIdx.x == 0) room[blockIdx.x] = rsqrtf(sum);
}
KERNEL(scaled__before_2)
{
  const float scale = room[blockIdx.x];
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int i = blockIdx.x * 4096 + k * 256 + threadIdx.x;
    out[i] = a[i] * scale;
  }
}
KERNEL(scaled__fusion)
{
  float x[16], sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    x[k] = a[blockIdx.x * 4096 + k * 256 + threadIdx.x];
    sum += x[k] * x[k];
  }
  const float scale = rsqrtf(total(sum));
#pragma unroll
  for (int k = 0; k < 16; ++k) out[blockIdx.x * 4096 + k * 256 + threadIdx.x] = x[k] * scale;
}

// rounded: a number is cut to a whole one in every step, or kept as it is.
template <bool WHOLE> __device__ __forceinline__ void rounded(ARGUMENTS)
{
  const float x = floorf(a[INDEX] * 1000.0f);
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < 64; ++k) {
    const float y = x + (float)k;
    sum = sum * 0.5f + (WHOLE ? (float)(int)(y * 1.0000001f) : y);
  }
  out[INDEX] = sum;
}
KERNEL(rounded__before) { rounded<true>(a, b, out, room, n); }
KERNEL(rounded__conversions) { rounded<false>(a, b, out, room, n); }

// votes: every number votes for one of 4096 places in memory, or for the block's own first.
KERNEL(votes__before)
{
  for (int k = 0; k < 32; ++k)
    atomicAdd((word *)out + (word)(a[blockIdx.x * 8192 + k * 256 + threadIdx.x] * 4096.0f), 1u);
}
KERNEL(votes__atomics)
{
  __shared__ word counts[4096];
  for (int i = threadIdx.x; i < 4096; i += 256) counts[i] = 0u;
  __syncthreads();
  for (int k = 0; k < 32; ++k)
    atomicAdd(counts + (word)(a[blockIdx.x * 8192 + k * 256 + threadIdx.x] * 4096.0f), 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 4096; i += 256) atomicAdd((word *)out + i, counts[i]);
}

// kept: 40 values of a thread in 24 registers, or in as many as it takes.
__device__ __forceinline__ void forty(ARGUMENTS)
{
  float held[40], x = a[INDEX];
#pragma unroll
  for (int k = 0; k < 40; ++k) held[k] = x = x * 0.5f + 0.02f * k;
#pragma unroll 1
  for (int round = 0; round < 6; ++round)
#pragma unroll
    for (int k = 0; k < 40; ++k) held[k] = held[k] * 0.25f + held[(k * 17 + 11) % 40] * 0.5f;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 40; ++k) sum += held[k];
  out[INDEX] = sum;
}
BOUNDED(1024, 2, kept__before) { forty(a, b, out, room, n); }
BOUNDED(256, 2, kept__spills) { forty(a, b, out, room, n); }
