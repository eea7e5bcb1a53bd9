// The shrink of prefill tiles (up to 64 rows of one slot) on Hopper: a warpgroup multiplies 64 rows of x by
// the ranks of all slices at once, so that x is read once, from a ring of cp.async stages. K is split over
// the CTAs of a cluster, whose partial sums meet in distributed shared memory.
//
// Floor: x once over 4.2 TB/s, 16 us for 8192 rows of 4096; A comes from L2 once a tile.
//
// The order of every sum is fixed by in_features alone: within a CTA's part of K the tensor core adds up with
// K rising; then the parts are added in order.
#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

constexpr int kThreads = 128;  // one warpgroup
constexpr int kTileK = 64;     // elements of K in a stage: 128 bytes a row
constexpr int kCluster = 4;    // CTAs that share K
constexpr int kVectors = kTileK / 8;
constexpr int kRowStep = kThreads / kVectors;  // rows that the threads load at once
constexpr int kRingBytes = 100 * 1024;         // two CTAs to an SM
constexpr int kTileBytes = kPrefillRows * kTileK * 2;

__host__ __device__ constexpr int stage_bytes(int groups) {
  return kTileBytes + groups * kGroupRanks * kTileK * 2;
}

__host__ __device__ constexpr int num_stages(int groups) {
  return kRingBytes / stage_bytes(groups) < 8 ? kRingBytes / stage_bytes(groups) : 8;
}

// One group of 16 ranks of one slice.
template <typename T>
struct RankGroup {
  const T* a;  // its first row of A
  int ranks;   // rows of A from there on, at most 16; 0: none
  int slice;
  int first_rank;
};

// Grid: (kCluster CTAs that share K; prefill tiles; blocks of kGroups groups of ranks over all slices).
template <typename T, int kGroups>
__global__ void __launch_bounds__(kThreads) shrink_prefill_kernel(const __grid_constant__ ShrinkArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kStages = num_stages(kGroups);
  constexpr int kStageBytes = stage_bytes(kGroups);
  constexpr int kColumns = kGroups * kGroupRanks;
  constexpr int kBlockColumns = kGroups % 4 == 0 ? 64 : 16;  // of one multiplication
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RankGroup<T> groups[kGroups];
  __shared__ int64_t row_index[kPrefillRows];
  const Site& site = args.site;

  bool any_rank = false;
  let_next_kernel_start();
  TileRows tile_rows;
  if (!find_tile(args.plan, TileKind::prefill, blockIdx.y, &tile_rows)) return leave_idle();
  if (threadIdx.x < kGroups) {
    const int64_t groups_of_slice = ceil_div(site.max_rank, kGroupRanks);
    const int64_t index = int64_t{blockIdx.z} * kGroups + threadIdx.x;
    const int slice = static_cast<int>(index / groups_of_slice);
    const int first_rank = static_cast<int>(index % groups_of_slice) * kGroupRanks;
    RankGroup<T> group{nullptr, 0, slice, first_rank};
    if (slice < site.num_slices) {
      const SliceWeights<T> weights = find_slice<T>(site, tile_rows.slot, slice);
      group.ranks = max(min(weights.rank - first_rank, kGroupRanks), 0);
      group.a = weights.a + first_rank * site.in_features;
    }
    groups[threadIdx.x] = group;
    any_rank = group.ranks > 0;
  }
  if (!__syncthreads_or(any_rank)) return leave_idle();
  if (threadIdx.x < kPrefillRows) {
    row_index[threadIdx.x] = find_row(args.plan, tile_rows, threadIdx.x, args.rows).index;
  }
  __syncthreads();

  const uint32_t ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int64_t all_tiles = ceil_div(site.in_features, kTileK);
  const int64_t tiles_of_cta = ceil_div(all_tiles, kCluster);
  const int64_t first_tile = blockIdx.x * tiles_of_cta;
  const int tiles = static_cast<int>(max(min(tiles_of_cta, all_tiles - first_tile), int64_t{0}));
  const int lane_row = threadIdx.x / kVectors;
  const int vector = threadIdx.x % kVectors;
  const T* x_rows[kPrefillRows / kRowStep];
#pragma unroll
  for (int j = 0; j < kPrefillRows / kRowStep; ++j) {
    const int64_t row = row_index[lane_row + j * kRowStep];
    x_rows[j] = row < 0 ? nullptr : static_cast<const T*>(args.x) + row * args.x_stride;
  }
  const auto load_x = [&](int tile) {
    const uint32_t stage = ring + tile % kStages * kStageBytes;
    const int64_t k = (first_tile + tile) * kTileK + vector * 8;
#pragma unroll
    for (int j = 0; j < kPrefillRows / kRowStep; ++j) {
      const bool present = x_rows[j] != nullptr && k < site.in_features;
      copy16_async(stage + swizzled(lane_row + j * kRowStep, vector), present ? x_rows[j] + k : args.x,
                   present);
    }
  };
  const auto load_a = [&](int tile) {
    const uint32_t stage = ring + tile % kStages * kStageBytes + kTileBytes;
    const int64_t k = (first_tile + tile) * kTileK + vector * 8;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const RankGroup<T> group = groups[q];
      const bool present = lane_row < group.ranks && k < site.in_features;
      const T* const from = group.a + lane_row * site.in_features + k;
      copy16_async(stage + swizzled(q * kGroupRanks + lane_row, vector), present ? from : args.x, present);
    }
  };
  static_assert(kRowStep == kGroupRanks);

  for (int tile = 0; tile < kStages - 1 && tile < tiles; ++tile) load_a(tile);
  wait_for_earlier_kernels();
  for (int tile = 0; tile < kStages - 1; ++tile) {
    if (tile < tiles) load_x(tile);
    commit_copies();
  }
  float sums[kColumns / 2] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_copies<kStages - 2>();
    wgmma_wait();  // the stage that is filled next has been used
    fence_shared_for_wgmma();
    __syncthreads();
    if (tile + kStages - 1 < tiles) {
      load_x(tile + kStages - 1);
      load_a(tile + kStages - 1);
    }
    commit_copies();
    const uint32_t stage = ring + tile % kStages * kStageBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kColumns / kBlockColumns; ++n) {
        Wgmma<T, kBlockColumns>::multiply(
            sums + n * kBlockColumns / 2, tile_descriptor(stage) + 2 * k,
            tile_descriptor(stage + kTileBytes + n * kBlockColumns * 128) + 2 * k);
      }
    }
    wgmma_commit();
  }
  wgmma_wait();
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  wait_for_copies<0>();
  __syncthreads();

  // The partial sums take the ring's place; every CTA adds up its share of the rows over the cluster.
  constexpr int kPitch = kColumns + 4;
  const uint32_t partial = ring;
  const int warp = threadIdx.x / kLanes;
  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (warp * 16 + g + 8 * half) * kPitch + 8 * j + 2 * t;
      store_shared(partial + at * sizeof(float), sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
    }
  }
  cluster_arrive();
  cluster_wait();
  constexpr int kShare = kPrefillRows / kCluster;
  for (int i = threadIdx.x; i < kShare * kColumns / 4; i += kThreads) {
    const int row = blockIdx.x * kShare + i / (kColumns / 4);
    const int column = i % (kColumns / 4) * 4;
    float4 sum{};
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      sum = add(sum, load_from_peer(partial + (row * kPitch + column) * sizeof(float), rank));
    }
    const RankGroup<T> group = groups[column / kGroupRanks];
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (row_index[row] < 0) continue;
    float* const h =
        args.h + (row_index[row] * site.num_slices + group.slice) * site.max_rank + group.first_rank;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column % kGroupRanks + e < group.ranks) h[column % kGroupRanks + e] = values[e];
    }
  }
  cluster_arrive();  // no CTA leaves while another reads from it
  cluster_wait();
