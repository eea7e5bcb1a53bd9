#include "host/plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace loramux {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

// A slot of r rows takes ceil(r / 8) tiles, while they are decode tiles: one costs one row, each one more 8.
// A plan for a long step may hold a short one, whose slots may have more of them.
int64_t max_decode_tiles(int64_t rows, int64_t num_slots) {
  const int64_t adapters = std::max<int64_t>(num_slots - 1, 0);
  if (rows <= adapters) return rows;
  const int64_t tiles = std::min(adapters + (rows - adapters) / kDecodeRows,
                                 adapters * (max_decode_rows_of_slot(rows) / kDecodeRows));
  return rows < kLongStepRows ? tiles : std::max(tiles, max_decode_tiles(kLongStepRows - 1, num_slots));
}

// A slot of r rows takes ceil(r / 64) tiles, if they are prefill tiles: two cost 65 rows, each one more 64.
// In a long step another slot can have one tile for 33 rows.
int64_t max_prefill_tiles(int64_t rows, int64_t num_slots) {
  const int64_t adapters = std::max<int64_t>(num_slots - 1, 0);
  const int64_t pairs = std::min(rows / (kPrefillRows + 1), adapters);
  const int64_t left = rows - pairs * (kPrefillRows + 1);
  if (pairs < adapters && left > max_decode_rows_of_slot(rows)) return 2 * pairs + 1;
  return pairs == 0 ? 0 : 2 * pairs + left / kPrefillRows;
}

// A tile of n rows takes 4 words, and 2 n more if it is gathered, which needs n >= 2: at most 4 n in all.
int64_t plan_capacity(int64_t rows, int64_t num_slots) {
  const int64_t tiles = max_decode_tiles(rows, num_slots) + max_prefill_tiles(rows, num_slots);
  const int64_t words = std::min(tiles * kTileWords + rows * kRowWords, rows * kTileWords);
  return kTileWords * (1 + ceil_div(words, kTileWords));
}

// Adds a segment's rows, which come after all others of its slot.
inline void Planner::append(const PlanSegment& segment, int32_t first) {
  const auto [slot, rows, scale] = segment;
  if (slot >= static_cast<int64_t>(group_of_slot_.size())) group_of_slot_.resize(slot + int64_t{1}, -1);
  const int32_t run = static_cast<int32_t>(runs_.size());
  int32_t& index = group_of_slot_[slot];
  if (index < 0) {
    groups_.push_back({slot, rows, run, run});
    index = static_cast<int32_t>(groups_.size()) - 1;
  } else {
    Group& group = groups_[index];
    Run& last = runs_[group.last_run];
    group.rows += rows;
    if (last.first + last.rows == first && last.scale == scale) {
      last.rows += rows;
      return;
    }
    group.last_run = last.next = run;
  }
  runs_.push_back({first, rows, scale, -1});
}

PlanStatus Planner::plan(const PlanSegment* segments, int64_t count, int64_t num_slots, int32_t* words,
                         int64_t capacity) {
  reset();
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const PlanSegment& segment = segments[i];
    if (segment.slot >= num_slots) return PlanStatus::bad_slot;
    if (segment.rows < 0 || rows + segment.rows > kMaxInt32) return PlanStatus::bad_rows;
    if (segment.slot > 0 && segment.rows > 0) append(segment, static_cast<int32_t>(rows));
    rows += segment.rows;
  }

  const int64_t max_decode_rows = max_decode_rows_of_slot(rows);
  int64_t decode_tiles = 0, prefill_tiles = 0;
  for (const Group& group : groups_) {
    if (group.rows <= max_decode_rows)
      decode_tiles += ceil_div(group.rows, kDecodeRows);
    else
      prefill_tiles += ceil_div(group.rows, kPrefillRows);
  }
  // Refused before any tile is made: a wild count of rows costs no memory.
  const int64_t tile_words = kTileWords * (1 + decode_tiles + prefill_tiles);
  if (tile_words > capacity) return PlanStatus::too_small;

  gathered_at_ = kTileWords * (1 + decode_tiles);
  for (Group& group : groups_) {
    if (group.rows <= max_decode_rows) {
      pack_rows(group, kDecodeRows, decode_tiles_);
    } else {
      split_full_tiles(group);
      pack_rows(group, kPrefillRows, prefill_tiles_);
    }
  }
  const int64_t gathered = static_cast<int64_t>(gathered_.size());
  // Offsets of gathered rows are int32 words.
  if (tile_words + kRowWords * gathered > std::min(capacity, kMaxInt32)) return PlanStatus::too_small;

  *reinterpret_cast<PlanHeader*>(words) = {static_cast<int32_t>(decode_tiles),
                                           static_cast<int32_t>(prefill_tiles), static_cast<int32_t>(rows),
                                           static_cast<int32_t>(gathered)};
  std::copy(decode_tiles_.begin(), decode_tiles_.end(), reinterpret_cast<Tile*>(words) + 1);
  std::copy(gathered_.begin(), gathered_.end(), reinterpret_cast<GatheredRow*>(words + gathered_at_));
  std::copy(prefill_tiles_.begin(), prefill_tiles_.end(),
            std::make_reverse_iterator(reinterpret_cast<Tile*>(words + capacity)));
  return PlanStatus::ok;
}

void Planner::reset() {
  for (const Group& group : groups_) group_of_slot_[group.slot] = -1;
  groups_.clear();
  runs_.clear();
  decode_tiles_.clear();
  prefill_tiles_.clear();
  gathered_.clear();
}

// Turns what it can of every run into contiguous tiles of full height; the group keeps the remainders.
void Planner::split_full_tiles(Group& group) {
  for (int32_t i = group.first_run; i >= 0; i = runs_[i].next) {
    Run& run = runs_[i];
    const int32_t whole = run.rows / kPrefillRows * kPrefillRows;
    for (int32_t row = 0; row < whole; row += kPrefillRows)
      prefill_tiles_.push_back({group.slot, run.first + row, kPrefillRows, run.scale});
    run.first += whole;
    run.rows -= whole;
    group.rows -= whole;
  }
}

// Packs the group's rows densely into tiles of `height` rows, gathered where a tile spans several runs.
void Planner::pack_rows(const Group& group, int32_t height, std::vector<Tile>& tiles) {
  const Run* run = &runs_[group.first_run];
  int32_t used = 0;  // rows of the run
  const auto skip_used_runs = [&] {
    for (; used == run->rows; used = 0) run = &runs_[run->next];
  };
  for (int32_t left = group.rows; left > 0;) {
    skip_used_runs();
    const int32_t count = std::min(height, left);
    left -= count;
    if (run->rows - used >= count) {
      tiles.push_back({group.slot, run->first + used, count, run->scale});
      used += count;
      continue;
    }
    const size_t begin = gathered_.size();
    tiles.push_back({group.slot, static_cast<int32_t>(gathered_at_ + kRowWords * static_cast<int64_t>(begin)),
                     -count, 0.0f});
    gathered_.resize(begin + count);
    for (GatheredRow* row = &gathered_[begin]; row != gathered_.data() + gathered_.size(); ++row) {
      skip_used_runs();
      *row = {run->first + used++, run->scale};
    }
  }
}

}  // namespace loramux
