// The packer: fills an adapter's slot image from the matrices of its file. Plain C++, no torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lora.h"

namespace loramux {

// One matrix of an image: `rows` x `cols` elements of the source (through its strides, in elements), widened
// with zeros to padded_rows x padded_cols, row-major at `offset` bytes.
struct Block {
  const std::byte* source;  // any alignment; null: all zeros
  DType source_dtype;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  int64_t padded_rows, padded_cols;
  int64_t offset;
};

enum class PackFault { none, not_finite, overflow };

struct PackResult {
  PackFault fault = PackFault::none;
  int64_t block = -1;  // the first offender, by position in `blocks`
  int64_t index = -1;  // its first bad element, row * cols + col in the source's logical shape
};

// Fills image[0 .. bytes) from blocks, rounding to `dtype` to nearest even, on up to `threads` >= 1 threads.
// The blocks come in ascending order, without overlap; the bytes between them become zeros. A NaN or Inf in a
// source, or a finite value that rounds to Inf, is a fault; the image's content is then undefined.
PackResult pack(std::byte* image, int64_t bytes, DType dtype, const std::vector<Block>& blocks, int threads);

}  // namespace loramux
