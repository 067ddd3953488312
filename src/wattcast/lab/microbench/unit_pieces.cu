// Pieces of CUDA C that units are made of (unit_source.py). A line that begins with "//: " names the piece below it,
// KIND.PART, where PART is a field of BenchUnit; its lines are joined by blanks. ${p} is the name of the unit.

// Stamps of every block, or of some: these alone wait for one another and read the timer.
//: stamps.begin
__syncthreads();
const u64 begin_ns = timer_ns(), begin = clock64();
//: stamps.begin_of_some
const bool stamped = blockIdx.x % ${every}u == 0u;
const u64 begin_ns = stamped ? timer_ns() : 0ull, begin = stamped ? (u64)clock64() : 0ull;
//: stamps.end
__syncthreads();
if (threadIdx.x == 0u) { const unsigned place = blockIdx.x;
//: stamps.end_of_some
if (stamped) __syncthreads();
if (stamped && threadIdx.x == 0u) { const unsigned place = blockIdx.x / ${every}u;

//: cluster.sync
asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");

//: compare.step
asm volatile("{.reg .pred q; setp.ne.u32 q, %0, 0; setp.lt.xor.s32 q, %1, %2, q; selp.u32 %0, 1, 0, q;}"
  : "+r"(${p}_q${q}) : "r"(${p}${x}), "r"(${p}${y}));

//: growth.declare
const ${type} ${p}_g = (${type})1 + (${p}_a - (${type})1) * (${type})0.0625;
const ${type} ${p}_i = (${type})0.99999 / ${p}_g;

//: move.advance
{ const unsigned t = ${p}0; ${shifts} ${p}${last} = t; }

//: ring.declare
const u64 ${p}_first = ((u64)seed * 0x9e3779b97f4a7c15ull >> 16) % ${nodes}ull;
u64 ${p}_at = (u64)b + ${p}_first * ${stride}ull + (${p}_first * ${line}ull & ${mask}ull);
_Pragma("unroll 1") for (unsigned i = 0u; i < ${warm}u; ++i) asm volatile("ld.global.${cache}.u64 %0, [%0];" : "+l"(${p}_at) : );
//: ring.step
asm volatile("ld.global.${cache}.u64 %0, [%0];" : "+l"(${p}_at) : );
//: ring.fold
(unsigned)${p}_at

//: shared_ring.declare
unsigned ${p}_own = (unsigned)__cvta_generic_to_shared(pool), ${p}_at = ${p}_own;
for (unsigned i = threadIdx.x; i < ${nodes}u; i += blockDim.x)
  ((unsigned *)pool)[i] = ${p}_own + (i * ${factor}u + ${hop}u) % ${nodes}u * sizeof(unsigned);
__syncthreads();
//: shared_ring.step
asm volatile("ld.shared.u32 %0, [%0];" : "+r"(${p}_at) : );
//: shared_ring.fold
(unsigned)${p}_at

// A block's memory holds addresses of itself as the cluster sees it; its neighbour follows them.
//: cluster_ring.declare
u64 ${p}_own = (u64)pool, ${p}_at = ${p}_own;
unsigned ${p}_rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(${p}_rank));
asm volatile("mapa.u64 %0, %0, %1;" : "+l"(${p}_at) : "r"((${p}_rank + 1u) % ${cluster}u));
asm volatile("mapa.u64 %0, %0, %1;" : "+l"(${p}_own) : "r"(${p}_rank));
for (unsigned i = threadIdx.x; i < ${nodes}u; i += blockDim.x)
  ((u64 *)pool)[i] = ${p}_own + (i * ${factor}u + ${hop}u) % ${nodes}u * sizeof(u64);
${sync}
//: cluster_ring.step
asm volatile("ld.u64 %0, [%0];" : "+l"(${p}_at) : );
//: cluster_ring.fold
(unsigned)${p}_at
//: cluster_ring.finish
${sync}

//: walk.declare
const unsigned ${p}_chunks = (unsigned)(bytes / ${chunk}ull), ${p}_step = gridDim.x % ${p}_chunks;
unsigned ${p}_k = blockIdx.x % ${p}_chunks;
unsigned char *const ${p}_base = ${buffer} + ${place};
unsigned char *${p}_at = ${p}_base + (u64)${p}_k * ${chunk}ull;
//: walk.advance
// on to the next chunk of the block, by the remainder of the grid, which may be larger than the buffer has chunks
${p}_k += ${p}_step; if (${p}_k >= ${p}_chunks) ${p}_k -= ${p}_chunks;
${p}_at = ${p}_base + (u64)${p}_k * ${chunk}ull;

//: load.declare
${declare} unsigned ${p}_s0 = 0u, ${p}_s1 = 0u; ${words}
//: load.step
asm volatile("${load}.${kind} ${registers}, [%${count} + ${at}];" : ${outs} : "${letter}"(${p}_at));
//: load.fold
${p}_s0 ^ ${p}_s1
//: load.advance
${folds} ${advance}

//: store.declare
${declare} ${words}
//: store.step
asm volatile("${store}.${kind} [%0 + ${at}], ${registers};" : : "${letter}"(${p}_at), ${ins});
//: store.advance
${turns} ${advance}

//: pace.declare
u64 ${p}_next = clock64() + blockIdx.x % 16u * ${apart}ull;
//: pace.before
if (threadIdx.x == 0u) {
  _Pragma("unroll 1") for (unsigned spin = 0u; spin < ${spins}u && (long long)(${p}_next - clock64()) > 0; ++spin)
  asm volatile("nanosleep.u32 200;"); ${p}_next += ${period}ull;
} __syncthreads();

//: cached.declare
const u64 ${p}_own = blockIdx.x % (unsigned)(bytes / ${both}ull); u64 ${p}_step = ${half}ull;
u64 ${p}_at = (u64)(a + ${p}_own * ${both}ull + threadIdx.x * 16u);
//: cached.advance
${p}_at += ${p}_step; ${p}_step = 0ull - ${p}_step;

//: local.declare
uint4 ${p}[${slots}]; u64 ${p}_base;
asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(${p}_base) : "l"(${p}));
const unsigned ${p}_at = (unsigned)${p}_base;

