// The shrink of prefill tiles (up to 64 rows of one slot) on Hopper: a warpgroup multiplies 64 rows of x by
// the ranks of all slices at once, so that x is read once, from a ring of cp.async stages. K is split over
// the CTAs of a cluster, whose partial sums meet in distributed shared memory.
//
// Floor: x once over 4.2 TB/s, 16 us for 8192 rows of 4096; A comes from L2 once a tile.
//
// The order of every sum is fixed by in_features alone: K has four parts, within which the tensor core adds
// up with K rising; then come the sums (0 + 1) + (2 + 3), whether a CTA makes one part or two.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

constexpr int kThreads = 128;  // one warpgroup, one tile
constexpr int kTileK = 64;     // elements of K in a tile: 128 bytes a row
constexpr int kParts = 4;      // of K
constexpr int kVectors = kTileK / 8;
constexpr int kRowStep = kThreads / kVectors;  // rows that the threads load at once, 2 KB of a tile
static_assert(kRowStep == kGroupRanks && kRowStep % 8 == 0);
constexpr int kRingBytes = 100 * 1024;  // for each tile: two of them to an SM
constexpr int kTileBytes = kPrefillRows * kTileK * 2;

__host__ __device__ constexpr int a_bytes(int groups) {
  return groups * kGroupRanks * kTileK * 2;
}

// Tiles of K in a stage: two where they are small, so that there are half as many stages to wait for.
__host__ __device__ constexpr int tiles_of_stage(int groups) {
  return groups <= 4 ? 2 : 1;
}

// A stage holds x of `own` tiles and A of each of their slots.
__host__ __device__ constexpr int stage_bytes(int groups, int own, int slots) {
  return tiles_of_stage(groups) * (own * kTileBytes + slots * a_bytes(groups));
}

__host__ __device__ constexpr int num_stages(int groups, int own, int slots) {
  const int stages = own * kRingBytes / stage_bytes(groups, own, slots);
  return stages < 5 ? stages : 5;
}

__host__ __device__ constexpr int ring_bytes(int groups, int own, int slots) {
  return num_stages(groups, own, slots) * stage_bytes(groups, own, slots);
}

// One group of 16 ranks of one slice.
template <typename T>
struct RankGroup {
  const T* a;  // its first row of A
  int ranks;   // rows of A from there on, at most 16; 0: none
  int slice;
  int first_rank;
};

// Grid: (CTAs that share K, kOwn parts each; kOwn prefill tiles each; blocks of kGroups groups of ranks over
// all slices). Two tiles of one slot share A.
template <typename T, int kGroups, int kOwn>
__global__ void __launch_bounds__(kOwn* kThreads)
    shrink_prefill_kernel(const __grid_constant__ ShrinkArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTilesOfStage = tiles_of_stage(kGroups);
  constexpr int kColumns = kGroups * kGroupRanks;
  constexpr int kCluster = kParts / kOwn;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RankGroup<T> groups[kOwn][kGroups];
  __shared__ const T* a_rows[kOwn][kGroups][kGroupRanks];  // null: none
  __shared__ int64_t row_index[kOwn * kPrefillRows];
  const Site& site = args.site;
  const int own = __shfl_sync(~0u, threadIdx.x / kThreads, 0);  // this warpgroup's tile
  const int thread = threadIdx.x % kThreads;

  let_next_kernel_start();
  TileRows tiles_of_cta[kOwn];
  bool is_one_slot = true;  // if of two tiles, each warpgroup copies half of A
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (!find_tile(args.plan, TileKind::prefill, blockIdx.y * kOwn + i, args.rows, &tiles_of_cta[i]))
      tiles_of_cta[i] = {};
    is_one_slot &= tiles_of_cta[i].slot == tiles_of_cta[0].slot;
  }
  const TileRows tile_rows = own == 0 ? tiles_of_cta[0] : tiles_of_cta[kOwn - 1];
  bool any_rank = false;
  if (thread < kGroups) {
    const int64_t groups_of_slice = ceil_div(site.max_rank, kGroupRanks);
    const int64_t index = int64_t{blockIdx.z} * kGroups + thread;
    const int slice = static_cast<int>(index / groups_of_slice);
    const int first_rank = static_cast<int>(index % groups_of_slice) * kGroupRanks;
    RankGroup<T> group{nullptr, 0, slice, first_rank};
    if (slice < site.num_slices) {
      const SliceWeights<T> weights = find_slice<T>(site, tile_rows.slot, slice);
      group.ranks = max(min(weights.rank - first_rank, kGroupRanks), 0);
      group.a = weights.a + first_rank * site.in_features;
    }
    groups[own][thread] = group;
    any_rank = group.ranks > 0;
  }
  if (!__syncthreads_or(any_rank)) return leave_idle();
  if (thread < kPrefillRows) {
    row_index[own * kPrefillRows + thread] = find_row(args.plan, tile_rows, thread, args.rows).index;
  }
  const int lane_row = thread / kVectors;
  const int vector = thread % kVectors;
  if (vector == 0) {
    for (int q = 0; q < kGroups; ++q) {
      const RankGroup<T> group = groups[own][q];
      a_rows[own][q][lane_row] = lane_row < group.ranks ? group.a + lane_row * site.in_features : nullptr;
    }
  }
  __syncthreads();

  const uint32_t ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int in_features = static_cast<int>(site.in_features);
  const int all_tiles = (in_features + kTileK - 1) / kTileK;
  const int tiles_of_part = (all_tiles + kParts - 1) / kParts;
  const int first_tile = blockIdx.x * kOwn * tiles_of_part;
  const int steps_of_part = (tiles_of_part + kTilesOfStage - 1) / kTilesOfStage;
  const int steps = kOwn * steps_of_part;
  // Where this thread's vector of a step's tile lies in K; past the part's end: in_features.
  const auto find_k = [&](int step, int tile) {
    const int part = kOwn > 1 && step >= steps_of_part ? 1 : 0;
    const int at = (step - part * steps_of_part) * kTilesOfStage + tile;
    return at < tiles_of_part ? (first_tile + part * tiles_of_part + at) * kTileK + vector * 8 : in_features;
  };
  const T* x_rows[kPrefillRows / kRowStep];
