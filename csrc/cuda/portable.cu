// The kernels for every architecture from sm_80 on and every shape: plain float32 arithmetic, no tensor
// cores. They are the fallback of the tuned kernels and their reference on the device.
//
// A CTA computes up to kBlockRows rows of one slot and one slice. The order of every sum is fixed:
// - shrink: K is cut into vectors of kVector elements, dealt in turn to the kShrinkThreads threads. A thread
//   adds its products one by one, K rising; then lanes add up in pairs 16, 8, 4, 2 and 1 apart; then warps.
// - expand: products are added one by one, rank rising.
// So the order depends on in_features and rank alone: a row's bits do not change with its neighbours, its
// tile, the grid, or whether a vector is loaded at once or element by element.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>

#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "host/plan.h"

namespace loramux {
namespace {

// The rows of one CTA. A prefill tile is cut into blocks of the height of a decode tile, so a row meets the
// same code, and gets the same bits, in either kind.
constexpr int kBlockRows = kDecodeRows;
constexpr int kPrefillBlocks = kPrefillRows / kBlockRows;
static_assert(kPrefillRows % kBlockRows == 0);

constexpr int kVector = 8;  // elements that a thread loads and adds up at a time
constexpr int kLanes = 32;

constexpr int kShrinkThreads = 256;
constexpr int kShrinkRanks = 4;  // rows of A of one CTA
static_assert(kBlockRows * kShrinkRanks == kLanes, "after the warp's sums, every lane holds one");

constexpr int kExpandThreads = 128;
constexpr int kThreadColumns = 2;  // columns of y of one thread, kExpandThreads apart
constexpr int kExpandColumns = kExpandThreads * kThreadColumns;
constexpr int kRowThreads = kExpandThreads / kBlockRows;  // that find a row and stage its operand
constexpr int kStagedRanks = 128;                         // ranks of h in shared memory at a time
static_assert(kStagedRanks % kVector == 0 && kStagedRanks % kRowThreads == 0);

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Whether rows `stride` elements apart from `data` on can be read in 16-byte loads.
template <typename T>
__device__ bool is_aligned(const T* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * sizeof(T) % 16 == 0;
}

template <typename T, int kCount>
struct alignas(kCount == 1 ? sizeof(T) : 16) Vector {
  T elements[kCount];
};

template <int kCount, typename T>
__device__ Vector<T, kCount> load(const T* data) {
  return *reinterpret_cast<const Vector<T, kCount>*>(data);
}

// Some rows of a tile.
struct RowBlock {
  TileRows tile;
  int first;
};

// Block `index` of the tiles of a kind. False where it is empty or past the last tile.
__device__ bool find_row_block(const PlanView& plan, TileKind kind, int64_t index, int64_t rows,
                               RowBlock* block) {
  const int blocks = kind == TileKind::decode ? 1 : kPrefillBlocks;
  block->first = static_cast<int>(index % blocks) * kBlockRows;
  return find_tile(plan, kind, index / blocks, rows, &block->tile) && block->first < block->tile.count;
}

// ---- Shrink ----

// Adds this thread's share of x[i] @ a[j]^T to sums[i * kShrinkRanks + j]. kLoad: the elements of a vector
// that are loaded at once, kVector or 1.
template <int kLoad, typename T>
__device__ void shrink_rows(const T* const (&x)[kBlockRows], const T* const (&a)[kShrinkRanks],
                            int64_t in_features, float (&sums)[kLanes]) {
  for (int64_t first = threadIdx.x * kVector; first < in_features; first += kShrinkThreads * kVector) {
    for (int64_t k = first; k < first + kVector && k < in_features; k += kLoad) {
      Vector<T, kLoad> a_vectors[kShrinkRanks];
#pragma unroll
      for (int j = 0; j < kShrinkRanks; ++j) a_vectors[j] = load<kLoad>(a[j] + k);
#pragma unroll
      for (int i = 0; i < kBlockRows; ++i) {
        const Vector<T, kLoad> x_vector = load<kLoad>(x[i] + k);
#pragma unroll
        for (int j = 0; j < kShrinkRanks; ++j) {
          float& sum = sums[i * kShrinkRanks + j];
#pragma unroll
          for (int e = 0; e < kLoad; ++e) {
            const float a_element = static_cast<float>(a_vectors[j].elements[e]);
            sum = fmaf(static_cast<float>(x_vector.elements[e]), a_element, sum);
          }
        }
      }
    }
  }
}

// Adds up each of kLanes values over the lanes of a warp; lane i gets the sum of value i. Every step halves
// the values: a lane keeps the half with its own value and gives the other to the lane `half` apart.
__device__ float sum_over_lanes(float (&values)[kLanes]) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const bool upper = (threadIdx.x & half) != 0;
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {  // a constant count keeps the values in registers
      if (i >= half) break;
      const float kept = upper ? values[i + half] : values[i];
      const float given = upper ? values[i] : values[i + half];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, given, half);
    }
  }
  return values[0];
}

