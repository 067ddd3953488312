typedef unsigned long long u64;
${functions}
__device__ __forceinline__ unsigned mixed(unsigned x)
{
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ (x >> 16);
}
__device__ __forceinline__ u64 timer_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ float unit_float(unsigned x) { return __uint_as_float(0x3f800000u | (x >> 9)); }

extern "C" __global__ void ${cluster}__launch_bounds__(${threads}, ${blocks}) ${name}(
    unsigned long long *stamps, unsigned *sink, unsigned char *a, unsigned char *b,
    unsigned long long bytes, unsigned seed, int iterations)
{
  extern __shared__ __align__(1024) unsigned char pool[];
  const unsigned lane = threadIdx.x & 31u, thread = blockIdx.x * ${threads}u + threadIdx.x;
  unsigned state = mixed(thread * 2654435761u + seed);
  ${declare}
  ${begin}
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
    ${before}
${body}
    ${advance}
  }
  ${finish}
  ${end}
    const u64 end = clock64(), end_ns = timer_ns();
    unsigned sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    u64 *out = stamps + ${words}ull * place;
    out[0] = sm; out[1] = begin; out[2] = end; out[3] = begin_ns; out[4] = end_ns;
  }
  const unsigned folded = ${fold};
  if (seed == ${check}u || folded == 0x9e3779b9u) sink[thread] = folded;
  (void)lane; (void)state; (void)pool; (void)a; (void)b; (void)bytes;
}
