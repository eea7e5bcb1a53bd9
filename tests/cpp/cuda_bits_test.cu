// A row's bits: which forms of the CUDA kernels give the same ones, and that nothing else decides them.
#include <functional>
#include <utility>

#include "cuda_problem.cuh"

namespace loramux {
namespace {

template <typename T>
class CudaBits : public CudaTest {};
TYPED_TEST_SUITE(CudaBits, AllTypes);

// Of the tuned kernels.
template <typename T>
class CudaForms : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && !has_tuned_kernels()) GTEST_SKIP() << "sm_90 and later have several";
  }
};
TYPED_TEST_SUITE(CudaForms, HalfTypes);

constexpr int64_t kRowsOfBits = 130;

// y of every row under slot 1 in a tile of this kind. The plans are of kRowsOfBits rows: all of slot 1, or a
// third.
template <typename T>
std::vector<std::vector<T>> rows_in_tiles(const Shape& shape, TileKind kind) {
  const std::vector<std::vector<int32_t>> plans =
      kind == TileKind::prefill ? std::vector<std::vector<int32_t>>{{1}}
                                : std::vector<std::vector<int32_t>>{{1, 2, 3}, {3, 1, 2}, {2, 3, 1}};
  std::vector<std::vector<T>> rows(kRowsOfBits);
  for (const std::vector<int32_t>& slots : plans) {
    Problem<T> problem(shape, kRowsOfBits);
    problem.set_plan(slots);
    EXPECT_CUDA(apply_cuda(problem.args(), stream()));
    const std::vector<T> y = problem.y.read();
    for (int64_t row = 0; row < kRowsOfBits; ++row) {
      const auto at = y.begin() + row * problem.y_stride + shape.pad;
      if (problem.segments[row].slot == 1) rows[row].assign(at, at + shape.width());
    }
  }
  return rows;
}

// Tiles contiguous and gathered, full and not, next to others and alone, aligned (pad 0) and not. Where the
// portable kernels serve, the kind of tile does not matter either.
TYPED_TEST(CudaBits, BitsOfARowDependOnNothingElse) {
  for (const auto& [rank, pad] : {std::pair<int32_t, int64_t>{136, 0}, {136, 1}, {64, 0}, {16, 0}}) {
    SCOPED_TRACE(testing::Message() << "rank " << rank << ", pad " << pad);
    Shape shape{4104, {304}, {rank, 8}, rank, pad};
    shape.exact = false;
    const auto decode = rows_in_tiles<TypeParam>(shape, TileKind::decode);
    const auto prefill = rows_in_tiles<TypeParam>(shape, TileKind::prefill);
    const bool is_portable =
        is_portable_forced() ||
        !shrink_decode_serves(Problem<TypeParam>(shape, 1).args().shrink, current_device());
    EXPECT_EQ(is_portable, is_portable_forced() || pad != 0 || sizeof(TypeParam) == 4);
    for (int64_t row = 0; row < kRowsOfBits && is_portable; ++row)
      expect_same_bits(decode[row], prefill[row]);
    for (const int64_t rows : {int64_t{1}, kRowsOfBits, int64_t{300}, int64_t{600}}) {
      for (const std::vector<int32_t>& slots : std::vector<std::vector<int32_t>>{
               {1}, {1, 0}, {1, 2}, {0, 0, 1}, {2, 1, 1, 3, 0}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}}) {
        Problem<TypeParam> problem(shape, rows);
        problem.set_plan(slots);
        EXPECT_CUDA(apply_cuda(problem.args(), stream()));
        const std::vector<TypeParam> got = problem.y.read();
        const auto is_ours = [](const PlanSegment& segment) { return segment.slot == 1; };
        const bool in_prefill = std::count_if(problem.segments.begin(), problem.segments.end(), is_ours) >
                                max_decode_rows_of_slot(rows);
        for (int64_t row = 0; row < std::min(rows, kRowsOfBits); ++row) {
          if (problem.segments[row].slot != 1) continue;
          const auto at = got.begin() + row * problem.y_stride + pad;
          expect_same_bits(std::vector<TypeParam>(at, at + shape.width()),
                           (in_prefill ? prefill : decode)[row]);
        }
      }
    }
  }
}

