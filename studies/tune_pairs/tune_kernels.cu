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

// The third set, after kernels that are tuned often. Written after `tune` had been mended by the second.

// layernorm: rows of 256; a thread walks along its row, or a warp takes it together; 4 or 16 bytes at a time.
KERNEL(layernorm__before)
{
  const float *row = a + (size_t)INDEX * 256;
  float mean = 0.0f, square = 0.0f;
  for (int k = 0; k < 256; ++k) mean += row[k];
  mean /= 256.0f;
  for (int k = 0; k < 256; ++k) square += (row[k] - mean) * (row[k] - mean);
  const float scale = rsqrtf(square / 256.0f + 1e-5f);
  for (int k = 0; k < 256; ++k) out[(size_t)INDEX * 256 + k] = (row[k] - mean) * scale;
}
__device__ __forceinline__ float4 less(float4 x, float y) { return make_float4(x.x - y, x.y - y, x.z - y, x.w - y); }
__device__ __forceinline__ float4 times(float4 x, float y) { return make_float4(x.x * y, x.y * y, x.z * y, x.w * y); }
__device__ __forceinline__ float add_up(float4 x) { return x.x + x.y + x.z + x.w; }
__device__ __forceinline__ float add_squares(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
KERNEL(layernorm__access_size)
{
  const float4 *row = (const float4 *)a + (size_t)INDEX * 64;
  float mean = 0.0f, square = 0.0f;
  for (int k = 0; k < 64; ++k) mean += add_up(row[k]);
  mean /= 256.0f;
  for (int k = 0; k < 64; ++k) square += add_squares(less(row[k], mean));
  const float scale = rsqrtf(square / 256.0f + 1e-5f);
  for (int k = 0; k < 64; ++k) ((float4 *)out)[(size_t)INDEX * 64 + k] = times(less(row[k], mean), scale);
}
KERNEL(layernorm__coalescing)
{
  const int lane = threadIdx.x % 32;
  const size_t first = (size_t)(INDEX / 32) * 256;
  float mean = 0.0f, square = 0.0f;
  for (int k = lane; k < 256; k += 32) mean += a[first + k];
  mean = warp_sum(mean) / 256.0f;
  for (int k = lane; k < 256; k += 32) square += (a[first + k] - mean) * (a[first + k] - mean);
  const float scale = rsqrtf(warp_sum(square) / 256.0f + 1e-5f);
  for (int k = lane; k < 256; k += 32) out[first + k] = (a[first + k] - mean) * scale;
}
KERNEL(layernorm__both)
{
  const int lane = threadIdx.x % 32;
  const float4 *row = (const float4 *)a + (size_t)(INDEX / 32) * 64;
  float4 *to = (float4 *)out + (size_t)(INDEX / 32) * 64;
  float mean = 0.0f, square = 0.0f;
  for (int k = lane; k < 64; k += 32) mean += add_up(row[k]);
  mean = warp_sum(mean) / 256.0f;
  for (int k = lane; k < 64; k += 32) square += add_squares(less(row[k], mean));
  const float scale = rsqrtf(warp_sum(square) / 256.0f + 1e-5f);
  for (int k = lane; k < 64; k += 32) to[k] = times(less(row[k], mean), scale);
}

// softmax: rows of 2048 in three passes, or in one. 256 threads a row.
__device__ __forceinline__ float highest(float x)
{
  __shared__ float parts[8];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k) x = fmaxf(x, parts[k]);
  return x;
}
KERNEL(softmax__before_1)
{
  float most = -1e30f;
  for (int k = threadIdx.x; k < 2048; k += 256) most = fmaxf(most, a[blockIdx.x * 2048 + k]);
  most = highest(most);
  if (threadIdx.x == 0) room[2 * blockIdx.x] = most;
}
KERNEL(softmax__before_2)
{
  const float most = room[2 * blockIdx.x];
  float sum = 0.0f;
  for (int k = threadIdx.x; k < 2048; k += 256) sum += __expf(a[blockIdx.x * 2048 + k] - most);
  sum = total(sum);
  if (threadIdx.x == 0) room[2 * blockIdx.x + 1] = 1.0f / sum;
}
KERNEL(softmax__before_3)
{
  const float most = room[2 * blockIdx.x], scale = room[2 * blockIdx.x + 1];
  for (int k = threadIdx.x; k < 2048; k += 256)
    out[blockIdx.x * 2048 + k] = __expf(a[blockIdx.x * 2048 + k] - most) * scale;
}
KERNEL(softmax__fusion)
{
  float x[8], most = -1e30f, sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) most = fmaxf(most, x[k] = a[blockIdx.x * 2048 + k * 256 + threadIdx.x]);
  most = highest(most);
#pragma unroll
  for (int k = 0; k < 8; ++k) sum += x[k] = __expf(x[k] - most);
  const float scale = 1.0f / total(sum);
#pragma unroll
  for (int k = 0; k < 8; ++k) out[blockIdx.x * 2048 + k * 256 + threadIdx.x] = x[k] * scale;
}

// gelu: literals without an f draw an activation into double precision; one element a thread, or four.
__device__ __forceinline__ float gelu_double(float y)
{
  const float x = y * 8.0f - 4.0f;
  return 0.5 * x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}
__device__ __forceinline__ float gelu_single(float y)
{
  const float x = y * 8.0f - 4.0f;
  return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
KERNEL(gelu__before) { out[INDEX] = gelu_double(a[INDEX]); }
KERNEL(gelu__fp64) { out[INDEX] = gelu_single(a[INDEX]); }
KERNEL(gelu__access_size)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((float4 *)out)[INDEX] = make_float4(gelu_double(x.x), gelu_double(x.y), gelu_double(x.z), gelu_double(x.w));
}
KERNEL(gelu__both)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((float4 *)out)[INDEX] = make_float4(gelu_single(x.x), gelu_single(x.y), gelu_single(x.z), gelu_single(x.w));
}

// nbody: forces of 1024 bodies on each; in double precision, and from memory or out of a tile of shared memory.
template <typename T> __device__ __forceinline__ T inverse_root(T x) { return rsqrt(x); }
template <typename T> __device__ __forceinline__ void attract(T *force, float4 me, float4 other)
{
  const T x = (T)other.x - (T)me.x, y = (T)other.y - (T)me.y, z = (T)other.z - (T)me.z;
  const T r = inverse_root(x * x + y * y + z * z + (T)0.01), pull = (T)other.w * r * r * r;
  force[0] += x * pull;
  force[1] += y * pull;
  force[2] += z * pull;
}
template <typename T, bool TILED> __device__ __forceinline__ void nbody(ARGUMENTS)
{
  __shared__ float4 tile[256];
  const float4 *bodies = (const float4 *)a, me = bodies[INDEX];
  T force[3] = {0, 0, 0};
  if (TILED) {
    for (int first = 0; first < 1024; first += 256) {
      __syncthreads();
      tile[threadIdx.x] = bodies[first + threadIdx.x];
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < 256; ++k) attract<T>(force, me, tile[k]);
    }
  } else {
#pragma unroll 4
    for (int k = 0; k < 1024; ++k) attract<T>(force, me, bodies[k]);
  }
  out[INDEX] = (float)(force[0] + (T)2 * force[1] + (T)3 * force[2]);
}
KERNEL(nbody__before) { nbody<double, false>(a, b, out, room, n); }
KERNEL(nbody__fp64) { nbody<float, false>(a, b, out, room, n); }
KERNEL(nbody__shared_memory) { nbody<double, true>(a, b, out, room, n); }

