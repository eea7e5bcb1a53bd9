#include "kernels.inl"

namespace loramux {

const Kernels kPortableKernels{"portable",
                               {shrink_task<float>, shrink_task<F16>, shrink_task<BF16>},
                               {expand_task<float>, expand_task<F16>, expand_task<BF16>}};

}  // namespace loramux
