// The CPU entry points of lora.h: a call is cut into parts of equal cost, which the kernels work on in
// parallel.
#include <algorithm>
#include <iterator>

#include "half.h"
#include "kernels.h"
#include "resolve.h"

namespace loramux {
namespace {

constexpr int64_t kRankUnit = 8;     // ranks that a shrink leaves to one thread
constexpr int64_t kWeightCost = 4;   // of reading a weight, in multiply-adds
constexpr int64_t kGrain = 1 << 17;  // cost that is worth a thread

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Aligned memory of this thread, kept between calls.
float* scratch(int64_t floats) {
  struct alignas(64) Line {
    float values[16];
  };
  thread_local std::vector<Line> lines;
  const auto needed = static_cast<size_t>(ceil_div(floats, 16));
  if (lines.size() < needed) lines.resize(needed);
  return lines[0].values;
}

// Some rows of one slot, at one slice of the site. Its units are what threads share: ranks, or columns of y.
struct Job {
  SliceWeights weights;
  const GatheredRow* rows;
  int64_t count;
  int slice;
  int64_t units;
  int64_t unit_cost;
  int64_t cost_before;  // of all jobs before this one
};

// The work of one call.
class Work {
 public:
  // Tiles that follow each other and share a slot become one group, so that they share the loads of its
  // weights.
  template <typename Keep>
  void gather(const PlanView& plan, int64_t rows, Keep keep) {
    rows_.clear();
    groups_.clear();
    const TileCounts counts = tile_counts(plan);
    for (int64_t i = 0; i < counts.decode; ++i) add(resolve_tile(plan, 4 * (1 + i), kDecodeRows, rows), keep);
    for (int64_t i = 0; i < counts.prefill; ++i)
      add(resolve_tile(plan, plan.capacity - 4 * (1 + i), kPrefillRows, rows), keep);
  }

  // `measure` sets the units of a job and what one of them costs.
  template <typename Measure>
  void cut(const Site& site, Measure measure) {
    jobs_.clear();
    cost_ = 0;
    for (const Group& group : groups_) {
      for (int slice = 0; slice < site.num_slices; ++slice) {
        Job job{resolve_slice(site, group.slot, slice), &rows_[group.first], group.count, slice, 0, 1, cost_};
        if (job.weights.rank == 0) continue;
        measure(job);
        cost_ += job.units * job.unit_cost;
        jobs_.push_back(job);
      }
    }
  }

  // body(job, begin, end) for units [begin, end) of every job. A unit belongs to the part in which its cost
  // begins.
  template <typename Body>
  void run(const ParallelFor& parallel_for, Body body) const {
    if (jobs_.empty()) return;
    parallel_for(cost_, kGrain, [&](int64_t begin, int64_t end) {
      const auto starts_after = [](int64_t cost, const Job& job) { return cost < job.cost_before; };
      auto job = std::upper_bound(jobs_.begin(), jobs_.end(), begin, starts_after) - 1;
      for (; job != jobs_.end() && job->cost_before < end; ++job) {
        const auto unit_at = [&](int64_t cost) {
          return std::clamp<int64_t>(ceil_div(cost - job->cost_before, job->unit_cost), 0, job->units);
        };
        if (unit_at(begin) < unit_at(end)) body(*job, unit_at(begin), unit_at(end));
      }
    });
  }

 private:
  struct Group {
    int32_t slot;
    size_t first;
    int64_t count;
  };

  template <typename Keep>
  void add(const TileRows& tile, Keep keep) {
    const size_t first = rows_.size();
    std::copy_if(tile.rows, tile.rows + tile.count, std::back_inserter(rows_), keep);
    const auto count = static_cast<int64_t>(rows_.size() - first);
    if (count == 0) return;
    if (groups_.empty() || groups_.back().slot != tile.slot || groups_.back().count + count > kTaskRows)
      groups_.push_back({tile.slot, first, 0});
    groups_.back().count += count;
  }