// spmv: a sparse matrix with 32 entries a row near the diagonal; a thread takes a row, or a warp does.
KERNEL(spmv_columns)  // not measured
{
  for (int i = INDEX; i < n; i += gridDim.x * blockDim.x)
    ((int *)room)[i] = (i / 32 + (int)(scramble(i) & 4095u)) & 1048575;
}
KERNEL(spmv__before)
{
  const int *column = (const int *)room;
  float sum = 0.0f;
  for (int k = INDEX * 32; k < INDEX * 32 + 32; ++k) sum += a[k] * a[column[k]];
  out[INDEX] = sum;
}
KERNEL(spmv__coalescing)
{
  const float sum = warp_sum(a[INDEX] * a[((const int *)room)[INDEX]]);
  if (threadIdx.x % 32 == 0) out[INDEX / 32] = sum;
}

// scan: prefix sums of 512 by a tree in shared memory, at strides of powers of two, or with padding.
template <bool PADDED> __device__ __forceinline__ int slot(int i) { return PADDED ? i + (i >> 5) : i; }
template <bool PADDED> __device__ __forceinline__ void scan(ARGUMENTS)
{
  __shared__ float held[512 + 16];
  const int t = threadIdx.x, first = blockIdx.x * 512;
  held[slot<PADDED>(t)] = a[first + t];
  held[slot<PADDED>(t + 256)] = a[first + t + 256];
  int step = 1;
  for (int active = 256; active > 0; active >>= 1, step <<= 1) {
    __syncthreads();
    if (t < active) held[slot<PADDED>(step * (2 * t + 2) - 1)] += held[slot<PADDED>(step * (2 * t + 1) - 1)];
  }
  if (t == 0) held[slot<PADDED>(511)] = 0.0f;
  for (int active = 1; active < 512; active <<= 1) {
    step >>= 1;
    __syncthreads();
    if (t < active) {
      const int low = slot<PADDED>(step * (2 * t + 1) - 1), high = slot<PADDED>(step * (2 * t + 2) - 1);
      const float x = held[low];
      held[low] = held[high];
      held[high] += x;
    }
  }
  __syncthreads();
  out[first + t] = held[slot<PADDED>(t)];
  out[first + t + 256] = held[slot<PADDED>(t + 256)];
}
KERNEL(scan__before) { scan<false>(a, b, out, room, n); }
KERNEL(scan__bank_conflicts) { scan<true>(a, b, out, room, n); }

// reduce: sums of 256 by a tree; every second, fourth, ... thread adds, or the first half, quarter, ...
KERNEL(reduce__before)
{
  __shared__ float held[256];
  held[threadIdx.x] = a[INDEX];
  for (int step = 1; step < 256; step *= 2) {
    __syncthreads();
    if (threadIdx.x % (2 * step) == 0) held[threadIdx.x] += held[threadIdx.x + step];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = held[0];
}
KERNEL(reduce__divergence)
{
  __shared__ float held[256];
  held[threadIdx.x] = a[INDEX];
  for (int step = 128; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) held[threadIdx.x] += held[threadIdx.x + step];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = held[0];
}

// normals: random numbers of a bell curve, one by one or four at a time.
__device__ __forceinline__ float draw_normal(word i)
{
  const word x = scramble(2u * i + 1u), y = scramble(x + i);
  const float u = ((x >> 8) + 1u) * 5.9604645e-8f, v = (y >> 8) * 5.9604645e-8f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}
KERNEL(normals__before) { out[INDEX] = draw_normal(INDEX); }
KERNEL(normals__access_size)
{
  const word i = 4u * INDEX;
  ((float4 *)out)[INDEX] = make_float4(draw_normal(i), draw_normal(i + 1u), draw_normal(i + 2u), draw_normal(i + 3u));
}

// clusters: points go to the nearest of 16 centres and add to its sums in memory, or in the block's own first.
template <bool OWN> __device__ __forceinline__ void clusters(ARGUMENTS)
{
  __shared__ float held[48];
  if (OWN && threadIdx.x < 48) held[threadIdx.x] = 0.0f;
  __syncthreads();
  float *sums = OWN ? held : out;
  for (int turn = 0; turn < 16; ++turn) {
    const float2 point = ((const float2 *)a)[(blockIdx.x * 16 + turn) * 256 + threadIdx.x];
    int best = 0;
    float least = 1e30f;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float x = point.x - 0.25f * (k % 4) - 0.125f, y = point.y - 0.25f * (k / 4) - 0.125f, far = x * x + y * y;
      if (far < least) { least = far; best = k; }
    }
    atomicAdd(sums + 3 * best, point.x);
    atomicAdd(sums + 3 * best + 1, point.y);
    atomicAdd(sums + 3 * best + 2, 1.0f);
  }
  __syncthreads();
  if (OWN && threadIdx.x < 48) atomicAdd(out + threadIdx.x, held[threadIdx.x]);
}
KERNEL(clusters__before) { clusters<false>(a, b, out, room, n); }
KERNEL(clusters__atomics) { clusters<true>(a, b, out, room, n); }

// dot_half: rows of 2048 numbers of two bytes times a vector, one by one or eight at a time. A warp takes a row.
KERNEL(dot_half_numbers)  // not measured
{
  for (int i = INDEX; i < n; i += gridDim.x * blockDim.x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(a[i & (n / 2 - 1)] * 0.25f));
    ((unsigned short *)room)[i] = half;
  }
}
__device__ __forceinline__ float widen(unsigned short half)
{
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}
KERNEL(dot_half__before)
{
  const unsigned short *vector = (const unsigned short *)room, *row = vector + (size_t)(INDEX / 32) * 2048;
  unsigned short sum = 0;
  for (int k = threadIdx.x % 32; k < 2048; k += 32)
    asm("fma.rn.f16 %0, %1, %2, %0;" : "+h"(sum) : "h"(row[k]), "h"(vector[k]));
  const float all = warp_sum(widen(sum));
  if (threadIdx.x % 32 == 0) out[INDEX / 32] = all;
}
KERNEL(dot_half__access_size)
{
  const uint4 *vector = (const uint4 *)room, *row = vector + (size_t)(INDEX / 32) * 256;
  word sum = 0u;
  for (int k = threadIdx.x % 32; k < 256; k += 32) {
    const uint4 x = row[k], y = vector[k];
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x.x), "r"(y.x));
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x.y), "r"(y.y));
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x.z), "r"(y.z));
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x.w), "r"(y.w));
  }
  const float all = warp_sum(widen((unsigned short)sum) + widen((unsigned short)(sum >> 16)));
  if (threadIdx.x % 32 == 0) out[INDEX / 32] = all;
}

