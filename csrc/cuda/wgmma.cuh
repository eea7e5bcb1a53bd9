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

// The registers of d by its columns: in the instruction, and as its outputs, eight at a time.
#define LORAMUX_R_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LORAMUX_R_32 LORAMUX_R_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define LORAMUX_R_48 LORAMUX_R_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define LORAMUX_R_64 LORAMUX_R_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define LORAMUX_R_128                                                \
  LORAMUX_R_64                                                       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LORAMUX_R_192                                                \
  LORAMUX_R_128                                                      \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LORAMUX_D(k)                                                                              \
  "+f"(d[8 * k]), "+f"(d[8 * k + 1]), "+f"(d[8 * k + 2]), "+f"(d[8 * k + 3]), "+f"(d[8 * k + 4]), \
      "+f"(d[8 * k + 5]), "+f"(d[8 * k + 6]), "+f"(d[8 * k + 7])
#define LORAMUX_D_16 LORAMUX_D(0)
#define LORAMUX_D_32 LORAMUX_D_16, LORAMUX_D(1)
#define LORAMUX_D_48 LORAMUX_D_32, LORAMUX_D(2)
#define LORAMUX_D_64 LORAMUX_D_48, LORAMUX_D(3)
#define LORAMUX_D_128 LORAMUX_D_64, LORAMUX_D(4), LORAMUX_D(5), LORAMUX_D(6), LORAMUX_D(7)
#define LORAMUX_D_192 LORAMUX_D_128, LORAMUX_D(8), LORAMUX_D(9), LORAMUX_D(10), LORAMUX_D(11)
#define LORAMUX_WGMMA(type, name, columns, a_operand, b_operand)                                  \
  template <>                                                                                     \
  struct Wgmma<type, columns> {                                                                   \
    static __device__ void multiply(float* d, uint64_t a, uint64_t b) {                           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name          \
                   " {" LORAMUX_R_##columns "}, %" #a_operand ", %" #b_operand ", 1, 1, 1, 0, 0;" \
                   : LORAMUX_D_##columns                                                          \
                   : "l"(a), "l"(b));                                                             \
    }                                                                                             \
  };

#define LORAMUX_WGMMA_OF_BOTH(columns, a_operand, b_operand)          \
  LORAMUX_WGMMA(__nv_bfloat16, "bf16", columns, a_operand, b_operand) \
  LORAMUX_WGMMA(__half, "f16", columns, a_operand, b_operand)

LORAMUX_WGMMA_OF_BOTH(16, 8, 9)
LORAMUX_WGMMA_OF_BOTH(32, 16, 17)
LORAMUX_WGMMA_OF_BOTH(48, 24, 25)
LORAMUX_WGMMA_OF_BOTH(64, 32, 33)
LORAMUX_WGMMA_OF_BOTH(128, 64, 65)
LORAMUX_WGMMA_OF_BOTH(192, 96, 97)
#undef LORAMUX_WGMMA_OF_BOTH
#undef LORAMUX_WGMMA
#undef LORAMUX_D
#undef LORAMUX_R_16
#undef LORAMUX_R_32
#undef LORAMUX_R_48
#undef LORAMUX_R_64
#undef LORAMUX_R_128
#undef LORAMUX_R_192
#undef LORAMUX_D_16
#undef LORAMUX_D_32
#undef LORAMUX_D_48
#undef LORAMUX_D_64
#undef LORAMUX_D_128
#undef LORAMUX_D_192

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
