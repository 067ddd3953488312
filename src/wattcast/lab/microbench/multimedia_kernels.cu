// Multimedia kernels on planar YUV 4:2:0 frames of 1920 x 1080; one thread a pixel, coefficient or macroblock.
// A launch takes all frames of a clip. Plain C but for the cache operators, so a host compiler can run it too.

#ifndef __CUDACC__
#define UNCACHED(p) (*(p))
#define CACHED(p) (*(p))
#else
__device__ __forceinline__ unsigned char UNCACHED(const unsigned char *p)
{
  unsigned value;
  asm volatile("ld.global.cg.u8 %0, [%1];" : "=r"(value) : "l"(p));  // L2 only
  return (unsigned char)value;
}
__device__ __forceinline__ unsigned char CACHED(const unsigned char *p)
{
  unsigned value;
  asm("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(p));  // the non-coherent cache
  return (unsigned char)value;
}
#endif

enum { WIDTH = 1920, HEIGHT = 1080, LUMA = WIDTH * HEIGHT, CHROMA = LUMA / 4, FRAME = LUMA + 2 * CHROMA };
enum { BLOCKS_X = WIDTH / 8, BLOCKS_Y = HEIGHT / 8, BLOCKS = BLOCKS_X * BLOCKS_Y };

__device__ unsigned lattice(int x, int y)
{
  unsigned h = (unsigned)x * 0x9e3779b9u ^ (unsigned)y * 0x85ebca6bu;
  h ^= h >> 15; h *= 0x2c1b3c6du; h ^= h >> 12;
  return h & 255u;
}

// Value noise on a lattice of 16 pixels: smooth, so that a search for motion has slopes to follow.
__device__ int noise(int x, int y)
{
  const int cx = x >> 4, cy = y >> 4, fx = x & 15, fy = y & 15;
  const int top = (int)lattice(cx, cy) * (16 - fx) + (int)lattice(cx + 1, cy) * fx;
  const int low = (int)lattice(cx, cy + 1) * (16 - fx) + (int)lattice(cx + 1, cy + 1) * fx;
  return (top * (16 - fy) + low * fy) >> 8;
}

// The clip: a scene that pans by (2, 1) pixels a frame, with a square that moves the other way.
extern "C" __global__ void media_clip(unsigned char *out, const int *unused, unsigned char *also, int frames)
{
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (unsigned)frames * FRAME) return;
  const int f = i / FRAME, place = i % FRAME;
  int value;
  if (place < LUMA) {
    const int x = place % WIDTH, y = place / WIDTH;
    const int inside = x >= 900 - 3 * f && x < 1100 - 3 * f && y >= 500 && y < 700;
    value = inside ? 255 - noise(x + 3 * f, y) : noise(x + 2 * f + 4096, y + f + 4096);
  } else {
    const int c = (place - LUMA) % CHROMA, plane = (place - LUMA) / CHROMA;
    value = noise(2 * (c % (WIDTH / 2)) + 2 * f, 2 * (c / (WIDTH / 2)) + f + 7000 * (plane + 1));
  }
  out[i] = (unsigned char)(16 + value * 219 / 255);
  (void)unused; (void)also;
}

// Rotation by an angle that grows from frame to frame; ``turn`` holds cosine and sine of each frame times 65536.
extern "C" __global__ void media_rotate(const unsigned char *in, const int *turn, unsigned char *out, int frames)
{
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (unsigned)frames * FRAME) return;
  const int f = i / FRAME, place = i % FRAME;
  const int luma = place < LUMA, w = luma ? WIDTH : WIDTH / 2, h = luma ? HEIGHT : HEIGHT / 2;
  const int plane = luma ? 0 : LUMA + (place - LUMA) / CHROMA * CHROMA;
  const int x = (place - plane) % w - w / 2, y = (place - plane) / w - h / 2;
  const int c = turn[2 * f], s = turn[2 * f + 1];
  const int u = ((c * x + s * y) >> 16) + w / 2, v = ((c * y - s * x) >> 16) + h / 2;
  const int within = u >= 0 && u < w && v >= 0 && v < h;
  out[i] = within ? in[(unsigned)f * FRAME + plane + v * w + u] : (unsigned char)(luma ? 16 : 128);
}