// Forms that a step takes by its rows, and rows among more of their slot.
TYPED_TEST(CudaForms, BitsOfARowDoNotDependOnTheForm) {
  for (const auto& [in, rank] :
       {std::pair<int64_t, int32_t>{4096, 48}, {4096, 24}, {8200, 16}, {14344, 16}, {16384, 32}}) {
    SCOPED_TRACE(testing::Message() << "in " << in << ", rank " << rank);
    Shape shape{in, {304}, {rank, 8}, rank, 0};
    shape.exact = false;
    Problem<TypeParam> problem(shape, 20);
    problem.set_plan({1, 2, 0});
    const ApplyArgs args = problem.args();
    ASSERT_TRUE(apply_decode_serves(args, current_device()));
    EXPECT_CUDA(apply_decode(args, stream()));
    const std::vector<TypeParam> want = problem.y.read();
    problem.reset();
    EXPECT_CUDA(shrink_decode(args.shrink, stream()));
    EXPECT_CUDA(expand_decode(args.expand, 1, stream()));
    expect_same_bits(problem.y.read(), want);
  }
  Shape shape{4104, {8192}, {64}, 64, 0};
  shape.exact = false;
  std::vector<std::vector<TypeParam>> of_first_tile;
  for (const int64_t rows : {70, 4500}) {
    Problem<TypeParam> problem(shape, rows);
    problem.set_plan({1});
    EXPECT_CUDA(apply_cuda(problem.args(), stream()));
    const std::vector<TypeParam> y = problem.y.read();
    of_first_tile.emplace_back(y.begin(), y.begin() + kPrefillRows * shape.width());
  }
  expect_same_bits(of_first_tile[1], of_first_tile[0]);
}

// `prefill` and `decode` each enqueue what adds the deltas of tiles of their kind.
template <typename T>
void expect_same_bits_in_both_kinds(Problem<T>& problem, const std::function<int()>& prefill,
                                    const std::function<int()>& decode) {
  problem.set_plan({1});
  EXPECT_CUDA(prefill());
  const std::vector<T> want = problem.y.read();
  EXPECT_NE(std::memcmp(want.data(), problem.y_before.data(), want.size() * sizeof(T)), 0);
  problem.y.write(problem.y_before);
  problem.set_plan({1, 2, 3});  // 44 rows of slot 1
  EXPECT_CUDA(decode());
  const std::vector<T> got = problem.y.read();
  for (int64_t row = 0; row < kRowsOfBits; row += 3) {
    const int64_t first = row * problem.y_stride, last = first + problem.y_stride;
    expect_same_bits<T>({got.begin() + first, got.begin() + last},
                        {want.begin() + first, want.begin() + last});
  }
}

// Of one h: rows in decode tiles and in prefill tiles differ by their shrink alone.
TYPED_TEST(CudaForms, BothExpandsGiveARowTheSameBits) {
  for (const int32_t rank : {8, 16, 24, 48, 96, 136}) {
    SCOPED_TRACE(testing::Message() << "rank " << rank);
    Shape shape{64, {304}, {rank}, rank, 0};
    shape.exact = false;
    Problem<TypeParam> problem(shape, kRowsOfBits);
    const ApplyArgs args = problem.args();
    const auto prefill = [&] {
      EXPECT_CUDA(shrink_cuda(args.shrink, stream()));
      return expand_prefill(args.expand, stream());
    };
    expect_same_bits_in_both_kinds(problem, prefill, [&] { return expand_decode(args.expand, 1, stream()); });
  }
}

