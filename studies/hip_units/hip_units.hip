// Microbenchmarks of an AMD GPU's units, in the form of `wattcast lab microbench`: throughput, and two latencies.
//
// THIS HAS NEVER RUN. It compiles (hipcc 5.2.3 of Debian 12, gfx90a); no AMD GPU was at hand.
//
// Build: HIP_PLATFORM=amd hipcc -O3 --offload-arch=gfx90a studies/hip_units/hip_units.hip -o hip_units
// Run:   wattcast measure run --source amd -- ./hip_units > rows.jsonl    (watts of the whole; rows hold times)
//        wattcast lab microbench --show rows.jsonl --gpu mi300x
//
// As in the CUDA suite, operands come from a hash of the thread's number, results feed later operations, and they are
// stored under a condition that is never true, so that the compiler can neither compute ahead nor drop anything.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <functional>

#define CHECK(call)                                                              \
  do {                                                                           \
    const hipError_t status = (call);                                            \
    if (status != hipSuccess) {                                                  \
      std::fprintf(stderr, "%s: %s\n", #call, hipGetErrorString(status));        \
      std::exit(1);                                                              \
    }                                                                            \
  } while (0)

namespace {

constexpr int kThreads = 256, kChains = 8, kSteps = 64;
constexpr unsigned kRingFactor = 12u * 138707u + 1u, kRingStep = 1013904223u;  // a full period for 2^n nodes

__device__ unsigned mixed(unsigned x)
{
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

template <typename T>
__device__ T between_one_and_two(unsigned x) { return T(1) + T(x >> 9) / T(1u << 23); }

// x·a + b in eight chains; a and its inverse by turns, so that values stay bounded.
template <typename T>
__global__ void multiply_add(T *sink, int iterations, unsigned seed)
{
  const unsigned state = mixed((blockIdx.x * blockDim.x + threadIdx.x) * 2654435761u + seed);
  const T a = between_one_and_two<T>(mixed(state)), inverse = T(1) / a, b = between_one_and_two<T>(mixed(state + 9u));
  T x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = between_one_and_two<T>(mixed(state + i + 1u));
  for (int n = 0; n < iterations; ++n)
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool back = (s / kChains) % 2 == 1;
      x[s % kChains] = fma(x[s % kChains], back ? inverse : a, back ? -b : b);
    }
  T sum = 0;
  for (int i = 0; i < kChains; ++i) sum += x[i];
  if (sum == T(-12345)) sink[0] = sum;
}

__global__ void integer_add(unsigned *sink, int iterations, unsigned seed)
{
  const unsigned state = mixed((blockIdx.x * blockDim.x + threadIdx.x) * 2654435761u + seed);
  unsigned x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = mixed(state + i + 1u);
  for (int n = 0; n < iterations; ++n)
#pragma unroll
    for (int s = 0; s < kSteps; ++s) x[s % kChains] += x[(s + 1) % kChains] ^ x[(s + 3) % kChains];
  unsigned sum = 0;
  for (int i = 0; i < kChains; ++i) sum ^= x[i];
  if (sum == 0x9e3779b9u) sink[0] = sum;
}

__global__ void shared_read(unsigned *sink, int iterations, unsigned seed)
{
  __shared__ uint4 pool[kThreads * 8];
  for (int i = threadIdx.x; i < kThreads * 8; i += kThreads) pool[i] = make_uint4(mixed(seed + i), i, seed, 1u);
  __syncthreads();
  unsigned sum = 0, at = threadIdx.x;
  for (int n = 0; n < iterations; ++n) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint4 word = pool[(at + s * kThreads) % (kThreads * 8)];
      sum ^= word.x ^ word.y ^ word.z ^ word.w;
    }
    at = (at + (sum & 1u) * kThreads) % (kThreads * 8);
  }
  if (sum == 0x9e3779b9u) sink[0] = sum;
}

__global__ void copy(uint4 *to, const uint4 *from, size_t words)
{
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) to[i] = from[i];
}

__global__ void add_atomically(unsigned *places, unsigned lines, int iterations)
{
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int n = 0; n < iterations; ++n) atomicAdd(places + (thread / 32u % lines) * 32u + thread % 32u, 1u);
}

__global__ void link_ring(size_t *ring, size_t nodes, size_t stride)
{
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < nodes; i += step)
    ring[i * stride] = (i * kRingFactor + kRingStep) % nodes * stride;
}

__global__ void follow_ring(const size_t *ring, size_t first, int hops, long long *cycles, size_t *sink)
{
  size_t at = first;
  for (int i = 0; i < hops; ++i) at = ring[at];  // warm
  const long long begin = clock64();
  for (int i = 0; i < hops; ++i) at = ring[at];
  *cycles = clock64() - begin;
  if (at == ~size_t(0)) *sink = at;
}

