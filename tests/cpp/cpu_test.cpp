#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "half.h"

namespace loramux {
namespace {

// Memory that ends at a page nobody may touch, so that a read past the end is seen as well as a write. Before
// it lie bytes that must keep their value.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    pages_ = (bytes + 64 + page - 1) / page * page;
    void* map = mmap(nullptr, pages_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    map_ = static_cast<std::byte*>(map);
    mprotect(map_ + pages_, page, PROT_NONE);
    std::memset(map_, 0x5a, pages_ - bytes_);
  }
  Buffer(Buffer&& other) noexcept
      : map_(std::exchange(other.map_, nullptr)), bytes_(other.bytes_), pages_(other.pages_) {}
  ~Buffer() {
    if (map_ == nullptr) return;
    for (int64_t i = 0; i < pages_ - bytes_; ++i)
      if (map_[i] != std::byte{0x5a}) ADD_FAILURE() << "byte " << i - (pages_ - bytes_) << " was written";
    munmap(map_, pages_ + sysconf(_SC_PAGESIZE));
  }

  template <typename T = std::byte>
  T* data() {
    return reinterpret_cast<T*>(map_ + pages_ - bytes_);
  }
  int64_t bytes() const { return bytes_; }
  std::vector<std::byte> copy() { return {data(), data() + bytes_}; }

 private:
  std::byte* map_;
  int64_t bytes_;
  int64_t pages_;
};

float read(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  const uint16_t half = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::f16 ? f16_to_float(half) : bf16_to_float(half);
}

void write(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::f32)
    static_cast<float*>(data)[i] = value;
  else
    static_cast<uint16_t*>(data)[i] = dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
}

// A matrix of one dtype whose rows lie `stride` elements apart.
struct Matrix {
  Matrix(DType dtype, int64_t rows, int64_t columns, int64_t stride)
      : dtype(dtype),
        rows(rows),
        columns(columns),
        stride(stride),
        buffer(((rows - 1) * stride + columns) * item_size(dtype)) {}

  void fill(std::mt19937& random, float spread) {
    std::normal_distribution<float> normal(0, spread);
    for (int64_t i = 0; i < buffer.bytes() / item_size(dtype); ++i)
      write(buffer.data(), dtype, i, normal(random));
  }
  float at(int64_t row, int64_t column) { return read(buffer.data(), dtype, row * stride + column); }

  DType dtype;
  int64_t rows, columns, stride;
  Buffer buffer;
};

// A plan written tile by tile.
class PlanBuilder {
 public:
  explicit PlanBuilder(int32_t rows, int64_t capacity = 2048) : words_(capacity, 0), end_(capacity / 2) {
    words_[2] = rows;
  }

  void contiguous(int32_t slot, int32_t first, int32_t count, float scale = 1) {
    tile(count > kDecodeRows, {slot, first, count, scale});
  }
  void gathered(int32_t slot, const std::vector<GatheredRow>& rows) {
    const auto count = static_cast<int32_t>(rows.size());
    tile(count > kDecodeRows, {slot, end_, -count, 0});
    std::memcpy(&words_[end_], rows.data(), rows.size() * sizeof(GatheredRow));
    end_ += 2 * count;
    words_[3] += count;
  }
  const std::vector<int32_t>& words() const { return words_; }

 private:
  void tile(bool prefill, const Tile& tile) {
    const int64_t i = words_[prefill]++;
    const int64_t at = prefill ? static_cast<int64_t>(words_.size()) - 4 * (1 + i) : 4 * (1 + i);
    std::memcpy(&words_[at], &tile, sizeof tile);
  }

  std::vector<int32_t> words_;
  int32_t end_;
};

// Adapters in an arena of blocks, as a pool holds them, or in stacked tensors [slots, max_rank, in] and
// [slots, out, max_rank]. ranks[slot][slice] includes slot 0, whose ranks are 0.
struct Adapters {
  using Ranks = std::vector<std::vector<int32_t>>;

