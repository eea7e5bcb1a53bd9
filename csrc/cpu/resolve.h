// From a plan's tile and a slot's table entry to rows, pointers and a rank that lie inside the tensors,
// whatever the plan and the table hold.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lora.h"

namespace loramux {

// The rows of one tile; none if any of them, or the list that names them, lies outside.
struct TileRows {
  int32_t slot;
  int32_t count;
  GatheredRow rows[kPrefillRows];
};

// One slice of a site under one slot's adapter.
struct SliceWeights {
  const std::byte* a;  // linear: [rank, in_features]; embedding: [in_features, stride]
  const std::byte* b;  // [width, stride]
  int64_t rank;        // 0: nothing to do
  int64_t stride;      // elements
  float scale;
};

// Tiles that the header counts and the buffer has room for, decode tiles first.
struct TileCounts {
  int64_t decode, prefill;
};

inline TileCounts tile_counts(const PlanView& plan) {
  const int64_t room = plan.capacity / 4 - 1;
  const auto clamp = [room](int64_t count) { return std::clamp<int64_t>(count, 0, room); };
  return room < 0 ? TileCounts{} : TileCounts{clamp(plan.words[0]), clamp(plan.words[1])};
}

inline TileRows resolve_tile(const PlanView& plan, int64_t word, int64_t max_count, int64_t rows) {
  Tile tile;
  std::memcpy(&tile, plan.words + word, sizeof tile);
  const int64_t first = tile.first;
  const int64_t count = std::abs(int64_t{tile.count});
  if (first < 0 || count > max_count) return {};
  TileRows out{tile.slot, static_cast<int32_t>(count), {}};
  if (tile.count > 0) {
    if (first + count > std::min(rows, int64_t{1} << 31)) return {};
    for (int64_t i = 0; i < count; ++i) out.rows[i] = {static_cast<int32_t>(first + i), tile.scale};
    return out;
  }
  if (first + 2 * count > plan.capacity) return {};
  std::memcpy(out.rows, plan.words + first, count * sizeof(GatheredRow));
  const auto outside = [rows](const GatheredRow& r) { return r.row < 0 || r.row >= rows; };
  return std::any_of(out.rows, out.rows + count, outside) ? TileRows{} : out;
}

// Rank 0 stands for everything that cannot be served: an absent slice, a slot outside the table, blocks that
// reach past the weights.
inline SliceWeights resolve_slice(const Site& site, int32_t slot, int slice) {
  if (slot <= 0 || slot >= site.num_slots) return {};
  const SlotEntry& entry = site.table[slot * site.num_entries + site.entry + slice];
  if (entry.rank <= 0 || entry.rank > site.max_rank) return {};
  const Slice& s = site.slices[slice];
  const int64_t stride = site.rank_stride > 0 ? site.rank_stride : entry.rank;
  if (entry.rank > stride) return {};
  const int64_t a = entry.a * site.offset_unit;
  const int64_t b = entry.b * site.offset_unit;
  const int64_t bytes_per_column = stride * item_size(site.dtype);
  if (a + site.in_features * bytes_per_column > s.a_bytes) return {};
  if (b + s.width * bytes_per_column > s.b_bytes) return {};
  return {s.a + a, s.b + b, entry.rank, stride, entry.scale};
}

}  // namespace loramux
