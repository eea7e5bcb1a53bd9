// The expand of prefill tiles (up to 64 rows of one slot) on sm_90 and later. The grid fills the chip once.
// A CTA's share of units, 16 rows of a tile by 512 columns, goes down one block of columns after another.
//
// Floor: y read and written over 4.2 TB/s; gate_up takes 224 us for 8192 rows. One warp reads the plan,
// rounds h and has the copy engine fetch y of the units to come into a ring in shared memory, past the ends
// of tiles. B of up to 128 ranks comes the same way ahead of y of another slot or block of columns, in parts
// the size of a unit's y; the first before the wait for the kernel that makes h. The other warps keep B of 64
// columns each in registers, add to y where it lies in the ring and have the copy engine store it from there.
// Scattered rows come one by one and go by 16 bytes, columns that are no whole block come by 16 bytes too. An
// embedding has its vectors of A in the place of h.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/rows16.cuh"
#include "cuda/y_maps.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

constexpr int kWarps = 8;  // that compute
constexpr int kCtaColumns = kWarps * kBlockColumns;
constexpr int kThreads = (kWarps + 1) * kLanes;
constexpr int kTileUnits = kPrefillRows / kUnitRows;
constexpr int kBlockBytes = kBlockColumns * 2;
constexpr int kBoxBytes = kUnitRows * kBlockBytes;  // y of a warp
constexpr int kPlaceBytes = kWarps * kBoxBytes;     // y of a stage
constexpr int kRowBytes = kCtaColumns * 2;
constexpr int kMaxStages = 6;  // to an SM: with more y is no faster
static_assert(kPrefillRows % kUnitRows == 0 && kUnitRows <= kLanes && kBoxBytes % 1024 == 0 &&
              kRowBytes % 1024 == 0);

// A stage of the ring, beside its y and h.
template <typename T>
struct alignas(16) Unit {
  uint64_t known;  // barriers: the unit has been written,
  uint64_t full;   // its y and h, or B, have come,
  uint64_t empty;  // and every lane that computes is done with it
  SliceWeights<T> weights;
  bool is_new;         // weights or columns are others than those of the unit before
  bool is_last;        // nothing but this is set
  int b_begin, b_end;  // warps whose B lies in the place of y; none: y does
  int slice;
  int column;          // the CTA's first within the slice
  int boxes;           // warps whose y is a whole box
  bool by_rows;        // y lies as [row][warp][128 bytes], not as [warp][row][128 bytes]
  int row[kUnitRows];  // -1: no row
  float factor[kUnitRows];
};

// CTAs to an SM. B of more than 64 ranks takes as many registers as two have.
constexpr int num_ctas(int groups) {
  return groups <= 4 ? 2 : 1;
}

