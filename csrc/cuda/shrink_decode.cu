// The shrink of decode tiles (at most 8 rows of one slot) on sm_90 and later. It is bound by A's bytes and by
// latency: a thread asks for all of its part of A before it waits for the kernel that makes x.
//
// Floor: 2 bytes x rank x in_features of each adapter's slice over 4.2 TB/s; qkv at rank 16 and 64
// adapters 6.0 us. A goes from global memory to registers in 16-byte loads and meets x there; partial sums
// meet in the shared memory of the cluster's first CTA; h is written once.
//
// The order of every sum is fixed by in_features and max_rank alone: K is cut evenly over the warps of a
// cluster's CTAs in steps of 32. A warp adds its steps up in the tensor core, K rising; then the warps of a
// CTA are added up, and then the CTAs, in order.
#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kStepK = 32;  // of K, one 16-byte load a lane
constexpr int kMaxCluster = 8;

// Grid: (CTAs that share K, one cluster; decode tiles; slices x blocks of kGroups * 16 ranks).
// kSteps: steps of K whose weights a warp holds at a time.
template <typename T, int kGroups, int kSteps>
__global__ void __launch_bounds__(kThreads) shrink_decode_kernel(const __grid_constant__ ShrinkArgs args) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  const int64_t in_features = args.site.in_features;
  const int slice = blockIdx.z % args.site.num_slices;
  const int first_rank = blockIdx.z / args.site.num_slices * kRanks;
  let_next_kernel_start();
  TileRows tile;
  if (!find_tile(args.plan, TileKind::decode, blockIdx.y, &tile)) return leave_idle();
  const SliceWeights<T> weights = find_slice<T>(args.site, tile.slot, slice);
  if (first_rank >= weights.rank) return leave_idle();

  const int warp = threadIdx.x / kLanes;
  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  __shared__ alignas(16) float partial[kWarps][kDecodeRows][kRanks];
  __shared__ alignas(16) float received[kMaxCluster][kDecodeRows][kRanks];  // of the cluster's first CTA
  __shared__ int64_t row_index[kDecodeRows];
  __shared__ uint64_t arrived;
  if (threadIdx.x == 0) expect_bytes(&arrived, gridDim.x * sizeof(received[0]));
  cluster_arrive();

  const int64_t warps = int64_t{gridDim.x} * kWarps;
  const int steps = ceil_div(ceil_div(in_features, kStepK), warps);
  const int64_t first_k = (int64_t{blockIdx.x} * kWarps + warp) * steps * kStepK + t * 8;
  const T* const a = weights.a + (first_rank + g) * in_features;
  uint4 a_steps[kSteps][kGroups][2];
  const auto load_a = [&](int first_step) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t k = first_k + (first_step + i) * kStepK;
      const bool inside = first_step + i < steps && k < in_features;
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int rank = q * kGroupRanks + half * 8;
          a_steps[i][q][half] = inside && first_rank + rank + g < weights.rank
                                    ? load_weights16(a + rank * in_features + k)
                                    : uint4{};
        }
      }
    }
  };
  load_a(0);
  const TileRow row = find_row(args.plan, tile, g, args.rows);
  if (threadIdx.x < kLanes && t == 0) row_index[g] = row.index;
  const T* const x = static_cast<const T*>(args.x) + max(row.index, int64_t{0}) * args.x_stride;
  wait_for_earlier_kernels();

  float sums[kGroups][4] = {};
  for (int first_step = 0; first_step < steps; first_step += kSteps) {
    if (first_step > 0) load_a(first_step);
    uint4 x_steps[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t k = first_k + (first_step + i) * kStepK;
      const bool inside = first_step + i < steps && k < in_features && row.index >= 0;
      x_steps[i] = inside ? load16(x + k) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        const uint4 low = a_steps[i][q][0];
        const uint4 high = a_steps[i][q][1];
        mma<T>(sums[q], low.x, high.x, low.y, high.y, x_steps[i].x, x_steps[i].y);
        mma<T>(sums[q], low.z, high.z, low.w, high.w, x_steps[i].z, x_steps[i].w);
      }
    }
  }
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[warp][2 * t + i % 2][q * kGroupRanks + g + i / 2 * 8] = sums[q][i];
    }
  }
  __syncthreads();

  // The CTA's sum goes to the cluster's first CTA, which adds up and writes h.
  constexpr int kVectors = kDecodeRows * kRanks / 4;
  cluster_wait();
  const uint32_t barrier = peer_address(&arrived, 0);
  for (int v = threadIdx.x; v < kVectors; v += kThreads) {
    float4 sum{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum = add(sum, reinterpret_cast<const float4*>(partial[w])[v]);
    store_to_peer(peer_address(reinterpret_cast<float4*>(received[blockIdx.x]) + v, 0), sum, barrier);
  }
  if (blockIdx.x > 0) return;
  wait_for_bytes(&arrived);
  for (int i = threadIdx.x; i < kDecodeRows * kRanks; i += kThreads) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < kMaxCluster; ++c) {
      if (c < gridDim.x) sum += received[c][i / kRanks][i % kRanks];
    }
    const int64_t to = row_index[i / kRanks];
    const int rank = first_rank + i % kRanks;
    if (to >= 0 && rank < weights.rank) {
      args.h[(to * args.site.num_slices + slice) * args.site.max_rank + rank] = sum;
    }
  }
#endif
}

template <typename T, int kGroups, int kSteps>
int launch_shrink(const ShrinkArgs& args, void* stream) {
  const int64_t steps = ceil_div(args.site.in_features, kStepK * kWarps);
  int cluster = 2;  // a single CTA has no peer to store to
  while (cluster < kMaxCluster && cluster * kSteps < steps) cluster *= 2;
  const int64_t rank_blocks = ceil_div(args.site.max_rank, kGroups * kGroupRanks);
  const dim3 grid(cluster, max_decode_tiles(args.rows, args.site.num_slots),
                  args.site.num_slices * rank_blocks);
  return launch(shrink_decode_kernel<T, kGroups, kSteps>, grid, kThreads, cluster, stream, 0, args);
}

// A warp holds all of its part of A: with 8 steps, of 16 ranks at any K up to 16384.
template <typename T>
int shrink(const ShrinkArgs& args, void* stream) {
  if (args.site.max_rank <= 16) return launch_shrink<T, 1, 8>(args, stream);
  return args.site.in_features <= 4 * kStepK * kWarps * kMaxCluster ? launch_shrink<T, 2, 4>(args, stream)
                                                                    : launch_shrink<T, 2, 8>(args, stream);
}

}  // namespace

bool shrink_decode_serves(const ShrinkArgs& args) {
  const Site& site = args.site;
  if (!is_half(site.dtype) || compute_capability() < 90) return false;
  static const bool is_compiled = is_compiled_for_sm90(shrink_decode_kernel<__half, 1, 8>);
  return is_compiled && site.in_features % 8 == 0 && is_aligned(args.x, args.x_stride, site.dtype) &&
         fits_grid(args);
}

int shrink_decode(const ShrinkArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? shrink<__nv_bfloat16>(args, stream) : shrink<__half>(args, stream);
}

}  // namespace loramux
