// Hopper's warpgroup matrix multiplication, from shared memory in the 128-byte swizzle. sm_90a only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx.cuh"

namespace loramux {

// A tile of rows of 64 elements: row r lies at 128 r bytes, its 16-byte vector v at place v ^ (r % 8). The
// tile starts on 1024 bytes. This is how the multiplication wants it, and it has no bank conflicts.
__device__ inline uint32_t swizzled(int row, int vector) {
  return row * 128 + ((vector ^ (row & 7)) << 4);
}

// The descriptor of such a tile; `+ 2` moves it 16 elements along the rows.
__device__ inline uint64_t tile_descriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return (shared_address >> 4 & 0x3fff) | uint64_t{1} << 16 | kEightRows | kSwizzle128;
}

// d += a @ b^T for tiles a of 64 rows and b of kColumns rows, 16 elements along, in float32.
// Lane 4 g + t of warp w holds row 16 w + g of d in d[4 j], d[4 j + 1], row 16 w + g + 8 in d[4 j + 2], d[4 j
// + 3]: at columns 8 j + 2 t and 8 j + 2 t + 1.
template <typename T, int kColumns>
struct Wgmma;

#define LORAMUX_WGMMA_16(type, name)                                                                     \
  template <>                                                                                            \
  struct Wgmma<type, 16> {                                                                               \
    static __device__ void multiply(float* d, uint64_t a, uint64_t b) {                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." name "." name                           \
                   " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"                                  \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
                     "+f"(d[7])                                                                          \
                   : "l"(a), "l"(b));                                                                    \
    }                                                                                                    \
  };

#define LORAMUX_WGMMA_64(type, name)                                                                        \
  template <>                                                                                               \
  struct Wgmma<type, 64> {                                                                                  \
    static __device__ void multiply(float* d, uint64_t a, uint64_t b) {                                     \
      asm volatile(                                                                                         \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name                                       \
          " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"        \
          "%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"                                      \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
            "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
            "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
            "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                                           \
          : "l"(a), "l"(b));                                                                                \
    }                                                                                                       \
  };

LORAMUX_WGMMA_16(__nv_bfloat16, "bf16")
LORAMUX_WGMMA_16(__half, "f16")
LORAMUX_WGMMA_64(__nv_bfloat16, "bf16")
LORAMUX_WGMMA_64(__half, "f16")
#undef LORAMUX_WGMMA_16
#undef LORAMUX_WGMMA_64

__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most `kLeft` of the latest groups of multiplications are under way.
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Makes ordinary and cp.async writes to shared memory visible to the multiplication.
__device__ inline void fence_shared_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace loramux
