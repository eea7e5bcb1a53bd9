// A decode tile's shrink and expand in one kernel, on sm_90 and later, for steps of few tiles, which latency
// bounds: it saves the second kernel and the way of h through global memory. A cluster makes the h of one
// slice, every CTA a part of K, and hands all of it to each of its CTAs, which add it to columns of their
// own. Several clusters share a wide slice and make the same h; A then comes from L2.
//
// Floor: 2 bytes x rank x (in_features + width) of each adapter's slice, x once, y read and written, over 4.2
// TB/s; qkv at rank 16, 32 rows and 4 adapters 0.8 us. A and B are in registers before the wait for the
// kernel that makes x. decode.cuh and columns.cuh have the data paths and the order of the sums, which are
// those of the two kernels.
#include "cuda/columns.cuh"
#include "cuda/decode.cuh"
#include "cuda/forms.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

struct Args {
  Site site;
  PlanView plan;
  const void* x;
  void* y;
  int64_t x_stride, y_stride, rows;
  int parts, steps;  // of K
};

// Grid: (clusters of parts * kRankParts CTAs, over the columns of each slice; decode tiles). A CTA shrinks
// kGroups / kRankParts groups of 16 ranks; a warp holds B of kBlocks blocks of columns.
template <typename T, int kGroups, int kRankParts, int kSteps, int kBlocks>
__global__ void __launch_bounds__(kDecodeThreads) apply_decode_kernel(const __grid_constant__ Args args) {
#if __CUDA_ARCH__ >= 900
  constexpr int kPartGroups = kGroups / kRankParts;
  constexpr int kPartRanks = kPartGroups * kGroupRanks;
  constexpr int kPitch = kRankParts == 1 ? kPartRanks : kPartRanks * kRankParts + 4;
  const Site& site = args.site;
  let_next_kernel_start();
  const int ctas = args.parts * kRankParts;
  const int cta = blockIdx.x % ctas;
  const ColumnRange columns =
      find_columns(site, blockIdx.x / ctas, ctas * kDecodeWarps * kBlocks * kBlockColumns);
  TileRows tile;
  if (!find_tile(args.plan, TileKind::decode, blockIdx.y, args.rows, &tile)) return leave_idle();
  const SliceWeights<T> weights = find_slice<T>(site, tile.slot, columns.slice);
  if (weights.rank == 0 || weights.stride % 8 != 0) return leave_idle();

  __shared__ PartialSums<kPartGroups> partial;
  __shared__ alignas(16) float received[kMaxParts][kDecodeRows][kPitch];
  __shared__ uint64_t arrived;
  const int part = cta % args.parts;
  const int first_rank = cta / args.parts * kPartRanks;
  const int ranks_made = static_cast<int>(ceil_div(weights.rank, kPartRanks)) * kPartRanks;
  if (threadIdx.x == 0) {
    make_barrier(&arrived, 1);
    fence_barriers();
    arrive_and_expect(&arrived, args.parts * kDecodeRows * ranks_made * sizeof(float));
  }
  cluster_arrive();
  DecodeChunk<T, kPartGroups, kSteps> chunk(weights.a + first_rank * site.in_features,
                                            weights.rank - first_rank, static_cast<int>(site.in_features),
                                            part, args.steps);
  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  const Slice& slice = site.slices[columns.slice];
  const int width = static_cast<int>(slice.width);
  // Blocks are dealt to the CTAs in turn, so that all of them have a share of a narrow slice.
  const int warp_column = columns.first + (threadIdx.x / kLanes * ctas + cta) * kBlocks * kBlockColumns;
  BColumns<T, kGroups, kBlocks> b;
  b.load(weights, warp_column, width, 0);
  const TileRow row = find_row(args.plan, tile, g, args.rows);
  wait_for_earlier_kernels();
  YRows<T, kBlocks> y;
  y.load(row, static_cast<T*>(args.y) + slice.offset, args.y_stride, warp_column + 8 * g, width);
  float partial_sums[kPartGroups][4] = {};
  chunk.multiply(row.index < 0 ? nullptr : static_cast<const T*>(args.x) + row.index * args.x_stride,
                 partial_sums);
  partial.put(partial_sums);
  __syncthreads();

  cluster_wait();
  if (first_rank < ranks_made) {
#pragma unroll 1
    for (int i = threadIdx.x; i < partial.kVectors * ctas; i += kDecodeThreads) {
      const int peer = i / partial.kVectors;
      const int at = i % partial.kVectors * 4;
      const float* const to = &received[part][at / kPartRanks][first_rank + at % kPartRanks];
      store_to_peer(peer_address(to, peer), partial.sum(at / 4), peer_address(&arrived, peer));
    }
  }
  b.arrange();
  wait_for_phase(&arrived, 0);
  uint2 hidden[kGroups] = {};
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int rank = first_rank_of_lane<kGroups>(q, t);
    if (kRankParts > 1 && q / 2 * 2 * kGroupRanks >= ranks_made) break;
    float4 h{};
#pragma unroll
    for (int p = 0; p < kMaxParts; ++p) {
      if (p < args.parts) h = add(h, *reinterpret_cast<const float4*>(&received[p][g][rank]));
    }
    hidden[q] = pack_operand<T>(h, weights.rank - rank);
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    float sums[kTiles][4] = {};
#pragma unroll
    for (int q = 0; q < kGroups; ++q) b.multiply(n, q, hidden[q], sums);
    y.add_and_store(n, sums, weights.scale);
  }
