// The deltas beside a GEMM, in their two halves.
#include <random>

#include "cuda_problem.cuh"

namespace loramux {
namespace {

class CudaBesideTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && !has_tuned_kernels()) GTEST_SKIP() << "made on sm_90 and later";
  }
};

template <typename T>
class CudaBeside : public CudaBesideTest {};
TYPED_TEST_SUITE(CudaBeside, HalfTypes);

// A problem whose y gets its deltas in two halves. `shift`: elements by which y lies behind an aligned place.
template <typename T>
struct Halves {
  Halves(const Shape& shape, int64_t rows, int64_t shift = 0)
      : problem(shape, rows),
        y_stride(shape.width() + shift),
        y_before(make_matrix<T>(rows, y_stride, [&](int64_t row, int64_t n) { return shape.y(row, n); })),
        delta(std::vector<T>(rows * shape.width(), static_cast<T>(NAN))),
        parts(std::vector<float>(kBesideParts * rows * shape.slices() * shape.max_rank, NAN)),
        y(y_before) {}

  ApplyArgs args() const {
    ApplyArgs args = problem.args();
    args.shrink.h = parts.data();
    args.expand.h = parts.data();
    args.expand.y = delta.data();
    args.expand.y_stride = problem.shape.width();
    return args;
  }

  void run() const {
    EXPECT_CUDA(start_cuda(args(), stream()));
    EXPECT_CUDA(finish_cuda(args().expand, y.data() + y_stride - problem.shape.width(), y_stride, stream()));
  }

  // What `run` makes of a y.
  std::vector<T> want(std::vector<T> y) const {
    const Shape& shape = problem.shape;
    for (int64_t row = 0; row < problem.rows; ++row) {
      for (int slice = 0; slice < shape.slices(); ++slice) {
        const std::vector<double> h = problem.operand(row, slice);
        for (int64_t n = 0; n < shape.widths[slice] && !h.empty(); ++n) {
          const auto delta = static_cast<T>(static_cast<float>(problem.delta(row, slice, n, h, true)));
          const int64_t column = y_stride - shape.width() + problem.site.slices[slice].offset + n;
          T& sum = y[row * y_stride + column];
          if (static_cast<float>(delta) != 0)
            sum = static_cast<T>(static_cast<float>(sum) + static_cast<float>(delta));
        }
      }
    }
    return y;
  }

  Problem<T> problem;
  int64_t y_stride;
  std::vector<T> y_before;
  Buffer<T> delta;
  Buffer<float> parts;
  Buffer<T> y;
};

TYPED_TEST(CudaBeside, StartAndFinishMatchTheDefinition) {
  struct Case {
    Shape shape;
    int64_t rows;
    std::vector<int32_t> slots;
    int64_t shift;
  };
  const std::vector<Case> cases = {
      {{64, {40}, {8}, 8, 0}, 8, {1}, 0},
      {{64, {40, 8}, {8, 0}, 8, 8}, 9, {1, 0, 2}, 8},
      {{4104, {1000, 512, 8}, {16, 8, 0}, 16, 8}, 32, {1, 2, 3, 0}, 0},
      {{14344, {600}, {16}, 16, 0}, 32, {3, 1, 2}, 0},
      {{40, {24, 16}, {5, 16}, 16, 0, Kind::stacked}, 31, {3, 1}, 3},
      {{64, {40}, {8}, 8, 0}, 32, {0}, 0},
      {{4096, {8192, 512}, {16, 8}, 16, 0}, 32, {1, 3, 2}, 0},
      {{64, {8192}, {8}, 8, 0}, 32, {2, 0}, 3},
      {{64, {60000}, {8}, 8, 0}, 32, {1, 2, 3}, 0},  // its CTAs go through the tiles
      // ranks that come after one another
      {{4104, {1000, 512, 8}, {64, 8, 40, 0}, 64, 8}, 32, {1, 2, 3, 0}, 0},
      {{14344, {600}, {24, 8}, 24, 0}, 32, {3, 1, 2}, 0},
      {{64, {40}, {5, 60}, 64, 0, Kind::stacked}, 9, {3, 1}, 3},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << "in " << c.shape.in_features << ", rows " << c.rows);
    Halves<TypeParam> halves(c.shape, c.rows, c.shift);
    halves.problem.set_plan(c.slots);
    ASSERT_TRUE(beside_serves(halves.args()));
    halves.run();
    expect_same_bits(halves.y.read(), halves.want(halves.y_before));
    halves.delta.read();
    halves.parts.read();
  }
}