// kGroups groups of ranks are held in registers. If kIsLong there may be more: they are read for every unit.
// max_tiles: what the plan holds of it, only the device knows. column_blocks: of kCtaColumns columns.
template <typename Args, typename T, int kGroups, bool kIsLong>
__global__ void __launch_bounds__(kThreads, num_ctas(kGroups))
    expand_prefill_kernel(const __grid_constant__ Args args, const __grid_constant__ YMaps y_maps,
                          int max_tiles, int column_blocks, int stages) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRanks = kGroups * kGroupRanks;
  static_assert(kIsLong || kBlockColumns * kRanks * 2 <= kPlaceBytes);
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ Unit<T> units[kMaxStages];
  unsigned char* const ring = dynamic_shared + (-shared_address(dynamic_shared) & 1023);  // y of each stage
  const int stage_vectors = hidden_vectors<kGroups>(args.site.max_rank);                  // of h
  uint4* const hidden = reinterpret_cast<uint4*>(ring + stages * kPlaceBytes);
  const int warp = __shfl_sync(~0u, threadIdx.x / kLanes, 0);
  const int lane = threadIdx.x % kLanes;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      make_barrier(&units[i].known, 1);
      make_barrier(&units[i].full, 2 * kLanes);
      make_barrier(&units[i].empty, kWarps * kLanes);
    }
    fence_barriers();
    prefetch_map(y_maps.box);
    prefetch_map(y_maps.blocks);
    prefetch_map(y_maps.row);
  }
  __syncthreads();
  int stage = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  };

  if (warp == kWarps) {
    const PlanHeader header = *reinterpret_cast<const PlanHeader*>(args.plan.words);
    const int block_units = min(max(header.prefill_tiles, 0), max_tiles) * kTileUnits;  // of one column block
    const int64_t all_units = int64_t{block_units} * column_blocks;
    const int64_t begin = all_units * blockIdx.x / gridDim.x;
    int64_t left = all_units * (blockIdx.x + 1) / gridDim.x - begin;
    int block = left > 0 ? static_cast<int>(begin / block_units) : 0;
    int at = static_cast<int>(begin - int64_t{block} * block_units);  // within the block
    TileRows tile{};
    int tile_index = -1;
    SliceWeights<T> weights{};
    ColumnRange columns{};
    int weights_block = -1, weights_slot = 0;
    bool is_new = false;
    const auto describe = [&](Unit<T>& unit, int b_begin, int b_end) {
      unit.weights = weights;
      unit.is_last = false;
      unit.b_begin = b_begin;
      unit.b_end = b_end;
      unit.slice = columns.slice;
      unit.column = columns.first;
    };
    // Every lane's own arrival shows what it wrote of h.
    const auto arrive_full = [&](Unit<T>& unit, int bytes) {
      lane == 0 ? arrive_and_expect(&unit.full, bytes) : arrive(&unit.full);
    };
    for (; left > 0; --left, ++at) {
      if (at == block_units) {
        at = 0;
        ++block;
      }
      const int first = at % kTileUnits * kUnitRows;  // within the tile
      if (at / kTileUnits != tile_index) {
        tile_index = at / kTileUnits;
        if (!find_tile(args.plan, TileKind::prefill, tile_index, args.rows, &tile)) tile = {};
      }
      if (first >= tile.count) continue;
      if (block != weights_block || tile.slot != weights_slot) {
        weights_block = block;
        weights_slot = tile.slot;
        columns = find_columns(args.site, block, kCtaColumns);
        weights = find_slice<T>(args.site, tile.slot, columns.slice);
        if (weights.stride % 8 != 0) weights.rank = 0;
        is_new = true;
      }
      if (weights.rank == 0) continue;
      const Slice& slice = args.site.slices[columns.slice];
      const int width = min(static_cast<int>(slice.width) - columns.first, kCtaColumns);
      const T* const b = weights.b + columns.first * weights.stride;
      const int row_bytes = static_cast<int>(weights.stride * sizeof(T));
      if constexpr (kIsLong) {
        if (is_new && lane == 0) prefetch_bulk(b, width * row_bytes);
      } else if (is_new) {
        // B of as many warps as fit where a unit's y lies.
        const int warps = min(kPlaceBytes / (kBlockColumns * row_bytes), kWarps);
        for (int first = 0; first * kBlockColumns < width; first += warps) {
          Unit<T>& unit = units[stage];
          wait_for_cta_phase(&unit.empty, parity ^ 1);
          const int from = first * kBlockColumns;
          const int bytes = min(width - from, warps * kBlockColumns) * row_bytes;
          if (lane == 0) {
            describe(unit, first, first + warps);
            arrive(&unit.known);
            load_bulk(ring + stage * kPlaceBytes, b + from * weights.stride, bytes, &unit.full);
          }
          arrive_after_copies(&unit.full);
          arrive_full(unit, bytes);
          advance();
        }
      }

      TileRow found = lane < kUnitRows ? find_row(args.plan, tile, first + lane, args.rows) : TileRow{-1, 0};
      wait_for_earlier_kernels();
      const int operand = static_cast<int>(find_operand(args, &found));
      const int row = static_cast<int>(found.index);
      const int first_row = __shfl_sync(~0u, row, 0);
      const bool is_next = lane >= kUnitRows || (row >= 0 && row == first_row + lane);
      const bool is_run = __all_sync(~0u, is_next);
      const int boxes = is_run ? width / kBlockColumns : 0;
      const int y_column = static_cast<int>(slice.offset) + columns.first;
      const bool is_whole = y_column % kBlockColumns == 0;  // the columns are whole blocks of y's
      const bool by_rows = !is_run && is_whole && width % kBlockColumns == 0;
      const int bytes =
          by_rows ? __popc(__ballot_sync(~0u, row >= 0)) * kRowBytes : boxes * kBoxBytes;  // that come by box
      const auto operands = find_operands(args, weights, columns.slice);
      HiddenRows<T, typename decltype(operands)::Element, kGroups> hidden_rows;
      hidden_rows.load(operands, operand, weights.rank, 0);
      Unit<T>& unit = units[stage];
      wait_for_cta_phase(&unit.empty, parity ^ 1);
      if (lane < kUnitRows) {
        unit.row[lane] = row;
        unit.factor[lane] = weights.scale * found.scale;
      }
      if (lane == 0) {
        describe(unit, 0, 0);
        unit.is_new = is_new;
        unit.boxes = boxes;
        unit.by_rows = by_rows;
      }
      __syncwarp();
      if (lane == 0) arrive(&unit.known);
      // All reading of y is asked for here.
      unsigned char* const y_boxes = ring + stage * kPlaceBytes;
      if (by_rows) {
        if (row >= 0) {
          load_blocks(y_boxes + lane * kRowBytes, y_maps.row, row, y_column / kBlockColumns, &unit.full);
        }
      } else if (boxes == kWarps && is_whole) {
        if (lane == 0) load_blocks(y_boxes, y_maps.blocks, first_row, y_column / kBlockColumns, &unit.full);
      } else {
        if (lane < boxes) {
          load_box(y_boxes + lane * kBoxBytes, y_maps.box, y_column + lane * kBlockColumns, first_row,
                   &unit.full);
        }
        const T* const y = static_cast<const T*>(args.y) + y_column + lane * 8;
        const uint32_t to = shared_address(y_boxes + lane / 8 * kBoxBytes);
#pragma unroll 1
        for (int i = 0; i < min(tile.count - first, kUnitRows); ++i) {
          const int from = __shfl_sync(~0u, row, i);
          if (from < 0) continue;
#pragma unroll
          for (int column = 0; column < kCtaColumns; column += kLanes * 8) {
            if (column + lane * 8 < boxes * kBlockColumns || column + lane * 8 >= width) continue;
            copy16_async(to + column / kBlockColumns * kBoxBytes + i * kBlockBytes + (lane ^ i) % 8 * 16,
                         y + from * args.y_stride + column, true);
          }
        }
      }
      arrive_after_copies(&unit.full);
      hidden_rows.put(hidden + stage * stage_vectors, weights.rank, 0);
      for (int rank = kRanks; kIsLong && rank < weights.rank; rank += kRanks) {
        hidden_rows.load(operands, operand, weights.rank, rank);
        hidden_rows.put(hidden + stage * stage_vectors, weights.rank, rank);
      }
      arrive_full(unit, bytes);
      is_new = false;
      advance();
    }
    wait_for_cta_phase(&units[stage].empty, parity ^ 1);
    if (lane == 0) {
      units[stage].is_last = true;
      arrive(&units[stage].known);
    }
    return leave_idle();
  }

  const int g = lane / 4;
  const int t = lane % 4;
  int last_stage = -1;
  const auto leave_unit = [&] {
    if (lane == 0) {
      commit_bulk();
      wait_for_bulk_reads_but_one();
    }
    if (last_stage >= 0) arrive(&units[last_stage].empty);
    last_stage = stage;
    advance();
  };
  BHalves<T, kGroups> b;
  for (;;) {
    Unit<T>& unit = units[stage];
    wait_for_cta_phase(&unit.known, parity);
    if (unit.is_last) break;
    const Slice& slice = args.site.slices[unit.slice];
    const int width = static_cast<int>(slice.width);
    const int warp_column = unit.column + warp * kBlockColumns;
    unsigned char* const place = ring + stage * kPlaceBytes;
    if (!kIsLong && unit.b_end > unit.b_begin) {
      if (warp >= unit.b_begin && warp < unit.b_end) {
        wait_for_cta_phase(&unit.full, parity);
        const int64_t first = (warp - unit.b_begin) * kBlockColumns * unit.weights.stride;
        b.template load<true>(reinterpret_cast<const T*>(place) + first, unit.weights, width - warp_column,
                              0);
      }
      leave_unit();
      continue;
    }
    // This warp's y in pieces of 16 bytes. The copy engine turns those of a row by the place of its 128
    // bytes.
    const bool by_rows = unit.by_rows;
    uint4* const y = reinterpret_cast<uint4*>(place + warp * (by_rows ? kBlockBytes : kBoxBytes));
    const int pitch = (by_rows ? kRowBytes : kBlockBytes) / 16;
    const auto piece_of = [&](int row, int piece) {
      return row * pitch + (piece ^ (by_rows ? warp : row) % 8);
    };
    const auto multiply = [&](int half, int first_rank, float (&sums)[kTiles][4]) {
      const uint4* const h = hidden + stage * stage_vectors + first_rank / kGroupRanks * kLanes + lane;
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        if (kGroups > 2) __syncwarp();  // so that the compiler does not load all of h first
        b.multiply(half, q, h[q * kLanes], sums);
      }
    };
    const auto add = [&](int half, const float (&sums)[kTiles][4]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint4& pieces = y[(piece_of(g, 2 * t) ^ half) + 8 * r * pitch];
        pieces = add_delta<T>(pieces, sums, 2 * r, 2 * r + 1, unit.factor[g + 8 * r]);
      }
    };
    if constexpr (kIsLong) {
      wait_for_cta_phase(&unit.full, parity);
      float sums[2][kTiles][4] = {};
#pragma unroll 1
      for (int rank = 0; rank < unit.weights.rank; rank += kRanks) {
        if (unit.is_new || unit.weights.rank > kRanks) {
          b.template load<false>(unit.weights.b + warp_column * unit.weights.stride + rank, unit.weights,
                                 width - warp_column, rank);
        }
        multiply(0, rank, sums[0]);
        multiply(1, rank, sums[1]);
      }
      add(0, sums[0]);
      add(1, sums[1]);
    } else {
      wait_for_cta_phase(&unit.full, parity);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sums[kTiles][4] = {};
        multiply(half, 0, sums);
        add(half, sums);
        __syncwarp();  // so that the compiler does not begin the second half first
      }
    }
    fence_for_copy_engine();
    __syncwarp();
    const bool is_box = warp < unit.boxes;
    for (int i = lane; !is_box && i < kUnitRows * 8; i += kLanes) {
      const int64_t row = unit.row[i / 8];
      const int column = warp_column + i % 8 * 8;
      if (row >= 0 && column < width) {
        T* const to = static_cast<T*>(args.y) + row * args.y_stride + slice.offset + column;
        store16(to, y[piece_of(i / 8, i % 8)]);
      }
    }
    if (is_box && lane == 0)
      store_box(y_maps.box, static_cast<int>(slice.offset) + warp_column, unit.row[0], y);
    leave_unit();
  }
  if (lane == 0) wait_for_bulk();