#endif
}

template <typename T, int kGroups>
int launch_shrink(const ShrinkArgs& args, int64_t groups, void* stream) {
  constexpr int kShared = num_stages(kGroups) * stage_bytes(kGroups) + 1024;
  static_assert(num_stages(kGroups) >= 3 &&
                num_stages(kGroups) * stage_bytes(kGroups) >= kPrefillRows * (kGroups * kGroupRanks + 4) * 4);
  const auto kernel = shrink_prefill_kernel<T, kGroups>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const dim3 grid(kCluster, max_prefill_tiles(args.rows, args.site.num_slots), ceil_div(groups, kGroups));
  return launch(kernel, grid, kThreads, kCluster, stream, kShared, args);
}

// The ranks of all slices in one CTA where they fit, so that x is read once.
template <typename T>
int shrink(const ShrinkArgs& args, void* stream) {
  const int64_t groups = args.site.num_slices * ceil_div(args.site.max_rank, kGroupRanks);
  if (groups == 1) return launch_shrink<T, 1>(args, groups, stream);
  if (groups == 2) return launch_shrink<T, 2>(args, groups, stream);
  if (groups == 3) return launch_shrink<T, 3>(args, groups, stream);
  if (groups == 4) return launch_shrink<T, 4>(args, groups, stream);
  if (groups <= 8) return launch_shrink<T, 8>(args, groups, stream);
  return launch_shrink<T, 12>(args, groups, stream);
}

}  // namespace

bool shrink_prefill_serves(const ShrinkArgs& args) {
#ifdef LORAMUX_SM90A
  const Site& site = args.site;
  return is_half(site.dtype) && site.in_features % 8 == 0 && is_aligned(args.x, args.x_stride, site.dtype) &&
         fits_grid(args) && compute_capability() == 90;
#else
  (void)args;
  return false;  // no code for sm_90a was compiled
#endif
}

int shrink_prefill(const ShrinkArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? shrink<__nv_bfloat16>(args, stream) : shrink<__half>(args, stream);
}

}  // namespace loramux
