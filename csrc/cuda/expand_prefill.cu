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

constexpr int kAhead = 4;                          // passes of y under way
constexpr int kTilePasses = kPrefillRows / kRows;  // of a full tile

// Warps to a CTA: h of a tile is made anew for each.
__host__ __device__ constexpr int num_warps(int groups) {
  return groups < 4 ? 4 : 8;
}

__host__ __device__ constexpr int ring_vectors(int groups) {
  return kAhead * 2 * num_warps(groups) * kLanes;
}

// Ranks of h in shared memory, all of them, and the elements that keep the rows which lanes read at a time
// apart in their banks.
template <int kGroups, bool kIsLong>
__host__ __device__ int64_t hidden_ranks(int64_t max_rank) {
  constexpr int kRanks = kGroups * kGroupRanks;
  return kIsLong ? ceil_div(max_rank, kRanks) * kRanks : kRanks;
}

__host__ __device__ constexpr int hidden_padding(int groups) {
  return groups < 4 ? 0 : 32;
}

// Grid: (blocks of columns of each slice; decode tiles, then prefill tiles, kOwn to a CTA). A warp holds B of
// one block of columns and kGroups groups of ranks, which tiles of one slot share; ranks past those if
// kIsLong. kCtas: CTAs that an SM must hold at a time.
template <typename T, int kGroups, int kOwn, int kCtas, bool kIsLong>
__global__ void __launch_bounds__(num_warps(kGroups) * kLanes, kCtas)
    expand_prefill_kernel(const __grid_constant__ ExpandArgs args, int decode_tiles) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  constexpr int kThreads = num_warps(kGroups) * kLanes;
  constexpr int kOwnRows = kOwn * kPrefillRows;
  extern __shared__ uint4 ring[];  // y: [pass % kAhead][row of a lane][place]; then h
  __shared__ SliceWeights<T> own_weights[kOwn];
  __shared__ int64_t row_index[kOwnRows];  // -1: no row
  __shared__ float row_factor[kOwnRows];
  T* const h_tiles = reinterpret_cast<T*>(ring + ring_vectors(kGroups));
  let_next_kernel_start();
  const ColumnRange columns = find_columns(args.site, blockIdx.x, num_warps(kGroups) * kBlockColumns);
  TileRows tiles[kOwn];
  SliceWeights<T> weights{};  // of the first tile that has any
  int passes = 0;             // up to the last row
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int index = static_cast<int>(blockIdx.y) * kOwn + own;
    const bool is_decode = index < decode_tiles;
    TileRows& tile = tiles[own];
    SliceWeights<T> found{};
    if (find_tile(args.plan, is_decode ? TileKind::decode : TileKind::prefill,
                  is_decode ? index : index - decode_tiles, args.rows, &tile))
      found = find_slice<T>(args.site, tile.slot, columns.slice);
    if (found.rank == 0 || found.stride % 8 != 0) {
      found = {};
      tile = {};
    } else {
      if (passes == 0) weights = found;
      passes = own * kTilePasses + (tile.count + kRows - 1) / kRows;
    }
    if (threadIdx.x == 0) own_weights[own] = found;
  }
  if (passes == 0) return leave_idle();

  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  const Slice& slice = args.site.slices[columns.slice];
  const int width = static_cast<int>(slice.width);
  const int warp_column = columns.first + threadIdx.x / kLanes * kBlockColumns;
  BColumns<T, kGroups, 1> b;
  b.load(weights, warp_column, width, 0);
  if (threadIdx.x < kOwnRows) {
    const TileRows tile = threadIdx.x < kPrefillRows ? tiles[0] : tiles[kOwn - 1];
    const TileRow row = find_row(args.plan, tile, threadIdx.x % kPrefillRows, args.rows);
    row_index[threadIdx.x] = row.index;
    row_factor[threadIdx.x] = row.scale;
  }
  __syncthreads();
  wait_for_earlier_kernels();

  // A lane's place in the ring. The 128 bytes of one row are neighbours, turned so that the lanes which read
  // at a time meet in no bank.
  const int place = threadIdx.x / kLanes * kLanes + 8 * t + (g ^ 2 * t);
  const auto slot = [&](int pass, int r) { return &ring[(pass % kAhead * 2 + r) * kThreads + place]; };
  const int column = warp_column + 8 * g;
  T* const y = static_cast<T*>(args.y) + slice.offset + column;
  // The row of y that a lane adds to in a pass, -1 for none.
  const auto find_y = [&](int pass, int r) {
    return pass < passes && column < width ? row_index[pass * kRows + 2 * t + r] : -1;
  };
  const auto ask_for_y = [&](int pass) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = find_y(pass, r);
      if (row >= 0) copy16_async(shared_address(slot(pass, r)), y + row * args.y_stride, true);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int pass = 0; pass < kAhead; ++pass) ask_for_y(pass);
  const int ranks = static_cast<int>(hidden_ranks<kGroups, kIsLong>(args.site.max_rank));
  const int pitch = ranks + hidden_padding(kGroups);
