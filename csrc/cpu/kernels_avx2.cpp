#include "kernels.h"

#ifdef LORAMUX_X86
#pragma GCC target("arch=x86-64-v3,tune=haswell")
#define LORAMUX_AVX2
#include "kernels.inl"

namespace loramux {

const Kernels kAvx2Kernels{"avx2",
                           {shrink_task<float>, shrink_task<F16>, shrink_task<BF16>},
                           {expand_task<float>, expand_task<F16>, expand_task<BF16>}};

}  // namespace loramux
#endif
