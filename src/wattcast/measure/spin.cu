// Spin for so many cycles and note how long they took: the clock at which the device runs.
extern "C" __global__ void spin(unsigned long long *out, unsigned long long cycles)
{
    if (threadIdx.x != 0) return;
    unsigned long long begin_ns, end_ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin_ns) :: "memory");
    unsigned long long begin = clock64(), now = begin;
    while (now - begin < cycles) { __nanosleep(2000); now = clock64(); }
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end_ns) :: "memory");
    now = clock64();
    out[0] = now - begin;
    out[1] = end_ns - begin_ns;
}
