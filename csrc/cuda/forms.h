// Where one form of a call takes over from another. `python -m bench forms` measures the candidates on the
// device at hand and prints these rows anew. Those here are of bench/results/forms-h200.json, where limits of
// 0.5 and 1 are 0.5% apart at rank 64.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace loramux {

struct Form {
  int64_t max_rank;  // of the sites that the row is for
  double limit;
};

// Decode as one kernel of clusters, not two kernels: while an SM has at most so many of its CTAs. Past the
// last row there is no such kernel. LORAMUX_ONE_KERNEL in the environment, a benchmark's, takes its place.
inline double max_one_kernel_ctas(int64_t rank) {
  static constexpr Form kForms[] = {{16, 1}, {64, 1}};
  static const char* const forced = std::getenv("LORAMUX_ONE_KERNEL");
  if (forced != nullptr) return std::atof(forced);
  for (const Form& form : kForms) {
    if (rank <= form.max_rank) return form.limit;
  }
  return 0;
}

}  // namespace loramux
