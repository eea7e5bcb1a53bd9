// How the copy engine sees y: the tensor maps of the expand of prefill tiles, made on the host for a call.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>

#include "cuda/columns.cuh"
#include "cuda/rows16.cuh"
#include "lora.h"

namespace loramux {

// The 16-byte pieces of a row of a box lie turned by its number in shared memory, so that lanes which access
// eight rows meet in no bank.
struct YMaps {
  CUtensorMap box;     // 16 rows of one block of columns
  CUtensorMap blocks;  // 16 rows of several, where columns are counted in whole blocks
  CUtensorMap row;     // one row of those
};

inline int encode_y(const ExpandArgs& args, cuuint32_t num_blocks, YMaps* maps) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const Site& site = args.site;
  cuuint64_t columns = 0;
  for (int i = 0; i < site.num_slices; ++i)
    columns = std::max<cuuint64_t>(columns, site.slices[i].offset + site.slices[i].width);
  const cuuint64_t rows = args.rows;
  const cuuint64_t box[] = {columns, rows};
  const cuuint64_t blocks[] = {kBlockColumns, rows, std::max<cuuint64_t>(columns / kBlockColumns, 1)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(args.y_stride * item_size(site.dtype)),
                                kBlockColumns * 2};
  const cuuint32_t rows16[] = {kBlockColumns, kUnitRows, num_blocks};
  const cuuint32_t row1[] = {kBlockColumns, 1, num_blocks};
  const cuuint32_t steps[] = {1, 1, 1};
  const auto type =
      site.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto make = [&](CUtensorMap* map, int dimensions, const cuuint64_t* sizes, const cuuint32_t* copied) {
    return encode(map, type, dimensions, args.y, sizes, strides, copied, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  return make(&maps->box, 2, box, rows16) && make(&maps->blocks, 3, blocks, rows16) &&
                 make(&maps->row, 3, blocks, row1)
             ? cudaSuccess
             : cudaErrorInvalidValue;
}

}  // namespace loramux
