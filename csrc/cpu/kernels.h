// The compiled kernels of one instruction set, and what they are given. All checks are behind: rows, pointers
// and ranks lie inside the tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "lora.h"

#if defined(__x86_64__) && !defined(__clang__)
#define LORAMUX_X86  // AVX kernels are built, which takes GCC's target pragma
#endif

namespace loramux {

inline constexpr int64_t kTaskRows = 64;     // most rows of a task
inline constexpr int64_t kRankBlock = 64;    // most ranks whose partial sums a shrink holds
inline constexpr int64_t kColumnBlock = 64;  // columns of y that an expand works on at a time
inline constexpr int64_t kXFloats = 8192;    // of x in float32 at a time: 32 KB, for the L1 cache
inline constexpr int64_t kMaxLanes = 16;     // floats of the widest vector
inline constexpr int64_t kHAlign = 32;       // floats; rows of an expand's h are padded to this with zeros

// Floats of scratch memory that a task needs, aligned to 64 bytes.
inline constexpr int64_t kShrinkScratch = kXFloats + kTaskRows * kRankBlock * kMaxLanes;
constexpr int64_t expand_scratch(int64_t h_stride) {
  return 2 * kTaskRows * h_stride + 2048;
}

// h[row * h_stride + j] = x[row] @ a[j] for j in [0, ranks).
struct ShrinkTask {
  const GatheredRow* rows;
  int64_t count;
  const void* x;
  int64_t x_stride;
  const void* a;  // [ranks, in_features]
  int64_t in_features;
  int64_t ranks;
  float* h;
  int64_t h_stride;
  float* scratch;
};

// y[row * y_stride + n] += scale * rows[i].scale * (h[i] @ b[n]) for n in [0, columns), where row =
// rows[i].row.
struct ExpandTask {
  const GatheredRow* rows;
  int64_t count;
  const float* h;  // [count, h_stride], zero from rank on
  int64_t h_stride;
  const void* b;  // [columns, b_stride]
  int64_t b_stride;
  int64_t rank;
  int64_t columns;
  float scale;
  void* y;
  int64_t y_stride;
  float* scratch;
};

// Functions by DType.
struct Kernels {
  const char* name;
  void (*shrink[3])(const ShrinkTask&);
  void (*expand[3])(const ExpandTask&);
};

extern const Kernels kPortableKernels, kAvx2Kernels, kAvx512Kernels;
void shrink_amx(const ShrinkTask& task);
void expand_amx(const ExpandTask& task);

// Those that this processor runs, the fastest first.
const std::vector<const Kernels*>& available_kernels();

// The entry points of lora.h with the instruction set chosen.
void shrink(const Kernels& kernels, const ShrinkArgs& args, const ParallelFor& parallel_for);
void expand(const Kernels& kernels, const ExpandArgs& args, const ParallelFor& parallel_for);
void embedding(const Kernels& kernels, const EmbeddingArgs& args, const ParallelFor& parallel_for);

}  // namespace loramux