  Adapters(DType dtype, int64_t in, std::vector<int64_t> widths, Ranks ranks, std::mt19937& random,
           bool stacked = false, bool embedding = false)
      : ranks(ranks), embedding(embedding), table(sizeof(SlotEntry) * ranks.size() * widths.size()) {
    for (const auto& slot : ranks)
      for (const int32_t rank : slot) site.max_rank = std::max<int64_t>(site.max_rank, rank);
    site.max_rank += 3;
    site.offset_unit = stacked ? 16 : kBlockAlign;
    site.rank_stride = stacked ? (site.max_rank + 7) / 8 * 8 : 0;
    site.num_slots = static_cast<int64_t>(ranks.size());
    site.num_entries = site.num_slices = static_cast<int32_t>(widths.size());
    site.in_features = in;
    site.dtype = dtype;
    site.table = table.data<SlotEntry>();
    std::memset(table.data(), 0, table.bytes());

    const int64_t item = item_size(dtype), unit = site.offset_unit;
    int64_t bytes = 0, column = 0;
    const auto place = [&](int64_t size) {
      return std::exchange(bytes, (bytes + size + unit - 1) / unit * unit) / unit;
    };
    for (size_t slice = 0; slice < widths.size(); ++slice) {
      site.slices[slice].width = widths[slice];
      site.slices[slice].offset = std::exchange(column, column + widths[slice]);
    }
    for (size_t slot = 1; slot < ranks.size(); ++slot) {
      for (size_t slice = 0; slice < widths.size(); ++slice) {
        const int64_t rank = ranks[slot][slice], room = stacked ? site.rank_stride : rank;
        if (rank == 0) continue;
        SlotEntry& entry = table.data<SlotEntry>()[slot * widths.size() + slice];
        entry.a = static_cast<uint32_t>(place(room * in * item));
        entry.b = static_cast<uint32_t>(place(room * widths[slice] * item));
        entry.rank = static_cast<int32_t>(rank);
        entry.scale = 0.37f + 0.1f * slot;
      }
    }
    arena = std::make_unique<Matrix>(dtype, 1, bytes / item, bytes / item);
    arena->fill(random, 1);
    for (size_t slice = 0; slice < widths.size(); ++slice) {
      site.slices[slice].a = site.slices[slice].b = arena->buffer.data();
      site.slices[slice].a_bytes = site.slices[slice].b_bytes = bytes;
    }
  }

  SlotEntry& entry(int64_t slot, int64_t slice) {
    return table.data<SlotEntry>()[slot * site.num_slices + slice];
  }

  double a(const SlotEntry& e, int64_t j, int64_t k) {
    const int64_t stride = site.rank_stride > 0 ? site.rank_stride : e.rank;
    return arena->at(0, e.a * elements_per_unit() + (embedding ? k * stride + j : j * site.in_features + k));
  }
  double b(const SlotEntry& e, int64_t n, int64_t j) {
    const int64_t stride = site.rank_stride > 0 ? site.rank_stride : e.rank;
    return arena->at(0, e.b * elements_per_unit() + n * stride + j);
  }
  int64_t elements_per_unit() const { return site.offset_unit / item_size(site.dtype); }

  Ranks ranks;
  bool embedding;
  Site site{};
  Buffer table;
  std::unique_ptr<Matrix> arena;
};

// The slot (0: base) and the factor of every row.
struct RowAdapter {
  int32_t slot = 0;
  float scale = 1;
};

void serial(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  body(0, count);
}

ParallelFor in_parts(int64_t parts) {
  return [parts](int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    for (int64_t i = 0; i < parts; ++i) body(count * i / parts, count * (i + 1) / parts);
  };
}

void on_threads(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < 3; ++i)
    threads.emplace_back([=, &body] { body(count * i / 3, count * (i + 1) / 3); });
  for (std::thread& thread : threads) thread.join();
}

using Param = std::tuple<const Kernels*, DType>;

class CpuTest : public testing::TestWithParam<Param> {
 protected:
  const Kernels& kernels() { return *std::get<0>(GetParam()); }
  DType dtype() { return std::get<1>(GetParam()); }

  void apply(Adapters& adapters, const std::vector<int32_t>& plan, Matrix& x, Matrix& y,
             const ParallelFor& parallel_for) {
    Buffer words(plan.size() * 4);
    std::memcpy(words.data(), plan.data(), words.bytes());
    const PlanView view{words.data<int32_t>(), static_cast<int64_t>(plan.size())};
    Buffer h(y.rows * adapters.site.num_slices * adapters.site.max_rank * 4);
    std::memset(h.data(), 0xff, h.bytes());  // NaN: what a shrink does not write must not be read
    shrink(kernels(), {adapters.site, view, x.buffer.data(), x.stride, x.rows, h.data<float>()},
           parallel_for);
    expand(kernels(), {adapters.site, view, h.data<float>(), y.buffer.data(), y.stride, y.rows},
           parallel_for);
  }

