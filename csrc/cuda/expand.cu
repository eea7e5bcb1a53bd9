// The expand on sm_90 and later. A warp holds B of some columns of y in registers, which it asks for before
// it waits for the kernel that makes h, and goes through the rows of its tile 8 at a time. Ranks are added in
// groups of 16, so a row gets the same bits in either kind of tile.
#include <algorithm>

#include "cuda/common.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace loramux {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;
constexpr int kRows = 8;           // of a pass: the columns of a tensor-core tile
constexpr int kBlockColumns = 64;  // of y: four tensor-core tiles; a lane ends with 8 neighbours of them
constexpr int kTiles = 4;

// Blocks of columns of one warp: as much of B as registers hold.
__host__ __device__ constexpr int blocks_of_warp(int groups) {
  return groups <= 2 ? 2 : 1;
}

__host__ __device__ constexpr int columns_of_cta(int groups) {
  return kWarps * blocks_of_warp(groups) * kBlockColumns;
}

// Which slice a CTA's columns lie in, and where.
struct ColumnRange {
  int slice;
  int first;  // column within the slice
};

__device__ inline ColumnRange find_columns(const Site& site, int index, int columns_of_cta) {
  int slice = 0;
  for (; slice + 1 < site.num_slices; ++slice) {
    const int ctas = (static_cast<int>(site.widths[slice]) + columns_of_cta - 1) / columns_of_cta;
    if (index < ctas) break;
    index -= ctas;
  }
  return {slice, index * columns_of_cta};
}

// Which four of a group's 16 ranks lane t of four holds, so that B comes in 16-byte loads: of one group, half
// a row to a lane, whose second half it swaps with the lane two on; of two groups, a quarter of both.
template <int kGroups>
__device__ inline int first_rank_of_lane(int group, int t) {
  return kGroups == 1 ? 8 * (t % 2) + 4 * (t / 2) : group / 2 * 32 + 8 * t + group % 2 * 4;
}

// Eight elements of a row of B from rank `rank` on, zeros from rank `end` on. is_aligned: rows start on 16
// bytes, as they do where a table's ranks are whole vectors.
template <typename T>
__device__ inline uint4 load_ranks(const T* row, int rank, int end, bool is_aligned) {
  if (rank >= end) return {};
  if (is_aligned && end - rank >= 8) return load_weights16(row + rank);
  alignas(16) T elements[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) elements[i] = rank + i < end ? row[rank + i] : T(0.f);
  return *reinterpret_cast<const uint4*>(elements);
}

// B of one warp, as the tensor core takes it: tile i holds columns 8 g + 2 i (rows[0]) and 8 g + 2 i + 1
// (rows[1]).
template <typename T, int kGroups>
struct BColumns {
  uint2 values[blocks_of_warp(kGroups)][kTiles][2][kGroups];

  __device__ void load(const SliceWeights<T>& weights, int column, int width, int first_rank) {
    const int g = threadIdx.x % kLanes / 4;
    const int t = threadIdx.x % 4;
    const int stride = static_cast<int>(weights.stride);
    const bool is_aligned = stride % 8 == 0;
#pragma unroll
    for (int n = 0; n < blocks_of_warp(kGroups); ++n) {
      const int first = column + n * kBlockColumns + 8 * g;
      const int end = first < width ? weights.rank : 0;
      const T* const b = weights.b + first * weights.stride;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint2(&rows)[2][kGroups] = values[n][i];
        if constexpr (kGroups == 1) {
          const bool upper = t >= 2;
          const uint4 v = load_ranks(b + (2 * i + upper) * stride, first_rank + 8 * (t % 2), end, is_aligned);
          const uint2 taken = {__shfl_xor_sync(~0u, upper ? v.x : v.z, 2),
                               __shfl_xor_sync(~0u, upper ? v.y : v.w, 2)};
          rows[0][0] = upper ? taken : uint2{v.x, v.y};
          rows[1][0] = upper ? uint2{v.z, v.w} : taken;
        } else {
#pragma unroll
          for (int q = 0; q < kGroups; q += 2) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int rank = first_rank + first_rank_of_lane<kGroups>(q, t);
              const uint4 v = load_ranks(b + (2 * i + r) * stride, rank, end, is_aligned);
              rows[r][q] = {v.x, v.y};
              rows[r][q + 1] = {v.z, v.w};
            }
          }
        }
      }
    }
  }
};

// Four values of a row of h from rank `rank` on, rounded to T, zeros from rank `end` on.
template <typename T>
__device__ inline uint2 load_hidden(const float* h, int rank, int end) {
  const int left = end - rank;
  if (left <= 0) return {};
  const float4 f = *reinterpret_cast<const float4*>(h + rank);
  return {pack2<T>(f.x, left > 1 ? f.y : 0.f), pack2<T>(left > 2 ? f.z : 0.f, left > 3 ? f.w : 0.f)};
}

// The two rows of a pass whose y a lane adds to: 2 t and 2 t + 1, at 8 columns of each block.
template <typename T, int kBlocks>
struct YRows {
  T* y[2];  // null: no row
  float scale[2];
  uint4 values[2][kBlocks];