// blur: 17 points of a row through a volatile pointer, which no L1 keeps, or through a plain one.
template <typename POINTER> __device__ __forceinline__ float blur(POINTER from, int n)
{
  float sum = 0.0f;
#pragma unroll
  for (int k = -8; k <= 8; ++k) sum += from[(INDEX + k) & (n - 1)] * (0.02f * (9 - abs(k)));
  return sum;
}
KERNEL(blur__before) { out[INDEX] = blur((const volatile float *)a, n); }
KERNEL(blur__caching) { out[INDEX] = blur(a, n); }

// clip: half of the elements, at random, need a long computation; a warp waits for its own, or a block packs them.
__device__ __forceinline__ float refine(float x)
{
  float y = x;
#pragma unroll 1
  for (int k = 0; k < 48; ++k) y = y * (1.5f - 0.4f * x * y * y) + 0.01f;
  return y;
}
KERNEL(clip__before)
{
  const float x = a[INDEX];
  out[INDEX] = x > 0.5f ? refine(x) : x;
}
KERNEL(clip__divergence)
{
  __shared__ int count, list[256];
  __shared__ float held[256];
  const float x = a[INDEX];
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  held[threadIdx.x] = x;
  if (x > 0.5f) list[atomicAdd(&count, 1)] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x < count) held[list[threadIdx.x]] = refine(held[list[threadIdx.x]]);
  __syncthreads();
  out[INDEX] = held[threadIdx.x];
}

// options: prices of options by few threads with one at a time, or four, or by more threads.
__device__ __forceinline__ float spread(float x)
{
  const float t = 1.0f / (1.0f + 0.2316419f * fabsf(x));
  const float tail = 0.3989423f * __expf(-0.5f * x * x) * t
    * (0.3193815f + t * (-0.3565638f + t * (1.7814779f + t * (-1.8212560f + t * 1.3302744f))));
  return x > 0.0f ? 1.0f - tail : tail;
}
template <int PARTS> __device__ __forceinline__ void price(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int i = INDEX; i < n; i += PARTS * step) {
    float x[PARTS], y[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) x[j] = 50.0f + 100.0f * a[i + j * step];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const float d = (__logf(x[j] * 0.01f) + 0.065f) / 0.3f;
      y[j] = x[j] * spread(d) - 98.0f * spread(d - 0.3f);
    }
#pragma unroll
    for (int j = 0; j < PARTS; ++j) out[i + j * step] = y[j];
  }
}
KERNEL(options__before) { price<1>(a, b, out, room, n); }
KERNEL(options__parallelism) { price<4>(a, b, out, room, n); }

// embedding: rows of 128 at random places, a warp takes eight; the launch asks for much shared memory, or for little.
KERNEL(embedding)
{
  extern __shared__ float unused[];
  const int warp = INDEX / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    const word to = warp * 8 + k, from = scramble(to) & 262143u;
    ((float4 *)out)[to * 32u + lane] = ((const float4 *)a)[from * 32u + lane];
  }
}

// micro: a block's 96 x 128 part of a product, 48 sums of a thread in 32 registers, or in as many as it takes.
__device__ __forceinline__ void micro(ARGUMENTS)
{
  __shared__ float left[16][96], right[16][128];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float sum[6][8];
#pragma unroll
  for (int i = 0; i < 6; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[i][j] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < 64; first += 16) {
    __syncthreads();
    for (int k = threadIdx.x; k < 16 * 96; k += 256) left[k / 96][k % 96] = a[blockIdx.x * 6144 + first * 96 + k];
    for (int k = threadIdx.x; k < 16 * 128; k += 256) right[k / 128][k % 128] = a[blockIdx.x * 8192 + first * 128 + k];
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < 16; ++k)
#pragma unroll
      for (int i = 0; i < 6; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] += left[k][ty * 6 + i] * right[k][tx + 16 * j];
  }
#pragma unroll
  for (int i = 0; i < 6; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) out[blockIdx.x * 12288 + (ty * 6 + i) * 128 + tx + 16 * j] = sum[i][j];
}
BOUNDED(256, 8, micro__before) { micro(a, b, out, room, n); }
BOUNDED(256, 1, micro__spills) { micro(a, b, out, room, n); }

// dequant: rows of 1024 whole numbers of four bits times a vector; converted, or put into the bits of a float.
template <bool CONVERTED> __device__ __forceinline__ void dequant(ARGUMENTS)
{
  __shared__ float vector[1024];
  for (int i = threadIdx.x; i < 1024; i += 256) vector[i] = a[i];
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const uint4 packed = ((const uint4 *)a)[INDEX];
  const word words[4] = {packed.x, packed.y, packed.z, packed.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const word four = words[i] >> (4 * j) & 15u;
      sum += (CONVERTED ? (float)four : __uint_as_float(four | 0x4b000000u) - 8388608.0f) * vector[(8 * i + j) * 32 + lane];
    }
  sum = warp_sum(sum);
  if (lane == 0) out[INDEX / 32] = sum;
}
KERNEL(dequant__before) { dequant<true>(a, b, out, room, n); }
KERNEL(dequant__conversions) { dequant<false>(a, b, out, room, n); }

// residual: scale and shift, an activation, and the sum with another stream in three passes, or in one.
__device__ __forceinline__ float bend(float x) { return x / (1.0f + __expf(-1.702f * x)); }
KERNEL(residual__before_1) { room[INDEX] = a[INDEX] * 1.5f - 0.5f; }
KERNEL(residual__before_2) { room[n + INDEX] = bend(room[INDEX]); }
KERNEL(residual__before_3) { out[INDEX] = room[n + INDEX] + a[(INDEX + n / 2) & (n - 1)]; }
KERNEL(residual__fusion) { out[INDEX] = bend(a[INDEX] * 1.5f - 0.5f) + a[(INDEX + n / 2) & (n - 1)]; }

// scores: products of 2048 queries with 8192 keys of 64; keys as they lie, transposed, or in a tile of shared memory.
#define KEYS (a + 131072)
KERNEL(scores__before)
{
  const int key = INDEX % 8192, query = INDEX / 8192;
  float sum = 0.0f;
  for (int d = 0; d < 64; ++d) sum += a[query * 64 + d] * KEYS[key * 64 + d];
  out[INDEX] = sum;
}
KERNEL(scores_transposed)  // not measured
{
  for (int i = INDEX; i < 8192 * 64; i += gridDim.x * blockDim.x) room[i % 64 * 8192 + i / 64] = KEYS[i];
}
KERNEL(scores__coalescing)
{
  const int key = INDEX % 8192, query = INDEX / 8192;
  float sum = 0.0f;
  for (int d = 0; d < 64; ++d) sum += a[query * 64 + d] * room[d * 8192 + key];
  out[INDEX] = sum;
}
KERNEL(scores__shared_memory)
{
  __shared__ float keys[32][65], queries[8][64];
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int first_key = blockIdx.x % 256 * 32, first_query = blockIdx.x / 256 * 8;
  for (int i = threadIdx.x; i < 2048; i += 256) keys[i / 64][i % 64] = KEYS[first_key * 64 + i];
  for (int i = threadIdx.x; i < 512; i += 256) queries[i / 64][i % 64] = a[first_query * 64 + i];
  __syncthreads();
  float sum = 0.0f;
  for (int d = 0; d < 64; ++d) sum += queries[line][d] * keys[lane][d];
  out[(first_query + line) * 8192 + first_key + lane] = sum;
}

