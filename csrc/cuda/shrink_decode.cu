// The shrink of decode tiles (at most 8 rows of one slot) as a kernel of its own, on sm_90 and later. It is
// bound by A's bytes and by latency: a thread asks for its part of A, of a long K for its beginning, before
// it waits for the kernel that makes x.
//
// Floor: 2 bytes x rank x in_features of each adapter's slice over 4.2 TB/s; qkv at rank 16 and 64
// adapters 6.0 us. decode.cuh has the data path and the order of the sums; h is written once, by the
// cluster's first CTA.
#include <algorithm>

#include "cuda/decode.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

// To an SM, at the registers that a kernel without a loop takes: with one the compiler would take more.
constexpr int loop_ctas(int groups, bool is_long) {
  return groups > 1 ? 2 : is_long ? 3 : 4;
}

// Asks for weights that come next to be brought into L2, so that memory does not idle between waves of CTAs:
// of one group of ranks this CTA's share of B, for the expand; else this part of K of A of the next block of
// ranks.
template <int kGroups, typename T>
__device__ void prefetch_next(const SliceWeights<T>& weights, const Site& site, int slice, int first_rank,
                              int steps) {
  constexpr int kRanks = kGroups * kGroupRanks;
  constexpr int64_t kMaxBytes = 16 * 1024;  // of B: more comes too early
  if constexpr (kGroups == 1) {
    const int64_t vectors = site.slices[slice].width * weights.stride / (gridDim.x * 8);
    if (threadIdx.x == 0 && vectors > 0) {
      prefetch_bulk(weights.b + blockIdx.x * vectors * 8,
                    static_cast<uint32_t>(min(vectors * 16, kMaxBytes)));
    }
  } else {
    const int in_features = static_cast<int>(site.in_features);
    const int part = kDecodeWarps * steps * kStepK;
    const int k = blockIdx.x * part;
    const int rank = first_rank + kRanks + threadIdx.x;
    if (threadIdx.x < kRanks && rank < weights.rank && k < in_features) {
      prefetch_bulk(weights.a + int64_t{in_features} * rank + k, min(part, in_features - k) * sizeof(T));
    }
  }
}

// Grid: (parts of K, one cluster; decode tiles; slices x blocks of kGroups * 16 ranks). If kLoops there may
// be more tiles, and the clusters go through them.
template <typename T, int kGroups, int kSteps, bool kIsLong, bool kLoops>
__global__ void __launch_bounds__(kDecodeThreads, kLoops ? loop_ctas(kGroups, kIsLong) : 0)
    shrink_decode_kernel(const __grid_constant__ ShrinkArgs args, int steps) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  const int slice = blockIdx.z % args.site.num_slices;
  const int first_rank = blockIdx.z / args.site.num_slices * kRanks;
  let_next_kernel_start();
  __shared__ PartialSums<kGroups> partial;
  __shared__ alignas(16) float received[kMaxParts][kDecodeRows][kRanks];  // of the cluster's first CTA
  __shared__ int64_t row_index[kDecodeRows];
  __shared__ uint64_t arrived;  // of the first CTA
  static_assert(partial.kVectors <= kDecodeThreads && kDecodeRows * kRanks <= kDecodeThreads);
  const bool is_first = blockIdx.x == 0;
  uint32_t round = 0;  // tiles that this cluster has had a part in
  TileRows tile;
