// The pieces of an expand on sm_90 and later: B of some columns in a warp's registers, and what it adds to 8
// rows of y. Ranks are added in groups of 16 in one order, so that a row gets the same bits from every kernel
// that is made of these pieces.
#pragma once

#include "cuda/common.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace loramux {

inline constexpr int kTiles = 4;          // of a block
inline constexpr int kBlockColumns = 64;  // of y; a lane ends with 8 neighbours of them

// Which slice a CTA's (or a cluster's) columns lie in, and where. columns_of_cta: a power of two.
struct ColumnRange {
  int slice;
  int first;  // column within the slice
};

__device__ inline ColumnRange find_columns(const Site& site, int index, int columns_of_cta) {
  int slice = 0;
  int first = index * columns_of_cta;
  for (; slice + 1 < site.num_slices; ++slice) {
    const int padded = (static_cast<int>(site.slices[slice].width) + columns_of_cta - 1) & -columns_of_cta;
    if (first < padded) break;
    first -= padded;
  }
  return {slice, first};
}

// CTAs that find_columns deals the columns of a site to.
inline int64_t count_column_ctas(const Site& site, int columns_of_cta) {
  int64_t ctas = 0;
  for (int i = 0; i < site.num_slices; ++i) ctas += ceil_div(site.slices[i].width, columns_of_cta);
  return ctas;
}

// Which four of a group's 16 ranks lane t of four holds, so that B comes in 16-byte loads: of one group, half
// a row to a lane, whose second half it swaps with the lane two on; of two groups, a quarter of both.
template <int kGroups>
__device__ inline int first_rank_of_lane(int group, int t) {
  return kGroups == 1 ? 8 * (t % 2) + 4 * (t / 2) : group / 2 * 32 + 8 * t + group % 2 * 4;
}

// Zeros in place of the elements from rank `end` on, in eight of them from rank `rank` on.
__device__ inline uint4 mask_ranks(uint4 v, int rank, int end) {
  uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = end - rank - 2 * i;
    pairs[i] = left >= 2 ? pairs[i] : left == 1 ? pairs[i] & 0xffff : 0;
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// B of one warp's columns, kGroups groups of ranks. Tensor-core tile i of a block holds columns 8 g + 2 i and
// 8 g + 2 i + 1 in its two halves.
template <typename T, int kGroups, int kBlocks>
class BColumns {
 public:
  // Asks for B from column `column` of the slice and rank first_rank on.
  __device__ void load(const SliceWeights<T>& weights, int column, int width, int first_rank) {
    const int g = threadIdx.x % kLanes / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int first = column + n * kBlockColumns + 8 * g;
      const int end = first < width ? weights.rank : 0;
      const T* const b = weights.b + first * weights.stride + first_rank;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int rank = rank_of_vector(v, t);
          const T* const row = b + (2 * i + row_of_vector(v, t)) * static_cast<int>(weights.stride);
          values_[n][i][v] = first_rank + rank < end ? load_weights16(row + rank) : uint4{};
        }
      }
    }
    if (weights.rank % 8 != 0) mask(first_rank, weights.rank, t);
  }

  // Puts what was loaded where the tensor core takes it. All lanes of the warp.
  __device__ void arrange() {
    if constexpr (kGroups == 1) {
      const bool is_odd_row = threadIdx.x % 4 >= 2;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          uint4& v = values_[n][i][0];
          const uint32_t x = __shfl_xor_sync(~0u, is_odd_row ? v.x : v.z, 2);
          const uint32_t y = __shfl_xor_sync(~0u, is_odd_row ? v.y : v.w, 2);
          v = is_odd_row ? uint4{x, y, v.z, v.w} : uint4{v.x, v.y, x, y};
        }
      }
    }
  }

  // Adds B of block n times group q of 8 rows of h: hidden holds four ranks of row g, from first_rank_of_lane
  // on.
  __device__ void multiply(int n, int q, uint2 hidden, float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (kGroups == 1) {
        const uint4 v = values_[n][i][0];
        mma<T>(sums[i], v.x, v.z, v.y, v.w, hidden.x, hidden.y);
      } else {
        const uint4 even = values_[n][i][q / 2 * 2];
        const uint4 odd = values_[n][i][q / 2 * 2 + 1];
        if (q % 2 == 0) mma<T>(sums[i], even.x, odd.x, even.y, odd.y, hidden.x, hidden.y);
        if (q % 2 == 1) mma<T>(sums[i], even.z, odd.z, even.w, odd.w, hidden.x, hidden.y);
      }
    }
  }

 private:
  // A lane's loads of a tile: half a row, of the even row or the odd one; or a quarter of each row's 32
  // ranks.
  static constexpr int kVectors = kGroups == 1 ? 1 : kGroups;

  static __device__ int row_of_vector(int v, int t) { return kGroups == 1 ? t / 2 : v % 2; }

  static __device__ int rank_of_vector(int v, int t) {
    return kGroups == 1 ? 8 * (t % 2) : v / 2 * 32 + 8 * t;
  }

  // Only over stacked tensors: there may be anything past the slot's own rank.
  __device__ void mask(int first_rank, int end, int t) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          values_[n][i][v] = mask_ranks(values_[n][i][v], first_rank + rank_of_vector(v, t), end);
      }
    }
  }

  uint4 values_[kBlocks][kTiles][kVectors];
};