// The fourth set, written after `tune` had been mended by the third.

// rms: rows of 1024 over their root mean square, summed in double precision; 4 or 16 bytes at a time. A warp takes a row.
template <typename T> __device__ __forceinline__ void rms(ARGUMENTS)
{
  const int lane = threadIdx.x % 32;
  const size_t first = (size_t)(INDEX / 32) * 1024;
  T sum = 0;
  for (int k = lane; k < 1024; k += 32) sum += (T)a[first + k] * (T)a[first + k];
  const float scale = rsqrtf(warp_sum((float)sum) / 1024.0f + 1e-5f);
  for (int k = lane; k < 1024; k += 32) out[first + k] = a[first + k] * scale;
}
template <typename T> __device__ __forceinline__ void rms_four(ARGUMENTS)
{
  const int lane = threadIdx.x % 32;
  const float4 *row = (const float4 *)a + (size_t)(INDEX / 32) * 256;
  float4 *to = (float4 *)out + (size_t)(INDEX / 32) * 256;
  T sum = 0;
  for (int k = lane; k < 256; k += 32) {
    const float4 x = row[k];
    sum += (T)x.x * (T)x.x + (T)x.y * (T)x.y + (T)x.z * (T)x.z + (T)x.w * (T)x.w;
  }
  const float scale = rsqrtf(warp_sum((float)sum) / 1024.0f + 1e-5f);
  for (int k = lane; k < 256; k += 32) to[k] = times(row[k], scale);
}
KERNEL(rms__before) { rms<double>(a, b, out, room, n); }
KERNEL(rms__fp64) { rms<float>(a, b, out, room, n); }
KERNEL(rms__access_size) { rms_four<double>(a, b, out, room, n); }
KERNEL(rms__both) { rms_four<float>(a, b, out, room, n); }

// lengths: a root in double precision where single would do.
KERNEL(lengths__before) { const double x = a[INDEX]; out[INDEX] = (float)sqrt(x * x + 0.5); }
KERNEL(lengths__fp64) { const float x = a[INDEX]; out[INDEX] = sqrtf(x * x + 0.5f); }

// pool: the largest of 2 x 2 pixels, one by one or of 16 bytes at a time.
KERNEL(pool__before)
{
  const float *from = a + (size_t)(INDEX / 2048) * 8192 + INDEX % 2048 * 2;
  out[INDEX] = fmaxf(fmaxf(from[0], from[1]), fmaxf(from[4096], from[4097]));
}
KERNEL(pool__access_size)
{
  const float4 *from = (const float4 *)a + (size_t)(INDEX / 1024) * 2048 + INDEX % 1024;
  const float4 x = from[0], y = from[1024];
  ((float2 *)out)[INDEX] =
    make_float2(fmaxf(fmaxf(x.x, x.y), fmaxf(y.x, y.y)), fmaxf(fmaxf(x.z, x.w), fmaxf(y.z, y.w)));
}

// particles: records of place and speed, read field by field, as a whole, or from arrays of one field each.
KERNEL(particles__before)
{
  const float *p = a + 4 * (size_t)INDEX;
  out[INDEX] = p[0] * p[2] + p[1] * p[3];
}
KERNEL(particles_packed)  // not measured
{
  for (int field = 0; field < 4; ++field) room[field * (n / 4) + INDEX] = a[4 * (size_t)INDEX + field];
}
KERNEL(particles__coalescing)
{
  const float *p = room + INDEX;
  out[INDEX] = p[0] * p[n / 2] + p[n / 4] * p[n / 4 * 3];
}
KERNEL(particles__access_size)
{
  const float4 p = ((const float4 *)a)[INDEX];
  out[INDEX] = p.x * p.z + p.y * p.w;
}

// symmetric: a matrix of 4096 x 4096 plus its transpose, read down the columns or through a tile.
KERNEL(symmetric__before)
{
  const int tiles = SIDE / 32, lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int x0 = blockIdx.x % tiles * 32, y0 = blockIdx.x / tiles * 32;
  for (int y = line; y < 32; y += 8)
    out[(y0 + y) * SIDE + x0 + lane] = a[(y0 + y) * SIDE + x0 + lane] + a[(x0 + lane) * SIDE + y0 + y];
}
KERNEL(symmetric__coalescing)
{
  __shared__ float tile[32][33];
  const int tiles = SIDE / 32, lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int x0 = blockIdx.x % tiles * 32, y0 = blockIdx.x / tiles * 32;
  for (int y = line; y < 32; y += 8) tile[y][lane] = a[(x0 + y) * SIDE + y0 + lane];
  __syncthreads();
  for (int y = line; y < 32; y += 8)
    out[(y0 + y) * SIDE + x0 + lane] = a[(y0 + y) * SIDE + x0 + lane] + tile[lane][y];
}

// gram: products of all rows of 1024 with each other through tiles, whose columns share a bank, or padded.
template <int PITCH> __device__ __forceinline__ void gram(ARGUMENTS)
{
  __shared__ float left[32][32], right[32][PITCH];
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const int x0 = blockIdx.x % (WIDE / 32) * 32, y0 = blockIdx.x / (WIDE / 32) * 32;
  float sum = 0.0f;
  for (int k0 = 0; k0 < WIDE; k0 += 32) {
    left[line][lane] = a[(y0 + line) * WIDE + k0 + lane];
    right[line][lane] = a[(x0 + line) * WIDE + k0 + lane];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; ++k) sum += left[line][k] * right[lane][k];
    __syncthreads();
  }
  out[(y0 + line) * WIDE + x0 + lane] = sum;
}
KERNEL(gram__before) { gram<32>(a, b, out, room, n); }
KERNEL(gram__bank_conflicts) { gram<33>(a, b, out, room, n); }

// quads: records of four words in shared memory, one field at a time; or an array for each field.
template <bool SPLIT> __device__ __forceinline__ void quads(ARGUMENTS)
{
  __shared__ float held[1024];
  const int t = threadIdx.x;
  for (int i = t; i < 1024; i += 256) held[SPLIT ? i % 4 * 256 + i / 4 : i] = a[blockIdx.x * 1024 + i];
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 32; ++k) {
    const int record = (t + k * 7) & 255;
    sum = sum * 0.5f + held[SPLIT ? (k & 3) * 256 + record : 4 * record + (k & 3)];
  }
  out[INDEX] = sum;
}
KERNEL(quads__before) { quads<false>(a, b, out, room, n); }
KERNEL(quads__bank_conflicts) { quads<true>(a, b, out, room, n); }