//: shared.declare
const unsigned short ${p}_word[32] = {${table}};
unsigned ${p}_at = (unsigned)__cvta_generic_to_shared(pool) + ${place}; unsigned ${p}_step = ${half}u;
for (unsigned i = threadIdx.x; i < ${all}u; i += blockDim.x) ((unsigned *)pool)[i] = mixed(state + i);
__syncthreads(); (void)${p}_word;
//: shared.advance
${p}_at += ${p}_step; ${p}_step = 0u - ${p}_step;

//: shared_cluster.declare
unsigned ${p}_rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(${p}_rank));
asm volatile("mapa.shared::cluster.u32 %0, %0, %1;"
  : "+r"(${p}_at) : "r"((${p}_rank + 1u + threadIdx.x / 32u % ${others}u) % ${cluster}u));
${sync}

//: constant.source
__constant__ unsigned ${p}_table[512] = {${table}};
//: constant.declare
unsigned ${p}_at = (seed & 3u) * 4u, ${p}_step = ${size}u, ${p}_s = 0u;
u64 ${p}_base; asm volatile("cvta.to.const.u64 %0, %1;" : "=l"(${p}_base) : "l"(${p}_table));
${p}_at += (unsigned)${p}_base; ${words}
//: constant.step
asm volatile("ld.const.u32 %0, [%1 + ${at}];" : "=r"(${p}${i}) : "r"(${p}_at));
//: constant.fold
${p}_s
//: constant.advance
${folds} ${p}_at += ${p}_step; ${p}_step = 0u - ${p}_step;

//: texture.declare
const u64 ${p}_t = (u64)b; int ${p}_x = (int)threadIdx.x, ${p}_step = ${all};
//: texture.advance
${p}_x += ${p}_step; ${p}_step = -${p}_step;
//: texture.step
asm volatile("tex.1d.v4.u32.s32 {%0, %1, %2, %3}, [%4, {%5}];" : ${outs} : "l"(${p}_t), "r"(${p}_x + ${at}));

//: copy.declare
${walk} const long long ${p}_apart = b - a; ${words}
//: copy.load
asm volatile("${read}.${kind} ${loaded}, [%${count} + ${at}];" : ${outs} : "l"(${p}_at));
//: copy.store
asm volatile("${write}.${kind} [%0 + ${at}], ${stored};" : : "l"((${p}_at + ${p}_apart)), ${ins});
//: copy.fold
0u

//: block_copy.walk
unsigned char *const ${p}_at = a + (u64)blockIdx.x * ${chunk}ull + threadIdx.x * 16u;

