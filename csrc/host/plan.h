// The planner: a step's segments to the binary plan of lora.h. Plain C++, no torch, no Python.
#pragma once

#include <cstdint>
#include <vector>

#include "lora.h"

namespace loramux {

// One request's span of the step, in packed order.
struct PlanSegment {
  int32_t slot;  // <= 0: base rows, which are in no tile
  int32_t rows;  // rows that a linear of this grouping sees, >= 0
  float scale;   // the request's own factor on its adapter's delta
};

// The most that any plan of at most `rows` rows over `num_slots` slots (slot 0 included) can hold; both
// counts of tiles are reached by some plan. They size the buffer and the launch grids, which must not depend
// on the batch.
int64_t max_decode_tiles(int64_t rows, int64_t num_slots);
int64_t max_prefill_tiles(int64_t rows, int64_t num_slots);
int64_t plan_capacity(int64_t rows, int64_t num_slots);  // int32 words, a multiple of 4

enum class PlanStatus {
  ok,
  bad_slot,   // a slot >= num_slots
  bad_rows,   // a negative count, or more than INT32_MAX rows in all
  too_small,  // the plan does not fit the capacity
};

// Keeps its scratch memory between calls, so that a step like the last one allocates nothing. One thread at a
// time.
class Planner {
 public:
  // Writes the plan into words[0 .. capacity): 16-byte aligned, and a multiple of 4 words. Slots come in
  // order of their first segment. On anything but ok nothing is written.
  PlanStatus plan(const PlanSegment* segments, int64_t count, int64_t num_slots, int32_t* words,
                  int64_t capacity);

 private:
  // Consecutive rows of one slot and one scale.
  struct Run {
    int32_t first;
    int32_t rows;
    float scale;
    int32_t next;  // the slot's next run, in row order
  };
  // All rows of one slot.
  struct Group {
    int32_t slot;
    int32_t rows;
    int32_t first_run;
    int32_t last_run;
  };

  void reset();
  void append(const PlanSegment& segment, int32_t first);
  void split_full_tiles(Group& group);
  void pack_rows(const Group& group, int32_t height, std::vector<Tile>& tiles);

  std::vector<int32_t> group_of_slot_;  // index in groups_, or -1
  std::vector<Group> groups_;
  std::vector<Run> runs_;
  std::vector<Tile> decode_tiles_;
  std::vector<Tile> prefill_tiles_;
  std::vector<GatheredRow> gathered_;
  int64_t gathered_at_ = 0;  // word of the plan where gathered_ will lie
};

}  // namespace loramux
