// The pieces of an expand of 16 rows at a time on sm_90 and later: h and B where the tensor core takes them.
// Ranks meet in the order of columns.cuh, so that a row gets the same bits as from the kernels made of those
// pieces.
#pragma once

#include "cuda/columns.cuh"
#include "cuda/common.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace loramux {

inline constexpr int kUnitRows = 16;

// B of one warp's columns, kGroups groups of ranks, as the tensor core's 8-column operand. A block of 64
// columns has two halves: lane 4 g + t ends with columns 8 (2 t + half) to 8 (2 t + half) + 7.
template <typename T, int kGroups>
class BHalves {
 public:
  // b: the block's first row of B, in global or shared memory, from rank first_rank on. columns: of the slice
  // from there on.
  template <bool kIsShared>
  __device__ void load(const T* b, const SliceWeights<T>& weights, int columns, int first_rank) {
    const int g = threadIdx.x % kLanes / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = (g / 2 * 2 + half) * 8;
      const int end = first < columns ? weights.rank : 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int q = 0; q < kGroups; q += 2) {
          const int rank_of_lane = first_rank_of_lane<kGroups>(q, t);
          const int rank = first_rank + rank_of_lane;
          const T* const from = b + (first + g % 2 + 2 * i) * static_cast<int>(weights.stride) + rank_of_lane;
          uint4 v{};
          if constexpr (kGroups == 1) {
            static_assert(kIsShared);  // from global memory groups are loaded two at a time
            const uint2 four = rank < end ? *reinterpret_cast<const uint2*>(from) : uint2{};
            v = {four.x, four.y, 0, 0};
          } else {
            if (rank < end) v = kIsShared ? *reinterpret_cast<const uint4*>(from) : load_weights16(from);
          }
          // Only over stacked tensors: there may be anything past the slot's own rank.
          if (weights.rank % 8 != 0) v = mask_ranks(v, rank, end);
          pairs_[half][i][q] = {v.x, v.y};
          if constexpr (kGroups > 1) pairs_[half][i][q + 1] = {v.z, v.w};
        }
      }
    }
  }

  // Adds group q of 16 rows of h times B of one half. h: of rows g and g + 8 by turns, two ranks each, from
  // first_rank_of_lane on. Of the sums a lane holds those of row g, then those of row g + 8.
  __device__ void multiply(int half, int q, uint4 h, float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      mma<T>(sums[i], h.x, h.y, h.z, h.w, pairs_[half][i][q].x, pairs_[half][i][q].y);
  }

 private:
  uint2 pairs_[2][kTiles][kGroups];
};

// Vectors of h of 16 rows in shared memory: [group][lane that multiplies it].
template <int kGroups>
__host__ __device__ inline int hidden_vectors(int64_t max_rank) {
  return static_cast<int>(ceil_div(max_rank, kGroups * kGroupRanks)) * kGroups * kLanes;
}

// h of 16 rows on its way from global to shared memory through one warp's registers, where it is rounded.
template <typename T, typename Element, int kGroups>
class HiddenRows {
 public:
  // index: of this lane's row among the operands, -1 for none. rank: of the slot.
  __device__ void load(const Operands<Element>& operands, int index, int rank, int first_rank) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int lane_rank = first_rank + first_rank_of_lane<kGroups>(group(), threadIdx.x % 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int from = __shfl_sync(~0u, index, row_pair(i) + 8 * r);
        const Element* const values = operands.data + int64_t{from} * operands.stride + lane_rank;
        values_[i][r] = from >= 0 && lane_rank < rank ? load_operand(values) : Values{};
      }
    }
  }

  __device__ void put(uint4* to, int rank, int first_rank) const {
    const bool are_fours = rank % 4 == 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int left = rank - first_rank - first_rank_of_lane<kGroups>(group(), threadIdx.x % 4);
      uint2 rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        rows[r] = are_fours ? pack_operand<T>(values_[i][r], 4) : pack_operand<T>(values_[i][r], left);
      to[(first_rank / kGroupRanks + group()) * kLanes + row_pair(i) * 4 + threadIdx.x % 4] = {
          rows[0].x, rows[1].x, rows[0].y, rows[1].y};
    }
  }

 private:
  // Neighbouring lanes take neighbouring ranks of a row.
  static __device__ int group() { return threadIdx.x % kLanes / 4 % kGroups; }
  static __device__ int row_pair(int i) { return (i * kLanes + threadIdx.x % kLanes) / (4 * kGroups); }

  using Values = decltype(load_operand(static_cast<const Element*>(nullptr)));
  Values values_[kGroups][2];
};

}  // namespace loramux