// opcodes: eight kinds of integer work; neighbours differ, or a warp has one kind.
__device__ __forceinline__ word execute(int kind, word x)
{
#define WORK(step) { _Pragma("unroll 1") for (int k = 0; k < 16; ++k) { step; } break; }
  switch (kind) {
    case 0: WORK(x = x * 5u + 1u)
    case 1: WORK(x ^= x << 3)
    case 2: WORK(x = (x >> 1) + (x << 30))
    case 3: WORK(x = x * x + 7u)
    case 4: WORK(x = min(x, ~x) + 3u)
    case 5: WORK(x = (x & 0xffffu) * 40503u + (x >> 16))
    case 6: WORK(x -= x >> 2)
    default: WORK(x = __brev(x) + 11u)
  }
  return x;
}
KERNEL(opcodes__before) { ((word *)out)[INDEX] = execute(INDEX & 7, ((const word *)a)[INDEX]); }
KERNEL(opcodes__divergence)
{
  const int i = blockIdx.x * 256 + threadIdx.x % 32 * 8 + threadIdx.x / 32;
  ((word *)out)[i] = execute(i & 7, ((const word *)a)[i]);
}

// tonemap: a curve for every pixel, four after another; the launch asks for much shared memory, or for little.
KERNEL(tonemap)
{
  extern __shared__ float unused[];
#pragma unroll 1
  for (int turn = 0; turn < 4; ++turn) {
    const int i = (blockIdx.x * 4 + turn) * blockDim.x + threadIdx.x;
    const float x = a[i];
    out[i] = __powf(x / (1.0f + x), 0.4545f);
  }
}

// roots: few threads take one element after another; four at once, more threads, or both.
template <int PARTS> __device__ __forceinline__ void roots(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int i = INDEX; i < n; i += PARTS * step) {
    float x[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) x[j] = a[i + j * step];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) out[i + j * step] = sqrtf(x[j]) * 0.5f + 1.0f;
  }
}
KERNEL(roots__before) { roots<1>(a, b, out, room, n); }
KERNEL(roots__parallelism) { roots<4>(a, b, out, room, n); }

// quantise: floats to bytes, one by one or four at a time.
__device__ __forceinline__ word to_byte(float x) { return (word)fminf(fmaxf(x * 255.0f + 0.5f, 0.0f), 255.0f); }
KERNEL(quantise__before) { ((byte *)out)[INDEX] = (byte)to_byte(a[INDEX]); }
KERNEL(quantise__access_size)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((word *)out)[INDEX] = to_byte(x.x) | to_byte(x.y) << 8 | to_byte(x.z) << 16 | to_byte(x.w) << 24;
}

// moments: sums and sums of squares of stretches of 2048 in two passes, or in one.
KERNEL(moments__before_1)
{
  float sum = 0.0f;
  for (int k = threadIdx.x; k < 2048; k += 256) sum += a[blockIdx.x * 2048 + k];
  sum = total(sum);
  if (threadIdx.x == 0) out[2 * blockIdx.x] = sum;
}
KERNEL(moments__before_2)
{
  float sum = 0.0f;
  for (int k = threadIdx.x; k < 2048; k += 256) sum += a[blockIdx.x * 2048 + k] * a[blockIdx.x * 2048 + k];
  sum = total(sum);
  if (threadIdx.x == 0) out[2 * blockIdx.x + 1] = sum;
}
KERNEL(moments__fusion)
{
  float sum = 0.0f, square = 0.0f;
  for (int k = threadIdx.x; k < 2048; k += 256) {
    const float x = a[blockIdx.x * 2048 + k];
    sum += x;
    square += x * x;
  }
  sum = total(sum);
  square = total(square);
  if (threadIdx.x == 0) {
    out[2 * blockIdx.x] = sum;
    out[2 * blockIdx.x + 1] = square;
  }
}

// gate: an activation, then its product with another stream, in two passes or in one.
KERNEL(gate__before_1) { room[INDEX] = bend(a[INDEX]); }
KERNEL(gate__before_2) { out[INDEX] = room[INDEX] * a[(INDEX + n / 2) & (n - 1)]; }
KERNEL(gate__fusion) { out[INDEX] = bend(a[INDEX]) * a[(INDEX + n / 2) & (n - 1)]; }

// maxima: the largest number of each of 128 groups, found in memory, or in the block first.
template <bool OWN> __device__ __forceinline__ void maxima(ARGUMENTS)
{
  __shared__ int held[128];
  if (OWN && threadIdx.x < 128) held[threadIdx.x] = 0;
  __syncthreads();
  int *most = OWN ? held : (int *)out;
  for (int k = 0; k < 16; ++k) {
    const int i = blockIdx.x * 4096 + k * 256 + threadIdx.x;
    atomicMax(most + (scramble(i) & 127u), __float_as_int(a[i]));
  }
  __syncthreads();
  if (OWN && threadIdx.x < 128) atomicMax((int *)out + threadIdx.x, held[threadIdx.x]);
}
KERNEL(maxima__before) { maxima<false>(a, b, out, room, n); }
KERNEL(maxima__atomics) { maxima<true>(a, b, out, room, n); }

// sorted: 48 numbers of a thread put in order, in 32 registers or in as many as it takes.
__device__ __forceinline__ void sorted(ARGUMENTS)
{
  float held[48];
  const float x = a[INDEX];
#pragma unroll
  for (int k = 0; k < 48; ++k) held[k] = x * (0.25f + 0.015f * ((k * 29 + 17) % 48));
#pragma unroll 1
  for (int round = 0; round < 6; ++round)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
      for (int k = odd; k < 47; k += 2) {
        const float low = fminf(held[k], held[k + 1]);
        held[k + 1] = fmaxf(held[k], held[k + 1]);
        held[k] = low;
      }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 48; ++k) sum += held[k] * (0.01f * k);
  out[INDEX] = sum;
}
BOUNDED(256, 8, sorted__before) { sorted(a, b, out, room, n); }
BOUNDED(256, 1, sorted__spills) { sorted(a, b, out, room, n); }

// smooth: 7 x 7 points of an image through a volatile pointer, which no L1 keeps, or through a plain one.
template <typename POINTER> __device__ __forceinline__ float smooth(POINTER from, int n)
{
  float sum = 0.0f;
#pragma unroll
  for (int dy = -3; dy <= 3; ++dy)
#pragma unroll
    for (int dx = -3; dx <= 3; ++dx)
      sum += from[(INDEX + dy * SIDE + dx) & (n - 1)] * (0.01f * (8 - abs(dx) - abs(dy)));
  return sum;
}
KERNEL(smooth__before) { out[INDEX] = smooth((const volatile float *)a, n); }
KERNEL(smooth__caching) { out[INDEX] = smooth(a, n); }