  // Compares y with the definition in float64. `input(row, k)` are the values of x, or a token's one-hot row.
  template <typename Input>
  void expect_definition(Adapters& adapters, const std::vector<RowAdapter>& rows, Input input, Matrix& before,
                         Matrix& y) {
    const Site& site = adapters.site;
    // Unit roundoff of y, and of the sums: float32 with some growth, 16 bits where h is a pair of bfloat16.
    const double rounding = std::ldexp(1, dtype() == DType::f32 ? -24 : dtype() == DType::f16 ? -11 : -8);
    const double summing = dtype() == DType::bf16 ? std::ldexp(1, -16) : std::ldexp(1, -18);
    for (int64_t i = 0; i < y.rows; ++i) {
      for (int64_t s = 0; s < site.num_slices; ++s) {
        const SlotEntry& e = adapters.entry(rows[i].slot, s);
        std::vector<double> h(e.rank), size(e.rank);
        for (int32_t j = 0; j < e.rank; ++j) {
          for (int64_t k = 0; k < site.in_features; ++k) {
            h[j] += input(i, k) * adapters.a(e, j, k);
            size[j] += std::abs(input(i, k) * adapters.a(e, j, k));
          }
        }
        for (int64_t n = 0; n < site.slices[s].width; ++n) {
          const int64_t column = site.slices[s].offset + n;
          double delta = 0, terms = 0;
          for (int32_t j = 0; j < e.rank; ++j) {
            delta += h[j] * adapters.b(e, n, j);
            terms += size[j] * std::abs(adapters.b(e, n, j));
          }
          const double scale = double{e.scale} * rows[i].scale;
          const double want = before.at(i, column) + scale * delta;
          const double allowed = 1.01 * rounding * std::abs(want) + summing * std::abs(scale) * terms + 1e-7;
          if (e.rank == 0)
            ASSERT_EQ(y.at(i, column), before.at(i, column)) << "base row " << i << " column " << column;
          else
            ASSERT_NEAR(y.at(i, column), want, allowed) << "row " << i << " column " << column;
        }
      }
    }
  }

  std::mt19937 random_{17};
};

// 80 rows: prefill and decode tiles, contiguous and gathered, of five adapters with absent slices and base
// rows.
std::vector<RowAdapter> mixed_step(PlanBuilder& plan) {
  std::vector<RowAdapter> rows(80);
  std::vector<GatheredRow> gathered_prefill, gathered_decode;
  const auto set = [&rows](int32_t row, int32_t slot, float scale) { rows[row] = {slot, scale}; };
  for (int32_t i = 0; i < 37; ++i) set(i, 1, 0.5f);
  plan.contiguous(1, 0, 37, 0.5f);
  for (int32_t i = 40; i < 60; i += 2) {
    set(i, 2, 1 + 0.25f * (i % 3));
    gathered_prefill.push_back({i, rows[i].scale});
  }
  plan.gathered(2, gathered_prefill);
  for (const int32_t i : {41, 43, 47, 70, 79}) {
    set(i, 3, -1.5f);
    gathered_decode.push_back({i, rows[i].scale});
  }
  plan.gathered(3, gathered_decode);
  for (int32_t i = 60; i < 68; ++i) set(i, 4, 1);
  plan.contiguous(4, 60, 8);
  for (int32_t i = 71; i < 74; ++i) set(i, 4, 2);  // a second tile of the same slot
  plan.contiguous(4, 71, 3, 2);
  set(75, 5, 1);
  plan.contiguous(5, 75, 1);
  return rows;
}