// Time a load: as many launches as last a second, after a warm one; print a row as the CUDA suite writes it.
void report(const char *name, const char *group, const char *operation, double operations, double byte,
            const std::function<void()> &launch)
{
  hipEvent_t begin, end;
  CHECK(hipEventCreate(&begin));
  CHECK(hipEventCreate(&end));
  float ms = 0.0f;
  int launches = 1;
  for (int round = 0; round < 2; ++round) {
    launch();
    CHECK(hipEventRecord(begin, nullptr));
    for (int i = 0; i < launches; ++i) launch();
    CHECK(hipEventRecord(end, nullptr));
    CHECK(hipEventSynchronize(end));
    CHECK(hipEventElapsedTime(&ms, begin, end));
    if (round == 0) launches = ms < 1000.0f ? int(1000.0f / (ms > 0.01f ? ms : 0.01f)) + 1 : 1;
  }
  std::printf("{\"id\":\"%s\",\"name\":\"%s\",\"group\":\"%s\",\"operation\":\"%s\",\"operations\":%.17g", name, name,
              group, operation, operations);
  if (byte > 0.0) std::printf(",\"byte\":%.17g", byte);
  std::printf(",\"launches\":%d,\"launch_s\":%.9g}\n", launches, 1e-3 * ms / launches);
  std::fflush(stdout);
  CHECK(hipEventDestroy(begin));
  CHECK(hipEventDestroy(end));
}

}  // namespace

int main()
{
  hipDeviceProp_t device;
  CHECK(hipGetDeviceProperties(&device, 0));
  std::fprintf(stderr, "%s, %d compute units. This program had never run when it was written.\n", device.name,
               device.multiProcessorCount);
  const int blocks = device.multiProcessorCount * 8, iterations = 512;
  const size_t size = size_t(1) << 30;
  void *a = nullptr, *b = nullptr;
  CHECK(hipMalloc(&a, size));
  CHECK(hipMalloc(&b, size));
  CHECK(hipMemset(a, 1, size));
  const double each = double(blocks) * kThreads * iterations * kSteps;
  report("fp32_fma", "arithmetic", "instruction", each, 0.0,
         [&] { multiply_add<float><<<blocks, kThreads>>>(static_cast<float *>(b), iterations, 1u); });
  report("fp64_fma", "arithmetic", "instruction", each, 0.0,
         [&] { multiply_add<double><<<blocks, kThreads>>>(static_cast<double *>(b), iterations, 1u); });
  report("int32_add", "arithmetic", "instruction", each, 0.0,
         [&] { integer_add<<<blocks, kThreads>>>(static_cast<unsigned *>(b), iterations, 1u); });
  const double reads = double(blocks) * kThreads * iterations * 8;
  report("shared_read", "memory", "load", reads, 16.0 * reads,
         [&] { shared_read<<<blocks, kThreads>>>(static_cast<unsigned *>(b), iterations, 1u); });
  report("dram_copy", "memory", "load or store", 2.0 * size / 16, 2.0 * size,
         [&] { copy<<<blocks, kThreads>>>(static_cast<uint4 *>(b), static_cast<const uint4 *>(a), size / 16); });
  for (unsigned lines : {1u, 64u, 4096u}) {
    char name[32];
    std::snprintf(name, sizeof name, "atomic_lines_%u", lines);
    const double adds = double(blocks) * kThreads * iterations;
    report(name, "memory", "atomic", adds, 4.0 * adds,
           [&] { add_atomically<<<blocks, kThreads>>>(static_cast<unsigned *>(b), lines, iterations); });
  }
  int khz = 0;
  CHECK(hipDeviceGetAttribute(&khz, hipDeviceAttributeClockRate, 0));
  for (size_t nodes = 128; nodes * 128 <= size; nodes *= 4) {  // 16 KiB to 1 GiB, a node a line of 128 bytes
    size_t *ring = static_cast<size_t *>(a);
    long long *cycles = static_cast<long long *>(b), ticks = 0;
    link_ring<<<blocks, kThreads>>>(ring, nodes, 16);
    follow_ring<<<1, 1>>>(ring, nodes / 3 * 16, 1 << 14, cycles, ring + size / sizeof(size_t) - 1);
    CHECK(hipMemcpy(&ticks, cycles, sizeof ticks, hipMemcpyDeviceToHost));
    std::printf("{\"id\":\"latency_ring_%zu\",\"name\":\"latency_ring_%zu\",\"group\":\"latency\",\"operation\":\"load\","
                "\"curve\":\"ring\",\"at\":%zu,\"effective_clock_hz\":%.9g,\"latency_cycles\":%.6g}\n",
                nodes, nodes, nodes * 128, 1e3 * khz, double(ticks) / (1 << 14));  // at the top clock, if it runs there
  }
  std::fprintf(stderr, "top clock %d MHz\n", khz / 1000);
  CHECK(hipFree(a));
  CHECK(hipFree(b));
  return 0;
}
