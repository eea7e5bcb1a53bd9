#include "host/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half.h"

namespace loramux {
namespace {

// Every finite magnitude of a 16-bit format, Inf standing for the next power of two, against its definition.
void check_half(int mantissa_bits, int bias, float (*to_float)(uint16_t), uint16_t (*from_float)(float)) {
  const auto value_of = [&](int bits) {
    const int exponent = std::max(bits >> mantissa_bits, 1);
    const int implicit = bits >> mantissa_bits ? 1 << mantissa_bits : 0;
    return std::ldexp(implicit + (bits & ((1 << mantissa_bits) - 1)), exponent - bias - mantissa_bits);
  };
  const int inf = 0x7fff >> mantissa_bits << mantissa_bits;
  for (int bits = 0; bits < inf; ++bits) {
    const int even = bits + bits % 2;
    const double value = value_of(bits);
    const float middle = static_cast<float>((value + value_of(bits + 1)) / 2);
    for (int sign : {0, 0x8000}) {
      const float direction = sign ? -1.0f : 1.0f;
      ASSERT_EQ(to_float(bits | sign), direction * value) << bits;
      ASSERT_EQ(from_float(direction * static_cast<float>(value)), bits | sign) << bits;
      ASSERT_EQ(from_float(direction * middle), even | sign) << bits;
      ASSERT_EQ(from_float(direction * std::nextafter(middle, 0.0f)), bits | sign) << bits;
      ASSERT_EQ(from_float(direction * std::nextafter(middle, INFINITY)), (bits + 1) | sign) << bits;
    }
  }
  EXPECT_EQ(to_float(inf), INFINITY);
  EXPECT_EQ(from_float(-INFINITY), inf | 0x8000);
  for (uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xffc00000u})
    EXPECT_TRUE(std::isnan(to_float(from_float(bits_float(nan)))));
  EXPECT_TRUE(std::isnan(to_float(inf | 1)));
}

TEST(Half, Float16IsExactAndRoundsToNearestEven) {
  check_half(10, 15, f16_to_float, float_to_f16);
}
TEST(Half, Bfloat16IsExactAndRoundsToNearestEven) {
  check_half(7, 127, bf16_to_float, float_to_bf16);
}

const std::byte* bytes_of(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

TEST(Pack, LaysBlocksOutWithZerosAroundThem) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<Block> blocks = {
      {bytes_of(a), DType::f32, 2, 3, 3, 1, 3, 4, 4},   // rows and columns padded
      {bytes_of(a), DType::f32, 3, 2, 1, 3, 3, 2, 56},  // the transpose of a 2 x 3 matrix
      {nullptr, DType::f32, 2, 2, 2, 1, 2, 2, 80},
  };
  std::vector<float> image(25, -1.0f);
  const PackResult result = pack(reinterpret_cast<std::byte*>(image.data()), 100, DType::f32, blocks, 1);
  EXPECT_EQ(result.fault, PackFault::none);
  EXPECT_EQ(image,
            (std::vector<float>{0, 1, 2, 3, 0, 4, 5, 6, 0, 0, 0, 0, 0,  // 12 elements after a gap of one
                                0, 1, 4, 2, 5, 3, 6,                    // 6 after a gap of one
                                0, 0, 0, 0, 0}));
}

TEST(Pack, ThreadsChangeNeitherTheImageNorTheFaultFound) {
  const int64_t rows = 1000, cols = 4001, block_bytes = rows * cols * 2;
  std::vector<float> plain(rows * cols);
  for (size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<float>(i % 251);
  std::vector<float> faulty = plain;
  const std::vector<Block> blocks = {
      {bytes_of(plain), DType::f32, rows, cols, cols, 1, rows, cols, 0},
      {bytes_of(faulty), DType::f32, rows, cols, 1, rows, rows, cols, block_bytes},
      {bytes_of(faulty), DType::f32, rows, cols, cols, 1, rows, cols, 2 * block_bytes},
  };
  const auto pack_with = [&](int threads, PackResult* result) {
    std::vector<std::byte> image(3 * block_bytes);
    *result = pack(image.data(), 3 * block_bytes, DType::bf16, blocks, threads);
    return image;
  };
  PackResult one, five;
  EXPECT_EQ(pack_with(1, &one), pack_with(5, &five));
  EXPECT_EQ(five.fault, PackFault::none);

  // In the transposed block, row 3 comes before row 20, whose element lies first in memory.
  faulty[7 * rows + 3] = std::numeric_limits<float>::max();
  faulty[20] = NAN;
  for (int threads : {1, 2, 5}) {
    PackResult result;
    pack_with(threads, &result);
    EXPECT_EQ(result.fault, PackFault::overflow);
    EXPECT_EQ(result.block, 1);
    EXPECT_EQ(result.index, 3 * cols + 7);
  }
}

}  // namespace
}  // namespace loramux
