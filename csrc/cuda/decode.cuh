// The pieces of a decode tile's shrink (at most 8 rows of one slot) on sm_90 and later. A goes from global
// memory to registers in 16-byte loads and meets x there; partial sums meet in the shared memory of a
// cluster.
//
// The order of every sum is fixed by in_features alone: K is cut evenly into decode_parts(K) parts of
// kDecodeWarps chunks, in steps of kStepK. The tensor core adds a chunk's steps up with K rising; then the
// chunks of a part are added up, and then the parts, in order. So a row gets the same h from every kernel
// that is made of these pieces.
#pragma once

#include "cuda/common.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace loramux {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * kLanes;
inline constexpr int kStepK = 32;  // of K, one 16-byte load a lane
inline constexpr int kMaxParts = 8;

// Parts of K, each a CTA's: as many as leave a warp at most 4 steps, if kMaxParts are enough for it.
__host__ __device__ constexpr int decode_parts(int64_t in_features) {
  int parts = 2;  // a single CTA has no peer to store to
  while (parts < kMaxParts && parts * kDecodeWarps * 4 * kStepK < in_features) parts *= 2;
  return parts;
}

// Steps of a warp.
inline int decode_steps(int64_t in_features) {
  return static_cast<int>(
      ceil_div(ceil_div(in_features, kStepK), int64_t{decode_parts(in_features)} * kDecodeWarps));
}

// One warp's chunk of K of kGroups * 16 ranks. kSteps: steps whose weights it holds at a time; all of them,
// unless kIsLong.
template <typename T, int kGroups, int kSteps, bool kIsLong = false>
class DecodeChunk {
 public:
  // a: the first rank's row of A. ranks: rows of A from there on. Asks for the weights.
  __device__ DecodeChunk(const T* a, int ranks, int in_features, int part, int steps)
      : ranks_(ranks), in_features_(in_features), steps_(steps) {
    const int first = (part * kDecodeWarps + static_cast<int>(threadIdx.x) / kLanes) * steps * kStepK;
    k_ = first + threadIdx.x % 4 * 8;
    end_ = min(first + steps * kStepK, in_features);
    a_ = a + int64_t{in_features} * (threadIdx.x % kLanes / 4);
    load_weights();
  }

  // Asks for the weights past those that it holds to be brought into L2.
  __device__ void prefetch_rest() const {
    constexpr int kRanks = kGroups * kGroupRanks;
    constexpr int kLineElements = 128 / sizeof(T);
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int first = k_ - lane % 4 * 8 + kSteps * kStepK;
    const T* const a = a_ - int64_t{in_features_} * (lane / 4);
    const int lines = (end_ - first + kLineElements - 1) / kLineElements;
    for (int i = lane; i < lines * kRanks; i += kLanes) {
      const int rank = i % kRanks;
      if (rank < ranks_) prefetch_line(a + int64_t{in_features_} * rank + first + i / kRanks * kLineElements);
    }
  }

  // x: the row of lane g of this warp's lanes 4 g + t, or null. Adds x @ A^T of this chunk to `sums`.
  __device__ void multiply(const T* x, float (&sums)[kGroups][4]) {
    for (int step = 0; true; load_weights()) {
      uint4 x_steps[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        x_steps[i] = x != nullptr && k_ + i * kStepK < end_ ? load16(x + k_ + i * kStepK) : uint4{};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          const uint4 low = weights_[i][q][0];
          const uint4 high = weights_[i][q][1];
          mma<T>(sums[q], low.x, high.x, low.y, high.y, x_steps[i].x, x_steps[i].y);
          mma<T>(sums[q], low.z, high.z, low.w, high.w, x_steps[i].z, x_steps[i].w);
        }
      }
      step += kSteps;
      if (!kIsLong || step >= steps_) return;
      k_ += kSteps * kStepK;
    }
  }

 private:
  __device__ void load_weights() {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int rank = q * kGroupRanks + half * 8;
        const T* const a = a_ + int64_t{in_features_} * rank + k_;
        const int end = rank + static_cast<int>(threadIdx.x) % kLanes / 4 < ranks_ ? end_ : 0;
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
          weights_[i][q][half] = k_ + i * kStepK < end ? load_weights16(a + i * kStepK) : uint4{};
      }
    }
  }

  int ranks_, in_features_, steps_;
  const T* a_;   // the row of lane g
  int k_, end_;  // of this lane's next step; of the chunk
  uint4 weights_[kSteps][kGroups][2];
};

// A part's sums by warp: [warp][row][rank].
template <int kGroups>
struct PartialSums {
  static constexpr int kRanks = kGroups * kGroupRanks;
  static constexpr int kVectors = kDecodeRows * kRanks / 4;
  alignas(16) float values[kDecodeWarps][kDecodeRows][kRanks];

  __device__ void put(const float (&sums)[kGroups][4]) {
    const int g = threadIdx.x % kLanes / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[threadIdx.x / kLanes][2 * t + i % 2][q * kGroupRanks + g + i / 2 * 8] = sums[q][i];
      }
    }
  }

  // Four neighbours of the part's sum, vector `v` of kVectors, rank fastest.
  __device__ float4 sum(int v) const {
    float4 sum{};
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) sum = add(sum, reinterpret_cast<const float4*>(values[w])[v]);
    return sum;
  }
};

}  // namespace loramux