#endif
}

// Blocks of columns a warp: one where A or B of two would take too many registers.
int blocks_of_warp(const Site& site) {
  return site.max_rank <= 16 && decode_steps(site.in_features) <= 4 ? 2 : 1;
}

int rank_parts(const Site& site) {
  return site.max_rank <= 32 ? 1 : 2;
}

dim3 grid_of(const Site& site, int64_t rows) {
  const int cluster = decode_parts(site.in_features) * rank_parts(site);
  const int columns = cluster * kDecodeWarps * blocks_of_warp(site) * kBlockColumns;
  return dim3(cluster * count_column_ctas(site, columns), max_decode_tiles(rows, site.num_slots));
}

template <typename T, int kGroups, int kRankParts, int kSteps, int kBlocks>
int launch_apply(const ApplyArgs& apply, void* stream) {
  const ShrinkArgs& shrink = apply.shrink;
  const Args args = {shrink.site,
                     shrink.plan,
                     shrink.x,
                     apply.expand.y,
                     shrink.x_stride,
                     apply.expand.y_stride,
                     shrink.rows,
                     decode_parts(shrink.site.in_features),
                     decode_steps(shrink.site.in_features)};
  return launch(apply_decode_kernel<T, kGroups, kRankParts, kSteps, kBlocks>, grid_of(args.site, args.rows),
                kDecodeThreads, args.parts * kRankParts, stream, 0, args);
}

template <typename T>
int apply(const ApplyArgs& args, void* stream) {
  const Site& site = args.shrink.site;
  if (site.max_rank > 32) return launch_apply<T, 4, 2, 4, 1>(args, stream);
  const bool is_long = decode_steps(site.in_features) > 4;
  if (site.max_rank > 16)
    return is_long ? launch_apply<T, 2, 1, 8, 1>(args, stream) : launch_apply<T, 2, 1, 4, 1>(args, stream);
  return is_long ? launch_apply<T, 1, 1, 8, 1>(args, stream) : launch_apply<T, 1, 1, 4, 2>(args, stream);
}

}  // namespace

bool apply_decode_serves(const ApplyArgs& args, const Device& device) {
  const Site& site = args.shrink.site;
  if (!shrink_decode_serves(args.shrink, device) || !expand_serves(args.expand, device) ||
      site.max_rank > 64 || decode_steps(site.in_features) > 8 ||
      decode_parts(site.in_features) * rank_parts(site) > kMaxParts)
    return false;
  const dim3 grid = grid_of(site, args.shrink.rows);
  return int64_t{grid.x} * grid.y <= max_one_kernel_ctas(site.max_rank) * device.multiprocessors;
}

int apply_decode(const ApplyArgs& args, void* stream) {
  return args.shrink.site.dtype == DType::bf16 ? apply<__nv_bfloat16>(args, stream)
                                               : apply<__half>(args, stream);
}

}  // namespace loramux
