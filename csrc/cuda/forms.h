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

// Decode as one kernel of clusters, not two kernels: while an SM has at most so many of its CTAs.
inline constexpr Form kOneKernel[] = {{16, 1}, {64, 1}};

// Decode tiles in a launch of their own, not with the prefill tiles: in steps of at most so many rows.
inline constexpr Form kShortStep[] = {{512, 256}};

// The limit for a site of this rank, 0 past the last row. `variable` of the environment takes its place, for
// that benchmark.
template <int kRows>
double limit_of(const Form (&forms)[kRows], const char* variable, int64_t rank) {
  if (const char* const text = std::getenv(variable)) return std::atof(text);
  for (const Form& form : forms) {
    if (rank <= form.max_rank) return form.limit;
  }
  return 0;
}

}  // namespace loramux
