// The instructions that C++ has no word for, one function each.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace loramux {

// d += a @ b for a 16 x 16 a and a 16 x 8 b of T, in float32. Lane 4 g + t of the warp holds, of a, row g
// (a0, a2) and row g + 8 (a1, a3); of b, column g; of d, rows g (d0, d1) and g + 8 (d2, d3) at columns 2 t
// and 2 t + 1. Which four of the 16 k's a lane holds does not matter as long as a and b agree.
template <typename T>
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1);

template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma<__half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats as two T in one register, rounded to nearest even.
template <typename T>
__device__ inline uint32_t pack2(float low, float high);

template <>
__device__ inline uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ inline uint32_t pack2<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T>
__device__ inline float2 unpack2(uint32_t pair);

template <>
__device__ inline float2 unpack2<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

template <>
__device__ inline float2 unpack2<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Weights are read once a call: they need no place in L1, and neighbours come along into L2.
__device__ inline uint4 load_weights16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Asks for a line of 128 bytes to be brought into L2.
__device__ inline void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Written by an earlier kernel, so never before wait_for_earlier_kernels() nor through the non-coherent
// cache.
__device__ inline uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ inline void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Programmatic dependent launch: the next kernel of the stream may start, up to its own wait.
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ inline void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// For a CTA without work. The next kernel's wait covers this kernel alone, so one CTA at least must see the
// kernels before it end.
__device__ inline void leave_idle() {
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_for_earlier_kernels();
}

__device__ inline float4 add(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Copies to shared memory ----

// Copies 16 bytes to shared memory, or zeros.
__device__ inline void copy16_async(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
               : "memory");
}

__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most `kLeft` of the latest groups of copies are under way.
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- Clusters ----

// The same shared memory in the CTA of rank `rank` of this cluster.
__device__ inline uint32_t peer_address(const void* p, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}

__device__ inline void store_shared(uint32_t address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(low), "f"(high) : "memory");
}

// 16 bytes at this CTA's shared address, in the CTA of rank `rank`.
__device__ inline float4 load_from_peer(uint32_t address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{\n.reg .u32 peer;\n"
      "mapa.shared::cluster.u32 peer, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [peer];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier in shared memory: a phase ends when `arrivals` threads have arrived and all bytes that they
// expect have. One thread makes it; fence_barriers() and a CTA or cluster barrier show it to the others.
__device__ inline void make_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and expects `bytes` of asynchronous copies or stores in this phase.
__device__ inline void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives when this thread's copies so far by copy16_async() are done.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Until the phase of this parity has ended, where only threads of this CTA and copies arrive. Of a new
// barrier the phase before the first, of parity 1, has ended.
__device__ inline void wait_for_cta_phase(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Until the phase of this parity has ended, where threads of other CTAs arrive too. Their writes are seen at
// the price of the L1 cache, which is emptied.
__device__ inline void wait_for_phase(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Store to a peer's shared memory; its barrier counts the 16 bytes.
__device__ inline void store_to_peer(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
          address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

// ---- Bulk copies ----
// By the copy engine, which takes shared memory as of its own: what threads have written there it sees after
// fence_for_copy_engine() of theirs and a barrier.

__device__ inline void fence_for_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Asks for `bytes`, a multiple of 16, to be brought into L2.
__device__ inline void prefetch_bulk(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Copies `bytes`, a multiple of 16, to shared memory; the barrier counts them.
__device__ inline void load_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box of a matrix that begins at a column and a row to shared memory; the barrier counts its
// bytes.
__device__ inline void load_box(void* to, const CUtensorMap& map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The same of a matrix whose columns are counted in blocks.
__device__ inline void load_blocks(void* to, const CUtensorMap& map, int row, int block, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(row), "r"(block), "r"(shared_address(barrier))
      : "memory");
}

// The way back of a box, in this thread's group of copies that commit_bulk() closes.
__device__ inline void store_box(const CUtensorMap& map, int column, int row, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(column), "r"(row), "r"(shared_address(from))
               : "memory");
}

__device__ inline void commit_bulk() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until of all but this thread's latest group of bulk copies shared memory has been read.
__device__ inline void wait_for_bulk_reads_but_one() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

// Until all of this thread's bulk copies are done.
__device__ inline void wait_for_bulk() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace loramux