// Grid: blocks of kShrinkRanks, slices, row blocks. So CTAs that read the same rows of x run together.
template <typename T>
__global__ void __launch_bounds__(kShrinkThreads, sizeof(T) == 2 ? 2 : 1)
    shrink_kernel(const __grid_constant__ ShrinkArgs args, TileKind kind, int64_t first_block) {
  const int64_t in_features = args.site.in_features;
  const int slice = blockIdx.y;
  const int first_rank = blockIdx.x * kShrinkRanks;
  RowBlock block;
  if (!find_row_block(args.plan, kind, first_block + blockIdx.z, args.rows, &block)) return;
  const SliceWeights<T> weights = find_slice<T>(args.site, block.tile.slot, slice);
  if (first_rank >= weights.rank) return;

  __shared__ TileRow rows[kBlockRows];
  if (threadIdx.x < kBlockRows)
    rows[threadIdx.x] = find_row(args.plan, block.tile, block.first + threadIdx.x, args.rows);
  __syncthreads();
  // In the place of absent rows, present ones are computed again: cheaper than to ask each time.
  const T* x = static_cast<const T*>(args.x);
  const T* x_rows[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    const int64_t row = rows[min(i, block.tile.count - block.first - 1)].index;
    x_rows[i] = x + max(row, int64_t{0}) * args.x_stride;
  }
  const T* a_rows[kShrinkRanks];
#pragma unroll
  for (int j = 0; j < kShrinkRanks; ++j) {
    a_rows[j] = weights.a + min(first_rank + j, weights.rank - 1) * in_features;
  }
  float sums[kLanes] = {};
  if (is_aligned(x, args.x_stride) && is_aligned(weights.a, in_features) && in_features % kVector == 0) {
    shrink_rows<kVector>(x_rows, a_rows, in_features, sums);
  } else {
    shrink_rows<1>(x_rows, a_rows, in_features, sums);
  }

  constexpr int kWarps = kShrinkThreads / kLanes;
  __shared__ float warp_sums[kWarps][kLanes];
  const int warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  warp_sums[warp][lane] = sum_over_lanes(sums);
  __syncthreads();
  if (warp > 0) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warp_sums[w][lane];
  const int64_t row = rows[lane / kShrinkRanks].index;
  const int rank = first_rank + lane % kShrinkRanks;
  if (row >= 0 && rank < weights.rank) {
    args.h[(row * args.site.num_slices + slice) * args.site.max_rank + rank] = sum;
  }
}

// ---- Expand ----

// Brings `count` ranks of every row's operand to shared memory, zeros after them and for a null operand. Each
// thread gives its own row's operand.
template <typename Operand>
__device__ void stage_operands(const Operand* operand, int count, float (&h)[kBlockRows][kStagedRanks]) {
  const int own = threadIdx.x / kRowThreads;
  const int lane = threadIdx.x % kRowThreads;
  float staged[kStagedRanks / kRowThreads];
#pragma unroll
  for (int m = 0; m < kStagedRanks / kRowThreads; ++m) {
    const int r = lane + m * kRowThreads;
    staged[m] = operand != nullptr && r < count ? static_cast<float>(operand[r]) : 0.f;
  }
  __syncthreads();  // the ranks before these have been used
#pragma unroll
  for (int m = 0; m < kStagedRanks / kRowThreads; ++m) h[own][lane + m * kRowThreads] = staged[m];
  __syncthreads();
}

// Adds ranks [first, first + count) of h[i] @ b[j]^T to sums[j][i], where h[i][0] is of rank `first`. kLoad:
// the elements of B that are loaded at once, kVector or 1.
template <int kLoad, typename T>
__device__ void expand_ranks(const float (&h)[kBlockRows][kStagedRanks], const T* const (&b)[kThreadColumns],
                             int first, int count, float (&sums)[kThreadColumns][kBlockRows]) {
  for (int r = 0; r < count; r += kLoad) {
    Vector<T, kLoad> b_vectors[kThreadColumns];
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) b_vectors[j] = load<kLoad>(b[j] + first + r);
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
#pragma unroll
      for (int e = 0; e < kLoad; ++e) {
#pragma unroll
        for (int j = 0; j < kThreadColumns; ++j) {
          sums[j][i] = fmaf(h[i][r + e], static_cast<float>(b_vectors[j].elements[e]), sums[j][i]);
        }
      }
    }
  }
}