TEST_P(CpuTest, AppliesTheDefinitionAtAnyWidthAndRank) {
  struct Shape {
    int64_t in;
    std::vector<int64_t> widths;
    Adapters::Ranks ranks;
  };
  const std::vector<Shape> shapes = {
      {1, {1}, {{0}, {1}, {2}, {3}, {1}, {5}}},
      {77, {5, 67, 130}, {{0, 0, 0}, {8, 0, 8}, {3, 16, 1}, {0, 24, 40}, {13, 33, 64}, {7, 7, 7}}},
      {1091, {200}, {{0}, {16}, {65}, {130}, {32}, {64}}},
      {2 * 1024, {64, 192}, {{0, 0}, {64, 16}, {16, 16}, {8, 8}, {16, 0}, {48, 80}}},
  };
  for (const Shape& shape : shapes) {
    for (const ParallelFor& parallel_for : {ParallelFor(serial), in_parts(7), ParallelFor(on_threads)}) {
      Adapters adapters(dtype(), shape.in, shape.widths, shape.ranks, random_);
      PlanBuilder plan(80);
      const std::vector<RowAdapter> rows = mixed_step(plan);
      const int64_t width = adapters.site.slices[shape.widths.size() - 1].offset + shape.widths.back();
      Matrix x(dtype(), 80, shape.in, shape.in + 3), y(dtype(), 80, width, width + 5),
          before(dtype(), 80, width, width + 5);
      x.fill(random_, 1);
      y.fill(random_, 1);
      std::memcpy(before.buffer.data(), y.buffer.data(), y.buffer.bytes());
      apply(adapters, plan.words(), x, y, parallel_for);
      expect_definition(adapters, rows, [&](int64_t i, int64_t k) { return double{x.at(i, k)}; }, before, y);
      for (int64_t i = 0; i + 1 < 80; ++i)
        for (int64_t n = width; n < width + 5; ++n)
          ASSERT_EQ(y.at(i, n), before.at(i, n)) << "between rows of y";
    }
  }
}

TEST_P(CpuTest, ReadsStackedWeightsByTheirFullRank) {
  Adapters adapters(dtype(), 96, {70, 33}, {{0, 0}, {16, 5}, {8, 0}}, random_, /*stacked=*/true);
  PlanBuilder plan(12);
  plan.contiguous(1, 0, 5);
  plan.gathered(2, {{7, 1.f}, {11, 0.5f}});
  std::vector<RowAdapter> rows(12);
  for (int i = 0; i < 5; ++i) rows[i].slot = 1;
  rows[7] = {2, 1.f};
  rows[11] = {2, 0.5f};
  Matrix x(dtype(), 12, 96, 96), y(dtype(), 12, 103, 103), before(dtype(), 12, 103, 103);
  x.fill(random_, 1);
  before.fill(random_, 1);
  std::memcpy(y.buffer.data(), before.buffer.data(), y.buffer.bytes());
  apply(adapters, plan.words(), x, y, serial);
  expect_definition(adapters, rows, [&](int64_t i, int64_t k) { return double{x.at(i, k)}; }, before, y);
}

TEST_P(CpuTest, EmbedsTokensAndLeavesUnknownOnesAlone) {
  const std::vector<int64_t> ids = {3, -1, 28, 0, 29, 11, 1L << 40, 28};
  for (const bool ids64 : {false, true}) {
    Adapters adapters(dtype(), 29, {75}, {{0}, {13}, {8}}, random_, false, /*embedding=*/true);
    PlanBuilder plan(8);
    plan.contiguous(1, 0, 5, 0.5f);
    plan.gathered(2, {{7, 1.f}, {6, 1.f}});
    std::vector<RowAdapter> rows(8);
    Buffer id_buffer(8 * (ids64 ? 8 : 4));
    for (int i = 0; i < 8; ++i) {
      const bool known = ids[i] >= 0 && ids[i] < 29;
      if (i < 5) rows[i] = {known ? 1 : 0, 0.5f};
      if (i == 7) rows[i] = {2, 1};
      if (ids64)
        id_buffer.data<int64_t>()[i] = ids[i];
      else
        id_buffer.data<int32_t>()[i] = static_cast<int32_t>(std::min<int64_t>(ids[i], 1 << 30));
    }
    Matrix y(dtype(), 8, 75, 80), before(dtype(), 8, 75, 80);
    before.fill(random_, 1);
    for (int64_t n = 0; n < 75; ++n) write(before.buffer.data(), dtype(), 80 + n, -0.0f);
    std::memcpy(y.buffer.data(), before.buffer.data(), y.buffer.bytes());
    Buffer words(plan.words().size() * 4);
    std::memcpy(words.data(), plan.words().data(), words.bytes());
    embedding(kernels(),
              {{adapters.site, {words.data<int32_t>(), words.bytes() / 4}, nullptr, y.buffer.data(), 80, 8},
               id_buffer.data(),
               ids64},
              in_parts(3));
    expect_definition(
        adapters, rows, [&](int64_t i, int64_t k) { return ids[i] == k ? 1.0 : 0.0; }, before, y);
    for (int64_t n = 0; n < 75; ++n)
      EXPECT_TRUE(std::signbit(y.at(1, n))) << "row of an unknown token was touched";
  }
}

