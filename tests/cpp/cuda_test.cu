// The CUDA kernels against the definition; run them under compute-sanitizer too.
#include <climits>
#include <functional>
#include <iterator>
#include <random>
#include <utility>

#include "cuda_problem.cuh"

namespace loramux {
namespace {

template <typename T>
class CudaKernels : public CudaTest {};
TYPED_TEST_SUITE(CudaKernels, AllTypes);

struct Case {
  Shape shape;
  int64_t rows;
  std::vector<int32_t> slots;
};

TYPED_TEST(CudaKernels, ShrinkExpandAndApplyMatchTheDefinition) {
  const std::vector<Case> cases = {
      // in, widths, ranks, max_rank, pad; rows, slots
      {{64, {40}, {8}, 8, 0}, 8, {1}},
      {{1, {1}, {1}, 8, 0}, 3, {1, 0, 2}},
      {{7, {33, 1}, {24, 0, 8}, 24, 1}, 8, {1}},
      {{33, {7, 33}, {8, 1}, 8, 3}, 9, {1, 2, 3, 0}},
      {{4095, {33}, {129, 8}, 136, 1}, 9, {1, 2}},
      {{4104, {300, 7}, {264, 24}, 264, 8}, 9, {2, 1, 1}},
      {{72, {520}, {24, 1}, 24, 8}, 130, {1}},
      {{72, {520, 8}, {24, 7}, 24, 8}, 140, {1, 0}},
      {{40, {16, 16, 8}, {16, 8, 0}, 16, 0, Kind::stacked}, 200, {1, 2, 3}},
      {{40, {24}, {5, 24}, 24, 0, Kind::stacked}, 130, {3}},
      {{2056, {24}, {8}, 8, 0}, 65, {2}},
      // few tiles, in one kernel: ranks in one and two parts, K in any number of steps, absent slices
      {{4104, {1000, 512, 8}, {64, 8, 40, 0}, 64, 8}, 19, {1, 2, 3, 0}},
      {{8200, {2056}, {16, 8}, 16, 8}, 32, {1, 1, 2}},
      {{14344, {600, 40}, {32, 16, 0}, 32, 0}, 7, {1, 2, 3}},
      {{14344, {600}, {64, 24}, 64, 0}, 10, {3, 1, 2}},
      {{16392, {72}, {16}, 16, 0}, 5, {1}},
      {{64, {40}, {5, 60}, 64, 0, Kind::stacked}, 9, {3, 1}},
      // many rows
      {{40, {264, 1032}, {16, 64, 0, 48}, 64, 8}, 400, {1, 1, 1, 2, 3, 0}},
      {{4104, {72, 8, 16}, {64, 40}, 64, 0}, 200, {1, 2}},
      {{4104, {24, 8, 8}, {264, 24, 0}, 264, 8}, 180, {1, 2, 3}},  // clusters go through the decode tiles
      {{72, {520}, {16}, 16, 8}, 9000, {1, 2, 3}},
      {{40, {264}, {5, 60}, 64, 0, Kind::stacked}, 300, {3, 3, 1}},
      {{72, {520}, {136, 24}, 136, 0}, 300, {1}},
      {{72, {520}, {136, 24}, 136, 0}, 300, {1, 2}},
      {{72, {40, 1032}, {16, 64}, 64, 8}, 300, {1}},
      {{72, {576, 64}, {16, 64, 0}, 64, 8}, 300, {1, 2, 1, 1, 3, 0}},  // scattered rows of whole blocks
      {{72, {512, 40}, {16}, 16, 0}, 300, {1, 2}},
      {{72, {1024}, {136, 24}, 136, 0}, 300, {1, 1, 2}},
      {{72, {520, 1096}, {128, 8, 72, 0}, 128, 8}, 400, {1, 1, 2, 3, 0}},
      {{40, {1032}, {100, 5}, 128, 0, Kind::stacked}, 300, {1, 2, 2}},
      {{8, {40}, {1480, 8}, 1480, 0}, 70, {1}},  // h of a tile leaves one CTA to an SM, or finds no room
      // of an H200 the last that finds room, and the first that does not
      {{8, {40}, {3072, 8}, 3072, 0}, 70, {1}},
      {{8, {40}, {3080, 8}, 3080, 0}, 70, {1}},
      {{36, {8}, {12}, 16, 0}, 1, {0}},
      {{36, {8}, {12}, 16, 0}, 1, {3}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << "in " << c.shape.in_features << ", rows " << c.rows);
    Problem<TypeParam> problem(c.shape, c.rows);
    problem.set_plan(c.slots);
    const ApplyArgs args = problem.args();
    const std::vector<TypeParam> want_y = problem.want_y();
    EXPECT_CUDA(shrink_cuda(args.shrink, stream()));
    expect_same_bits(problem.h.read(), problem.want_h());
    expect_same_bits(problem.y.read(), problem.y_before);
    EXPECT_CUDA(expand_cuda(args.expand, stream()));
    expect_same_bits(problem.y.read(), want_y);
    problem.reset();
    EXPECT_CUDA(apply_cuda(args, stream()));
    expect_same_bits(problem.y.read(), want_y);
  }
}

TYPED_TEST(CudaKernels, EmbeddingMatchesTheDefinitionAndUnknownIdsTouchNothing) {
  // The portable kernels, then the tuned ones: columns in pieces and in whole blocks.
  const Shape any{100, {300, 5}, {24, 129, 0, 1}, 136, 3, Kind::embedding},
      pieces{100, {304, 40}, {24, 129, 0, 1}, 136, 8, Kind::embedding},
      blocks{100, {2048}, {16, 8}, 16, 0, Kind::embedding},
      ranks64{100, {1032}, {5, 64, 24}, 64, 0, Kind::embedding},
      ranks128{100, {1032}, {8, 99, 128}, 128, 0, Kind::embedding};
  for (const Case& c : std::vector<Case>{{any, 9, {1, 2, 0}},
                                         {any, 65, {1}},
                                         {any, 140, {1, 0}},
                                         {pieces, 9, {1, 2, 0}},
                                         {pieces, 65, {1}},
                                         {pieces, 140, {1, 0}},
                                         {pieces, 300, {1, 1, 2, 3}},
                                         {blocks, 300, {1, 2}},
                                         {blocks, 300, {1}},
                                         {blocks, 4500, {1, 1, 2}},
                                         {ranks64, 400, {1, 1, 2, 3}},
                                         {ranks128, 400, {1, 1, 2, 3}}}) {
    SCOPED_TRACE(testing::Message() << "widths of " << c.shape.width() << ", rows " << c.rows);
    const int64_t rows = c.rows;
    Problem<TypeParam> problem(c.shape, rows);
    problem.set_plan(c.slots);
    std::vector<int64_t>& ids = problem.ids;
    for (int64_t i = 0; i < rows; ++i) ids[i] = i * 37 % 100;
    ids[0] = 99;
    ids[1] = 100;
    ids[3] = -1;
    ids[4] = INT32_MIN;
    ids[7] = INT32_MAX;
    Buffer<int32_t> ids32({ids.begin(), ids.end()});
    EXPECT_CUDA(embedding_cuda(problem.embedding_args(ids32.data(), false), stream()));
    expect_same_bits(problem.y.read(), problem.want_y());
    ids[4] = INT64_MIN;
    ids[6] = int64_t{1} << 32;
    Buffer<int64_t> ids64(ids);
    problem.reset();
    EXPECT_CUDA(embedding_cuda(problem.embedding_args(ids64.data(), true), stream()));
    expect_same_bits(problem.y.read(), problem.want_y());
  }
}

// Enough columns and rows for CTAs of two tiles: of one slot, of two, of few rows, and gathered.
TEST_F(CudaTest, TilesThatShareACtaMatchTheDefinition) {
  std::vector<int32_t> few_of_two(1000, 1);
  few_of_two[0] = 2;
  few_of_two[500] = 3;
  for (const auto& [shape, slots] :
       {std::pair<Shape, std::vector<int32_t>>{{8, {6152}, {8, 16}, 16, 0}, few_of_two},
        {{8, {5000}, {32, 8}, 32, 8}, {1, 2, 2}},
        {{8, {4104}, {8, 40, 0}, 64, 0}, {1, 2, 2, 3}},
        {{8, {1032}, {8, 104, 24}, 128, 0}, {1, 2, 2, 3}},
        {{8, {520}, {8, 680}, 680, 0}, {1, 2, 2}}}) {  // two stages, over and over
    SCOPED_TRACE(testing::Message() << "max_rank " << shape.max_rank);
    Problem<__nv_bfloat16> problem(shape, 9000);
    problem.set_plan(slots);
    EXPECT_CUDA(apply_cuda(problem.args(), stream()));
    expect_same_bits(problem.y.read(), problem.want_y());
  }
}

TYPED_TEST(CudaKernels, DamagedPlansAndTablesTouchNothing) {
  const Shape shape{40, {24}, {8}, 8, 0};
  using Words = std::vector<int32_t>;
  const auto check = [&](const char* what, int64_t value, int64_t rows, const std::vector<int32_t>& slots,
                         const std::function<void(Words&, SlotEntry&)>& damage) {
    SCOPED_TRACE(testing::Message() << what << " = " << value << " in a plan of " << rows << " rows");
    Problem<TypeParam> problem(shape, rows);
    problem.set_plan(slots);
    Words words = problem.plan.read();
    words[1] = std::min(words[1], 1);
    std::vector<SlotEntry> table = problem.table.read();
    damage(words, table[problem.site.num_entries + problem.site.entry]);
    problem.plan.write(words);
    problem.table.write(table);
    EXPECT_CUDA(apply_cuda(problem.args(), stream()));
    expect_same_bits(problem.y.read(), problem.y_before);
    expect_same_bits(problem.h.read(), problem.h_before);
  };
  // Eight rows of slot 1: a contiguous decode tile. Seventy: a prefill tile, of whose two the first counts.
  // Every other row of eight: a gathered tile.
  constexpr int kSlot = 0, kFirst = 1, kCount = 2;
  const auto decode = [](Words& words, int word) -> int32_t& { return words[4 + word]; };
  const auto prefill = [](Words& words, int word) -> int32_t& { return words[words.size() - 4 + word]; };
  for (const int32_t v : {0, -1, INT32_MIN}) {
    check("decode tiles", v, 8, {1}, [v](Words& words, SlotEntry&) { words[0] = v; });
    check("prefill tiles", v, 70, {1}, [v](Words& words, SlotEntry&) { words[1] = v; });
  }
  check("rows", 9, 8, {1}, [](Words& words, SlotEntry&) { words[2] = 9; });
  check("rows", 71, 70, {1}, [](Words& words, SlotEntry&) { words[2] = 71; });
  for (const int32_t v : {0, -1, kSlots, INT32_MIN, INT32_MAX}) {
    check("slot", v, 8, {1}, [&](Words& words, SlotEntry&) { decode(words, kSlot) = v; });
    check("slot", v, 70, {1}, [&](Words& words, SlotEntry&) { prefill(words, kSlot) = v; });
  }
  for (const int32_t v : {70, -64, INT32_MIN, INT32_MAX}) {
    check("first row", v, 8, {1}, [&](Words& words, SlotEntry&) { decode(words, kFirst) = v; });
    check("first row", v, 70, {1}, [&](Words& words, SlotEntry&) { prefill(words, kFirst) = v; });
  }
  for (const int32_t v : {-64, 9, 1 << 20, INT32_MIN, INT32_MAX}) {
    check("list", v, 8, {1, 0}, [&](Words& words, SlotEntry&) { decode(words, kFirst) = v; });
  }
  check("count", 0, 8, {1}, [&](Words& words, SlotEntry&) { decode(words, kCount) = 0; });
  check("count", 0, 70, {1}, [&](Words& words, SlotEntry&) { prefill(words, kCount) = 0; });
  for (const int32_t v : {-1, 9, INT32_MIN, INT32_MAX}) {
    check("rank", v, 8, {1}, [v](Words&, SlotEntry& entry) { entry.rank = v; });
  }
  const uint32_t last_unit = Problem<TypeParam>(shape, 8).site.slices[0].a_bytes / kBlockAlign - 1;
  for (const uint32_t v : {last_unit, UINT32_MAX}) {
    check("A", v, 8, {1}, [v](Words&, SlotEntry& entry) { entry.a = v; });
    check("B", v, 8, {1}, [v](Words&, SlotEntry& entry) { entry.b = v; });
  }
}

TYPED_TEST(CudaKernels, TilesOutsideTheCapacityAreNotRead) {
  Problem<TypeParam> problem({40, {24}, {8}, 8, 0}, 130);
  ApplyArgs args = problem.args();
  args.shrink.plan.capacity = args.expand.plan.capacity = 8;  // the header and one tile
  std::vector<int32_t> words(problem.plan.size());
  const Tile tiles[] = {{1, 0, 1, 1.f}, {2, 1, 1, 1.f}, {3, 2, 1, 1.f}};
  words[0] = INT32_MAX;
  std::memcpy(&words[4], tiles, sizeof tiles);
  problem.plan.write(words);
  problem.segments.assign(problem.rows, {0, 1, 1.f});
  problem.segments[0].slot = 1;
  EXPECT_CUDA(apply_cuda(args, stream()));
  expect_same_bits(problem.y.read(), problem.want_y());
  // As a tile the header would be of slot 1: rows 2 to 41, behind an empty tile in word 4.
  words.assign(words.size(), 0);
  words[0] = 1;
  words[1] = 2;
  words[2] = 40;
  problem.plan.write(words);
  problem.reset();
  EXPECT_CUDA(apply_cuda(args, stream()));
  expect_same_bits(problem.h.read(), problem.h_before);
}

TYPED_TEST(CudaKernels, RandomPlansAndTablesStayInsideTheTensors) {
  std::mt19937 random(7);
  // The portable kernels, then the tuned ones: in one kernel, in tiles of both kinds, in a long step.
  for (const auto& [shape, rows] : {std::pair<Shape, int64_t>{{40, {24, 300}, {8, 16}, 16, 3}, 70},
                                    {{40, {24, 300}, {8, 16}, 16, 3, Kind::stacked}, 70},
                                    {{40, {24, 300}, {8, 16}, 16, 3, Kind::embedding}, 70},
                                    {{40, {24, 304}, {8, 16}, 16, 8, Kind::embedding}, 300},
                                    {{40, {24, 304}, {8, 16}, 16, 8}, 20},
                                    {{40, {24, 304}, {8, 16}, 16, 8}, 70},
                                    {{40, {24, 304}, {8, 16}, 16, 8}, 300},
                                    {{40, {64, 576}, {8, 16}, 16, 8}, 300}}) {
    Problem<TypeParam> problem(shape, rows);
    problem.set_plan({1});
    const auto any_word = [&]() -> int32_t {
      const int32_t edges[] = {INT32_MIN, INT32_MAX, -64, -9, -8, -1, 0, 1, 2, 3, 8, 9, 64, 65};
      const uint32_t die = random();
      return die % 3 == 0 ? edges[die / 3 % std::size(edges)]
                          : static_cast<int32_t>(die / 3 % problem.plan.size());
    };
    for (int round = 0; round < 40; ++round) {
      std::vector<int32_t> words(problem.plan.size());
      std::generate(words.begin(), words.end(), any_word);
      words[0] = any_word() % 16;
      words[2] = std::min<int64_t>(words[2], rows);
      for (size_t i = 4; i < words.size(); i += 4) words[i] = any_word() % (kSlots + 1);
      std::vector<SlotEntry> table(problem.table.size());
      for (SlotEntry& entry : table) {
        entry = {static_cast<uint32_t>(any_word()), static_cast<uint32_t>(any_word()), any_word() % 20, 1.f};
      }
      std::vector<int32_t> ids(problem.rows);
      std::generate(ids.begin(), ids.end(), any_word);
      problem.plan.write(words);
      problem.table.write(table);
      Buffer<int32_t> ids_buffer(ids);
      if (shape.kind == Kind::embedding) {
        EXPECT_CUDA(embedding_cuda(problem.embedding_args(ids_buffer.data(), false), stream()));
      } else {
        EXPECT_CUDA(apply_cuda(problem.args(), stream()));
      }
      problem.h.read();
      const std::vector<TypeParam> y = problem.y.read();
      for (int64_t row = 0; row < problem.rows; ++row) {
        const int64_t at = row * problem.y_stride;
        ASSERT_EQ(std::memcmp(&y[at], &problem.y_before[at], problem.shape.pad * sizeof(TypeParam)), 0);
      }
    }
  }
}

TEST_F(CudaTest, AGraphReplaysWithTheContentOfItsPlan) {
  Problem<__nv_bfloat16> problem({72, {520, 8}, {24, 7}, 24, 8}, 65);
  problem.set_plan({1});
  EXPECT_CUDA(apply_cuda(problem.args(), stream()));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_CUDA(apply_cuda(problem.args(), stream()));
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (const std::vector<int32_t>& slots :
       std::vector<std::vector<int32_t>>{{0}, {2}, {1, 2, 3, 0}, {3, 0}, {0}}) {
    problem.set_plan(slots);
    problem.reset();
    EXPECT_CUDA(cudaGraphLaunch(replay, stream()));
    expect_same_bits(problem.h.read(), problem.want_h());
    expect_same_bits(problem.y.read(), problem.want_y());
  }
  EXPECT_CUDA(cudaGraphExecDestroy(replay));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TYPED_TEST(CudaKernels, WithoutRowsOrSlotsNothingIsLaunched) {
  Problem<TypeParam> problem({8, {8}, {8}, 8, 0}, 300);
  ApplyArgs no_rows = problem.args(), no_slots = problem.args();
  no_rows.shrink.rows = no_rows.expand.rows = 0;
  no_slots.shrink.site.num_slots = no_slots.expand.site.num_slots = 1;
  EmbeddingArgs embedding = problem.embedding_args(nullptr, false);
  embedding.rows = 0;
  cudaGraph_t graph = nullptr;
  size_t nodes = 1;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_CUDA(apply_cuda(no_rows, stream()));
  EXPECT_CUDA(apply_cuda(no_slots, stream()));
  EXPECT_CUDA(embedding_cuda(embedding, stream()));
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  EXPECT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 0u);
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(CudaTest, LaunchErrorsAreReturned) {
  Problem<float> problem({8, {8}, {8}, 8, 0}, 8);
  problem.set_plan({1});
  ApplyArgs args = problem.args();
  args.shrink.site.num_slices = 1 << 16;  // more than a grid can have
  const int error = apply_cuda(args, stream());
  EXPECT_NE(error, cudaSuccess);
  EXPECT_STRNE(take_cuda_error(error), take_cuda_error(cudaSuccess));
  EXPECT_STREQ(take_cuda_error(cudaSetDevice(-1)), cudaGetErrorString(cudaErrorInvalidDevice));
  EXPECT_CUDA(cudaPeekAtLastError());
  EXPECT_CUDA(apply_cuda(problem.args(), stream()));
  expect_same_bits(problem.y.read(), problem.want_y());
}

TEST_F(CudaTest, RowsMayExceedOneGrid) {
  Problem<__nv_bfloat16> problem({1, {1}, {8}, 8, 0}, 8 * 65535 + 1);
  problem.set_plan({1});
  EXPECT_CUDA(apply_cuda(problem.args(), stream()));
  expect_same_bits(problem.h.read(), problem.want_h());
  expect_same_bits(problem.y.read(), problem.want_y());
}

// The last row of x and of y, and the weights, lie past 2^31 elements of one allocation.
TEST_F(CudaTest, OffsetsAreSixtyFourBitsWide) {
  using T = __nv_bfloat16;
  constexpr int64_t kRows31 = int64_t{1} << 31, kA = kRows31 + (1 << 28), kB = kA + 64, kEnd = kB + 64;
  T* memory = nullptr;
  if (cudaMalloc(&memory, kEnd * sizeof(T)) != cudaSuccess) {
    cudaGetLastError();
    GTEST_SKIP() << "no room for 4.8 GB";
  }
  const auto fill = [&](int64_t at, int64_t count, float value) {
    const std::vector<T> values(count, static_cast<T>(value));
    EXPECT_CUDA(
        cudaMemcpyAsync(memory + at, values.data(), count * sizeof(T), cudaMemcpyHostToDevice, stream()));
  };
  fill(kA, 64, 1);
  fill(kB, 64, 1);
  for (const int64_t rows : {2, 70}) {
    const int64_t stride = kRows31 / (rows - 1) + 64;
    constexpr int64_t kY = 64;  // of a row, behind its x
    Problem<T> problem({8, {8}, {8}, 8, 0}, rows);
    problem.set_plan({1});
    std::vector<SlotEntry> table = problem.table.read();
    table[problem.site.num_entries + 1] = {kA * sizeof(T) / kBlockAlign, kB * sizeof(T) / kBlockAlign, 8,
                                           1.f};
    problem.table.write(table);
    ApplyArgs args = problem.args();
    Slice& slice = args.shrink.site.slices[0];
    slice.a = slice.b = reinterpret_cast<const std::byte*>(memory);
    slice.a_bytes = slice.b_bytes = kEnd * sizeof(T);
    args.expand.site = args.shrink.site;
    args.shrink.x = memory;
    args.expand.y = memory + kY;
    args.shrink.x_stride = args.expand.y_stride = stride;
    const bool is_decode = rows <= max_decode_rows_of_slot(rows);
    const auto portable = [&](TileKind kind) {
      const int error = shrink_portable(kind, args.shrink, stream());
      return error != cudaSuccess ? error : expand_portable(kind, args.expand, stream());
    };
    std::vector<std::function<int()>> forms = {
        [&] { return apply_cuda(args, stream()); },
        [&] { return portable(is_decode ? TileKind::decode : TileKind::prefill); }};
    if (is_decode && shrink_decode_serves(args.shrink, current_device())) {
      forms.push_back([&] {
        const int error = shrink_decode(args.shrink, stream());
        return error != cudaSuccess ? error : expand_decode(args.expand, 1, stream());
      });
    }
    for (const auto& form : forms) {
      for (const int64_t row : {int64_t{0}, rows - 1}) {
        fill(row * stride, 8, 1 + row % 2);
        fill(row * stride + kY, 8, 0);
      }
      EXPECT_CUDA(form());
      for (const int64_t row : {int64_t{0}, rows - 1}) {
        std::vector<T> got(8);
        EXPECT_CUDA(cudaMemcpyAsync(got.data(), memory + row * stride + kY, sizeof(T) * 8,
                                    cudaMemcpyDeviceToHost, stream()));
        EXPECT_CUDA(cudaStreamSynchronize(stream()));
        expect_same_bits(got, std::vector<T>(8, static_cast<T>(0.5f * 64 * (1 + row % 2))));
      }
    }
  }
  EXPECT_CUDA(cudaFree(memory));
}

}  // namespace
}  // namespace loramux
