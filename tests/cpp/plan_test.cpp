#include "host/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace loramux {
namespace {

constexpr int32_t kCanary = 0x5a5a5a5a;

struct TileRows {
  int32_t slot;
  bool contiguous;
  std::vector<int32_t> rows;
  std::vector<float> scales;

  bool operator==(const TileRows&) const = default;
};

// A tile of consecutive rows.
TileRows span(int32_t slot, int32_t first, int32_t count, float scale = 1.0f) {
  TileRows tile{slot, true, std::vector<int32_t>(count), std::vector<float>(count, scale)};
  std::iota(tile.rows.begin(), tile.rows.end(), first);
  return tile;
}

// A gathered tile of the rows of these spans.
TileRows gathered(const std::vector<TileRows>& spans) {
  TileRows tile{spans[0].slot, false, {}, {}};
  for (const TileRows& part : spans) {
    tile.rows.insert(tile.rows.end(), part.rows.begin(), part.rows.end());
    tile.scales.insert(tile.scales.end(), part.scales.begin(), part.scales.end());
  }
  return tile;
}

int64_t total_rows(const std::vector<PlanSegment>& segments) {
  int64_t rows = 0;
  for (const PlanSegment& segment : segments) rows += segment.rows;
  return rows;
}

class PlanTest : public testing::Test {
 protected:
  PlanStatus plan(const std::vector<PlanSegment>& segments, int64_t num_slots, int64_t capacity) {
    buffer_.assign(1 + capacity / 4, {kCanary, kCanary, kCanary, kCanary});
    capacity_ = capacity;
    return planner_.plan(segments.data(), static_cast<int64_t>(segments.size()), num_slots, words(),
                         capacity);
  }

  PlanStatus plan(const std::vector<PlanSegment>& segments, int64_t num_slots = 8) {
    return plan(segments, num_slots, plan_capacity(total_rows(segments), num_slots));
  }

  int32_t* words() { return &buffer_[0].decode_tiles; }
  const PlanHeader& header() { return buffer_[0]; }

  std::vector<TileRows> decode_tiles() {
    std::vector<TileRows> tiles;
    for (int32_t i = 0; i < header().decode_tiles; ++i) tiles.push_back(read_tile(4 * (1 + i)));
    return tiles;
  }

  std::vector<TileRows> prefill_tiles() {
    std::vector<TileRows> tiles;
    for (int32_t i = 0; i < header().prefill_tiles; ++i) tiles.push_back(read_tile(capacity_ - 4 * (1 + i)));
    return tiles;
  }

  Planner planner_;
  std::vector<PlanHeader> buffer_;  // for its alignment
  int64_t capacity_ = 0;