TEST_P(CpuTest, GivesARowTheSameBitsInAnyBatch) {
  constexpr int64_t kIn = 2500, kWidth = 203, kRows = 64;
  for (const int32_t rank : {16, 40, 67}) {
    Adapters adapters(dtype(), kIn, {kWidth}, {{0}, {rank}}, random_);
    Matrix x(dtype(), kRows, kIn, kIn), start(dtype(), kRows, kWidth, kWidth);
    x.fill(random_, 1);
    start.fill(random_, 1);
    const auto run = [&](const PlanBuilder& plan, const ParallelFor& parallel_for) {
      Matrix y(dtype(), kRows, kWidth, kWidth);
      std::memcpy(y.buffer.data(), start.buffer.data(), y.buffer.bytes());
      apply(adapters, plan.words(), x, y, parallel_for);
      return y.buffer.copy();
    };
    const int64_t row_bytes = kWidth * item_size(dtype());
    std::vector<std::byte> alone = start.buffer.copy();
    for (int32_t i = 0; i < kRows; ++i) {
      PlanBuilder plan(kRows);
      plan.contiguous(1, i, 1);
      const std::vector<std::byte> y = run(plan, serial);
      std::copy_n(y.begin() + i * row_bytes, row_bytes, alone.begin() + i * row_bytes);
    }
    const auto expect_alone = [&](const PlanBuilder& plan, int64_t rows) {
      for (const int64_t parts : {1, 2, 1000}) {
        const std::vector<std::byte> y = run(plan, in_parts(parts));
        EXPECT_TRUE(std::equal(y.begin(), y.begin() + rows * row_bytes, alone.begin()))
            << rows << " rows of rank " << rank << " in " << parts << " parts";
      }
    };
    for (const int32_t rows : {2, 3, 4, 5, 6, 7, 8, 13, 37, 64}) {
      PlanBuilder plan(kRows);
      plan.contiguous(1, 0, rows);
      expect_alone(plan, rows);
    }
    PlanBuilder tiles(kRows), gathered(kRows);
    std::vector<GatheredRow> backwards;
    for (int32_t i = 0; i < kRows; ++i) tiles.contiguous(1, i, 1);
    for (int32_t i = kRows - 1; i >= 0; --i) backwards.push_back({i, 1});
    gathered.gathered(1, backwards);
    expect_alone(tiles, kRows);
    expect_alone(gathered, kRows);
  }
}

TEST_P(CpuTest, RoundsOnceToNearestEven) {
  // x, A and B are 1 and y is 0, so that y becomes the scale.
  const std::vector<uint32_t> scales = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f801000,
                                        0x3f803000, 0x3f801001, 0x7f7fffff, 0x7f800000,
                                        0xff800000, 0x7f800001, 0x7fc00000, 0xbf818000};
  for (const uint32_t bits : scales) {
    Adapters adapters(dtype(), 1, {19}, {{0}, {1}}, random_);
    for (int64_t i = 0; i < adapters.arena->columns; ++i) write(adapters.arena->buffer.data(), dtype(), i, 1);
    adapters.entry(1, 0).scale = bits_float(bits);
    PlanBuilder plan(1);
    plan.contiguous(1, 0, 1);
    Matrix x(dtype(), 1, 1, 1), y(dtype(), 1, 19, 19), want(dtype(), 1, 19, 19);
    write(x.buffer.data(), dtype(), 0, 1);
    for (int64_t n = 0; n < 19; ++n) {
      write(y.buffer.data(), dtype(), n, 0);
      write(want.buffer.data(), dtype(), n, bits_float(bits));
    }
    apply(adapters, plan.words(), x, y, serial);
    for (int64_t n = 0; n < 19; ++n) {
      if (std::isnan(want.at(0, n)))
        EXPECT_TRUE(std::isnan(y.at(0, n))) << std::hex << bits;
      else
        EXPECT_EQ(y.at(0, n), want.at(0, n)) << std::hex << bits;
    }
  }
}

