/* A stand-in for the CUDA driver: memory of the host, a stream that keeps time, kernels known by name.
 *
 * The stream has a clock of its own: kernels and copies run back to back, however late a busy host queues them, until
 * the host has seen that the stream is empty. Multimedia kernels begin when they are queued, since some are paced.
 *
 * STANDIN_CUDA_FAULT=NAME   a launch of NAME ends in an illegal address, and so does every later call
 * STANDIN_CUDA_HANG=NAME    a launch of NAME never ends
 * STANDIN_CUDA_WRONG=NAME   a launch of NAME computes nothing
 * STANDIN_CUDA_NONE=1       there is no device
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef unsigned long long u64;
typedef struct { char name[96]; } Function;
typedef struct { double at_s; } Event;
enum { SMS = 4, L2 = 1 << 20, FREE = 160 << 20 };
static const double CLOCK_HZ = 1.75e9, ITERATION_S = 2e-6;
static double free_at_s;
static int seen_empty = 1;
static int broken;
static int capturing;
static u64 captured;
/* an empty kernel in a queue, a graph of such kernels, and each of its nodes */
static const double NOTHING_S = 5e-6, GRAPH_S = 8e-6, NODE_S = 1.5e-6;
static u64 taken;

static double now_s(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}
static double begin_s(void)
{
  const double t = now_s();
  if (seen_empty && free_at_s < t) free_at_s = t;
  seen_empty = 0;
  return free_at_s;
}
static int see(double at_s) /* Whether the host sees that the stream has come to a point of its time. */
{
  const int there = at_s <= now_s();
  if (there && at_s >= free_at_s) seen_empty = 1;
  return there;
}
static int chosen(const char *variable, const char *name)
{
  const char *value = getenv(variable);
  return value && !strcmp(value, name);
}
#define ALIVE if (broken) return 700

