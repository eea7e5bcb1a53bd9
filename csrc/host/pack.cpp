#include "host/pack.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "half.h"

namespace loramux {
namespace {

constexpr int64_t kTransposeTile = 64;    // rows and columns whose lines stay in the L1 cache
constexpr int64_t kCheckedAtOnce = 1024;  // values, of which a copy stays in the L1 cache

template <DType>
struct Element;

template <>
struct Element<DType::f32> {
  using Bits = uint32_t;
  static constexpr Bits kInf = 0x7f800000;
  static constexpr uint32_t kOverflow = 0x7f800000;  // as float bits: the least magnitude that rounds to Inf
  static float to_float(Bits bits) { return bits_float(bits); }
  static Bits from_float(float value) { return float_bits(value); }
};

template <>
struct Element<DType::f16> {
  using Bits = uint16_t;
  static constexpr Bits kInf = 0x7c00;
  static constexpr uint32_t kOverflow = 0x477ff000;
  static float to_float(Bits bits) { return f16_to_float(bits); }
  static Bits from_float(float value) { return float_to_f16(value); }
};

template <>
struct Element<DType::bf16> {
  using Bits = uint16_t;
  static constexpr Bits kInf = 0x7f80;
  static constexpr uint32_t kOverflow = 0x7f7f8000;
  static float to_float(Bits bits) { return bf16_to_float(bits); }
  static Bits from_float(float value) { return float_to_bf16(value); }
};

// Converts `count` elements, strides in elements; false if one is not finite or overflows. Looks at them all,
// so that the loop vectorises.
template <DType From, DType To>
bool convert(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t count) {
  using FromBits = typename Element<From>::Bits;
  using ToBits = typename Element<To>::Bits;
  using Word = std::conditional_t<From == To, FromBits, uint32_t>;
  constexpr Word kSign = Word{1} << (8 * sizeof(Word) - 1);
  constexpr Word kLimit = From == To ? Element<From>::kInf : Element<To>::kOverflow;

  const auto loop = [=](int64_t from_stride, int64_t to_stride) {
    Word slack = 0;
    for (int64_t i = 0; i < count; ++i) {
      FromBits bits;
      std::memcpy(&bits, from + i * from_stride * int64_t{sizeof bits}, sizeof bits);
      Word word;
      ToBits result;
      if constexpr (From == To) {
        word = result = bits;
      } else {
        word = float_bits(Element<From>::to_float(bits));
        result = Element<To>::from_float(bits_float(word));
      }
      std::memcpy(to + i * to_stride * int64_t{sizeof result}, &result, sizeof result);
      slack |= static_cast<Word>(kLimit - 1 - (word & ~kSign));  // negative if the magnitude is too large
    }
    return (slack & kSign) == 0;
  };
  return from_stride == 1 && to_stride == 1 ? loop(1, 1) : loop(from_stride, to_stride);
}

using Convert = decltype(&convert<DType::f32, DType::f32>);

Convert converter(DType from, DType to) {
  using enum DType;
  static constexpr Convert kConverters[3][3] = {
      {convert<f32, f32>, convert<f32, f16>, convert<f32, bf16>},
      {convert<f16, f32>, convert<f16, f16>, convert<f16, bf16>},
      {convert<bf16, f32>, convert<bf16, f16>, convert<bf16, bf16>},
  };
  return kConverters[static_cast<int>(from)][static_cast<int>(to)];
}

const std::byte* source_element(const Block& block, int64_t row, int64_t col) {
  return block.source + (row * block.row_stride + col * block.col_stride) * item_size(block.source_dtype);
}

int64_t row_bytes(const Block& block, DType dtype) {
  return block.padded_cols * item_size(dtype);
}

int64_t block_bytes(const Block& block, DType dtype) {
  return (block.padded_rows * row_bytes(block, dtype) + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
}

void zero(std::byte* begin, std::byte* end) {
  std::fill(begin, end, std::byte{0});
}

// False if an element does not fit.
bool copy(const Block& block, std::byte* image, DType dtype) {
  const Convert convert = converter(block.source_dtype, dtype);
  const auto to = [&](int64_t row, int64_t col) {
    return image + block.offset + row * row_bytes(block, dtype) + col * item_size(dtype);
  };

  if (block.col_stride == 1 && block.row_stride == block.cols && block.cols == block.padded_cols)
    return convert(block.source, 1, to(0, 0), 1, block.rows * block.cols);

  bool good = true;
  if (block.col_stride <= block.row_stride) {
    for (int64_t row = 0; row < block.rows; ++row)
      good &= convert(source_element(block, row, 0), block.col_stride, to(row, 0), 1, block.cols);
    return good;
  }
  for (int64_t row = 0; row < block.rows; row += kTransposeTile)
    for (int64_t col = 0; col < block.cols; col += kTransposeTile)
      for (int64_t c = col; c < std::min(col + kTransposeTile, block.cols); ++c)
        good &= convert(source_element(block, row, c), block.row_stride, to(row, c), block.padded_cols,
                        std::min(kTransposeTile, block.rows - row));
  return good;
}

PackResult first_fault(const Block& block, DType dtype) {
  const Convert fits = converter(block.source_dtype, dtype);
  const Convert is_finite = converter(block.source_dtype, block.source_dtype);
  std::byte ignored[sizeof(float)];
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t col = 0; col < block.cols; ++col) {
      const std::byte* element = source_element(block, row, col);
      if (fits(element, 1, ignored, 1, 1)) continue;
      const bool finite = is_finite(element, 1, ignored, 1, 1);
      return {finite ? PackFault::overflow : PackFault::not_finite, row * block.cols + col};
    }
  }
  return {};
}

}  // namespace

PackResult pack(const Block& block, std::byte* image, DType dtype) {
  const auto row_start = [&](int64_t row) { return image + block.offset + row * row_bytes(block, dtype); };
  if (block.cols < block.padded_cols)
    for (int64_t row = 0; row < block.rows; ++row)
      zero(row_start(row) + block.cols * item_size(dtype), row_start(row + 1));
  zero(row_start(block.rows), image + block.offset + block_bytes(block, dtype));
  return copy(block, image, dtype) ? PackResult{} : first_fault(block, dtype);
}

bool all_finite(const std::byte* values, DType dtype, int64_t count) {
  const Convert is_finite = converter(dtype, dtype);
  alignas(64) std::byte ignored[kCheckedAtOnce * sizeof(float)];
  bool good = true;
  for (int64_t i = 0; i < count && good; i += kCheckedAtOnce)
    good = is_finite(values + i * item_size(dtype), 1, ignored, 1, std::min(kCheckedAtOnce, count - i));
  return good;
}

}  // namespace loramux
