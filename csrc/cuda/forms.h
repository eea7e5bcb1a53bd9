// Where one form of a call takes over from another. `python -m bench forms` measures the candidates on the
// device at hand and prints these rows anew; those here are from `bench kernels` with and without `--part
// pair`.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace loramux {

struct Form {
  int64_t max_rank;  // of the sites that the row is for
  double limit;
};

// The limit for a site of this rank, 0 past the last row. `forced`, a benchmark's, takes its place if not
// null.
template <int kRows>
double limit_of(const Form (&forms)[kRows], const char* forced, int64_t rank) {
  if (forced != nullptr) return std::atof(forced);
  for (const Form& form : forms) {
    if (rank <= form.max_rank) return form.limit;
  }
  return 0;
}

// Decode as one kernel of clusters, not two kernels: while an SM has at most so many of its CTAs.
inline double max_one_kernel_ctas(int64_t rank) {
  static constexpr Form kForms[] = {{16, 1}, {64, 1}};
  static const char* const forced = std::getenv("LORAMUX_ONE_KERNEL");
  return limit_of(kForms, forced, rank);
}

// Decode tiles in a launch of their own, not with the prefill tiles: in steps of at most so many rows.
inline double max_short_step_rows(int64_t rank) {
  static constexpr Form kForms[] = {{512, 256}};
  static const char* const forced = std::getenv("LORAMUX_SHORT_STEP");
  return limit_of(kForms, forced, rank);
}

}  // namespace loramux