  std::vector<GatheredRow> rows_;
  std::vector<Group> groups_;
  std::vector<Job> jobs_;
  int64_t cost_ = 0;
};

Work& work_of_thread() {
  thread_local Work work;
  return work;
}

bool any_row(const GatheredRow&) {
  return true;
}

// What an expand and an embedding share: `read_h` gives the float32 factors of a row, [rank].
template <typename Args, typename ReadH>
void expand_from(const Kernels& kernels, const Args& args, const ParallelFor& parallel_for, Work& work,
                 ReadH read_h) {
  const Site& site = args.site;
  work.cut(site, [&](Job& job) {
    job.units = ceil_div(site.slices[job.slice].width, kColumnBlock);
    job.unit_cost = kColumnBlock * job.weights.rank * (job.count + kWeightCost);
  });
  work.run(parallel_for, [&](const Job& job, int64_t begin, int64_t end) {
    const SliceWeights& w = job.weights;
    const int64_t item = item_size(site.dtype);
    const int64_t first = begin * kColumnBlock;
    const int64_t h_stride = ceil_div(w.rank, kHAlign) * kHAlign;
    float* const h = scratch(job.count * h_stride + expand_scratch(h_stride));
    for (int64_t i = 0; i < job.count; ++i) {
      float* const row = h + i * h_stride;
      read_h(job, job.rows[i].row, row);
      std::fill(row + w.rank, row + h_stride, 0.f);
    }
    kernels.expand[static_cast<int>(site.dtype)]({
        .rows = job.rows,
        .count = job.count,
        .h = h,
        .h_stride = h_stride,
        .b = w.b + first * w.stride * item,
        .b_stride = w.stride,
        .rank = w.rank,
        .columns = std::min(end * kColumnBlock, site.slices[job.slice].width) - first,
        .scale = w.scale,
        .y = static_cast<std::byte*>(args.y) + (site.slices[job.slice].offset + first) * item,
        .y_stride = args.y_stride,
        .scratch = h + job.count * h_stride,
    });
  });
}

int64_t token_id(const EmbeddingArgs& args, int64_t row) {
  return args.ids64 ? static_cast<const int64_t*>(args.ids)[row] : static_cast<const int32_t*>(args.ids)[row];
}

void to_float(const std::byte* from, DType dtype, int64_t count, float* out) {
  if (dtype == DType::f32) {
    std::memcpy(out, from, count * sizeof(float));
    return;
  }
  const auto* values = reinterpret_cast<const uint16_t*>(from);
  const auto convert = dtype == DType::f16 ? f16_to_float : bf16_to_float;
  std::transform(values, values + count, out, convert);
}

}  // namespace

void shrink(const Kernels& kernels, const ShrinkArgs& args, const ParallelFor& parallel_for) {
  const Site& site = args.site;
  Work& work = work_of_thread();
  work.gather(args.plan, args.rows, any_row);
  work.cut(site, [&](Job& job) {
    job.units = ceil_div(job.weights.rank, kRankUnit);
    job.unit_cost = kRankUnit * (site.in_features + 1) * (job.count + kWeightCost);
  });
  work.run(parallel_for, [&](const Job& job, int64_t begin, int64_t end) {
    const int64_t first = begin * kRankUnit;
    kernels.shrink[static_cast<int>(site.dtype)]({
        .rows = job.rows,
        .count = job.count,
        .x = args.x,
        .x_stride = args.x_stride,
        .a = job.weights.a + first * site.in_features * item_size(site.dtype),
        .in_features = site.in_features,
        .ranks = std::min(end * kRankUnit, job.weights.rank) - first,
        .h = args.h + job.slice * site.max_rank + first,
        .h_stride = site.num_slices * site.max_rank,
        .scratch = scratch(kShrinkScratch),
    });
  });
}

void expand(const Kernels& kernels, const ExpandArgs& args, const ParallelFor& parallel_for) {
  const Site& site = args.site;
  Work& work = work_of_thread();
  work.gather(args.plan, args.rows, any_row);
  expand_from(kernels, args, parallel_for, work, [&](const Job& job, int64_t row, float* h) {
    std::copy_n(args.h + (row * site.num_slices + job.slice) * site.max_rank, job.weights.rank, h);
  });
}

void embedding(const Kernels& kernels, const EmbeddingArgs& args, const ParallelFor& parallel_for) {
  Work& work = work_of_thread();
  work.gather(args.plan, args.rows, [&](const GatheredRow& r) {
    const int64_t id = token_id(args, r.row);
    return id >= 0 && id < args.site.in_features;
  });
  expand_from(kernels, args, parallel_for, work, [&](const Job& job, int64_t row, float* h) {
    const int64_t offset = token_id(args, row) * job.weights.stride * item_size(args.site.dtype);
    to_float(job.weights.a + offset, args.site.dtype, job.weights.rank, h);
  });
}

void shrink_cpu(const ShrinkArgs& args, const ParallelFor& parallel_for) {
  shrink(*available_kernels().front(), args, parallel_for);
}

void expand_cpu(const ExpandArgs& args, const ParallelFor& parallel_for) {
  expand(*available_kernels().front(), args, parallel_for);
}

void apply_cpu(const ApplyArgs& args, const ParallelFor& parallel_for) {
  shrink_cpu(args.shrink, parallel_for);
  expand_cpu(args.expand, parallel_for);
}

void embedding_cpu(const EmbeddingArgs& args, const ParallelFor& parallel_for) {
  embedding(*available_kernels().front(), args, parallel_for);
}

}  // namespace loramux
