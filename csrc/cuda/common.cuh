// What every kernel shares: the plan and the slot table, read with distrust. Whatever they hold, the rows and
// blocks that these functions find lie inside the tensors.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/kernels.h"
#include "lora.h"

namespace loramux {

// The rows of one tile.
struct TileRows {
  int64_t first;  // contiguous: the first row. gathered: word offset in the plan of the first GatheredRow
  int32_t slot;
  int32_t count;  // 1 to the kind's height
  float scale;    // contiguous: of all rows
  bool gathered;
};

struct TileRow {
  int64_t index;  // in [0, rows), or -1: no row
  float scale;
};

// Tile `index` of a kind, in a call of `rows` rows. False past the last one, where it would lie outside the
// plan, and everywhere if the plan is for more rows: it is another call's.
__device__ inline bool find_tile(const PlanView& plan, TileKind kind, int64_t index, int64_t rows,
                                 TileRows* found) {
  const bool decode = kind == TileKind::decode;
  const int64_t word = decode ? kTileWords * (1 + index) : plan.capacity - kTileWords * (1 + index);
  if (word < kTileWords || word > plan.capacity - kTileWords) return false;
  // Both are asked for at once; the tile counts only if the header says so.
  const PlanHeader header = *reinterpret_cast<const PlanHeader*>(plan.words);
  const Tile tile = *reinterpret_cast<const Tile*>(plan.words + word);
  if (index >= (decode ? header.decode_tiles : header.prefill_tiles) || tile.count == 0 || header.rows > rows)
    return false;
  const int64_t count = tile.count < 0 ? -static_cast<int64_t>(tile.count) : tile.count;
  found->first = tile.first;
  found->slot = tile.slot;
  found->count = static_cast<int32_t>(min(count, int64_t{decode ? kDecodeRows : kPrefillRows}));
  found->scale = tile.scale;
  found->gathered = tile.count < 0;
  return true;
}

// Row i of a tile, in x and y of `rows` rows.
__device__ inline TileRow find_row(const PlanView& plan, const TileRows& tile, int i, int64_t rows) {
  TileRow row{-1, tile.scale};
  if (i >= tile.count) return row;
  if (tile.gathered) {
    const int64_t word = tile.first + 2 * i;
    if (word < kTileWords || word > plan.capacity - 2 || word % 2 != 0) return row;
    const GatheredRow gathered = *reinterpret_cast<const GatheredRow*>(plan.words + word);
    row = {gathered.row, gathered.scale};
  } else {
    row.index = tile.first + i;
  }
  if (row.index < 0 || row.index >= rows) row.index = -1;
  return row;
}

// One slice of a site under one slot's adapter.
template <typename T>
struct SliceWeights {
  const T* a;      // linear: [rank, in_features]; embedding: [in_features, stride]
  const T* b;      // [width, stride]
  int32_t rank;    // 0: nothing to do
  int64_t stride;  // elements between rows of B and of an embedding's A
  float scale;
};

// Rank 0 where the adapter does not touch the slice, and for everything that cannot be served: a slot outside
// the table, a rank that is no rank, blocks that reach past the weights.
template <typename T>
__device__ SliceWeights<T> find_slice(const Site& site, int32_t slot, int slice) {
  if (slot <= 0 || slot >= site.num_slots) return {};
  const SlotEntry entry = site.table[slot * site.num_entries + site.entry + slice];
  const Slice& s = site.slices[slice];
  const int64_t stride = site.rank_stride > 0 ? site.rank_stride : entry.rank;
  if (entry.rank <= 0 || entry.rank > site.max_rank || entry.rank > stride) return {};
  const int64_t a = entry.a * site.offset_unit;
  const int64_t b = entry.b * site.offset_unit;
  const int64_t column_bytes = stride * sizeof(T);
  if (a + site.in_features * column_bytes > s.a_bytes) return {};
  if (b + s.width * column_bytes > s.b_bytes) return {};
  return {reinterpret_cast<const T*>(s.a + a), reinterpret_cast<const T*>(s.b + b), entry.rank, stride,
          entry.scale};
}

// What an expand multiplies B by: rows of h, or vectors of an embedding's A. `stride` elements apart.
template <typename T>
struct Operands {
  using Element = T;
  const Element* data;
  int stride;
};

template <typename T>
__device__ Operands<float> find_operands(const ExpandArgs& args, const SliceWeights<T>&, int slice) {
  const int max_rank = static_cast<int>(args.site.max_rank);
  return {args.h + slice * max_rank, args.site.num_slices * max_rank};
}

template <typename T>
__device__ Operands<T> find_operands(const EmbeddingArgs&, const SliceWeights<T>& weights, int) {
  return {weights.a, static_cast<int>(weights.stride)};
}

// Which of the operands is a row's, once earlier kernels have ended. A row without one is none: its index
// becomes -1.
__device__ inline int64_t find_operand(const ExpandArgs&, TileRow* row) {
  return row->index;
}

__device__ inline int64_t find_operand(const EmbeddingArgs& args, TileRow* row) {
  if (row->index < 0) return -1;
  const int64_t id = args.ids64 ? static_cast<const int64_t*>(args.ids)[row->index]
                                : static_cast<const int32_t*>(args.ids)[row->index];
  if (id >= 0 && id < args.site.in_features) return id;
  return row->index = -1;
}

}  // namespace loramux