// lookup: 16 entries of a table of 4096 for each element, from memory (and so from the L1), or from shared memory.
template <bool SHARED> __device__ __forceinline__ void lookup(ARGUMENTS)
{
  __shared__ float held[4096];
  const float *table = SHARED ? held : a;
  if (SHARED) for (int i = threadIdx.x; i < 4096; i += 256) held[i] = a[i];
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < 16; ++turn) {
    const int i = (blockIdx.x * 16 + turn) * 256 + threadIdx.x;
    const word at = (word)(a[i] * 4096.0f);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 16; ++k) sum += table[(at * 5u + k * 977u) & 4095u];
    out[i] = sum;
  }
}
KERNEL(lookup__before) { lookup<false>(a, b, out, room, n); }
KERNEL(lookup__shared_memory) { lookup<true>(a, b, out, room, n); }

// The fifth set, written after `tune` had been mended by the fourth.

// entropy: of a coin, with logarithms in double precision where single would do; one element a thread, or four.
template <typename T> __device__ __forceinline__ float entropy(T x)
{
  const T p = x * (T)0.9 + (T)0.05;
  return (float)(-p * log(p) - ((T)1 - p) * log((T)1 - p));
}
template <typename T> __device__ __forceinline__ void entropy_four(ARGUMENTS)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((float4 *)out)[INDEX] = make_float4(entropy((T)x.x), entropy((T)x.y), entropy((T)x.z), entropy((T)x.w));
}
KERNEL(entropy__before) { out[INDEX] = entropy((double)a[INDEX]); }
KERNEL(entropy__fp64) { out[INDEX] = entropy(a[INDEX]); }
KERNEL(entropy__access_size) { entropy_four<double>(a, b, out, room, n); }
KERNEL(entropy__both) { entropy_four<float>(a, b, out, room, n); }

// luma: three planes of colour to one of brightness, four bytes or sixteen at a time.
__device__ __forceinline__ float luma(float x, float y, float z) { return 0.299f * x + 0.587f * y + 0.114f * z; }
KERNEL(luma__before) { out[INDEX] = luma(a[INDEX], a[n + INDEX], a[2 * n + INDEX]); }
KERNEL(luma__access_size)
{
  const float4 *from = (const float4 *)a + INDEX;
  const float4 x = from[0], y = from[n / 4], z = from[n / 2];
  ((float4 *)out)[INDEX] =
    make_float4(luma(x.x, y.x, z.x), luma(x.y, y.y, z.y), luma(x.z, y.z, z.z), luma(x.w, y.w, z.w));
}

// momentum: a step of descent, its momentum in a pass of its own, or all in one.
#define SHIFTED(part) a[(INDEX + (part)) & (n - 1)]
KERNEL(momentum__before_1) { room[INDEX] = 0.9f * SHIFTED(n / 2) + a[INDEX]; }
KERNEL(momentum__before_2) { out[INDEX] = SHIFTED(n / 4) - 0.01f * room[INDEX]; }
KERNEL(momentum__fusion) { out[INDEX] = SHIFTED(n / 4) - 0.01f * (0.9f * SHIFTED(n / 2) + a[INDEX]); }

// logsum: logarithms of sums of powers of rows of 1024, the largest in a pass of its own or not. A warp takes a row.
__device__ __forceinline__ float warp_largest(float x)
{
#pragma unroll
  for (int far = 16; far > 0; far /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, far));
  return x;
}
__device__ __forceinline__ void load_row(const float *a, float *x)
{
  const float *row = a + (size_t)(INDEX / 32) * 1024 + threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 32; ++k) x[k] = row[32 * k] * 8.0f;
}
__device__ __forceinline__ float largest_of(const float *x)
{
  float largest = x[0];
#pragma unroll
  for (int k = 1; k < 32; ++k) largest = fmaxf(largest, x[k]);
  return warp_largest(largest);
}
__device__ __forceinline__ float powers_of(const float *x, float largest)
{
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 32; ++k) sum += __expf(x[k] - largest);
  return largest + __logf(warp_sum(sum));
}
KERNEL(logsum__before_1)
{
  float x[32];
  load_row(a, x);
  const float largest = largest_of(x);
  if (threadIdx.x % 32 == 0) room[INDEX / 32] = largest;
}
KERNEL(logsum__before_2)
{
  float x[32];
  load_row(a, x);
  const float all = powers_of(x, room[INDEX / 32]);
  if (threadIdx.x % 32 == 0) out[INDEX / 32] = all;
}
KERNEL(logsum__fusion)
{
  float x[32];
  load_row(a, x);
  const float all = powers_of(x, largest_of(x));
  if (threadIdx.x % 32 == 0) out[INDEX / 32] = all;
}

// rowmax: the largest of rows of 128; a thread walks along its row, 4 or 16 bytes at a time, or a warp takes it together.
KERNEL(rowmax__before)
{
  const float *row = a + (size_t)INDEX * 128;
  float largest = 0.0f;
#pragma unroll 4
  for (int k = 0; k < 128; ++k) largest = fmaxf(largest, row[k] * (1.0f - row[k]));
  out[INDEX] = largest;
}
KERNEL(rowmax__access_size)
{
  const float4 *row = (const float4 *)a + (size_t)INDEX * 32;
  float largest = 0.0f;
#pragma unroll 1
  for (int k = 0; k < 32; ++k) {
    const float4 x = row[k];
    largest = fmaxf(fmaxf(largest, x.x * (1.0f - x.x)), fmaxf(x.y * (1.0f - x.y), x.z * (1.0f - x.z)));
    largest = fmaxf(largest, x.w * (1.0f - x.w));
  }
  out[INDEX] = largest;
}
KERNEL(rowmax__coalescing)
{
  const float *row = a + (size_t)(INDEX / 32) * 128 + threadIdx.x % 32;
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < 128; k += 32) largest = fmaxf(largest, row[k] * (1.0f - row[k]));
  largest = warp_largest(largest);
  if (threadIdx.x % 32 == 0) out[INDEX / 32] = largest;
}