TYPED_TEST(CudaBeside, RandomPlansAndTablesStayInsideTheTensors) {
  std::mt19937 random(11);
  Halves<TypeParam> halves({40, {24, 304}, {8, 16}, 16, 8}, 32, 8);
  halves.problem.set_plan({1});
  for (int round = 0; round < 40; ++round) {
    std::vector<int32_t> words(halves.problem.plan.size());
    const int32_t edges[] = {INT32_MIN, INT32_MAX, -9, -8, -1, 0, 1, 2, 3, 8, 9, 32, 33};
    const auto any_word = [&] { return edges[random() % std::size(edges)]; };
    std::generate(words.begin(), words.end(), any_word);
    for (size_t i = 4; i < words.size(); i += 4) words[i] = random() % (kSlots + 1);
    words[0] = random() % 8;
    std::vector<SlotEntry> table(halves.problem.table.size());
    for (SlotEntry& entry : table)
      entry = {static_cast<uint32_t>(any_word()), static_cast<uint32_t>(any_word()), any_word(), 1.f};
    halves.problem.plan.write(words);
    halves.problem.table.write(table);
    halves.y.write(halves.y_before);
    halves.run();
    halves.delta.read();
    halves.parts.read();
    const std::vector<TypeParam> y = halves.y.read();
    for (int64_t row = 0; row < halves.problem.rows; ++row) {
      const int64_t at = row * halves.y_stride;
      ASSERT_EQ(std::memcmp(&y[at], &halves.y_before[at], 8 * sizeof(TypeParam)), 0);
    }
  }
}

// Of two sites, here the same one twice: the second begins while the first one's y is being added to.
TEST_F(CudaBesideTest, AGraphReplaysTwoSitesWithTheContentOfItsPlan) {
  Halves<__nv_bfloat16> halves({72, {520, 8}, {16, 8}, 16, 8}, 32);
  halves.problem.set_plan({1});
  halves.run();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  halves.run();
  halves.run();
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (const std::vector<int32_t>& slots :
       std::vector<std::vector<int32_t>>{{0}, {2}, {1, 2, 3, 0}, {3, 0}}) {
    halves.problem.set_plan(slots);
    halves.y.write(halves.y_before);
    halves.delta.write(std::vector<__nv_bfloat16>(halves.delta.size(), static_cast<__nv_bfloat16>(NAN)));
    halves.parts.write(std::vector<float>(halves.parts.size(), NAN));
    EXPECT_CUDA(cudaGraphLaunch(replay, stream()));
    expect_same_bits(halves.y.read(), halves.want(halves.want(halves.y_before)));
  }
  EXPECT_CUDA(cudaGraphExecDestroy(replay));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(CudaBesideTest, LongStepsAndManyRanksAreLeftToTheOneCall) {
  EXPECT_TRUE(beside_serves(Halves<__half>({64, {40}, {16}, 16, 0}, 32).args()));
  EXPECT_FALSE(beside_serves(Halves<__half>({64, {40}, {16}, 16, 0}, 33).args()));
  const auto serves = [](int32_t rank, int64_t rows, int64_t num_slots) {
    const Halves<__half> halves({64, {40}, {8}, rank, 0}, rows);
    ApplyArgs args = halves.args();
    args.shrink.site.num_slots = args.expand.site.num_slots = num_slots;
    return beside_serves(args);
  };
  EXPECT_TRUE(serves(16, 32, 1000));
  EXPECT_TRUE(serves(64, 32, 9));
  EXPECT_FALSE(serves(64, 32, 10));
  EXPECT_TRUE(serves(64, 8, 10));
  EXPECT_FALSE(serves(72, 1, 2));
  EXPECT_FALSE(beside_serves(Halves<__half>({64, {33}, {16}, 16, 0}, 32).args()));
  EXPECT_FALSE(beside_serves(Halves<float>({64, {40}, {16}, 16, 0}, 32).args()));
  EXPECT_FALSE(beside_serves(Halves<__half>({64, {40}, {16}, 16, 0}, 0).args()));
  const Halves<__half> no_slots({64, {40}, {16}, 16, 0}, 8);
  ApplyArgs args = no_slots.args();
  args.shrink.site.num_slots = args.expand.site.num_slots = 1;
  EXPECT_FALSE(beside_serves(args));
}

}  // namespace
}  // namespace loramux
