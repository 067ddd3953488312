// The multimedia kernels on the host: threads one after another, for a stand-in driver to call by name.
#include <cstddef>

struct Three {
  unsigned x;
};
static thread_local Three threadIdx, blockIdx, blockDim;
#define __global__
#define __device__ static
#define __forceinline__ inline
#include "multimedia_kernels.cu"

#define HOST(NAME, IN, TABLE, OUT)                                                        \
  extern "C" void host_##NAME(void **p, unsigned grid, unsigned block)                    \
  {                                                                                       \
    blockDim.x = block;                                                                   \
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)                                 \
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)                           \
        NAME(*(IN *)p[0], *(TABLE *)p[1], *(OUT *)p[2], *(int *)p[3]);                    \
  }

typedef const unsigned char *In;
HOST(media_clip, unsigned char *, const int *, unsigned char *)
HOST(media_rotate, In, const int *, unsigned char *)
HOST(media_debarrel, In, const int *, unsigned char *)
HOST(media_motion, In, const int *, short *)
HOST(media_dct_fp32_cached, In, const float *, short *)
HOST(media_dct_fp32_uncached, In, const float *, short *)
HOST(media_dct_fp64_cached, In, const double *, short *)
HOST(media_dct_fp64_uncached, In, const double *, short *)