// integral: sums to the left and above in tiles of 64 x 64, whose rows begin in one bank, or are padded by a word.
template <int PITCH> __device__ __forceinline__ void integral(ARGUMENTS)
{
  __shared__ float tile[64 * PITCH];
  const float *from = a + (size_t)blockIdx.x * 4096;
  float *to = out + (size_t)blockIdx.x * 4096;
#pragma unroll 8
  for (int y = 0; y < 64; ++y) tile[y * PITCH + threadIdx.x] = from[y * 64 + threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 8
  for (int x = 0; x < 64; ++x) tile[threadIdx.x * PITCH + x] = sum += tile[threadIdx.x * PITCH + x];
  __syncthreads();
  sum = 0.0f;
#pragma unroll 8
  for (int y = 0; y < 64; ++y) to[y * 64 + threadIdx.x] = sum += tile[y * PITCH + threadIdx.x];
}
KERNEL(integral__before) { integral<64>(a, b, out, room, n); }
KERNEL(integral__bank_conflicts) { integral<65>(a, b, out, room, n); }

// checkered: every second element needs 96 steps; neighbours differ, or a warp takes elements of one kind.
__device__ __forceinline__ void checkered(const float *a, float *out, word i)
{
  float x = a[i];
  if (i & 1)
#pragma unroll 8
    for (int k = 0; k < 96; ++k) x = 3.5f * x * (1.0f - x);
  out[i] = x;
}
KERNEL(checkered__before) { checkered(a, out, INDEX); }
KERNEL(checkered__divergence)
{
  checkered(a, out, (INDEX & ~255u) + ((threadIdx.x & 127) << 1) + (threadIdx.x >> 7));
}

// decay: 24 dependent steps for every element; the launch asks for much shared memory, or for little.
KERNEL(decay)
{
  extern __shared__ float unused[];
#pragma unroll 1
  for (int turn = 0; turn < 8; ++turn) {
    const int i = (blockIdx.x * 8 + turn) * blockDim.x + threadIdx.x;
    float x = a[i];
#pragma unroll
    for (int k = 0; k < 24; ++k) x = x * (0.98f - 0.01f * x);
    out[i] = x;
  }
}

// fractal: 40 steps of a complex map, few threads with one number at a time, or four, or more threads.
template <int PARTS> __device__ __forceinline__ void fractal(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int i = INDEX; i < n; i += PARTS * step) {
    float x[PARTS], y[PARTS], c[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) { c[j] = a[i + j * step] * 0.4f - 0.4f; x[j] = y[j] = 0.0f; }
#pragma unroll 4
    for (int k = 0; k < 40; ++k)
#pragma unroll
      for (int j = 0; j < PARTS; ++j) {
        const float next = x[j] * x[j] - y[j] * y[j] + c[j];
        y[j] = 2.0f * x[j] * y[j] + 0.1f;
        x[j] = next;
      }
#pragma unroll
    for (int j = 0; j < PARTS; ++j) out[i + j * step] = x[j] * x[j] + y[j] * y[j];
  }
}
KERNEL(fractal__before) { fractal<1>(a, b, out, room, n); }
KERNEL(fractal__parallelism) { fractal<4>(a, b, out, room, n); }

// colsum: sums of 1024 columns of whole numbers, added in memory for every number, or in the block's own first.
KERNEL(colsum__before)
{
  const float *from = a + (size_t)blockIdx.x * 65536;
  for (int k = threadIdx.x; k < 65536; k += 256) atomicAdd((word *)out + k % 1024, (word)(from[k] * 256.0f));
}
KERNEL(colsum__atomics)
{
  __shared__ word sums[1024];
  for (int i = threadIdx.x; i < 1024; i += 256) sums[i] = 0u;
  __syncthreads();
  const float *from = a + (size_t)blockIdx.x * 65536;
  for (int k = threadIdx.x; k < 65536; k += 256) atomicAdd(sums + k % 1024, (word)(from[k] * 256.0f));
  __syncthreads();
  for (int i = threadIdx.x; i < 1024; i += 256) atomicAdd((word *)out + i, sums[i]);
}

// erode: the least of 5 x 5 points of an image through a volatile pointer, which no L1 keeps, or through a plain one.
template <typename POINTER> __device__ __forceinline__ float erode(POINTER from, int n)
{
  float least = 1.0f;
#pragma unroll
  for (int dy = -2; dy <= 2; ++dy)
#pragma unroll
    for (int dx = -2; dx <= 2; ++dx) least = fminf(least, from[(INDEX + dy * SIDE + dx) & (n - 1)]);
  return least;
}
KERNEL(erode__before) { out[INDEX] = erode((const volatile float *)a, n); }
KERNEL(erode__caching) { out[INDEX] = erode(a, n); }

// palette: colours of 256 entries, eight for every element, from memory (and so from the L1), or from shared memory.
template <bool SHARED> __device__ __forceinline__ void palette(ARGUMENTS)
{
  __shared__ float4 held[256];
  const float4 *table = SHARED ? held : (const float4 *)a;
  if (SHARED) held[threadIdx.x] = ((const float4 *)a)[threadIdx.x];
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < 16; ++turn) {
    const int i = (blockIdx.x * 16 + turn) * 256 + threadIdx.x;
    const word at = (word)(a[i] * 65536.0f);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float4 colour = table[(at * (2u * k + 1u) >> 3) & 255u];
      sum += luma(colour.x, colour.y, colour.z) * colour.w;
    }
    out[i] = sum;
  }
}
KERNEL(palette__before) { palette<false>(a, b, out, room, n); }
KERNEL(palette__shared_memory) { palette<true>(a, b, out, room, n); }

// expand: bytes to floats, one by one or four at a time.
KERNEL(expand__before) { out[INDEX] = ((const byte *)a)[INDEX] * 0.0039215686f; }
KERNEL(expand__access_size)
{
  const word x = ((const word *)a)[INDEX];
  ((float4 *)out)[INDEX] = make_float4((x & 255u) * 0.0039215686f, (x >> 8 & 255u) * 0.0039215686f,
                                       (x >> 16 & 255u) * 0.0039215686f, (x >> 24) * 0.0039215686f);
}

// The sixth set, written after `tune` had been mended by the fifth.

// cosine: a series of ten terms in double precision where single would do; one element a thread, or four.
template <typename T> __device__ __forceinline__ float cosine(T x)
{
  T sum = 1;
  const T square = x * x;
#pragma unroll
  for (int k = 20; k > 0; k -= 2) sum = (T)1 - sum * square * (T)(1.0 / (k * (k - 1)));
  return (float)sum;
}
template <typename T> __device__ __forceinline__ void cosine_four(ARGUMENTS)
{
  const float4 x = ((const float4 *)a)[INDEX];
  ((float4 *)out)[INDEX] = make_float4(cosine((T)x.x), cosine((T)x.y), cosine((T)x.z), cosine((T)x.w));
}
KERNEL(cosine__before) { out[INDEX] = cosine((double)a[INDEX]); }
KERNEL(cosine__fp64) { out[INDEX] = cosine(a[INDEX]); }
KERNEL(cosine__access_size) { cosine_four<double>(a, b, out, room, n); }
KERNEL(cosine__both) { cosine_four<float>(a, b, out, room, n); }

// volume: samples of two bytes made louder, one by one or eight at a time.
__device__ __forceinline__ word louder(word x) { return x * 3u >> 1 & 0xffffu; }
__device__ __forceinline__ word louder_two(word x) { return louder(x & 0xffffu) | louder(x >> 16) << 16; }
KERNEL(volume__before)
{
  ((unsigned short *)out)[INDEX] = (unsigned short)louder(((const unsigned short *)a)[INDEX]);
}
KERNEL(volume__access_size)
{
  const uint4 x = ((const uint4 *)a)[INDEX];
  ((uint4 *)out)[INDEX] = make_uint4(louder_two(x.x), louder_two(x.y), louder_two(x.z), louder_two(x.w));
}

