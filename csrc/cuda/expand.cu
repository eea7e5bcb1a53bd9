// The expand on sm_90 and later. A warp holds B of some columns of y in registers, which it asks for before
// it waits for the kernel that makes h, and goes through the rows of its tile 8 at a time. Ranks are added in
// groups of 16, so a row gets the same bits in either kind of tile.
//
// Floor: 2 bytes x rank x width of each adapter's slice, and y read and written, over 4.2 TB/s; gate_up at
// rank 16 takes 7.9 us for 32 rows of 32 adapters and 224 us for 8192 rows. B goes to registers in 16-byte
// loads, h comes from L2, y in whole 128-byte lines.
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

// Zeros in place of the elements from rank `end` on, in eight of them from rank `rank` on.
__device__ inline uint4 mask_ranks(uint4 v, int rank, int end) {
  uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = end - rank - 2 * i;
    pairs[i] = left >= 2 ? pairs[i] : left == 1 ? pairs[i] & 0xffff : 0;
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// B of one warp, as the tensor core takes it: tile i holds columns 8 g + 2 i (rows[0]) and 8 g + 2 i + 1
// (rows[1]).
template <typename T, int kGroups, int kBlocks>
struct BColumns {
  uint2 values[kBlocks][kTiles][2][kGroups];

  __device__ void load(const SliceWeights<T>& weights, int column, int width, int first_rank) {
    const int g = threadIdx.x % kLanes / 4;
    const int t = threadIdx.x % 4;
    const int stride = static_cast<int>(weights.stride);
    uint4 loaded[kBlocks][kTiles][kVectors];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int first = column + n * kBlockColumns + 8 * g;
      const int end = first < width ? weights.rank : 0;
      const T* const b = weights.b + first * weights.stride;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int rank = first_rank + rank_of_vector(v, t);
          const T* const row = b + (2 * i + row_of_vector(v, t)) * stride;
          loaded[n][i][v] = rank < end ? load_weights16(row + rank) : uint4{};
        }
      }
    }
    if (weights.rank % 8 != 0) {  // only over stacked tensors: there may be anything past the slot's own rank
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            loaded[n][i][v] = mask_ranks(loaded[n][i][v], first_rank + rank_of_vector(v, t), weights.rank);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) distribute(loaded[n][i], values[n][i], t);
    }
  }

 private:
  // A lane's loads of a tile: half a row, of the even row or the odd one; or a quarter of each row's 32
  // ranks.
  static constexpr int kVectors = kGroups == 1 ? 1 : kGroups;

  static __device__ int row_of_vector(int v, int t) { return kGroups == 1 ? t / 2 : v % 2; }

  static __device__ int rank_of_vector(int v, int t) {
    return kGroups == 1 ? 8 * (t % 2) : v / 2 * 32 + 8 * t;
  }

  static __device__ void distribute(const uint4 (&loaded)[kVectors], uint2 (&rows)[2][kGroups], int t) {
    if constexpr (kGroups == 1) {
      const uint4 v = loaded[0];
      const bool is_odd_row = t >= 2;
      const uint2 taken = {__shfl_xor_sync(~0u, is_odd_row ? v.x : v.z, 2),
                           __shfl_xor_sync(~0u, is_odd_row ? v.y : v.w, 2)};
      rows[0][0] = is_odd_row ? taken : uint2{v.x, v.y};
      rows[1][0] = is_odd_row ? uint2{v.z, v.w} : taken;
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        rows[v % 2][v / 2 * 2] = {loaded[v].x, loaded[v].y};
        rows[v % 2][v / 2 * 2 + 1] = {loaded[v].z, loaded[v].w};
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

// Grid: (blocks of columns of each slice; decode tiles, then prefill tiles). A warp holds B of kBlocks blocks
// of columns and kGroups groups of ranks. kCtas: CTAs that an SM must hold at a time.
template <typename T, int kGroups, int kBlocks, int kCtas>
__global__ void __launch_bounds__(kThreads, kCtas)
    expand_kernel(const __grid_constant__ ExpandArgs args, int decode_tiles) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  let_next_kernel_start();
  const ColumnRange columns = find_columns(args.site, blockIdx.x, kWarps * kBlocks * kBlockColumns);
  const int index = static_cast<int>(blockIdx.y);
  const bool is_decode = index < decode_tiles;
  TileRows tile;
  if (!find_tile(args.plan, is_decode ? TileKind::decode : TileKind::prefill,
                 is_decode ? index : index - decode_tiles, &tile))
    return leave_idle();
  const SliceWeights<T> weights = find_slice<T>(args.site, tile.slot, columns.slice);
  if (weights.rank == 0 || weights.stride % 8 != 0) return leave_idle();

  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  const int width = static_cast<int>(args.site.widths[columns.slice]);
  const int warp_column = columns.first + threadIdx.x / kLanes * kBlocks * kBlockColumns;
  const int column = warp_column + 8 * g;  // this lane's in y
  T* const y_slice = static_cast<T*>(args.y) + args.site.offsets[columns.slice];
  const int64_t h_stride = args.site.num_slices * args.site.max_rank;
  const float* const h_slice = args.h + columns.slice * args.site.max_rank;
  BColumns<T, kGroups, kBlocks> b;
  b.load(weights, warp_column, width, 0);
  TileRow row = find_row(args.plan, tile, g, args.rows);
  wait_for_earlier_kernels();

  // Works on the rows at `first` and asks for the y of those after them.
  const auto run_pass = [&](int first, YRows<T, kBlocks>& now, YRows<T, kBlocks>& next) {
    const float* const h = h_slice + row.index * h_stride;
    const int end = row.index < 0 ? 0 : weights.rank;
    if (first + kRows < tile.count) {
      row = find_row(args.plan, tile, first + kRows + g, args.rows);
      next.load(row, y_slice, args.y_stride, column, width);
    }
    float sums[kBlocks][kTiles][4] = {};
    for (int first_rank = 0; first_rank < weights.rank; first_rank += kRanks) {
      if (weights.rank > kRanks && (first_rank > 0 || first > 0))
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
    for (int n = 0; n < kBlocks; ++n) now.add_and_store(n, sums[n], weights.scale, column, width);
  };
  YRows<T, kBlocks> even, odd;
  even.load(row, y_slice, args.y_stride, column, width);
  for (int first = 0; first < tile.count; first += 2 * kRows) {
    run_pass(first, even, odd);
    if (first + kRows < tile.count) run_pass(first + kRows, odd, even);
  }
#endif
}

template <typename T, int kGroups, int kBlocks, int kCtas>
int launch_expand(const ExpandArgs& args, void* stream) {
  int64_t ctas = 0;
  for (int i = 0; i < args.site.num_slices; ++i)
    ctas += ceil_div(args.site.widths[i], kWarps * kBlocks * kBlockColumns);
  const int64_t decode_tiles = max_decode_tiles(args.rows, args.site.num_slots);
  const dim3 grid(ctas, decode_tiles + max_prefill_tiles(args.rows, args.site.num_slots));
  return launch(expand_kernel<T, kGroups, kBlocks, kCtas>, grid, kThreads, 1, stream, 0, args,
                static_cast<int>(decode_tiles));
}

// Measured on an H200 (bench/results/kernels-h200.json): two blocks to a warp are best at rank 16, but for
// the middle, where one block makes enough CTAs for the chip. Beyond rank 16 B leaves registers for one.
template <typename T>
int launch_expand(const ExpandArgs& args, void* stream) {
  constexpr int64_t kFewRows = 64, kManyRows = 4096;
  const bool is_middle = args.rows > kFewRows && args.rows < kManyRows;
  if (args.site.max_rank <= 16)
    return is_middle ? launch_expand<T, 1, 1, 4>(args, stream) : launch_expand<T, 1, 2, 3>(args, stream);
  if (args.site.max_rank <= 32) return launch_expand<T, 2, 1, 4>(args, stream);
  return launch_expand<T, 4, 1, 3>(args, stream);
}

}  // namespace

bool expand_serves(const ExpandArgs& args) {
  const Site& site = args.site;
  if (!is_half(site.dtype) || compute_capability() < 90) return false;
  static const bool is_compiled = is_compiled_for_sm90(expand_kernel<__half, 1, 2, 3>);
  bool whole_vectors = site.max_rank % 8 == 0 && is_aligned(args.y, args.y_stride, site.dtype);
  for (int i = 0; i < site.num_slices; ++i)
    whole_vectors &= site.widths[i] % 8 == 0 && site.offsets[i] % 8 == 0 && site.widths[i] < 1 << 30;
  return is_compiled && whole_vectors && fits_grid(args);
}

int expand(const ExpandArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? launch_expand<__nv_bfloat16>(args, stream)
                                        : launch_expand<__half>(args, stream);
}

}  // namespace loramux