#endif
}

// Beside its stages a CTA has the kilobyte that y is aligned to, and its units.
constexpr int kAlignBytes = 1024;
constexpr int kOwnBytes = kMaxStages * sizeof(Unit<__half>);

int64_t stage_bytes(int64_t vectors) {
  return kPlaceBytes + vectors * 16;
}

template <typename T, int kGroups, bool kIsLong, typename Args>
int launch_expand(const Args& args, void* stream) {
  constexpr int kCtas = num_ctas(kGroups);
  const auto kernel = expand_prefill_kernel<Args, T, kGroups, kIsLong>;
  YMaps y_maps;
  if (const int error = encode_y(args, kWarps, &y_maps)) return error;
  const int64_t tiles = max_prefill_tiles(args.rows, args.site.num_slots);
  const int64_t column_blocks = count_column_ctas(args.site, kCtaColumns);
  const Device device = current_device();
  // As many stages as leave room for kCtas CTAs, each with a kilobyte of the system's own, at least two.
  const int64_t bytes = stage_bytes(hidden_vectors<kGroups>(args.site.max_rank));
  const int64_t room = (device.shared_bytes + 1024) / kCtas - 1024 - kOwnBytes - kAlignBytes;
  const int stages = static_cast<int>(std::clamp<int64_t>(room / bytes, 2, kMaxStages / kCtas));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 device.shared_bytes - kOwnBytes);
  if (error != cudaSuccess) return error;
  // No less than keeps a further CTA off an SM: all start at once, and must be as many on each.
  const int64_t shared = std::max<int64_t>(stages * bytes + kAlignBytes, device.shared_bytes / (kCtas + 1));
  const dim3 grid(std::min<int64_t>(tiles * kTileUnits * column_blocks, kCtas * device.multiprocessors));
  return launch(kernel, grid, kThreads, 1, stream, static_cast<int>(shared), args, y_maps,
                static_cast<int>(tiles), static_cast<int>(column_blocks), stages);
}