int cuInit(unsigned flags) { (void)flags; return getenv("STANDIN_CUDA_NONE") ? 100 : 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return i == 0 ? 0 : 101; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGetName(char *name, int n, int d) { (void)d; snprintf(name, n, "Stand-in H200"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d)
{
  (void)d;
  switch (a) {
    case 75: *v = 9; break;   /* compute capability */
    case 76: *v = 0; break;
    case 16: *v = SMS; break;
    case 38: *v = L2; break;
    case 97: *v = 232448; break;
    default: *v = 0;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = (void *)1; return 0; }
int cuCtxSynchronize(void) { ALIVE; see(free_at_s); return 0; }
int cuCtxSetCurrent(void *c) { (void)c; return 0; }
int cuStreamCreate(void **s, unsigned f) { (void)f; *s = (void *)2; return 0; }
int cuStreamBeginCapture_v2(void *s, int mode) { (void)s; (void)mode; capturing = 1; captured = 0; return broken ? 700 : 0; }
int cuStreamEndCapture(void *s, void **g) { (void)s; capturing = 0; *g = (void *)(captured + 1); return broken ? 700 : 0; }
int cuGraphInstantiateWithFlags(void **e, void *g, u64 f) { (void)f; *e = g; return broken ? 700 : 0; }
int cuGraphLaunch(void *e, void *s) { ALIVE; (void)s; free_at_s = begin_s() + GRAPH_S + NODE_S * ((u64)e - 1); return 0; }
int cuGraphExecDestroy(void *e) { (void)e; return 0; }
int cuGraphDestroy(void *g) { (void)g; return 0; }
int cuStreamSynchronize(void *s) { ALIVE; (void)s; while (!see(free_at_s)) ; return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { ALIVE; *f = FREE - taken; *t = FREE; return 0; }
int cuMemAlloc_v2(u64 *p, size_t n)
{
  ALIVE;
  if (taken + n > FREE) return 2;
  void *m = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return 2;
  taken += n;
  *p = (u64)m;
  return 0;
}
int cuMemHostAlloc(void **p, size_t n, unsigned f) { ALIVE; (void)f; *p = calloc(1, n); return *p ? 0 : 2; }
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t n, void *s) { ALIVE; (void)s; memcpy((void *)to, from, n); free_at_s = begin_s() + n / 2e10; return 0; }
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t n, void *s) { ALIVE; (void)s; memcpy(to, (void *)from, n); free_at_s = begin_s() + n / 2e10; return 0; }
int cuMemFree_v2(u64 p) { ALIVE; (void)p; return 0; }
int cuMemFreeHost(void *p) { ALIVE; free(p); return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned f) { ALIVE; (void)s; (void)e; (void)f; return 0; }
int cuTensorMapEncodeTiled(u64 *made, int kind, unsigned rank, void *at, const u64 *dims, const u64 *strides, const unsigned *box, const unsigned *steps, int i, int swizzle, int l2, int fill)
{
  ALIVE;
  (void)kind; (void)steps; (void)i; (void)l2; (void)fill;
  if ((u64)made % 64 || rank != 2 || (u64)at % 16 || strides[0] != 2 * dims[0] || box[0] * 2 != 128 || box[1] > 256 || swizzle != 3) return 1;
  memset(made, 1, 128);
  return 0;
}
int cuMemcpyHtoD_v2(u64 to, const void *from, size_t n) { ALIVE; memcpy((void *)to, from, n); return 0; }
int cuMemcpyDtoH_v2(void *to, u64 from, size_t n) { ALIVE; memcpy(to, (void *)from, n); return 0; }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, void *s)
{
  ALIVE;
  (void)s;
  memcpy((void *)to, (void *)from, n < 4096 ? n : 4096);
  free_at_s = begin_s() + 2.0 * n / 4.0e10;
  return 0;
}
int cuMemsetD32Async(u64 p, unsigned v, size_t n, void *s)
{
  ALIVE;
  (void)s;
  for (size_t i = 0; i < n; ++i) ((unsigned *)p)[i] = v;
  return 0;
}
int cuModuleLoadData(void **m, const void *image)
{
  ALIVE;
  *m = (void *)3;
  return memcmp(image, "\x7f" "ELF", 4) ? 200 : 0;
}
int cuModuleUnload(void *m) { ALIVE; (void)m; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name)
{
  ALIVE;
  (void)m;
  Function *made = calloc(1, sizeof *made);
  snprintf(made->name, sizeof made->name, "%s", name);
  *f = made;
  return 0;
}
int cuFuncSetAttribute(void *f, int a, int v) { ALIVE; (void)f; (void)a; return v > 232448 ? 1 : 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared)
{
  ALIVE;
  (void)f;
  *n = 2048 / block;
  if (shared && *n > (int)(233472 / shared)) *n = 233472 / shared;
  if (*n > 32) *n = 32;
  return 0;
}
static void fill(unsigned *out, u64 words, unsigned seed)
{
  for (u64 i = 0; i < words; ++i) {
    unsigned x = (unsigned)i * 2654435761u + (unsigned)(i >> 32) + seed;
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
    out[i] = x ^ (x >> 16);
  }
}
static void compute(const char *name, unsigned blocks, unsigned threads, u64 *sink, u64 *a, u64 *b, u64 bytes,
                    unsigned seed, int iterations)
{
  if (!strncmp(name, "dram_copy", 9) || !strncmp(name, "access_", 7)) {
    static int whole; /* copies all it may in one iteration; afterwards it only takes time */
    if (iterations == 2 || (strstr(name, "whole") && !whole++)) memcpy(b, a, bytes);
  } else if (seed == 0 && (!strcmp(name, "dram_read") || !strcmp(name, "l2_read") ||
                           !strncmp(name, "async_copy", 10))) {
    unsigned all = 0;
    for (u64 i = 0; i < bytes / 4; ++i) all ^= ((unsigned *)a)[i];
    ((unsigned *)sink)[1] = all;
  } else if (!strcmp(name, "atomic_own") && iterations == 2) {
    for (u64 i = 0; i < (u64)blocks * threads && i < bytes / 4; ++i) ((unsigned *)b)[i] += 64 * 2;
  } else if (seed == 0 && !strncmp(name, "wgmma_", 6)) {
    const char *p = name + (strncmp(name, "wgmma_sparse_", 13) ? 6 : 13);
    int k = !strcmp(p, "tf32") ? 8 : !strcmp(p, "fp8") || !strcmp(p, "int8") ? 32 : 16;
    for (u64 i = 0; i < (u64)blocks * threads; ++i)
      if (!strcmp(p, "int8")) ((int *)sink)[i] = 16 * k;
      else ((float *)sink)[i] = 16 * k * 0.25f;
  }
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *s, void **parameters, void **extra)
{
  ALIVE;
  (void)gy; (void)gz; (void)by; (void)bz; (void)shared; (void)s; (void)extra;
  const char *name = ((Function *)f)->name;
  if (gx == 0 || bx == 0 || bx > 1024) return 1;
  if (chosen("STANDIN_CUDA_FAULT", name)) { broken = 1; return 0; }
  if (chosen("STANDIN_CUDA_HANG", name)) { free_at_s = 1e18; return 0; }
  const int wrong = chosen("STANDIN_CUDA_WRONG", name);
  if (!strcmp(name, "fill")) {
    if (!wrong) fill(*(unsigned **)parameters[0], *(u64 *)parameters[1], *(unsigned *)parameters[2]);
    return 0;
  }
  if (!strcmp(name, "launch_nothing")) { /* takes no parameters; a capture keeps it for later */
    if (capturing) ++captured;
    else free_at_s = begin_s() + NOTHING_S;
    return 0;
  }
  if (!strcmp(name, "link_ring") || !strcmp(name, "link_plain")) {
    char *ring = *(char **)parameters[0];
    const u64 nodes = *(u64 *)parameters[1], stride = *(u64 *)parameters[2];
    for (u64 i = 0; i < nodes; ++i) *(u64 *)(ring + i * stride) = i;
    return 0;
  }
  if (strstr(name, "own_")) { /* a user's kernel, whose parameters are its own */
    free_at_s = begin_s() + 1e-4;
    return 0;
  }
  if (!strncmp(name, "media_", 6)) {
    typedef void (*Media)(void **, unsigned, unsigned);
    const char *library = getenv("STANDIN_MEDIA");
    void *handle = library ? dlopen(library, RTLD_NOW) : 0;
    char entry[160];
    snprintf(entry, sizeof entry, "host_%s", name);
    Media run = handle ? (Media)dlsym(handle, entry) : 0;
    static char done[16][96]; /* a workload computes once; afterwards it only takes time */
    int known = 0, place = 0;
    while (place < 16 && done[place][0]) known |= !strcmp(done[place++], name);
    if (run && !wrong && !known) { run(parameters, gx, bx); snprintf(done[place & 15], 96, "%s", name); }
    const double t = now_s();
    free_at_s = (free_at_s > t ? free_at_s : t) + 2e-3;
    seen_empty = 0;
    return 0;
  }
  u64 *stamps = *(u64 **)parameters[0];
  const int iterations = *(int *)parameters[6];
  const double length_s = strstr(name, "whole") ? 1e-3 : 3e-6 + iterations * ITERATION_S;
  const double begin = begin_s();
  free_at_s = begin + length_s;
  for (unsigned b = 0; b < gx; ++b) {
    u64 *out = stamps + 5ull * b;
    out[0] = b % SMS;
    out[1] = (u64)(begin * CLOCK_HZ);
    out[2] = out[1] + (u64)(length_s * CLOCK_HZ);
    out[3] = (u64)(begin * 1e9);
    out[4] = out[3] + (u64)(length_s * 1e9);
  }
  if (!wrong)
    compute(name, gx, bx, *(u64 **)parameters[1], *(u64 **)parameters[2], *(u64 **)parameters[3],
            *(u64 *)parameters[4], *(unsigned *)parameters[5], iterations);
  return 0;
}
int cuEventCreate(void **e, unsigned f) { ALIVE; (void)f; *e = calloc(1, sizeof(Event)); return 0; }
int cuEventRecord(void *e, void *s)
{
  ALIVE;
  (void)s;
  ((Event *)e)->at_s = begin_s();
  return 0;
}
int cuEventQuery(void *e) { ALIVE; return see(((Event *)e)->at_s) ? 0 : 600; }
int cuEventElapsedTime(float *ms, void *a, void *b) { ALIVE; *ms = 1e3 * (((Event *)b)->at_s - ((Event *)a)->at_s); return 0; }
int cuEventElapsedTime_v2(float *ms, void *a, void *b) { return cuEventElapsedTime(ms, a, b); }
int cuTexObjectCreate(u64 *t, const void *r, const void *d, const void *v) { ALIVE; (void)r; (void)d; (void)v; *t = 77; return 0; }
int cuProfilerStart(void) { ALIVE; return 0; }
int cuProfilerStop(void) { ALIVE; return 0; }
int cuGetExportTable(const void **t, const void *id) { (void)id; *t = 0; return 500; }
int cuGetErrorName(int code, const char **name)
{
  *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
        : code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuGetProcAddress_v2(const char *name, void **p, int version, u64 flags, void *status)
{
  (void)version; (void)flags;
  char longer[160];
  snprintf(longer, sizeof longer, "%s_v2", name);
  *p = dlsym(RTLD_DEFAULT, longer);
  Dl_info own, found;
  dladdr((void *)cuInit, &own);
  if (!*p || !dladdr(*p, &found) || found.dli_fbase != own.dli_fbase) *p = dlsym(RTLD_DEFAULT, name);
  if (*p && (!dladdr(*p, &found) || found.dli_fbase != own.dli_fbase)) *p = 0;
  if (status) *(int *)status = *p ? 0 : 1;
  return *p ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **p, int version, u64 flags) { return cuGetProcAddress_v2(name, p, version, flags, 0); }