// Args: ExpandArgs or EmbeddingArgs. Grid: blocks of kExpandColumns, slices, row blocks.
template <typename T, typename Args>
__global__ void __launch_bounds__(kExpandThreads, 4)
    expand_kernel(const __grid_constant__ Args args, TileKind kind, int64_t first_block) {
  const int slice = blockIdx.y;
  const int64_t first_column = int64_t{blockIdx.x} * kExpandColumns;
  const int64_t width = args.site.slices[slice].width;
  RowBlock block;
  if (first_column >= width || !find_row_block(args.plan, kind, first_block + blockIdx.z, args.rows, &block))
    return;
  const SliceWeights<T> weights = find_slice<T>(args.site, block.tile.slot, slice);
  if (weights.rank == 0) return;

  const int own = threadIdx.x / kRowThreads;
  TileRow row = find_row(args.plan, block.tile, block.first + own, args.rows);
  const auto operands = find_operands(args, weights, slice);
  const int64_t found = find_operand(args, &row);
  const auto* const operand = found < 0 ? nullptr : operands.data + found * operands.stride;
  __shared__ T* y_rows[kBlockRows];  // null: not to be touched
  __shared__ float scales[kBlockRows];
  if (threadIdx.x % kRowThreads == 0) {
    const int64_t at = row.index * args.y_stride + args.site.slices[slice].offset;
    y_rows[own] = operand != nullptr ? static_cast<T*>(args.y) + at : nullptr;
    scales[own] = weights.scale * row.scale;
  }
  __syncthreads();

  int64_t columns[kThreadColumns];
  const T* b_rows[kThreadColumns];
  float y[kThreadColumns][kBlockRows];  // all read before the first is written: one latency, not sixteen
#pragma unroll
  for (int j = 0; j < kThreadColumns; ++j) {
    columns[j] = first_column + j * kExpandThreads + threadIdx.x;
    b_rows[j] = weights.b + min(columns[j], width - 1) * weights.stride;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      if (y_rows[i] != nullptr && columns[j] < width) y[j][i] = static_cast<float>(y_rows[i][columns[j]]);
    }
  }

  alignas(16) __shared__ float h[kBlockRows][kStagedRanks];
  const bool wide = is_aligned(weights.b, weights.stride) && weights.rank % kVector == 0;
  float sums[kThreadColumns][kBlockRows] = {};
  for (int first = 0; first < weights.rank; first += kStagedRanks) {
    const int count = min(weights.rank - first, kStagedRanks);
    stage_operands(operand == nullptr ? nullptr : operand + first, count, h);
    if (wide) {
      expand_ranks<kVector>(h, b_rows, first, count, sums);
    } else {
      expand_ranks<1>(h, b_rows, first, count, sums);
    }
  }

#pragma unroll
  for (int j = 0; j < kThreadColumns; ++j) {
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      if (y_rows[i] != nullptr && columns[j] < width) {
        y_rows[i][columns[j]] = static_cast<T>(fmaf(scales[i], sums[j][i], y[j][i]));
      }
    }
  }
}

// ---- Launch ----

template <typename Args>
using Kernels = std::array<void (*)(Args, TileKind, int64_t first_block), 3>;  // by DType

// CTAs for every row block of this kind that a plan of these rows can have.
template <typename Args>
int launch(const Kernels<Args>& kernels, int64_t grid_x, int threads, TileKind kind, const Args& args,
           void* stream) {
  constexpr int64_t kMaxGridZ = 65535;
  const auto kernel = kernels[static_cast<int>(args.site.dtype)];
  const int64_t row_blocks = kind == TileKind::decode
                                 ? max_decode_tiles(args.rows, args.site.num_slots)
                                 : max_prefill_tiles(args.rows, args.site.num_slots) * kPrefillBlocks;
  for (int64_t first = 0; first < row_blocks; first += kMaxGridZ) {
    const dim3 grid(grid_x, args.site.num_slices, std::min(row_blocks - first, kMaxGridZ));
    kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(args, kind, first);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Args>
int launch_expand(TileKind kind, const Args& args, void* stream) {
  const Slice* const slices = args.site.slices;
  const int64_t width =
      std::max_element(slices, slices + args.site.num_slices, [](const Slice& a, const Slice& b) {
        return a.width < b.width;
      })->width;
  const Kernels<Args> kernels = {expand_kernel<float, Args>, expand_kernel<__half, Args>,
                                 expand_kernel<__nv_bfloat16, Args>};
  return launch(kernels, ceil_div(width, kExpandColumns), kExpandThreads, kind, args, stream);
}

}  // namespace

int shrink_portable(TileKind kind, const ShrinkArgs& args, void* stream) {
  const Kernels<ShrinkArgs> kernels = {shrink_kernel<float>, shrink_kernel<__half>,
                                       shrink_kernel<__nv_bfloat16>};
  return launch(kernels, ceil_div(args.site.max_rank, kShrinkRanks), kShrinkThreads, kind, args, stream);
}

int expand_portable(TileKind kind, const ExpandArgs& args, void* stream) {
  return launch_expand(kind, args, stream);
}

int embedding_portable(TileKind kind, const EmbeddingArgs& args, void* stream) {
  return launch_expand(kind, args, stream);
}

}  // namespace loramux