 private:
  TileRows read_tile(int64_t word) {
    const Tile& tile = *reinterpret_cast<const Tile*>(words() + word);
    if (tile.count > 0) return span(tile.slot, tile.first, tile.count, tile.scale);
    TileRows rows{tile.slot, false, {}, {}};
    const auto* list = reinterpret_cast<const GatheredRow*>(words() + tile.first);
    for (int32_t i = 0; i < -tile.count; ++i) {
      rows.rows.push_back(list[i].row);
      rows.scales.push_back(list[i].scale);
    }
    return rows;
  }
};

using Tiles = std::vector<TileRows>;

TEST_F(PlanTest, BaseRowsAreCountedAndInNoTile) {
  ASSERT_EQ(plan({{0, 3, 1.0f}, {-1, 100, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(header().rows, 103);
  EXPECT_EQ(header().decode_tiles, 0);
  EXPECT_EQ(header().prefill_tiles, 0);
}

TEST_F(PlanTest, DecodeRowsOfASlotShareTilesWhereverTheyLie) {
  ASSERT_EQ(plan({{2, 5, 1.0f}, {1, 1, 1.0f}, {0, 1, 1.0f}, {2, 4, 0.5f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(),
            (Tiles{gathered({span(2, 0, 5), span(2, 7, 3, 0.5f)}), span(2, 10, 1, 0.5f), span(1, 5, 1)}));
}

TEST_F(PlanTest, AdjacentSegmentsOfOneScaleAreContiguous) {
  ASSERT_EQ(plan({{1, 2, 1.0f}, {1, 3, 1.0f}, {1, 3, 2.0f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(), (Tiles{gathered({span(1, 0, 5), span(1, 5, 3, 2.0f)})}));
  ASSERT_EQ(plan({{1, 2, 1.0f}, {1, 0, 2.0f}, {1, 3, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(), (Tiles{span(1, 0, 5)}));
}

TEST_F(PlanTest, TheRowsOfASlotInTheStepDecideBetweenDecodeAndPrefill) {
  ASSERT_EQ(plan({{1, 16, 1.0f}, {0, 1, 1.0f}, {1, 16, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(), (Tiles{span(1, 0, 8), span(1, 8, 8), span(1, 17, 8), span(1, 25, 8)}));
  ASSERT_EQ(plan({{1, 32, 1.0f}, {0, 1, 1.0f}, {1, 33, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(), Tiles{});
  EXPECT_EQ(prefill_tiles(), (Tiles{gathered({span(1, 0, 32), span(1, 33, 32)}), span(1, 65, 1)}));
}

TEST_F(PlanTest, ALongStepHasFewerRowsOfASlotInDecodeTiles) {
  ASSERT_EQ(plan({{1, 33, 1.0f}, {0, 478, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(header().decode_tiles, 5);
  EXPECT_EQ(header().prefill_tiles, 0);
  ASSERT_EQ(plan({{1, 33, 1.0f}, {2, 32, 1.0f}, {0, 447, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(header().decode_tiles, 4);
  EXPECT_EQ(prefill_tiles(), (Tiles{span(1, 0, 33)}));
}

TEST_F(PlanTest, PrefillSegmentsGiveFullTilesAndGatherTheirRemainders) {
  ASSERT_EQ(plan({{3, 74, 1.0f}, {2, 1, 1.0f}, {3, 64, 1.0f}, {0, 1, 1.0f}, {3, 124, 0.5f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(), (Tiles{span(2, 74, 1)}));
  EXPECT_EQ(prefill_tiles(),
            (Tiles{span(3, 0, 64), span(3, 75, 64), span(3, 140, 64, 0.5f),
                   gathered({span(3, 64, 10), span(3, 204, 54, 0.5f)}), span(3, 258, 6, 0.5f)}));
}

TEST_F(PlanTest, SlotsComeInOrderOfFirstAppearance) {
  ASSERT_EQ(plan({{5, 1, 1.0f}, {1, 1, 1.0f}, {7, 70, 1.0f}, {5, 1, 1.0f}, {3, 70, 1.0f}}), PlanStatus::ok);
  EXPECT_EQ(decode_tiles(), (Tiles{gathered({span(5, 0, 1), span(5, 72, 1)}), span(1, 1, 1)}));
  EXPECT_EQ(prefill_tiles(), (Tiles{span(7, 2, 64), span(7, 66, 6), span(3, 73, 64), span(3, 137, 6)}));
}

TEST_F(PlanTest, RefusesWhatIsNoPlanAndWritesNothing) {
  const auto expect_refused = [&](const std::vector<PlanSegment>& segments, int64_t capacity,
                                  PlanStatus status) {
    EXPECT_EQ(plan(segments, 8, capacity), status);
    EXPECT_EQ(std::count(words(), words() + capacity + 4, kCanary), capacity + 4);
  };
  const int32_t max = std::numeric_limits<int32_t>::max();
  expect_refused({{1, 1, 1.0f}, {8, 1, 1.0f}}, 64, PlanStatus::bad_slot);
  expect_refused({{1, 1, 1.0f}, {1, -1, 1.0f}}, 64, PlanStatus::bad_rows);
  expect_refused({{0, max, 1.0f}, {0, 1, 1.0f}}, 64, PlanStatus::bad_rows);
  expect_refused({{1, max, 1.0f}}, 64, PlanStatus::too_small);
  expect_refused({}, 0, PlanStatus::too_small);
  EXPECT_EQ(plan({{0, max, 1.0f}}, 8, 64), PlanStatus::ok);
}

TEST_F(PlanTest, FitsItsExactSizeAndNothingSmaller) {
  const std::vector<PlanSegment> segments = {
      {1, 2, 1.0f}, {2, 70, 1.0f}, {1, 2, 1.0f}, {2, 30, 1.0f}, {3, 8, 1.0f}};
  // Header, 2 decode tiles, 4 + 36 gathered rows, 2 prefill tiles.
  const int64_t exact = 4 + 2 * 4 + 40 * 2 + 2 * 4;
  ASSERT_EQ(plan(segments, 8, exact - 4), PlanStatus::too_small);
  EXPECT_EQ(std::count(words(), words() + exact, kCanary), exact);
  ASSERT_EQ(plan(segments, 8, exact), PlanStatus::ok);
  EXPECT_EQ(std::count(words() + exact, words() + exact + 4, kCanary), 4);
  EXPECT_EQ(decode_tiles(), (Tiles{gathered({span(1, 0, 2), span(1, 72, 2)}), span(3, 104, 8)}));
  EXPECT_EQ(prefill_tiles(), (Tiles{span(2, 2, 64), gathered({span(2, 66, 6), span(2, 74, 30)})}));
}

TEST_F(PlanTest, APlanDoesNotDependOnTheOnesBefore) {
  const std::vector<PlanSegment> segments = {{1, 70, 1.0f}, {2, 1, 1.0f}, {1, 1, 2.0f}, {2, 1, 1.0f}};
  ASSERT_EQ(plan(segments), PlanStatus::ok);
  const std::vector<int32_t> first(words(), words() + capacity_);
  ASSERT_EQ(plan({{2, 100, 1.0f}, {1, 9, 1.0f}, {9, 1, 1.0f}}), PlanStatus::bad_slot);
  ASSERT_EQ(plan({{2, 100, 1.0f}, {1, 9, 1.0f}}, 8, 8), PlanStatus::too_small);
  ASSERT_EQ(plan(segments), PlanStatus::ok);
  EXPECT_EQ(std::vector<int32_t>(words(), words() + capacity_), first);
}

// most[r]: the most tiles that r rows make when `adapters` slots share them in any way.
template <typename TilesOfSlot>
std::vector<int64_t> most_tiles(int64_t max_rows, int64_t adapters, TilesOfSlot tiles_of_slot) {
  std::vector<int64_t> most(max_rows + 1, 0);
  for (int64_t slot = 0; slot < adapters; ++slot)
    for (int64_t rows = max_rows; rows > 0; --rows)
      for (int64_t own = 1; own <= rows; ++own)
        most[rows] = std::max(most[rows], tiles_of_slot(own) + most[rows - own]);
  return most;
}

TEST(PlanBounds, TileBoundsAreReachedAndNeverExceeded) {
  const int64_t max_rows = 2 * kLongStepRows;
  for (int64_t num_slots : {1, 2, 3, 5, 9, 40}) {
    int64_t decode = 0, prefill = 0;  // of steps of so many rows or fewer
    for (const auto& [from, to] : {std::pair{int64_t{0}, kLongStepRows - 1}, {kLongStepRows, max_rows}}) {
      const int64_t max_decode_rows = max_decode_rows_of_slot(from);
      const auto decode_tiles = most_tiles(to, num_slots - 1, [&](int64_t rows) {
        return rows <= max_decode_rows ? (rows + kDecodeRows - 1) / kDecodeRows : 0;
      });
      const auto prefill_tiles = most_tiles(to, num_slots - 1, [&](int64_t rows) {
        return rows > max_decode_rows ? (rows + kPrefillRows - 1) / kPrefillRows : 0;
      });
      for (int64_t rows = from; rows <= to; ++rows) {
        decode = std::max(decode, decode_tiles[rows]);
        prefill = std::max(prefill, prefill_tiles[rows]);
        EXPECT_EQ(max_decode_tiles(rows, num_slots), decode) << rows << " rows, " << num_slots << " slots";
        EXPECT_EQ(max_prefill_tiles(rows, num_slots), prefill) << rows << " rows, " << num_slots << " slots";
      }
    }
  }
}

TEST(PlanBounds, ADecodeStepOverManySlotsHasATileARow) {
  EXPECT_EQ(max_decode_tiles(8, 512), 8);
  EXPECT_EQ(max_prefill_tiles(64, 512), 0);
  EXPECT_EQ(plan_capacity(8, 512), 4 + 8 * 4);
}

}  // namespace
}  // namespace loramux
