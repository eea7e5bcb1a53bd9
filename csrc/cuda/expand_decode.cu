// The expand of decode tiles (at most 8 rows of one slot) on sm_90 and later. It is bound by B's bytes and by
// latency: a warp asks for its B, past rank 64 for that of the first ranks, before it waits for the kernel
// that makes h.
//
// Floor: 2 bytes x rank x width of each adapter's slice, and y read and written, over 4.2 TB/s; gate_up at
// rank 16 takes 7.9 us for 32 rows of 32 adapters. B goes to registers in 16-byte loads, h comes from L2, y
// in whole 128-byte lines. An embedding has its vectors of A in the place of h.
#include <algorithm>

#include "cuda/columns.cuh"
#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;

// Grid: (blocks of columns of each slice; CTAs that go through the decode tiles, as many as the chip holds:
// of a plan with few tiles the rest would come in vain). A warp holds B of kBlocks blocks of columns and
// kGroups groups of ranks; ranks past those if kIsLong. kCtas: CTAs that an SM must hold at a time. If
// kHasParts h comes as h_parts arrays, part_values apart, to be added up in order.
template <typename Args, typename T, int kGroups, int kBlocks, int kCtas, bool kIsLong, bool kHasParts>
__global__ void __launch_bounds__(kThreads, kCtas)
    expand_decode_kernel(const __grid_constant__ Args args, int h_parts, int64_t part_values) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  static_assert(!kIsLong || kBlocks == 1);
  let_next_kernel_start();
  const ColumnRange columns = find_columns(args.site, blockIdx.x, kWarps * kBlocks * kBlockColumns);
  const int g = threadIdx.x % kLanes / 4;
  const int t = threadIdx.x % 4;
  const Slice& slice = args.site.slices[columns.slice];
  const int width = static_cast<int>(slice.width);
  const int warp_column = columns.first + threadIdx.x / kLanes * kBlocks * kBlockColumns;
  TileRows tile;
#pragma unroll 1
  for (int index = blockIdx.y; find_tile(args.plan, TileKind::decode, index, args.rows, &tile);
       index += gridDim.y) {
    const SliceWeights<T> weights = find_slice<T>(args.site, tile.slot, columns.slice);
    if (weights.rank == 0 || weights.stride % 8 != 0) continue;
    BColumns<T, kGroups, kBlocks> b;
    b.load(weights, warp_column, width, 0);
    TileRow row = find_row(args.plan, tile, g, args.rows);
    wait_for_earlier_kernels();
    const auto operands = find_operands(args, weights, columns.slice);
    const int64_t operand = find_operand(args, &row);
    YRows<T, kBlocks> y;
    y.load(row, static_cast<T*>(args.y) + slice.offset, args.y_stride, warp_column + 8 * g, width);
    const auto* const h = operands.data + operand * operands.stride;
    const int end = row.index < 0 ? 0 : weights.rank;
    float sums[kBlocks][kTiles][4] = {};
#pragma unroll 1
    for (int first_rank = 0; first_rank < weights.rank; first_rank += kRanks) {
      if (kIsLong && first_rank > 0) b.load(weights, warp_column, width, first_rank);
      const auto rank_of = [&](int q) { return first_rank + first_rank_of_lane<kGroups>(q, t); };
      decltype(load_operand(h)) values[kGroups];
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        values[q] = {};
        if (rank_of(q) < end) values[q] = load_operand(h + rank_of(q));
      }
      if constexpr (kHasParts) {
#pragma unroll 1
        for (int part = 1; part < h_parts; ++part) {
#pragma unroll
          for (int q = 0; q < kGroups; ++q) {
            if (rank_of(q) < end)
              values[q] = add(values[q], load_operand(h + part * part_values + rank_of(q)));
          }
        }
      }
      uint2 hidden[kGroups];
#pragma unroll
      for (int q = 0; q < kGroups; ++q) hidden[q] = pack_operand<T>(values[q], end - rank_of(q));
      b.arrange();
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) b.multiply(n, q, hidden[q], sums[n]);
        if (!kIsLong) y.add_and_store(n, sums[n], weights.scale);
      }
      if (!kIsLong) break;
    }
    if (kIsLong) y.add_and_store(0, sums[0], weights.scale);
  }
  leave_idle();
#endif
}

template <typename T, int kGroups, int kBlocks, int kCtas, bool kIsLong, bool kHasParts = false,
          typename Args>
int launch_expand(const Args& args, int h_parts, void* stream) {
  const int64_t ctas = count_column_ctas(args.site, kWarps * kBlocks * kBlockColumns);
  const int64_t tiles = max_decode_tiles(args.rows, args.site.num_slots);
  const int64_t tiles_at_once = std::max<int64_t>(kCtas * current_device().multiprocessors / ctas, 1);
  const int64_t rounds = ceil_div(tiles, tiles_at_once);
  return launch(expand_decode_kernel<Args, T, kGroups, kBlocks, kCtas, kIsLong, kHasParts>,
                dim3(ctas, ceil_div(tiles, rounds)), kThreads, 1, stream, 0, args, h_parts,
                args.rows * args.site.num_slices * args.site.max_rank);
}

// Beyond rank 16 B leaves registers for one block.
template <typename T>
int expand(const ExpandArgs& args, int h_parts, void* stream) {
  if (h_parts > 1) {
    return args.site.max_rank <= 16 ? launch_expand<T, 1, 2, 5, false, true>(args, h_parts, stream)
                                    : launch_expand<T, 4, 1, 4, false, true>(args, h_parts, stream);
  }
  if (args.site.max_rank <= 16) return launch_expand<T, 1, 2, 5, false>(args, 1, stream);
  if (args.site.max_rank <= 32) return launch_expand<T, 2, 1, 6, false>(args, 1, stream);
  if (args.site.max_rank <= 64) return launch_expand<T, 4, 1, 4, false>(args, 1, stream);
  return launch_expand<T, 4, 1, 3, true>(args, 1, stream);
}

}  // namespace

bool expand_serves(const ExpandArgs& args, const Device& device) {
  const Site& site = args.site;
  if (!is_half(site.dtype) || device.capability < 90) return false;
  static const bool is_compiled =
      is_compiled_for_sm90(expand_decode_kernel<ExpandArgs, __half, 1, 2, 5, false, false>);
  bool whole_vectors = site.max_rank % 8 == 0 && site.rank_stride <= site.max_rank &&
                       is_aligned(args.y, args.y_stride, site.dtype) &&
                       reinterpret_cast<uintptr_t>(args.h) % 16 == 0;
  for (int i = 0; i < site.num_slices; ++i) {
    const Slice& slice = site.slices[i];
    whole_vectors &= slice.width % 8 == 0 && slice.offset % 8 == 0 && slice.offset + slice.width < 1 << 30;
  }
  return is_compiled && whole_vectors && fits_grid(args) && expand_prefill_has_room(site, device);
}

int expand_decode(const ExpandArgs& args, int h_parts, void* stream) {
  return args.site.dtype == DType::bf16 ? expand<__nv_bfloat16>(args, h_parts, stream)
                                        : expand<__half>(args, h_parts, stream);
}

int embedding_decode(const EmbeddingArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? launch_expand<__nv_bfloat16, 4, 1, 3, true>(args, 1, stream)
                                        : launch_expand<__half, 4, 1, 3, true>(args, 1, stream);
}

}  // namespace loramux
