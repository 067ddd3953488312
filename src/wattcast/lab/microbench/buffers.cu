// Fill a buffer with random words, and link a ring of addresses in it, each of which holds the next.
extern "C" __global__ void fill(unsigned *out, unsigned long long words, unsigned seed)
{
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
    unsigned x = (unsigned)i * 2654435761u + (unsigned)(i >> 32) + seed;
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; out[i] = x ^ (x >> 16);
  }
}

extern "C" __global__ void link_ring(unsigned char *ring, unsigned long long nodes, unsigned long long stride)
{
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < nodes; i += step) {
    const unsigned long long next = (i * ${factor}ull + ${step}ull) % nodes;
    *(unsigned long long *)(ring + i * stride + (i * ${line}ull & (stride - 1ull))) =
      (unsigned long long)(ring + next * stride + (next * ${line}ull & (stride - 1ull)));
  }
}

// Nodes at multiples of the stride: each leads to its neighbour, or at random to all in turn.
extern "C" __global__ void link_plain(
    unsigned char *ring, unsigned long long nodes, unsigned long long stride, unsigned walk)
{
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < nodes; i += step) {
    const unsigned long long next = walk ? (i + 1ull) % nodes : (i * ${factor}ull + ${step}ull) % nodes;
    *(unsigned long long *)(ring + i * stride) = (unsigned long long)(ring + next * stride);
  }
}