#pragma unroll
  for (int j = 0; j < kPrefillRows / kRowStep; ++j) {
    const int64_t row = row_index[own * kPrefillRows + lane_row + j * kRowStep];
    x_rows[j] = row < 0 ? nullptr : static_cast<const T*>(args.x) + row * args.x_stride;
  }
  // This thread copies one vector of every kRowStep'th row.
  const auto copy = [&](uint32_t to, const T* row, int k) {
    const bool present = row != nullptr && k < in_features;
    copy16_async(to, present ? row + k : args.x, present);
  };
  const uint32_t place = swizzled(lane_row, vector);
  float total[kColumns / 2];
  const auto multiply = [&](auto slots) {
    constexpr int kSlots = decltype(slots)::value;
    constexpr int kStages = num_stages(kGroups, kOwn, kSlots);
    constexpr int kStageBytes = stage_bytes(kGroups, kOwn, kSlots);
    constexpr int kPlaceBytes = kStageBytes / kTilesOfStage;  // of one tile of K
    const uint32_t a_place = kOwn * kTileBytes + (is_one_slot ? 0 : own * a_bytes(kGroups));
    const auto load_x = [&](int step) {
#pragma unroll
      for (int tile = 0; tile < kTilesOfStage; ++tile) {
        const uint32_t to =
            ring + step % kStages * kStageBytes + tile * kPlaceBytes + own * kTileBytes + place;
        const int k = find_k(step, tile);
#pragma unroll
        for (int j = 0; j < kPrefillRows / kRowStep; ++j) copy(to + j * kRowStep * 128, x_rows[j], k);
      }
    };
    const auto load_a = [&](int step) {
#pragma unroll
      for (int tile = 0; tile < kTilesOfStage; ++tile) {
        const uint32_t to = ring + step % kStages * kStageBytes + tile * kPlaceBytes + a_place + place;
        const int k = find_k(step, tile);
        if (kOwn > 1 && is_one_slot) {
#pragma unroll
          for (int q = 0; q < kGroups; q += 2) {
            if (q + own < kGroups) copy(to + (q + own) * kRowStep * 128, a_rows[own][q + own][lane_row], k);
          }
        } else {
#pragma unroll
          for (int q = 0; q < kGroups; ++q) copy(to + q * kRowStep * 128, a_rows[own][q][lane_row], k);
        }
      }
    };

    // Tiles are loaded kAhead ahead, into the stage of the last multiplication or, where there are stages to
    // spare, of the one before, so that the last may still be under way.
    constexpr int kUnderWay = kStages > 4 ? 1 : 0;
    constexpr int kAhead = kStages - 1 - kUnderWay;
    for (int step = 0; step < kAhead && step < steps; ++step) load_a(step);
    wait_for_earlier_kernels();
    for (int step = 0; step < kAhead; ++step) {
      if (step < steps) load_x(step);
      commit_copies();
    }
#pragma unroll
    for (int part = 0; part < kOwn; ++part) {
      float sums[kColumns / 2] = {};
      for (int step = part * steps_of_part; step < (part + 1) * steps_of_part; ++step) {
        wait_for_copies<kAhead - 1>();
        wgmma_wait<kUnderWay>();  // the stage that is filled next has been used
        fence_shared_for_wgmma();
        __syncthreads();
        if (step + kAhead < steps) {
          load_x(step + kAhead);
          load_a(step + kAhead);
        }
        commit_copies();
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < kTilesOfStage; ++tile) {
          const uint32_t at = ring + step % kStages * kStageBytes + tile * kPlaceBytes;
#pragma unroll
          for (int k = 0; k < kTileK / 16; ++k) {
            Wgmma<T, kColumns>::multiply(sums, tile_descriptor(at + own * kTileBytes) + 2 * k,
                                         tile_descriptor(at + a_place) + 2 * k);
          }
        }
        wgmma_commit();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        asm volatile("" : "+f"(sums[i])::"memory");
        total[i] = part == 0 ? sums[i] : total[i] + sums[i];
      }
    }
  };
  // A deeper ring pays where A is large. Elsewhere CTAs of two slots would only fall behind those of one.
  if (kTilesOfStage == 1 && is_one_slot) {
    multiply(std::integral_constant<int, 1>());
  } else {
    multiply(std::integral_constant<int, kOwn>());
  }
  wait_for_copies<0>();
  __syncthreads();

  // The partial sums take the ring's place; every CTA adds up its share of the rows over the cluster.
  constexpr int kPitch = kColumns + 4;
  const uint32_t partial = ring;
  const int warp = threadIdx.x / kLanes;  // over both tiles, 16 rows each
  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (warp * 16 + g + 8 * half) * kPitch + 8 * j + 2 * t;
      store_shared(partial + at * sizeof(float), total[4 * j + 2 * half], total[4 * j + 2 * half + 1]);
    }
  }
  cluster_arrive();
  cluster_wait();
  constexpr int kShare = kOwn * kPrefillRows / kCluster;
  for (int i = threadIdx.x; i < kShare * kColumns / 4; i += kOwn * kThreads) {
    const int row = blockIdx.x * kShare + i / (kColumns / 4);
    const int column = i % (kColumns / 4) * 4;
    float4 own[kCluster];
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      own[rank] = load_from_peer(partial + (row * kPitch + column) * sizeof(float), rank);
    }
    float4 sum = add(own[0], own[1]);
    if (kCluster == 4) sum = add(sum, add(own[kCluster - 2], own[kCluster - 1]));
    const RankGroup<T> group = groups[row / kPrefillRows][column / kGroupRanks];
    if (row_index[row] < 0) continue;
    const int left = group.ranks - column % kGroupRanks;
    float* const h = args.h + (row_index[row] * site.num_slices + group.slice) * site.max_rank +
                     group.first_rank + column % kGroupRanks;
    if (left >= 4 && reinterpret_cast<uintptr_t>(h) % 16 == 0) {
      *reinterpret_cast<float4*>(h) = sum;
    } else {
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < left) h[e] = values[e];
      }
    }
  }
  cluster_arrive();  // no CTA leaves while another reads from it
  cluster_wait();
