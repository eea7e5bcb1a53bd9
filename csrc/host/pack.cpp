#include "host/pack.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <type_traits>

#include "half.h"

namespace loramux {
namespace {

constexpr int64_t kMinBytesPerThread = 4 << 20;  // about a millisecond: a thread's start is small beside it
constexpr int64_t kTransposeTile = 64;           // rows and columns whose lines stay in the L1 cache

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

void zero(std::byte* begin, std::byte* end) {
  std::fill(begin, end, std::byte{0});
}

// The next three functions take rows [begin, end) of a block. The first is false if an element does not fit.
bool copy_rows(const Block& block, int64_t begin, int64_t end, std::byte* image, DType dtype) {
  const Convert convert = converter(block.source_dtype, dtype);
  const auto to = [&](int64_t row, int64_t col) {
    return image + block.offset + row * row_bytes(block, dtype) + col * item_size(dtype);
  };

  if (block.col_stride == 1 && block.row_stride == block.cols && block.cols == block.padded_cols)
    return convert(source_element(block, begin, 0), 1, to(begin, 0), 1, (end - begin) * block.cols);

  bool good = true;
  if (block.col_stride <= block.row_stride) {
    for (int64_t row = begin; row < end; ++row)
      good &= convert(source_element(block, row, 0), block.col_stride, to(row, 0), 1, block.cols);
    return good;
  }
  for (int64_t row = begin; row < end; row += kTransposeTile)
    for (int64_t col = 0; col < block.cols; col += kTransposeTile)
      for (int64_t c = col; c < std::min(col + kTransposeTile, block.cols); ++c)
        good &= convert(source_element(block, row, c), block.row_stride, to(row, c), block.padded_cols,
                        std::min(kTransposeTile, end - row));
  return good;
}

PackResult first_fault(const Block& block, int64_t begin, int64_t end, DType dtype) {
  const Convert fits = converter(block.source_dtype, dtype);
  const Convert is_finite = converter(block.source_dtype, block.source_dtype);
  std::byte ignored[sizeof(float)];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t col = 0; col < block.cols; ++col) {
      const std::byte* element = source_element(block, row, col);
      if (fits(element, 1, ignored, 1, 1)) continue;
      const bool finite = is_finite(element, 1, ignored, 1, 1);
      return {finite ? PackFault::overflow : PackFault::not_finite, -1, row * block.cols + col};
    }
  }
  return {};
}

PackResult pack_rows(const Block& block, int64_t begin, int64_t end, std::byte* image, DType dtype) {
  const int64_t filled = std::clamp(block.source ? block.rows : 0, begin, end);
  const auto row_start = [&](int64_t row) { return image + block.offset + row * row_bytes(block, dtype); };
  if (block.cols < block.padded_cols)
    for (int64_t row = begin; row < filled; ++row)
      zero(row_start(row) + block.cols * item_size(dtype), row_start(row + 1));
  zero(row_start(filled), row_start(end));
  return copy_rows(block, begin, filled, image, dtype) ? PackResult{}
                                                       : first_fault(block, begin, filled, dtype);
}

// Packs the rows that start in bytes [begin, end) of the image, up to the first fault.
PackResult pack_bytes(const std::vector<Block>& blocks, int64_t begin, int64_t end, std::byte* image,
                      DType dtype) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    const int64_t bytes = row_bytes(block, dtype);
    if (bytes == 0) continue;
    const auto first_row_from = [&](int64_t byte) {
      return std::clamp<int64_t>((byte - block.offset + bytes - 1) / bytes, 0, block.padded_rows);
    };
    PackResult result = pack_rows(block, first_row_from(begin), first_row_from(end), image, dtype);
    if (result.fault == PackFault::none) continue;
    result.block = static_cast<int64_t>(i);
    return result;
  }
  return {};
}

void zero_gaps(const std::vector<Block>& blocks, std::byte* image, int64_t bytes, DType dtype) {
  int64_t end = 0;
  for (const Block& block : blocks) {
    zero(image + end, image + block.offset);
    end = block.offset + block.padded_rows * row_bytes(block, dtype);
  }
  zero(image + end, image + bytes);
}

}  // namespace

PackResult pack(std::byte* image, int64_t bytes, DType dtype, const std::vector<Block>& blocks, int threads) {
  zero_gaps(blocks, image, bytes, dtype);
  const int64_t parts = std::clamp<int64_t>(bytes / kMinBytesPerThread, 1, threads);
  std::vector<PackResult> results(parts);
  const auto pack_part = [&](int64_t part) {
    results[part] = pack_bytes(blocks, bytes * part / parts, bytes * (part + 1) / parts, image, dtype);
  };
  {
    std::vector<std::jthread> others;
    for (int64_t part = 1; part < parts; ++part) others.emplace_back(pack_part, part);
    pack_part(0);
  }
  // The parts are in image order, hence in the order of blocks and of elements.
  const auto fault = std::find_if(results.begin(), results.end(),
                                  [](const PackResult& result) { return result.fault != PackFault::none; });
  return fault == results.end() ? PackResult{} : *fault;
}

}  // namespace loramux