// And so do both embeddings, of any rank.
TYPED_TEST(CudaForms, BothEmbeddingsGiveARowTheSameBits) {
  for (const int32_t rank : {8, 24, 48, 96, 136}) {
    SCOPED_TRACE(testing::Message() << "rank " << rank);
    Shape shape{64, {304}, {rank}, rank, 0, Kind::embedding};
    shape.exact = false;
    Problem<TypeParam> problem(shape, kRowsOfBits);
    std::vector<int32_t> ids(kRowsOfBits);
    for (int64_t row = 0; row < kRowsOfBits; ++row) ids[row] = static_cast<int32_t>(row * 37 % 64);
    Buffer<int32_t> ids_buffer(ids);
    const EmbeddingArgs args = problem.embedding_args(ids_buffer.data(), false);
    expect_same_bits_in_both_kinds(
        problem, [&] { return embedding_prefill(args, stream()); },
        [&] { return embedding_decode(args, stream()); });
  }
}

// A slot's rank says where h ends: what an infinite x makes of ranks past it is no number, and not for B.
TYPED_TEST(CudaBits, RanksPastASlotsOwnAddNothing) {
  for (const int64_t rows : {5, 200}) {
    Problem<TypeParam> problem({64, {40}, {1, 5}, 8, 0, Kind::stacked}, rows);
    int64_t k = 0;
    while (problem.shape.a(1, 0, 0, k) == 0) ++k;
    std::vector<TypeParam> x = problem.x.read();
    x[k] = static_cast<TypeParam>(INFINITY);
    problem.x.write(x);
    problem.set_plan({1});
    EXPECT_CUDA(apply_cuda(problem.args(), stream()));
    const std::vector<TypeParam> y = problem.y.read();
    for (int64_t n = 0; n < 40; ++n)
      EXPECT_EQ(std::isinf(static_cast<float>(y[n])), problem.shape.b(1, 0, n, 0) != 0) << "column " << n;
  }
}

// Every ring of the shrink of long segments goes round more than once.
TEST_F(CudaTest, LongSegmentsOfAWideInputMatchThePortableKernels) {
  for (const int32_t rank : {16, 32, 48, 64, 128, 192}) {
    Problem<__nv_bfloat16> problem({4104, {8}, {rank}, rank, 0}, 4500);
    for (const std::vector<int32_t>& slots : {std::vector<int32_t>{1}, {1, 2, 2, 3}}) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", " << slots.size() << " slots");
      problem.set_plan(slots);
      const ShrinkArgs args = problem.args().shrink;
      for (const TileKind kind : {TileKind::decode, TileKind::prefill})
        EXPECT_CUDA(shrink_portable(kind, args, stream()));
      const std::vector<float> want = problem.h.read();
      problem.h.write(problem.h_before);
      EXPECT_CUDA(shrink_cuda(args, stream()));
      expect_same_bits(problem.h.read(), want);
    }
  }
}

// Kernels may begin before those ahead of them have ended, but not read what these write.
TEST_F(CudaTest, ACallReadsWhatTheOneBeforeItHasWritten) {
  Problem<__nv_bfloat16> first({14344, {512}, {16, 8}, 16, 0}, 20), second({512, {40}, {8}, 8, 0}, 20);
  first.set_plan({1, 2, 0});
  second.set_plan({1, 1, 3});
  ApplyArgs after = second.args();
  after.shrink.x = first.y.data();
  after.shrink.x_stride = first.y_stride;
  std::vector<__nv_bfloat16> want;
  for (int round = 0; round < 100; ++round) {
    first.reset();
    second.reset();
    EXPECT_CUDA(apply_cuda(first.args(), stream()));
    if (round == 0) EXPECT_CUDA(cudaStreamSynchronize(stream()));
    EXPECT_CUDA(apply_cuda(after, stream()));
    const std::vector<__nv_bfloat16> got = second.y.read();
    if (round == 0) want = got;
    expect_same_bits(got, want);
  }
  expect_same_bits(first.y.read(), first.want_y());
}

}  // namespace
}  // namespace loramux
