// A short step's deltas beside the base GEMM: made on a stream of their own while the GEMM reads its weights,
// and added to y behind it. Of a call's latency (launch, plan, table, weights, x) only the addition's is left
// after the GEMM.
//
// A GEMM of cuBLAS fills the registers of each SM that it runs on, so that these kernels find room on the SMs
// that it leaves free, before it, and on those that it is done with. Hence small CTAs, few kernels, and no
// clusters, which would wait for the GEMM to end: a part of K to a CTA, whose sums meet in the expand. Floor
// of the addition: y read and written and the delta read, which is in L2: 0.9 us for gate_up and 32 rows.
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/common.cuh"
#include "cuda/decode.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "host/plan.h"
#include "lora.h"

namespace loramux {
namespace {

static_assert(kMaxParts <= kBesideParts && kBesideRows <= max_decode_rows_of_slot(kBesideRows));

// Grid: (parts of K; decode tiles; slices). As shrink_decode_kernel, but the sums of a part go to an array
// [rows, num_slices, max_rank] of their own behind args.h, 16 ranks after 16 if kHasMore. Zeroes the delta
// too, `vectors` of 16 bytes.
template <typename T, bool kIsLong, bool kHasMore>
__global__ void __launch_bounds__(kDecodeThreads, kIsLong ? 0 : 4)
    shrink_part_kernel(const __grid_constant__ ShrinkArgs args, int steps, uint4* delta, int64_t vectors) {
#if __CUDA_ARCH__ >= 900
  let_next_kernel_start();
  const auto wait_and_zero = [&] {
    wait_for_earlier_kernels();
    const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int threads = gridDim.x * gridDim.y * gridDim.z * kDecodeThreads;
    for (int64_t v = cta * kDecodeThreads + threadIdx.x; v < vectors; v += threads) delta[v] = {};
  };
  const int slice = blockIdx.z;
  TileRows tile;
  SliceWeights<T> weights{};
  if (find_tile(args.plan, TileKind::decode, blockIdx.y, args.rows, &tile))
    weights = find_slice<T>(args.site, tile.slot, slice);
  if (weights.rank == 0) return wait_and_zero();

  __shared__ PartialSums<1> partial;
  __shared__ int64_t row_index[kDecodeRows];
  const auto chunk_of = [&](int first_rank) {
    return DecodeChunk<T, 1, 4, kIsLong>(weights.a + first_rank * args.site.in_features,
                                         weights.rank - first_rank, static_cast<int>(args.site.in_features),
                                         blockIdx.x, steps);
  };
  const auto shrink = [&](auto& chunk, const T* x, int first_rank) {
    float sums[1][4] = {};
    chunk.multiply(x, sums);
    partial.put(sums);
    __syncthreads();
    if (threadIdx.x >= partial.kVectors) return;
    const int64_t to = row_index[threadIdx.x / (partial.kRanks / 4)];
    const int rank = first_rank + threadIdx.x % (partial.kRanks / 4) * 4;
    if (to < 0 || rank >= args.site.max_rank) return;
    float* const h =
        args.h + ((blockIdx.x * args.rows + to) * args.site.num_slices + slice) * args.site.max_rank;
    *reinterpret_cast<float4*>(h + rank) = partial.sum(threadIdx.x);
  };
  auto chunk = chunk_of(0);
  const int g = threadIdx.x % kLanes / 4;
  const TileRow row = find_row(args.plan, tile, g, args.rows);
  if (threadIdx.x < kLanes && threadIdx.x % 4 == 0) row_index[g] = row.index;
  wait_and_zero();
  const T* const x = row.index < 0 ? nullptr : static_cast<const T*>(args.x) + row.index * args.x_stride;
  shrink(chunk, x, 0);
#pragma unroll 1
  for (int rank = partial.kRanks; kHasMore && rank < weights.rank; rank += partial.kRanks) {
    auto next = chunk_of(rank);
    __syncthreads();  // the sums of the ranks before have been read
    shrink(next, x, rank);
  }
#endif
}

template <typename T>
int shrink_parts(const ApplyArgs& args, void* stream) {
  const ShrinkArgs& shrink = args.shrink;
  const int steps = decode_steps(shrink.site.in_features);
  const dim3 grid(decode_parts(shrink.site.in_features), max_decode_tiles(shrink.rows, shrink.site.num_slots),
                  shrink.site.num_slices);
  const int64_t vectors = shrink.rows * args.expand.y_stride * sizeof(T) / 16;
  const auto kernel_of = [&](auto few, auto many) {
    return shrink.site.max_rank <= kGroupRanks ? few : many;
  };
  const auto kernel = steps <= 4
                          ? kernel_of(shrink_part_kernel<T, false, false>, shrink_part_kernel<T, false, true>)
                          : kernel_of(shrink_part_kernel<T, true, false>, shrink_part_kernel<T, true, true>);
  return launch(kernel, grid, kDecodeThreads, 1, stream, 0, shrink, steps, static_cast<uint4*>(args.expand.y),
                vectors);
}

struct AddArgs {
  const void* delta;  // [rows, width], contiguous
  void* y;            // [rows, width], unit column stride
  int64_t y_stride;
  int width;
};

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Elements {
  T values[kCount];
};

constexpr int kAddThreads = 256;

// Grid: (blocks of columns; rows). A delta of zero leaves the bits of y as they are, also those of -0: rows
// and slices without an adapter have such.
template <typename T, int kCount>
__global__ void __launch_bounds__(kAddThreads) add_kernel(const __grid_constant__ AddArgs args) {
#if __CUDA_ARCH__ >= 900
  let_next_kernel_start();
  const int column = (blockIdx.x * kAddThreads + threadIdx.x) * kCount;
  using Vector = Elements<T, kCount>;
  auto* const y = reinterpret_cast<Vector*>(static_cast<T*>(args.y) + blockIdx.y * args.y_stride + column);
  wait_for_earlier_kernels();
  if (column >= args.width) return;
  const Vector delta = *reinterpret_cast<const Vector*>(static_cast<const T*>(args.delta) +
                                                        int64_t{blockIdx.y} * args.width + column);
  Vector sum = *y;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float d = static_cast<float>(delta.values[i]);
    if (d != 0.f) sum.values[i] = static_cast<T>(static_cast<float>(sum.values[i]) + d);
  }
  *y = sum;
#endif
}

template <typename T, int kCount>
int launch_add(const AddArgs& args, int64_t rows, void* stream) {
  return launch(add_kernel<T, kCount>, dim3(ceil_div(args.width, kAddThreads * kCount), rows), kAddThreads, 1,
                stream, 0, args);
}

template <typename T>
int add(const AddArgs& args, int64_t rows, DType dtype, void* stream) {
  return is_aligned(args.y, args.y_stride, dtype) ? launch_add<T, 8>(args, rows, stream)
                                                  : launch_add<T, 1>(args, rows, stream);
}

// The stream beside a caller's stream, and the events between the two. They live as long as the process, as
// torch's own streams do.
struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t begun = nullptr, made = nullptr;