// Four ranks of an operand as they lie there: nothing may wait for one load before the next is asked for.
__device__ inline float4 load_operand(const float* h) {
  return *reinterpret_cast<const float4*>(h);
}

template <typename T>
__device__ inline uint2 load_operand(const T* a) {
  return *reinterpret_cast<const uint2*>(a);
}

// Those four rounded to T, zeros in place of all but the first `left`.
template <typename T>
__device__ inline uint2 pack_operand(float4 h, int left) {
  return {pack2<T>(left > 0 ? h.x : 0.f, left > 1 ? h.y : 0.f),
          pack2<T>(left > 2 ? h.z : 0.f, left > 3 ? h.w : 0.f)};
}

template <typename T>
__device__ inline uint2 pack_operand(uint2 a, int left) {
  const uint4 masked = mask_ranks({a.x, a.y, 0, 0}, 0, left);
  return {masked.x, masked.y};
}

// Eight neighbours of a row of y with the delta added, rounded once. The row's sums are those at `even` and
// `odd` of every tile, for its even and odd columns.
template <typename T>
__device__ inline uint4 add_delta(uint4 y, const float (&sums)[kTiles][4], int even, int odd, float factor) {
  uint32_t pairs[kTiles] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float2 old = unpack2<T>(pairs[i]);
    pairs[i] = pack2<T>(fmaf(factor, sums[i][even], old.x), fmaf(factor, sums[i][odd], old.y));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// The two rows of a decode tile whose y a lane adds to, at 8 columns of each block.
template <typename T, int kBlocks>
class YRows {
 public:
  // row: of lane g of this warp's lanes 4 g + t. column: the lane's first.
  __device__ void load(const TileRow& row, T* y_slice, int64_t stride, int column, int width) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t index = __shfl_sync(~0u, row.index, 4 * (2 * t + r));
      scale_[r] = __shfl_sync(~0u, row.scale, 4 * (2 * t + r));
      y_[r] = y_slice + index * stride + column;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        present_[r][n] = index >= 0 && column + n * kBlockColumns < width;
        values_[r][n] = present_[r][n] ? load16(y_[r] + n * kBlockColumns) : uint4{};
      }
    }
  }

  // sums: of block n.
  __device__ void add_and_store(int n, const float (&sums)[kTiles][4], float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 sum = add_delta<T>(values_[r][n], sums, r, 2 + r, factor * scale_[r]);
      if (present_[r][n]) store16(y_[r] + n * kBlockColumns, sum);
    }
  }

 private:
  T* y_[2];
  float scale_[2];
  bool present_[2][kBlocks];
  uint4 values_[2][kBlocks];
};

}  // namespace loramux