  // row: of lane g of this warp's lanes 4 g + t.
  __device__ void load(const TileRow& row, T* y_slice, int64_t stride, int column, int width) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t index = __shfl_sync(~0u, row.index, 4 * (2 * t + r));
      scale[r] = __shfl_sync(~0u, row.scale, 4 * (2 * t + r));
      y[r] = index < 0 ? nullptr : y_slice + index * stride + column;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const bool present = y[r] != nullptr && column + n * kBlockColumns < width;
        values[r][n] = present ? load16(y[r] + n * kBlockColumns) : uint4{};
      }
    }
  }

  // sums: of block n.
  __device__ void add_and_store(int n, const float (&sums)[kTiles][4], float factor, int column, int width) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t* const pairs = reinterpret_cast<uint32_t*>(&values[r][n]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float2 old = unpack2<T>(pairs[i]);
        pairs[i] = pack2<T>(fmaf(factor * scale[r], sums[i][r], old.x),
                            fmaf(factor * scale[r], sums[i][2 + r], old.y));
      }
      if (y[r] != nullptr && column + n * kBlockColumns < width) {
        store16(y[r] + n * kBlockColumns, values[r][n]);
      }
    }
  }
};

// Grid: (blocks of columns of each slice, tiles). kGroups: groups of 16 ranks that a warp holds of B. The
// next pass's y is asked for before this one's is worked on.
template <typename T, int kGroups, TileKind kKind>
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ ExpandArgs args) {
  constexpr int kBlocks = blocks_of_warp(kGroups);
  constexpr int kRanks = kGroups * kGroupRanks;
  constexpr int kPasses = (kKind == TileKind::decode ? kDecodeRows : kPrefillRows) / kRows;
  let_next_kernel_start();
  const ColumnRange columns = find_columns(args.site, blockIdx.x, columns_of_cta(kGroups));
  TileRows tile;
  if (!find_tile(args.plan, kKind, blockIdx.y, &tile)) return leave_idle();
  const SliceWeights<T> weights = find_slice<T>(args.site, tile.slot, columns.slice);
  if (weights.rank == 0) return leave_idle();

  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  const int width = static_cast<int>(args.site.widths[columns.slice]);
  const int warp_column = columns.first + threadIdx.x / kLanes * kBlocks * kBlockColumns;
  const int column = warp_column + 8 * g;  // this lane's in y
  T* const y_slice = static_cast<T*>(args.y) + args.site.offsets[columns.slice];
  const int64_t h_stride = args.site.num_slices * args.site.max_rank;
  const float* const h_slice = args.h + columns.slice * args.site.max_rank;
  BColumns<T, kGroups> b;
  b.load(weights, warp_column, width, 0);
  TileRow row = find_row(args.plan, tile, g, args.rows);
  wait_for_earlier_kernels();

  YRows<T, kBlocks> y[2];
  y[0].load(row, y_slice, args.y_stride, column, width);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (pass * kRows >= tile.count) break;
    const float* const h = h_slice + row.index * h_stride;
    const int end = row.index < 0 ? 0 : weights.rank;
    if (pass + 1 < kPasses) {
      row = find_row(args.plan, tile, (pass + 1) * kRows + g, args.rows);
      y[(pass + 1) % 2].load(row, y_slice, args.y_stride, column, width);
    }
    float sums[kBlocks][kTiles][4] = {};
    for (int first_rank = 0; first_rank < weights.rank; first_rank += kRanks) {
      if (weights.rank > kRanks && (first_rank > 0 || pass > 0))
        b.load(weights, warp_column, width, first_rank);
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        const uint2 hidden = load_hidden<T>(h, first_rank + first_rank_of_lane<kGroups>(q, t), end);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            const uint2(&rows)[2][kGroups] = b.values[n][i];
            mma<T>(sums[n][i], rows[0][q].x, rows[1][q].x, rows[0][q].y, rows[1][q].y, hidden.x, hidden.y);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) y[pass % 2].add_and_store(n, sums[n], weights.scale, column, width);
  }
}

template <typename T, int kGroups, TileKind kKind>
int launch_kernel(const ExpandArgs& args, void* stream) {
  int64_t ctas = 0;
  for (int i = 0; i < args.site.num_slices; ++i)
    ctas += ceil_div(args.site.widths[i], columns_of_cta(kGroups));
  const dim3 grid(ctas, max_tiles(kKind, args.rows, args.site.num_slots));
  return launch(expand_kernel<T, kGroups, kKind>, grid, kThreads, 1, stream, 0, args);
}

template <typename T, TileKind kKind>
int launch_expand(const ExpandArgs& args, void* stream) {
  if (args.site.max_rank <= 16) return launch_kernel<T, 1, kKind>(args, stream);
  if (args.site.max_rank <= 32) return launch_kernel<T, 2, kKind>(args, stream);
  return launch_kernel<T, 4, kKind>(args, stream);
}

template <typename T>
int expand_tiles(TileKind kind, const ExpandArgs& args, void* stream) {
  return kind == TileKind::decode ? launch_expand<T, TileKind::decode>(args, stream)
                                  : launch_expand<T, TileKind::prefill>(args, stream);
}

}  // namespace

bool expand_serves(const ExpandArgs& args) {
  const Site& site = args.site;
  bool whole_vectors = true;
  for (int i = 0; i < site.num_slices; ++i)
    whole_vectors &= site.widths[i] % 8 == 0 && site.offsets[i] % 8 == 0 && site.widths[i] < 1 << 30;
  return is_half(site.dtype) && whole_vectors && site.max_rank % 8 == 0 &&
         is_aligned(args.y, args.y_stride, site.dtype) && fits_grid(args) && compute_capability() >= 90 &&
         is_compiled_for_sm90(expand_kernel<__half, 1, TileKind::decode>);
}

int expand(TileKind kind, const ExpandArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? expand_tiles<__nv_bfloat16>(kind, args, stream)
                                        : expand_tiles<__half>(kind, args, stream);
}

}  // namespace loramux