TEST_P(CpuTest, KeepsANonFiniteWeightToItsOwnColumn) {
  Adapters adapters(dtype(), 33, {40}, {{0}, {7}}, random_);
  const SlotEntry entry = adapters.entry(1, 0);
  const int64_t weight = entry.b * adapters.elements_per_unit() + 21 * entry.rank;
  write(adapters.arena->buffer.data(), dtype(), weight, std::numeric_limits<float>::infinity());
  PlanBuilder plan(3);
  plan.contiguous(1, 0, 3);
  Matrix x(dtype(), 3, 33, 33), y(dtype(), 3, 40, 40);
  x.fill(random_, 1);
  y.fill(random_, 1);
  apply(adapters, plan.words(), x, y, serial);
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t n = 0; n < 40; ++n) EXPECT_EQ(std::isfinite(y.at(i, n)), n != 21) << "column " << n;
}

TEST_P(CpuTest, SkipsWhatLiesOutsideTheTensors) {
  constexpr int64_t kRows = 10, kIn = 40;
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max(), kMin = std::numeric_limits<int32_t>::min();
  Adapters adapters(dtype(), kIn, {30, 20}, {{0, 0}, {8, 8}, {8, 8}}, random_);
  Matrix x(dtype(), kRows, kIn, kIn), start(dtype(), kRows, 50, 50);
  x.fill(random_, 1);
  start.fill(random_, 1);
  const auto run = [&](const std::vector<int32_t>& plan) {
    Matrix y(dtype(), kRows, 50, 50);
    std::memcpy(y.buffer.data(), start.buffer.data(), y.buffer.bytes());
    apply(adapters, plan, x, y, in_parts(2));
    return y.buffer.copy();
  };
  const auto expect_untouched = [&](const Tile& tile, const std::string& what) {
    for (const bool prefill : {false, true}) {
      std::vector<int32_t> plan(64, 0);
      plan[prefill] = 1;
      plan[2] = kRows;
      plan[32] = kRows;  // a gathered row past the end, for tiles whose list is here
      std::memcpy(&plan[prefill ? 60 : 4], &tile, sizeof tile);
      EXPECT_TRUE(run(plan) == start.buffer.copy()) << what;
    }
  };
  for (const int32_t slot : {-1, 0, 3, kMax, kMin})
    expect_untouched({slot, 0, 4, 1}, "slot " + std::to_string(slot));
  for (const auto& [first, count] : {std::pair{7, 4},
                                     {-1, 4},
                                     {kMax, 4},
                                     {kMin, 1},
                                     {0, 65},
                                     {0, kMax},
                                     {32, -1},
                                     {62, -2},
                                     {-2, -1},
                                     {kMax, -1},
                                     {8, kMin}})
    expect_untouched({1, first, count, 1}, "tile " + std::to_string(first) + ", " + std::to_string(count));

  const SlotEntry good = adapters.entry(1, 0);
  std::vector<SlotEntry> bad(6, good);
  bad[0].rank = kMax;
  bad[1].rank = -8;
  bad[2].rank = static_cast<int32_t>(adapters.site.max_rank) + 1;
  bad[3].a = std::numeric_limits<uint32_t>::max();
  bad[4].b = static_cast<uint32_t>(adapters.arena->buffer.bytes() / kBlockAlign);
  bad[5].b =
      static_cast<uint32_t>((adapters.arena->buffer.bytes() - 8 * 30 * item_size(dtype())) / kBlockAlign + 1);
  for (size_t i = 0; i < bad.size(); ++i) {
    adapters.entry(1, 0) = adapters.entry(1, 1) = bad[i];
    if (i == 5) adapters.entry(1, 1).rank = 0;
    expect_untouched({1, 0, 4, 1}, "entry " + std::to_string(i));
  }
  adapters.entry(1, 0) = adapters.entry(1, 1) = good;

  std::uniform_int_distribution<int32_t> any(kMin, kMax), small(-12, 70);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> plan(4 * (1 + round % 24));
    for (int32_t& word : plan) word = round % 3 == 0 ? any(random_) : small(random_);
    for (int64_t i = 0; i < adapters.table.bytes() / 4; ++i)
      if (any(random_) % 4 == 0)
        adapters.table.data<int32_t>()[i] = round % 2 == 0 ? any(random_) : small(random_);
    run(plan);
    adapters.entry(1, 0) = adapters.entry(2, 1) = good;
  }
}

std::string param_name(const testing::TestParamInfo<Param>& info) {
  const char* dtypes[] = {"f32", "f16", "bf16"};
  return std::string(std::get<0>(info.param)->name) + "_" + dtypes[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(, CpuTest,
                         testing::Combine(testing::ValuesIn(available_kernels()),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         param_name);

}  // namespace
}  // namespace loramux
