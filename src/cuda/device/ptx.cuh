#pragma once

#include "cuda/device/decode.cuh"

// The instructions the kernels are made of, one function each.
namespace qmlp::cuda {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float* d, std::uint32_t a0, std::uint32_t a1,
                                             std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                             std::uint32_t b1) {
  if constexpr (__is_same(T, Bf16)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Four 8x8 blocks of 16-bit elements; lane l gives the address of row l % 8 of block l / 8 and gets
// elements 2 (l % 4) and the next of row l / 4 of each.
__device__ __forceinline__ void load_matrices(std::uint32_t (&d)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address));
}
// An 8x8 block held as load_matrices gives it, transposed.
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t d) {
  std::uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(d));
  return t;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// A value that stays in a register: the compiler cannot compute it again from what it came from.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ const std::uint16_t* kept(const std::uint16_t* value) {
  asm volatile("" : "+l"(value));
  return value;
}

__device__ __forceinline__ uint4 load_global_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_16(std::uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Some of a CTA's warps wait for each other; 0 is __syncthreads' own.
__device__ __forceinline__ void team_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for warps that do not wait.
__device__ __forceinline__ void team_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- asynchronous copies of sm_80 ----
__device__ __forceinline__ void copy_16_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- sm_90: barriers, bulk copies, dependent launch ----
__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait_%=;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The policy that createpolicy.fractional.L2::evict_first makes for the whole of a copy on sm_90.
constexpr std::uint64_t kEvictFirst = 0x12F0000000000000;
// barrier_expect and bulk_copy by the lanes that are `elected`, without a branch. The bytes are the
// first that the L2 gives up: weights come once for a block of tokens, x and results are read
// again.
__device__ __forceinline__ void bulk_fill(bool elected, std::uint32_t to, const void* from,
                                          std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred elected;\nsetp.ne.u32 elected, %0, 0;\n"
      "@elected mbarrier.arrive.expect_tx.shared::cta.b64 _, [%4], %3;\n"
      "@elected cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%1], [%2], %3, [%4], %5;\n}" ::"r"(static_cast<std::uint32_t>(elected)),
      "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tensor_copy_2d(std::uint32_t to, const void* map, int c0, int c1,
                                               std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The low word of a wgmma descriptor of rows of 64 16-bit elements in shared memory with the
// 128-byte swizzle, K-major; the high word is always kSwizzledDescriptorHigh.
__device__ __forceinline__ std::uint32_t swizzled_descriptor(std::uint32_t address) {
  return (address & 0x3FFFFu) >> 4 | 1u << 16;
}
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The same as a loop that runs once, since gridDim.z is 1 (LaunchShape): ptxas moves a plain one
// above arithmetic that comes before it, which then runs when the wait is over.
__device__ __forceinline__ void wait_for_previous_grid_here() {
  asm volatile(
      "{\n.reg .pred again;\nagain_%=:\ngriddepcontrol.wait;\n"
      "setp.ne.u32 again, %0, 1;\n@again bra again_%=;\n}" ::"r"(gridDim.z)
      : "memory");
}

}  // namespace qmlp::cuda