// One group of ranks has an order of its own, which an embedding's decode tiles do not follow.
template <typename T, typename Args>
int expand(const Args& args, void* stream) {
  if constexpr (std::is_same_v<Args, ExpandArgs>) {
    if (args.site.max_rank <= 16) return launch_expand<T, 1, false>(args, stream);
  }
  if (args.site.max_rank <= 32) return launch_expand<T, 2, false>(args, stream);
  if (args.site.max_rank <= 64) return launch_expand<T, 4, false>(args, stream);
  if (args.site.max_rank <= 128) return launch_expand<T, 8, false>(args, stream);
  return launch_expand<T, 2, true>(args, stream);
}

}  // namespace

bool expand_prefill_has_room(const Site& site, const Device& device) {
  const int64_t bytes = stage_bytes(hidden_vectors<2>(site.max_rank));
  return 2 * bytes + kAlignBytes + kOwnBytes <= device.shared_bytes;
}

int expand_prefill(const ExpandArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? expand<__nv_bfloat16>(args, stream) : expand<__half>(args, stream);
}

int embedding_prefill(const EmbeddingArgs& args, void* stream) {
  return args.site.dtype == DType::bf16 ? expand<__nv_bfloat16>(args, stream) : expand<__half>(args, stream);
}

}  // namespace loramux