  int create() {
    // Allowed while another thread, or this one, captures a graph.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    int error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (cudaEvent_t* event : {&begun, &made}) {
      if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
  }
};

// A stream of null is each device's own.
int side_of(void* stream, Side* side) {
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, Side> sides;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  Side& known = sides[{device, stream}];
  const int error = known.made == nullptr ? known.create() : cudaSuccess;
  *side = known;
  return error;
}

}  // namespace

// A and B keep SMs from the GEMM. On an H200 (`python -m bench after-gemm`) deltas beside it save 6 to 9% of
// a layer at 32 rows of up to 4 adapters of rank 16, also where the largest rank is 64. With as many of rank
// 64 both are within 2%; 32 of rank 16 cost 3%, and 32 of rank 64 more.
bool beside_serves(const ApplyArgs& delta) {
  constexpr int64_t kMaxRank = 64, kRanks = 512;  // of an adapter; of all that a step may have
  const ShrinkArgs& shrink = delta.shrink;
  const Site& site = shrink.site;
  const int64_t adapters = std::min(shrink.rows, site.num_slots - 1);
  const Device device = current_device();
  return has_tiles(shrink) && shrink.rows <= kBesideRows && site.max_rank <= kMaxRank &&
         adapters * site.max_rank <= kRanks && !is_portable_forced() &&
         shrink_decode_serves(shrink, device) && expand_serves(delta.expand, device);
}

int start_cuda(const ApplyArgs& delta, void* stream) {
  const ShrinkArgs& shrink = delta.shrink;
  Side side;
  int error = side_of(stream, &side);
  if (error == cudaSuccess) error = cudaEventRecord(side.begun, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) error = cudaStreamWaitEvent(side.stream, side.begun);
  if (error == cudaSuccess)
    error = shrink.site.dtype == DType::bf16 ? shrink_parts<__nv_bfloat16>(delta, side.stream)
                                             : shrink_parts<__half>(delta, side.stream);
  if (error == cudaSuccess)
    error = expand_decode(delta.expand, decode_parts(shrink.site.in_features), side.stream);
  if (error == cudaSuccess) error = cudaEventRecord(side.made, side.stream);
  return error;
}

int finish_cuda(const ExpandArgs& delta, void* y, int64_t y_stride, void* stream) {
  Side side;
  int error = side_of(stream, &side);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), side.made);
  if (error != cudaSuccess) return error;
  const AddArgs args = {delta.y, y, y_stride, static_cast<int>(delta.y_stride)};
  const DType dtype = delta.site.dtype;
  return dtype == DType::bf16 ? add<__nv_bfloat16>(args, delta.rows, dtype, stream)
                              : add<__half>(args, delta.rows, dtype, stream);
}

}  // namespace loramux
