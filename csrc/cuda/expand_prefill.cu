// The expand of plans with prefill tiles (up to 64 rows of one slot), their decode tiles too, on sm_90 and
// later. A warp keeps B of its columns in registers and goes through the rows of a tile 8 at a time, whose y
// it asked for kAhead passes before.
//
// Floor: y read and written over 4.2 TB/s; gate_up takes 224 us for 8192 rows. A lane copies the y that it
// will add to into a ring of its own in shared memory, so that the ring needs no barrier; h of the tile is
// rounded once and shared by the warps; y is stored in whole 128-byte lines.
#include "cuda/columns.cuh"
#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

constexpr int kAhead = 4;  // passes of y under way

// Warps to a CTA: h of a tile is made anew for each.
__host__ __device__ constexpr int num_warps(int groups) {
  return groups < 4 ? 4 : 8;
}

__host__ __device__ constexpr int ring_vectors(int groups, int blocks) {
  return kAhead * 2 * blocks * num_warps(groups) * kLanes;
}

// Ranks of h in shared memory, all of them, and the elements that keep the rows which lanes read at a time
// apart in their banks.
template <int kGroups, bool kIsLong>
__host__ __device__ int hidden_ranks(int64_t max_rank) {
  constexpr int kRanks = kGroups * kGroupRanks;
  return kIsLong ? static_cast<int>(ceil_div(max_rank, kRanks)) * kRanks : kRanks;
}

__host__ __device__ constexpr int hidden_padding(int groups) {
  return groups < 4 ? 0 : 32;
}

// Grid: (blocks of columns of each slice; decode tiles, then prefill tiles). A warp holds B of kBlocks blocks
// of columns and kGroups groups of ranks; ranks past those if kIsLong. kCtas: CTAs that an SM must hold at a
// time.
template <typename T, int kGroups, int kBlocks, int kCtas, bool kIsLong>
__global__ void __launch_bounds__(num_warps(kGroups) * kLanes, kCtas)
    expand_prefill_kernel(const __grid_constant__ ExpandArgs args, int decode_tiles) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  constexpr int kWarps = num_warps(kGroups);
  constexpr int kThreads = kWarps * kLanes;
  extern __shared__ uint4 ring[];  // y: [pass % kAhead][row of a lane][block][place]; then h
  __shared__ int64_t row_index[kPrefillRows];
  __shared__ float row_factor[kPrefillRows];
  T* const h_tile = reinterpret_cast<T*>(ring + ring_vectors(kGroups, kBlocks));
  let_next_kernel_start();
  const int index = static_cast<int>(blockIdx.y);
  const bool is_decode = index < decode_tiles;
  TileRows tile;
  if (!find_tile(args.plan, is_decode ? TileKind::decode : TileKind::prefill,
                 is_decode ? index : index - decode_tiles, &tile))
    return leave_idle();
  const ColumnRange columns = find_columns(args.site, blockIdx.x, kWarps * kBlocks * kBlockColumns);
  const SliceWeights<T> weights = find_slice<T>(args.site, tile.slot, columns.slice);
  if (weights.rank == 0 || weights.stride % 8 != 0) return leave_idle();

  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  const Slice& slice = args.site.slices[columns.slice];
  const int width = static_cast<int>(slice.width);
  const int warp_column = columns.first + threadIdx.x / kLanes * kBlocks * kBlockColumns;
  BColumns<T, kGroups, kBlocks> b;
  b.load(weights, warp_column, width, 0);
  if (threadIdx.x < kPrefillRows) {
    const TileRow row = find_row(args.plan, tile, threadIdx.x, args.rows);
    row_index[threadIdx.x] = row.index;
    row_factor[threadIdx.x] = weights.scale * row.scale;
  }
  __syncthreads();
  wait_for_earlier_kernels();

  // A lane's place in the ring. The 128 bytes of one row are neighbours, turned so that the lanes which read
  // at a time meet in no bank.
  const int place = threadIdx.x / kLanes * kLanes + 8 * t + (g ^ 2 * t);
  const auto slot = [&](int pass, int r, int n) {
    return &ring[((pass % kAhead * 2 + r) * kBlocks + n) * kThreads + place];
  };
  const int column = warp_column + 8 * g;
  T* const y = static_cast<T*>(args.y) + slice.offset + column;
  const auto ask_for_y = [&](int pass) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = pass * kRows + 2 * t + r;
      const int64_t at = row < tile.count ? row_index[row] : -1;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        if (at >= 0 && column + n * kBlockColumns < width) {
          copy16_async(shared_address(slot(pass, r, n)), y + at * args.y_stride + n * kBlockColumns, true);
        }
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int pass = 0; pass < kAhead; ++pass) ask_for_y(pass);
  const int ranks = hidden_ranks<kGroups, kIsLong>(args.site.max_rank);
  const int pitch = ranks + hidden_padding(kGroups);
  constexpr int kVectors = kPrefillRows * kRanks / 4 / kThreads;
  for (int first_rank = 0; first_rank < ranks; first_rank += kRanks) {
    float4 hidden[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = (threadIdx.x + i * kThreads) / (kRanks / 4);
      const int rank = first_rank + threadIdx.x % (kRanks / 4) * 4;
      const bool present = row < tile.count && row_index[row] >= 0 && rank < weights.rank;
      const float* const h =
          args.h + (row_index[row] * args.site.num_slices + columns.slice) * args.site.max_rank;
      hidden[i] = present ? *reinterpret_cast<const float4*>(h + rank) : float4{};
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = (threadIdx.x + i * kThreads) / (kRanks / 4);
      const int rank = first_rank + threadIdx.x % (kRanks / 4) * 4;
      *reinterpret_cast<uint2*>(h_tile + row * pitch + rank) = pack_hidden<T>(hidden[i], weights.rank - rank);
    }
    if (!kIsLong) break;
  }
  b.arrange();
  __syncthreads();