// A constant map of where each pixel comes from, made once, applied to every frame.
extern "C" __global__ void media_debarrel(const unsigned char *in, const int *map, unsigned char *out, int frames)
{
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (unsigned)frames * FRAME) return;
  const unsigned f = i / FRAME, place = i % FRAME;
  const int from = map[place];
  out[i] = from >= 0 ? in[f * FRAME + from] : (unsigned char)(place < LUMA ? 16 : 128);
}

__device__ int clamped(int value, int most) { return value < 0 ? 0 : value > most ? most : value; }

__device__ int difference(const unsigned char *now, const unsigned char *before, int x0, int y0, int dx, int dy)
{
  int sum = 0;
  for (int y = 0; y < 8; ++y) {
    const unsigned char *row = before + clamped(y0 + y + dy, HEIGHT - 1) * WIDTH;
    for (int x = 0; x < 8; ++x) {
      const int d = (int)now[(y0 + y) * WIDTH + x0 + x] - (int)row[clamped(x0 + x + dx, WIDTH - 1)];
      sum += d < 0 ? -d : d;
    }
  }
  return sum;
}

// Diamond search of every 8 x 8 block of luma in the frame before: three steps of the large diamond, one of the small.
extern "C" __global__ void media_motion(const unsigned char *in, const int *unused, short *out, int frames)
{
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (unsigned)(frames - 1) * BLOCKS) return;
  const int f = i / BLOCKS + 1, block = i % BLOCKS;
  const int x0 = block % BLOCKS_X * 8, y0 = block / BLOCKS_X * 8;
  const unsigned char *now = in + (size_t)f * FRAME, *before = now - FRAME;
  const int large_x[8] = {-2, -1, 0, 1, 2, 1, 0, -1}, large_y[8] = {0, -1, -2, -1, 0, 1, 2, 1};
  const int small_x[4] = {-1, 0, 1, 0}, small_y[4] = {0, -1, 0, 1};
  int dx = 0, dy = 0, best = difference(now, before, x0, y0, 0, 0);
  for (int step = 0; step < 3; ++step) {
    int to_x = 0, to_y = 0;
    for (int n = 0; n < 8; ++n) {
      const int sad = difference(now, before, x0, y0, dx + large_x[n], dy + large_y[n]);
      if (sad < best) { best = sad; to_x = large_x[n]; to_y = large_y[n]; }
    }
    if (to_x == 0 && to_y == 0) break;
    dx += to_x; dy += to_y;
  }
  int to_x = 0, to_y = 0;
  for (int n = 0; n < 4; ++n) {
    const int sad = difference(now, before, x0, y0, dx + small_x[n], dy + small_y[n]);
    if (sad < best) { best = sad; to_x = small_x[n]; to_y = small_y[n]; }
  }
  out[4 * i] = (short)(dx + to_x); out[4 * i + 1] = (short)(dy + to_y);
  out[4 * i + 2] = (short)best; out[4 * i + 3] = 0;
  (void)unused;
}

// Equation 5 of the paper as it stands: one thread a coefficient, 64 pixels each. ``table`` holds
// gamma(u) cos(pi / 8 (x + 1/2) u) as [u][x] in the precision of the variant.
#define DCT(NAME, TYPE, LOAD)                                                                                \
  extern "C" __global__ void NAME(const unsigned char *in, const TYPE *table, short *out, int frames)       \
  {                                                                                                          \
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;                                                \
    if (i >= (unsigned)frames * LUMA) return;                                                                \
    const unsigned f = i / LUMA, place = i % LUMA, block = place / 64u, u = place % 8u, v = place / 8u % 8u; \
    const unsigned char *at =                                                                                \
      in + (size_t)f * FRAME + (size_t)(block / BLOCKS_X) * 8 * WIDTH + block % BLOCKS_X * 8;                \
    TYPE sum = 0;                                                                                            \
    for (int y = 0; y < 8; ++y)                                                                              \
      for (int x = 0; x < 8; ++x)                                                                            \
        sum += (TYPE)((int)LOAD(at + y * WIDTH + x) - 128) * (table[8 * u + x] * table[8 * v + y]);           \
    out[i] = u + v > 9u ? (short)0 : (short)(sum < 0 ? sum - (TYPE)0.5 : sum + (TYPE)0.5);                   \
  }

DCT(media_dct_fp32_cached, float, CACHED)
DCT(media_dct_fp32_uncached, float, UNCACHED)
DCT(media_dct_fp64_cached, double, CACHED)
DCT(media_dct_fp64_uncached, double, UNCACHED)