#endif
}

template <typename T, int kGroups, int kOwn>
int launch_shrink(const ShrinkArgs& args, int64_t groups, void* stream) {
  constexpr int kCluster = kParts / kOwn;
  constexpr int kRing = std::max(ring_bytes(kGroups, kOwn, 1), ring_bytes(kGroups, kOwn, kOwn));
  static_assert(num_stages(kGroups, kOwn, kOwn) >= 3 &&
                kRing >= kOwn * kPrefillRows * (kGroups * kGroupRanks + 4) * 4);
  const auto kernel = shrink_prefill_kernel<T, kGroups, kOwn>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRing + 1024);
  if (error != cudaSuccess) return error;
  const int64_t tiles = max_prefill_tiles(args.rows, args.site.num_slots);
  const dim3 grid(kCluster, ceil_div(tiles, kOwn), ceil_div(groups, kGroups));
  return launch(kernel, grid, kOwn * kThreads, kCluster, stream, kRing + 1024, args);
}

// One tile and one part a CTA while the tiles that the rows fill are resident at once, as clusters that
// launch() balances: a count that does not depend on the pool. Short segments have more of them, in waves.
template <typename T, int kGroups>
int launch_shrink(const ShrinkArgs& args, int64_t groups, void* stream) {
  const int64_t ctas = kParts * ceil_div(args.rows, kPrefillRows) * ceil_div(groups, kGroups);
  return ctas <= 2 * current_device().multiprocessors ? launch_shrink<T, kGroups, 1>(args, groups, stream)
                                                      : launch_shrink<T, kGroups, 2>(args, groups, stream);
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

bool shrink_prefill_serves(const ShrinkArgs& args, const Device& device) {
#ifdef LORAMUX_SM90A
  const Site& site = args.site;
  return is_half(site.dtype) && site.in_features % 8 == 0 && site.in_features < 1 << 30 &&
         is_aligned(args.x, args.x_stride, site.dtype) && fits_grid(args) && device.capability == 90;
#else
  (void)args, (void)device;
  return false;  // no code for sm_90a was compiled
#endif
}

int shrink_prefill(const ShrinkArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? shrink<__nv_bfloat16>(args, stream) : shrink<__half>(args, stream);
}

}  // namespace loramux
