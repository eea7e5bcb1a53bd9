// What the launchers of the tuned kernels share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "host/plan.h"
#include "lora.h"

namespace loramux {

inline constexpr int kLanes = 32;
inline constexpr int kGroupRanks = 16;  // ranks of one tensor-core tile

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Whether rows `stride` elements apart from `data` on can be read in 16-byte loads.
inline bool is_aligned(const void* data, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * item_size(dtype) % 16 == 0;
}

inline bool is_half(DType dtype) {
  return dtype != DType::f32;
}

// Whether a plan of these rows can have a tile: not where only the zero adapter has a slot.
template <typename Args>
bool has_tiles(const Args& args) {
  return max_decode_tiles(args.rows, args.site.num_slots) > 0;
}

// Whether the tiles fit the grid's second dimension.
template <typename Args>
bool fits_grid(const Args& args) {
  const int64_t num_slots = args.site.num_slots;
  return max_decode_tiles(args.rows, num_slots) + max_prefill_tiles(args.rows, num_slots) <= 65535;
}

// Of the current device.
struct Device {
  int capability;  // 90 for sm_90
  int multiprocessors;
  int shared_bytes;  // of a CTA at most; a multiprocessor has a kilobyte more
};

inline Device current_device() {
  thread_local int known = -1;
  thread_local Device device;
  const int index = current_cuda_device();
  if (index != known) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
    cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    device.capability = 10 * major + minor;
    known = index;
  }
  return device;
}

// Whether `kernel` as it runs on this device was compiled for sm_90 or later, whose instructions the tuned
// kernels need: older PTX runs on newer devices as well.
template <typename Kernel>
bool is_compiled_for_sm90(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Launches in clusters of `cluster` CTAs along x, and lets the kernel start before the one ahead of it ends.
// Clusters that about fill the chip go where there is room, two CTAs to an SM if need be: else the parts of
// the chip that hold no whole cluster stay idle. Fewer are faster with each CTA on an SM of its own.
template <typename... Args>
int launch(void (*kernel)(Args...), dim3 grid, int threads, int cluster, void* stream, int shared_bytes,
           const Args&... args) {
  cudaLaunchAttribute attributes[3] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[2].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  if (cluster > 1) {
    const int64_t ctas = int64_t{grid.x} * grid.y * grid.z;
    attributes[2].val.clusterSchedulingPolicyPreference = 4 * ctas > 3 * current_device().multiprocessors
                                                              ? cudaClusterSchedulingPolicyLoadBalancing
                                                              : cudaClusterSchedulingPolicySpread;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 3 : 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace loramux
