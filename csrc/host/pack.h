// The packer: fills an adapter's slot image from the matrices of its file. Plain C++, no torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lora.h"

namespace loramux {

// One matrix of an image: `rows` x `cols` elements of the source (through its strides, in elements), widened
// with zeros to padded_rows x padded_cols, row-major at `offset` bytes, and on to the next kBlockAlign.
struct Block {
  const std::byte* source;  // any alignment
  DType source_dtype;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  int64_t padded_rows, padded_cols;
  int64_t offset;
};

enum class PackFault { none, not_finite, overflow };

struct PackResult {
  PackFault fault = PackFault::none;
  int64_t index = -1;  // the first bad element, row * cols + col in the source's logical shape
};

// Fills a block of an image, rounding to `dtype` to nearest even. A NaN or Inf in the source, or a finite
// value that rounds to Inf, is a fault; the block's content is then undefined.
PackResult pack(const Block& block, std::byte* image, DType dtype);

// Whether none of `count` values, at any alignment, is a NaN or Inf.
bool all_finite(const std::byte* values, DType dtype, int64_t count);

}  // namespace loramux