#pragma unroll 1
  for (int index = blockIdx.y; find_tile(args.plan, TileKind::decode, index, args.rows, &tile);
       index += gridDim.y) {
    const SliceWeights<T> weights = find_slice<T>(args.site, tile.slot, slice);
    if (first_rank < weights.rank) {
      if (round > 0) __syncthreads();  // what is shared has been read
      if (is_first && threadIdx.x == 0) {
        if (round == 0) {
          make_barrier(&arrived, 1);
          fence_barriers();
        }
        arrive_and_expect(&arrived, gridDim.x * sizeof(received[0]));
      }
      cluster_arrive();
      DecodeChunk<T, kGroups, kSteps, kIsLong> chunk(
          weights.a + first_rank * args.site.in_features, weights.rank - first_rank,
          static_cast<int>(args.site.in_features), blockIdx.x, steps);
      const int g = threadIdx.x % kLanes / 4;
      const TileRow row = find_row(args.plan, tile, g, args.rows);
      if (threadIdx.x < kLanes && threadIdx.x % 4 == 0) row_index[g] = row.index;
      if (!kIsLong) prefetch_next<kGroups>(weights, args.site, slice, first_rank, steps);
      if (kIsLong && kGroups == 1) chunk.prefetch_rest();
      wait_for_earlier_kernels();
      float sums[kGroups][4] = {};
      chunk.multiply(row.index < 0 ? nullptr : static_cast<const T*>(args.x) + row.index * args.x_stride,
                     sums);
      partial.put(sums);
      __syncthreads();

      cluster_wait();
      const int v = threadIdx.x;
      if (v < partial.kVectors) {
        const float4* const to = reinterpret_cast<const float4*>(received[blockIdx.x]) + v;
        store_to_peer(peer_address(to, 0), partial.sum(v), peer_address(&arrived, 0));
      }
      if (is_first) {
        wait_for_phase(&arrived, round & 1);
        float sum = 0.f;
        if (v < kDecodeRows * kRanks) {
#pragma unroll
          for (int part = 0; part < kMaxParts; ++part) {
            if (part < gridDim.x) sum += received[part][v / kRanks][v % kRanks];
          }
          const int64_t to = row_index[v / kRanks];
          const int rank = first_rank + v % kRanks;
          if (to >= 0 && rank < weights.rank)
            args.h[(to * args.site.num_slices + slice) * args.site.max_rank + rank] = sum;
        }
      }
      ++round;
    }
    if (!kLoops) break;
  }
  if (round == 0) leave_idle();
#endif
}

template <typename T, int kGroups, int kSteps, bool kIsLong>
int launch_shrink(const ShrinkArgs& args, void* stream) {
  const int parts = decode_parts(args.site.in_features);
  const int64_t rank_blocks = ceil_div(args.site.max_rank, kGroups * kGroupRanks);
  const int64_t tiles = max_decode_tiles(args.rows, args.site.num_slots);
  // Over many slots most of the tiles that a step could have are not there, and CTAs that come in vain take
  // their time too: so clusters go through the tiles. A long step is prefills mostly, which wait for them; a
  // short one is decode rows, whose tiles are done sooner by CTAs of their own.
  const int64_t ctas_of_sm = args.rows < kLongStepRows ? 16 : 2 * loop_ctas(kGroups, kIsLong);
  const int64_t tile_ctas = parts * args.site.num_slices * rank_blocks;
  const int64_t most = std::max<int64_t>(ctas_of_sm * current_device().multiprocessors / tile_ctas, 1);
  const bool loops = max_prefill_tiles(args.rows, args.site.num_slots) > 0 && tiles > most;
  const dim3 grid(parts, loops ? most : tiles, args.site.num_slices * rank_blocks);
  return launch(loops ? shrink_decode_kernel<T, kGroups, kSteps, kIsLong, true>
                      : shrink_decode_kernel<T, kGroups, kSteps, kIsLong, false>,
                grid, kDecodeThreads, parts, stream, 0, args, decode_steps(args.site.in_features));
}

template <typename T, int kGroups>
int launch_shrink(const ShrinkArgs& args, void* stream) {
  return decode_steps(args.site.in_features) <= 4 ? launch_shrink<T, kGroups, 4, false>(args, stream)
                                                  : launch_shrink<T, kGroups, 4, true>(args, stream);
}

template <typename T>
int shrink(const ShrinkArgs& args, void* stream) {
  return args.site.max_rank <= 16 ? launch_shrink<T, 1>(args, stream) : launch_shrink<T, 2>(args, stream);
}

}  // namespace

bool shrink_decode_serves(const ShrinkArgs& args, const Device& device) {
  const Site& site = args.site;
  if (!is_half(site.dtype) || device.capability < 90) return false;
  static const bool is_compiled = is_compiled_for_sm90(shrink_decode_kernel<__half, 1, 4, false, false>);
  return is_compiled && site.in_features % 8 == 0 && site.in_features < 1 << 30 &&
         is_aligned(args.x, args.x_stride, site.dtype) && fits_grid(args);
}

int shrink_decode(const ShrinkArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? shrink<__nv_bfloat16>(args, stream) : shrink<__half>(args, stream);
}

}  // namespace loramux