//: async_copy.declare
${walk} unsigned ${p}_to = (unsigned)__cvta_generic_to_shared(pool) + threadIdx.x * 16u;
unsigned ${p}_half = ${chunk}u, ${p}_s = 0u;
//: async_copy.step
asm volatile("cp.async.cg.shared.global [%0 + ${at}], [%1 + ${at}], 16;" : : "r"(${p}_to), "l"(${p}_at));
//: async_copy.fold
${p}_s
//: async_copy.advance
asm volatile("cp.async.commit_group;" : : ); asm volatile("cp.async.wait_group 1;" : : );
${p}_to += ${p}_half; ${p}_half = 0u - ${p}_half; ${advance}
// What the last two iterations brought, for the check.
//: async_copy.finish
asm volatile("cp.async.wait_all;" : : );
for (unsigned i = 0u; i < ${both}u; ++i) {
  const uint4 w = *(const uint4 *)(pool + i * ${row}u + threadIdx.x * 16u); ${p}_s ^= w.x ^ w.y ^ w.z ^ w.w; }

// Layout: start address / 16; leading offset 16 B and stride 1024 B, both / 16; bit 62: 128-byte swizzle.
//: wgmma.declare
for (unsigned i = threadIdx.x; i < ${words}u; i += blockDim.x)
  { const unsigned x = mixed(state + i); ((unsigned *)pool)[i] = ${word}; (void)x; }
asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads();
${kind} acc[${registers}]; _Pragma("unroll") for (int i = 0; i < ${registers}; ++i) acc[i] = 0;
const unsigned group = threadIdx.x / 128u, pool_at = (unsigned)__cvta_generic_to_shared(pool);
const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16);
const u64 at_a = layout | ((pool_at + group * ${tile}u) >> 4);
const u64 at_b = layout | ((pool_at + ${tiles}u) >> 4);
//: wgmma.before
asm volatile("{.reg .pred p, q; .reg .b64 da, db; setp.ne.b32 p, 0, 0; setp.eq.b32 q, 0, 0; ${lines}}"
  : ${outs} : "l"(at_a), "l"(at_b)${pairs} : "memory");

//: mma.step
asm volatile("${product} {${d}}, {${a}}, {${b}}, {${d}}${ends};" : ${outs} : ${ins});

// Through a shuffle, or the assembler computes the operands again on every path.
//: divergence.declare
const unsigned ${p}_way = __shfl_sync(0xffffffffu, lane % ${ways}u, lane);
const float ${p}_g = __shfl_sync(0xffffffffu, 1.0f + (unit_float(state) - 1.0f) * 0.0625f, lane);
const float ${p}_r = __shfl_sync(0xffffffffu, 0.999999f / ${p}_g, lane);
${registers}

// Places and barriers of bulk copies, of which the first are started.
//: bulk.declare
const unsigned ${p}_pool = (unsigned)__cvta_generic_to_shared(pool);
const unsigned ${p}_bar = ${p}_pool + ${room}u,
${p}_chunks = (unsigned)(bytes / ${size}ull), ${p}_step = gridDim.x / ${cluster}u % ${p}_chunks;
unsigned ${p}_k = blockIdx.x / ${cluster}u % ${p}_chunks, ${p}_phase = 0u${more}; ${first}
if (threadIdx.x == 0u) { for (unsigned s = 0; s < ${stages}u; ++s)
asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(${p}_bar + 8u * s) : "memory");
asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); ${meet}
for (unsigned s = 0; s < ${started}u; ++s) { ${issue} } } __syncthreads();
//: bulk.before
if (threadIdx.x == 0u) { ${turns} } ${p}_phase ^= 1u;
//: bulk.finish
if (threadIdx.x == 0u) { ${drain} } ${sync}
//: bulk.fold
((unsigned *)pool)[threadIdx.x]
// The host wrote the map, which the copy engine reads past the usual caches.
//: bulk.tile
asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" : : "l"(b));
//: bulk.rank
unsigned ${p}_rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(${p}_rank));
// A block may send only when the others count.
//: bulk.meet
} ${sync} if (threadIdx.x == 0u) {
// The barrier of a stage is told how many bytes will come, their copy is started, and the next chunk is due.
//: bulk.issue
asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], ${size}; cp.async.bulk.${copy}"
  :: "r"(${p}_bar + 8u * ${stage}), "r"(${to}), "l"(${source})${more} : "memory");
${p}_k += ${p}_step; if (${p}_k >= ${p}_chunks) ${p}_k -= ${p}_chunks;
//: bulk.wait
{ unsigned done = 0u; for (unsigned spin = 0; spin < ${spins}u && !done; ++spin)
{ asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
  : "=r"(done) : "r"(${p}_bar + ${at}u), "r"(${p}_phase) : "memory"); }
if (!done) asm volatile("trap;"); }
//: bulk.send
asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;"
  :: "l"(b + (u64)${p}_out * ${size}ull), "r"(${p}_pool + ${at}u), "r"(${size}u) : "memory");
${p}_out += ${p}_step; if (${p}_out >= ${p}_chunks) ${p}_out -= ${p}_chunks;
asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