#pragma unroll 1
  for (int pass = 0; pass * kRows < tile.count; ++pass) {
    float sums[kBlocks][kTiles][4] = {};
    const T* const h = h_tile + (pass * kRows + g) * pitch;
#pragma unroll 1
    for (int first_rank = 0; first_rank < weights.rank; first_rank += kRanks) {
      if (kIsLong && weights.rank > kRanks && (first_rank > 0 || pass > 0))
        b.load(weights, warp_column, width, first_rank);
      uint2 hidden[kGroups];
#pragma unroll
      for (int q = 0; q < kGroups; q += 2) {
        const T* const from = h + first_rank + first_rank_of_lane<kGroups>(q, t);
        if constexpr (kGroups == 1) {
          hidden[0] = *reinterpret_cast<const uint2*>(from);
        } else {
          const uint4 two = *reinterpret_cast<const uint4*>(from);
          hidden[q] = {two.x, two.y};
          hidden[q + 1] = {two.z, two.w};
        }
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) b.multiply(n, q, hidden[q], sums[n]);
      }
      if (!kIsLong) break;
    }
    wait_for_copies<kAhead - 1>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = pass * kRows + 2 * t + r;
      const int64_t at = row < tile.count ? row_index[row] : -1;
      const float factor = row_factor[row];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const uint4 sum = add_delta<T>(*slot(pass, r, n), sums[n], r, factor);
        if (at >= 0 && column + n * kBlockColumns < width)
          store16(y + at * args.y_stride + n * kBlockColumns, sum);
      }
    }
    ask_for_y(pass + kAhead);
  }
#endif
}

template <typename T, int kGroups, int kBlocks, int kCtas, bool kIsLong>
int launch_expand(const ExpandArgs& args, bool with_decode, void* stream) {
  const auto kernel = expand_prefill_kernel<T, kGroups, kBlocks, kCtas, kIsLong>;
  const int pitch = hidden_ranks<kGroups, kIsLong>(args.site.max_rank) + hidden_padding(kGroups);
  const int shared = ring_vectors(kGroups, kBlocks) * 16 + kPrefillRows * pitch * static_cast<int>(sizeof(T));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t decode_tiles = with_decode ? max_decode_tiles(args.rows, args.site.num_slots) : 0;
  constexpr int kWarps = num_warps(kGroups);
  const dim3 grid(count_column_ctas(args.site, kWarps * kBlocks * kBlockColumns),
                  decode_tiles + max_prefill_tiles(args.rows, args.site.num_slots));
  return launch(kernel, grid, kWarps * kLanes, 1, stream, shared, args, static_cast<int>(decode_tiles));
}

template <typename T>
int expand(const ExpandArgs& args, bool with_decode, void* stream) {
  if (args.site.max_rank <= 16) {
    return launch_expand<T, 1, 1, 6, false>(args, with_decode, stream);
  }
  if (args.site.max_rank <= 32) return launch_expand<T, 2, 1, 5, false>(args, with_decode, stream);
  if (args.site.max_rank <= 64) return launch_expand<T, 4, 1, 2, false>(args, with_decode, stream);
  return launch_expand<T, 4, 1, 2, true>(args, with_decode, stream);
}

}  // namespace

int expand_prefill(const ExpandArgs& args, bool with_decode, void* stream) {
  return args.site.dtype == DType::bf16 ? expand<__nv_bfloat16>(args, with_decode, stream)
                                        : expand<__half>(args, with_decode, stream);
}

}  // namespace loramux
