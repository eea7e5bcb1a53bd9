#include "kernels.h"

#if defined(LORAMUX_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace loramux {
namespace {

#ifdef LORAMUX_X86
// The levels x86-64-v3 and -v4, by the features that GCC 11 can ask for.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

// Linux gives a process the state of the tile unit only when it asks.
bool may_use_tiles() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("avx512bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    constexpr int bf16 = static_cast<int>(DType::bf16);
    Kernels k = kAvx512Kernels;
    k.name = "amx";
    k.shrink[bf16] = shrink_amx;
    k.expand[bf16] = expand_amx;
    return k;
  }();
  return &kernels;
}
#endif

}  // namespace

const std::vector<const Kernels*>& available_kernels() {
  static const std::vector<const Kernels*> available = [] {
    std::vector<const Kernels*> found;
#ifdef LORAMUX_X86
    if (has_avx512() && may_use_tiles()) found.push_back(amx_kernels());
    if (has_avx512()) found.push_back(&kAvx512Kernels);
    if (has_avx2()) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kPortableKernels);
    return found;
  }();
  return available;
}

}  // namespace loramux