// contrast: centre, stretch and clamp in three passes, or in one.
KERNEL(contrast__before_1) { room[INDEX] = a[INDEX] - 0.5f; }
KERNEL(contrast__before_2) { room[n + INDEX] = room[INDEX] * 1.75f; }
KERNEL(contrast__before_3) { out[INDEX] = fminf(fmaxf(room[n + INDEX] + 0.5f, 0.0f), 1.0f); }
KERNEL(contrast__fusion) { out[INDEX] = fminf(fmaxf((a[INDEX] - 0.5f) * 1.75f + 0.5f, 0.0f), 1.0f); }

// share: rows of 1024 divided by their sums, in two passes or in one. A warp takes a row.
KERNEL(share__before_1)
{
  float x[32], sum = 0.0f;
  load_row(a, x);
#pragma unroll
  for (int k = 0; k < 32; ++k) sum += x[k];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) room[INDEX / 32] = 1.0f / sum;
}
__device__ __forceinline__ void store_row(float *out, const float *x, float scale)
{
  float *row = out + (size_t)(INDEX / 32) * 1024 + threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 32; ++k) row[32 * k] = x[k] * scale;
}
KERNEL(share__before_2)
{
  float x[32];
  load_row(a, x);
  store_row(out, x, room[INDEX / 32]);
}
KERNEL(share__fusion)
{
  float x[32], sum = 0.0f;
  load_row(a, x);
#pragma unroll
  for (int k = 0; k < 32; ++k) sum += x[k];
  store_row(out, x, 1.0f / warp_sum(sum));
}

// strips: each thread goes eight times over 16 words of its own in shared memory, one after the other or padded.
template <int PITCH> __device__ __forceinline__ void strips(ARGUMENTS)
{
  __shared__ float held[256 * PITCH];
  const float *from = a + (size_t)blockIdx.x * 4096;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int i = k * 256 + threadIdx.x;
    held[i / 16 * PITCH + i % 16] = from[i];
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 1
  for (int turn = 0; turn < 8; ++turn)
#pragma unroll
    for (int k = 0; k < 16; ++k) sum = sum * 0.5f + held[(threadIdx.x ^ turn) * PITCH + k];
  out[INDEX] = sum;
}
KERNEL(strips__before) { strips<16>(a, b, out, room, n); }
KERNEL(strips__bank_conflicts) { strips<17>(a, b, out, room, n); }

// quarters: four kinds of work of like length; neighbours differ, or a warp takes elements of one kind.
__device__ __forceinline__ void quarters(const float *a, float *out, word i)
{
  float x = a[i], y = 0.25f;
  switch (i & 3) {
  case 0:
#pragma unroll 8
    for (int k = 0; k < 64; ++k) y = y * x + 0.5f;
    break;
  case 1:
#pragma unroll 8
    for (int k = 0; k < 64; ++k) y = fmaxf(y * 0.75f, x - y);
    break;
  case 2:
#pragma unroll 8
    for (int k = 0; k < 64; ++k) y = x - y * y;
    break;
  default:
#pragma unroll 8
    for (int k = 0; k < 64; ++k) y = fminf(y + 0.125f, x * y + 0.25f);
  }
  out[i] = y;
}
KERNEL(quarters__before) { quarters(a, out, INDEX); }
KERNEL(quarters__divergence)
{
  quarters(a, out, (INDEX & ~255u) + ((threadIdx.x & 63) << 2) + (threadIdx.x >> 6));
}

// damped: an oscillation of 20 steps for every element; the launch asks for much shared memory, or for little.
KERNEL(damped)
{
  extern __shared__ float unused[];
#pragma unroll 1
  for (int turn = 0; turn < 8; ++turn) {
    const int i = (blockIdx.x * 8 + turn) * blockDim.x + threadIdx.x;
    float x = a[i], v = 0.0f;
#pragma unroll
    for (int k = 0; k < 20; ++k) { v = 0.95f * v - 0.1f * x; x = x + 0.1f * v; }
    out[i] = x;
  }
}

// orbits: 32 steps of a map of two numbers, few threads with one element at a time, or four, or more threads.
template <int PARTS> __device__ __forceinline__ void orbits(ARGUMENTS)
{
  const int step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int i = INDEX; i < n; i += PARTS * step) {
    float x[PARTS], y[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; ++j) { x[j] = a[i + j * step]; y[j] = 0.5f; }
#pragma unroll 4
    for (int k = 0; k < 32; ++k)
#pragma unroll
      for (int j = 0; j < PARTS; ++j) { y[j] = 0.9f * y[j] + 0.1f * x[j]; x[j] = 0.9f * x[j] - 0.1f * y[j] + 0.05f; }
#pragma unroll
    for (int j = 0; j < PARTS; ++j) out[i + j * step] = x[j] + y[j];
  }
}
KERNEL(orbits__before) { orbits<1>(a, b, out, room, n); }
KERNEL(orbits__parallelism) { orbits<4>(a, b, out, room, n); }

// ages: counts of 512 classes, added in memory for every number, or in the block's own first.
KERNEL(ages__before)
{
  const float *from = a + (size_t)blockIdx.x * 32768;
  for (int k = threadIdx.x; k < 32768; k += 256) atomicAdd((word *)out + (word)(from[k] * 512.0f), 1u);
}
KERNEL(ages__atomics)
{
  __shared__ word counts[512];
  for (int i = threadIdx.x; i < 512; i += 256) counts[i] = 0u;
  __syncthreads();
  const float *from = a + (size_t)blockIdx.x * 32768;
  for (int k = threadIdx.x; k < 32768; k += 256) atomicAdd(counts + (word)(from[k] * 512.0f), 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 512; i += 256) atomicAdd((word *)out + i, counts[i]);
}

// sharpen: a cross of 13 points of an image through a volatile pointer, which no L1 keeps, or through a plain one.
template <typename POINTER> __device__ __forceinline__ float sharpen(POINTER from, int n)
{
  float sum = 2.0f * from[INDEX];
#pragma unroll
  for (int far = 1; far <= 3; ++far)
    sum -= (from[(INDEX + far) & (n - 1)] + from[(INDEX - far) & (n - 1)] + from[(INDEX + far * SIDE) & (n - 1)]
            + from[(INDEX - far * SIDE) & (n - 1)]) * (0.125f / far);
  return sum;
}
KERNEL(sharpen__before) { out[INDEX] = sharpen((const volatile float *)a, n); }
KERNEL(sharpen__caching) { out[INDEX] = sharpen(a, n); }

// weighed: rows of 64 with weights that rise; a thread walks along its row, or a warp takes it together.
KERNEL(weighed__before)
{
  const float *row = a + (size_t)INDEX * 64;
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < 64; ++k) sum += row[k] * (0.5f + 0.01f * k);
  out[INDEX] = sum;
}
KERNEL(weighed__coalescing)
{
  const int lane = threadIdx.x % 32;
  const float *row = a + (size_t)(INDEX / 32) * 64;
  const float sum = warp_sum(row[lane] * (0.5f + 0.01f * lane) + row[lane + 32] * (0.82f + 0.01f * lane));
  if (lane == 0) out[INDEX / 32] = sum;
}
