#include "kernels.h"

#ifdef LORAMUX_X86
// The tuning keeps GCC from folding a load into each of its uses, which loads twice.
#pragma GCC target("arch=x86-64-v4,tune=icelake-server")
// GCC 12 takes the undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define LORAMUX_AVX512
#include "kernels.inl"

namespace loramux {

const Kernels kAvx512Kernels{"avx512",
                             {shrink_task<float>, shrink_task<F16>, shrink_task<BF16>},
                             {expand_task<float>, expand_task<F16>, expand_task<BF16>}};

}  // namespace loramux
#endif
