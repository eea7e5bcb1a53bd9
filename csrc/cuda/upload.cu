// Takes a step's plan from pinned memory to the device. A copy would wait its turn in the copy engine, 1.4 ms
// behind an adapter of 84 MB for another stream (measured on an H200). These threads read over PCIe what they
// write: 5 us for a plan of 4 KB, 6 for one of 74 KB, and 19 and 21 beside such an adapter.
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace loramux {
namespace {

constexpr int kThreads = 256;

__global__ void upload_kernel(uint4* plan, const uint4* words, int64_t vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < vectors) plan[i] = words[i];
  // The next kernel may start as the last of these threads ends: what they wrote must be there by then.
  __threadfence();
}

}  // namespace

int upload_cuda(const UploadArgs& args, void* stream) {
  void* words = nullptr;  // as the device sees them
  const int error = cudaHostGetDevicePointer(&words, const_cast<int32_t*>(args.words), 0);
  if (error != cudaSuccess) return error;
  const int64_t vectors = args.count / 4;
  upload_kernel<<<static_cast<unsigned>(ceil_div(vectors, kThreads)), kThreads, 0,
                  static_cast<cudaStream_t>(stream)>>>(reinterpret_cast<uint4*>(args.plan),
                                                       static_cast<const uint4*>(words), vectors);
  return cudaGetLastError();
}

}  // namespace loramux