#pragma unroll 1
  for (int own = 0; own < kOwn; ++own) {
    constexpr int kVectors = kPrefillRows * kRanks / 4 / kThreads;
    const int rank_end = own_weights[own].rank;
#pragma unroll 1
    for (int first_rank = 0; first_rank < ranks; first_rank += kRanks) {
      const int rank = first_rank + threadIdx.x % (kRanks / 4) * 4;
      float4 hidden[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int64_t row = row_index[own * kPrefillRows + (threadIdx.x + i * kThreads) / (kRanks / 4)];
        const float* const h = args.h + (row * args.site.num_slices + columns.slice) * args.site.max_rank;
        hidden[i] = row >= 0 && rank < rank_end ? *reinterpret_cast<const float4*>(h + rank) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int row = own * kPrefillRows + (threadIdx.x + i * kThreads) / (kRanks / 4);
        *reinterpret_cast<uint2*>(h_tiles + row * pitch + rank) = pack_hidden<T>(hidden[i], rank_end - rank);
      }
    }
  }
  b.arrange();
  __syncthreads();

  const int first_passes = (tiles[0].count + kRows - 1) / kRows;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    if (kOwn > 1 && pass >= first_passes && pass < kTilePasses) {  // a tile of few rows
      ask_for_y(pass + kAhead);
      continue;
    }
    if (kOwn > 1 && pass == kTilePasses && tiles[1].slot != tiles[0].slot) {
      weights = own_weights[1];
      b.load(weights, warp_column, width, 0);
      b.arrange();
    }
    float sums[kTiles][4] = {};
    const T* const h = h_tiles + (pass * kRows + g) * pitch;
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
      for (int q = 0; q < kGroups; ++q) b.multiply(0, q, hidden[q], sums);
      if (!kIsLong) break;
    }
    wait_for_copies<kAhead - 1>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = find_y(pass, r);
      const float factor = weights.scale * row_factor[pass * kRows + 2 * t + r];
      const uint4 sum = add_delta<T>(*slot(pass, r), sums, r, factor);
      if (row >= 0) store16(y + row * args.y_stride, sum);
    }
    ask_for_y(pass + kAhead);
  }
#endif
}

// For the ring and h: the rest is more than the kernel has besides.
int most_shared_bytes() {
  return current_device().shared_bytes - 2048;
}

template <int kGroups, int kOwn, bool kIsLong>
int64_t shared_bytes(int64_t max_rank) {
  const int64_t pitch = hidden_ranks<kGroups, kIsLong>(max_rank) + hidden_padding(kGroups);
  return ring_vectors(kGroups) * 16 + kOwn * kPrefillRows * pitch * 2;
}

template <typename T, int kGroups, int kOwn, int kCtas, bool kIsLong>
int launch_expand(const ExpandArgs& args, int64_t decode_tiles, int64_t tiles, void* stream) {
  const auto kernel = expand_prefill_kernel<T, kGroups, kOwn, kCtas, kIsLong>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes());
  if (error != cudaSuccess) return error;
  const int64_t shared = shared_bytes<kGroups, kOwn, kIsLong>(args.site.max_rank);
  const dim3 grid(count_column_ctas(args.site, num_warps(kGroups) * kBlockColumns), ceil_div(tiles, kOwn));
  return launch(kernel, grid, num_warps(kGroups) * kLanes, 1, stream, shared, args,
                static_cast<int>(decode_tiles));
}

// Two tiles to a CTA where there are many.
template <typename T, int kGroups, int kCtas>
int launch_expand(const ExpandArgs& args, int64_t decode_tiles, int64_t tiles, void* stream) {
  const int64_t columns = count_column_ctas(args.site, num_warps(kGroups) * kBlockColumns);
  const bool are_many = columns * tiles > 4 * kCtas * current_device().multiprocessors;
  return are_many ? launch_expand<T, kGroups, 2, kCtas, false>(args, decode_tiles, tiles, stream)
                  : launch_expand<T, kGroups, 1, kCtas, false>(args, decode_tiles, tiles, stream);
}

template <typename T>
int expand(const ExpandArgs& args, bool with_decode, void* stream) {
  const Site& site = args.site;
  const int64_t decode_tiles = with_decode ? max_decode_tiles(args.rows, site.num_slots) : 0;
  const int64_t tiles = decode_tiles + max_prefill_tiles(args.rows, site.num_slots);
  if (site.max_rank <= 16) return launch_expand<T, 1, 6>(args, decode_tiles, tiles, stream);
  if (site.max_rank <= 32) return launch_expand<T, 2, 5>(args, decode_tiles, tiles, stream);
  if (site.max_rank <= 64) return launch_expand<T, 4, 2>(args, decode_tiles, tiles, stream);
  return launch_expand<T, 4, 1, 2, true>(args, decode_tiles, tiles, stream);
}

}  // namespace

bool expand_prefill_has_room(const Site& site) {
  return shared_bytes<4, 1, true>(site.max_rank) <= most_shared_bytes();
}

int expand_prefill(const ExpandArgs& args, bool with_decode, void* stream) {
  return args.site.dtype == DType::bf16 ? expand<__nv_bfloat16>(args, with_decode, stream)
                                        : expand<__half>(args, with_decode, stream);
}

}  // namespace loramux
