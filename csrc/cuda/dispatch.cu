// The CUDA entry points of lora.h: which kernels a call runs. Each kind of tile has its own launch, left out
// where no plan of these rows can have such tiles.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "host/plan.h"

namespace loramux {
namespace {

template <typename Args, typename Decode, typename Prefill>
int run(const Args& args, Decode decode, Prefill prefill) {
  int error = cudaSuccess;
  if (has_tiles(args)) error = decode();
  if (error == cudaSuccess && max_prefill_tiles(args.rows, args.site.num_slots) > 0) error = prefill();
  return error;
}

}  // namespace

bool is_portable_forced() {
  static const bool forced = std::getenv("LORAMUX_PORTABLE") != nullptr;
  return forced;
}

int shrink_cuda(const ShrinkArgs& args, void* stream) {
  const bool forced = is_portable_forced();
  const Device device = current_device();
  return run(
      args,
      [&] {
        return !forced && shrink_decode_serves(args, device)
                   ? shrink_decode(args, stream)
                   : shrink_portable(TileKind::decode, args, stream);
      },
      [&] {
        return !forced && shrink_prefill_serves(args, device)
                   ? shrink_prefill(args, stream)
                   : shrink_portable(TileKind::prefill, args, stream);
      });
}

int expand_cuda(const ExpandArgs& args, void* stream) {
  const bool is_tuned = !is_portable_forced() && expand_serves(args, current_device());
  return run(
      args,
      [&] {
        return is_tuned ? expand_decode(args, 1, stream) : expand_portable(TileKind::decode, args, stream);
      },
      [&] {
        return is_tuned ? expand_prefill(args, stream) : expand_portable(TileKind::prefill, args, stream);
      });
}

int apply_cuda(const ApplyArgs& args, void* stream) {
  const bool has_prefill = max_prefill_tiles(args.shrink.rows, args.shrink.site.num_slots) > 0;
  if (has_tiles(args.shrink) && !has_prefill && !is_portable_forced() &&
      apply_decode_serves(args, current_device()))
    return apply_decode(args, stream);
  const int error = shrink_cuda(args.shrink, stream);
  return error != cudaSuccess ? error : expand_cuda(args.expand, stream);
}

int embedding_cuda(const EmbeddingArgs& args, void* stream) {
  const bool is_tuned =
      !is_portable_forced() && expand_serves(args, current_device()) && args.site.in_features <= INT32_MAX;
  return run(
      args,
      [&] {
        return is_tuned ? embedding_decode(args, stream) : embedding_portable(TileKind::decode, args, stream);
      },
      [&] {
        return is_tuned ? embedding_prefill(args, stream)
                        : embedding_portable(TileKind::prefill, args, stream);
      });
}

int current_cuda_device() {
  int index = -1;
  cudaGetDevice(&index);
  return index;
}

const char* take_cuda_error(int error) {
  cudaGetLastError();
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace loramux
