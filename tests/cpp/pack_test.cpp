#include "host/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
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

TEST(Pack, LaysABlockOutWithZerosUpToTheNext) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  std::vector<float> image(96, -1.0f), want = image;
  const auto pack_block = [&](const Block& block) {
    return pack(block, reinterpret_cast<std::byte*>(image.data()), DType::f32);
  };
  std::fill(want.begin() + 32, want.begin() + 64, 0.0f);
  for (int i : {0, 1, 2}) {
    want[32 + i] = a[i];
    want[36 + i] = a[3 + i];
  }
  EXPECT_EQ(pack_block({bytes_of(a), DType::f32, 2, 3, 3, 1, 3, 4, 128}).fault, PackFault::none);
  EXPECT_EQ(image, want) << "rows and columns padded";

  std::fill(want.begin() + 64, want.end(), 0.0f);
  const float transposed[] = {1, 4, 2, 5, 3, 6};
  std::copy(std::begin(transposed), std::end(transposed), want.begin() + 64);
  EXPECT_EQ(pack_block({bytes_of(a), DType::f32, 3, 2, 1, 3, 3, 2, 256}).fault, PackFault::none);
  EXPECT_EQ(image, want) << "the transpose of a 2 x 3 matrix";
}

TEST(Pack, FindsTheFirstFaultInTheOrderOfTheBlock) {
  const int64_t rows = 100, cols = 401;
  std::vector<float> values(rows * cols, 1.0f);
  // In the transposed block, row 3 comes before row 20, whose element lies first in memory.
  values[7 * rows + 3] = std::numeric_limits<float>::max();
  values[20] = NAN;
  std::vector<std::byte> image(rows * cols * 2 + kBlockAlign);
  const PackResult result =
      pack({bytes_of(values), DType::f32, rows, cols, 1, rows, rows, cols, 0}, image.data(), DType::bf16);
  EXPECT_EQ(result.fault, PackFault::overflow);
  EXPECT_EQ(result.index, 3 * cols + 7);
}

}  // namespace
}  // namespace loramux
