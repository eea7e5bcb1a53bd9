// What the operators are given, checked and made the kernels' arguments. Of torch's stable ABI, as ops.cpp:
// no ATen call is made from here, whose error text would be lost.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "lora.h"

namespace loramux {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorDevice = torch::stable::Device;

inline constexpr int64_t kStackedUnit = 16;  // bytes that a table offset counts over stacked tensors
// No product of sizes overflows, and 32 ranks of a slice a time are no more than a grid can have.
inline constexpr int64_t kMaxRank = 1 << 16, kMaxWidth = int64_t{1} << 40;

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16");
  }
}

// `device` is where the operator writes: everything else must be there too.
inline void check_device(const Tensor& t, const char* name, const TensorDevice& device) {
  STD_TORCH_CHECK(t.device() == device, name, " is on another device than the output");
}

// Plan records, table entries and weights are read 16 bytes at a time.
inline const void* aligned_data(const Tensor& t, const char* name) {
  const void* data = t.const_data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, name,
                  " must start on 16 bytes: give the whole tensor, not a view into it");
  return data;
}

inline PlanView plan_view(const Tensor& plan, const TensorDevice& device) {
  check_device(plan, "plan", device);
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Int && plan.dim() == 1 && plan.is_contiguous(),
                  "plan must be a contiguous int32 vector");
  const int64_t words = plan.numel();
  STD_TORCH_CHECK(words >= 4 && words % 4 == 0, "plan has ", words,
                  " words; want a multiple of 4, the header's 4 included");
  return {static_cast<const int32_t*>(aligned_data(plan, "plan")), words};
}

inline void set_weights(Site& site, const std::vector<Tensor>& tensors, const TensorDevice& device) {
  STD_TORCH_CHECK(!tensors.empty(), "weights has no tensor");
  const int64_t slices = site.num_slices;
  const bool arena = tensors.size() == 1;
  STD_TORCH_CHECK(arena || static_cast<int64_t>(tensors.size()) == 2 * slices, "weights has ", tensors.size(),
                  " tensors; want the arena alone, or A and B of each of ", slices, " slices");
  const ScalarType dtype = tensors[0].scalar_type();
  for (const Tensor& t : tensors) {
    check_device(t, "weights", device);
    STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == dtype,
                    "weights must be contiguous and of one dtype");
  }
  site.dtype = dtype_of(tensors[0], "weights");
  site.offset_unit = arena ? kBlockAlign : kStackedUnit;
  site.rank_stride = arena ? 0 : site.max_rank;
  const int64_t item = item_size(site.dtype);
  for (int64_t i = 0; i < slices; ++i) {
    const Tensor& a = tensors[arena ? 0 : i];
    const Tensor& b = tensors[arena ? 0 : slices + i];
    Slice& slice = site.slices[i];
    slice.a = static_cast<const std::byte*>(aligned_data(a, "weights"));
    slice.b = static_cast<const std::byte*>(aligned_data(b, "weights"));
    slice.a_bytes = a.numel() * item;
    slice.b_bytes = b.numel() * item;
  }
}

// Everything about a site but the widths, which only an expand has.
inline Site site_of(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry, int64_t slices,
                    int64_t in_features, int64_t max_rank, const TensorDevice& device) {
  check_device(table, "table", device);
  STD_TORCH_CHECK(slices >= 1 && slices <= kMaxSlices, "a site of ", slices, " slices; want 1 to ",
                  kMaxSlices);
  STD_TORCH_CHECK(max_rank >= 1 && max_rank <= kMaxRank, "max_rank is ", max_rank, "; want 1 to ", kMaxRank);
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int && table.dim() == 3 && table.size(2) == 4 &&
                      table.is_contiguous(),
                  "table must be contiguous int32 [num_slots, num_entries, 4]");
  STD_TORCH_CHECK(entry >= 0 && entry <= table.size(1) - slices, "entries ", entry, " to ",
                  entry + slices - 1, " are not among the table's ", table.size(1));
  Site site{};
  site.table = static_cast<const SlotEntry*>(aligned_data(table, "table"));
  site.num_slots = table.size(0);
  site.num_entries = table.size(1);
  site.entry = entry;
  site.max_rank = max_rank;
  site.in_features = in_features;
  site.num_slices = static_cast<int32_t>(slices);
  set_weights(site, weights, device);
  return site;
}

// The same with the widths.
inline Site site_of(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry,
                    const std::vector<int64_t>& widths, int64_t in_features, int64_t max_rank,
                    const TensorDevice& device) {
  Site site =
      site_of(weights, table, entry, static_cast<int64_t>(widths.size()), in_features, max_rank, device);
  int64_t column = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    STD_TORCH_CHECK(widths[i] >= 1 && widths[i] <= kMaxWidth, "slice ", i, " has width ", widths[i]);
    site.slices[i].width = widths[i];
    site.slices[i].offset = column;
    column += widths[i];
  }
  return site;
}

struct Matrix {
  int64_t rows, columns;
  int64_t stride;  // elements between rows
};

inline void check_dimensions(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; want [rows, columns]");
}

// x [rows, columns] or y [rows, sum of widths]: a row stride is welcome, a column stride is not.
inline Matrix check_matrix(const Tensor& t, const char* name, const Site& site) {
  check_dimensions(t, name);
  STD_TORCH_CHECK(dtype_of(t, name) == site.dtype, name, " has another dtype than the weights");
  const int64_t rows = t.size(0), columns = t.size(1);
  STD_TORCH_CHECK(columns <= 1 || t.stride(1) == 1, name, " must have unit column stride, has ", t.stride(1));
  return {rows, columns, rows > 1 ? t.stride(0) : columns};  // one row's may be anything
}

// t [rows, sum of the widths].
inline Matrix check_columns(const Tensor& t, const char* name, const Site& site) {
  const Matrix matrix = check_matrix(t, name, site);
  const Slice& last = site.slices[site.num_slices - 1];
  const int64_t width = last.offset + last.width;
  STD_TORCH_CHECK(matrix.columns == width, name, " has ", matrix.columns, " columns, the site's slices ",
                  width);
  return matrix;
}

// All but where h goes.
inline ShrinkArgs shrink_args(const Site& site, const Tensor& x, const Tensor& plan,
                              const TensorDevice& device) {
  check_device(x, "x", device);
  const Matrix matrix = check_matrix(x, "x", site);
  STD_TORCH_CHECK(matrix.columns == site.in_features, "x has ", matrix.columns, " columns, the site ",
                  site.in_features);
  return {site, plan_view(plan, device), x.const_data_ptr(), matrix.stride, matrix.rows, nullptr};
}

inline ExpandArgs expand_args(const Site& site, const Tensor& y, const PlanView& plan, const float* h,
                              int64_t rows) {
  const Matrix matrix = check_columns(y, "y", site);
  STD_TORCH_CHECK(matrix.rows == rows, "y has ", matrix.rows, " rows, the input ", rows);
  STD_TORCH_CHECK(rows <= 1 || matrix.stride >= matrix.columns, "rows of y overlap: stride ", matrix.stride,
                  " for ", matrix.columns, " columns");
  return {site, plan, h, y.mutable_data_ptr(), matrix.stride, rows};
}

inline void check_hidden(const Tensor& h) {
  STD_TORCH_CHECK(h.scalar_type() == ScalarType::Float && h.dim() == 3 && h.is_contiguous(),
                  "h must be contiguous float32 [rows, num_slices, max_rank]");
}

inline ShrinkArgs check_shrink(const Tensor& h, const Tensor& x, const std::vector<Tensor>& weights,
                               const Tensor& table, const Tensor& plan, int64_t entry) {
  check_hidden(h);
  STD_TORCH_CHECK(x.dim() == 2 && h.size(0) == x.size(0), "h has ", h.size(0), " rows, x ", x.size(0));
  const TensorDevice device = h.device();
  const Site site = site_of(weights, table, entry, h.size(1), x.size(1), h.size(2), device);
  ShrinkArgs args = shrink_args(site, x, plan, device);
  args.h = static_cast<float*>(h.mutable_data_ptr());
  return args;
}

inline ExpandArgs check_expand(const Tensor& y, const Tensor& h, const std::vector<Tensor>& weights,
                               const Tensor& table, const Tensor& plan, int64_t entry,
                               const std::vector<int64_t>& widths) {
  check_hidden(h);
  STD_TORCH_CHECK(h.size(1) == static_cast<int64_t>(widths.size()), "h has ", h.size(1), " slices, widths ",
                  widths.size());
  const TensorDevice device = y.device();
  check_device(h, "h", device);
  const Site site = site_of(weights, table, entry, widths, 0, h.size(2), device);
  return expand_args(site, y, plan_view(plan, device), static_cast<const float*>(h.const_data_ptr()),
                     h.size(0));
}

// All of an apply but where its deltas go, which is on `device`.
inline ShrinkArgs check_input(const Site& site, const Tensor& scratch, const Tensor& x, const Tensor& plan,
                              const TensorDevice& device) {
  ShrinkArgs args = shrink_args(site, x, plan, device);
  check_device(scratch, "scratch", device);
  const int64_t need = args.rows * site.num_slices * site.max_rank;
  STD_TORCH_CHECK(
      scratch.scalar_type() == ScalarType::Float && scratch.is_contiguous() && scratch.numel() >= need,
      "scratch must be contiguous float32 of at least rows * slices * max_rank = ", need, " values, has ",
      scratch.numel());
  args.h = static_cast<float*>(scratch.mutable_data_ptr());
  return args;
}

inline ShrinkArgs check_input(const Tensor& scratch, const Tensor& x, const std::vector<Tensor>& weights,
                              const Tensor& table, const Tensor& plan, int64_t entry,
                              const std::vector<int64_t>& widths, int64_t max_rank,
                              const TensorDevice& device) {
  check_dimensions(x, "x");
  const Site site = site_of(weights, table, entry, widths, x.size(1), max_rank, device);
  return check_input(site, scratch, x, plan, device);
}

// A site, checked once for all calls, as bytes on the CPU. The tensors that it was made of must outlive it.
struct PackedSite {
  Site site;
  int32_t device;
};

inline PackedSite check_site(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry,
                             const std::vector<int64_t>& widths, int64_t in_features, int64_t max_rank) {
  const TensorDevice device = table.device();
  return {site_of(weights, table, entry, widths, in_features, max_rank, device), device.index()};
}

inline ShrinkArgs check_packed_input(const Tensor& scratch, const Tensor& x, const Tensor& plan,
                                     const Tensor& site, const TensorDevice& device) {
  STD_TORCH_CHECK(site.is_cpu() && site.numel() == sizeof(PackedSite), "site is not of lora_pack_site");
  const PackedSite& packed = *static_cast<const PackedSite*>(site.const_data_ptr());
  STD_TORCH_CHECK(packed.device == device.index(), "the site is on another device than the output");
  return check_input(packed.site, scratch, x, plan, device);
}

inline ApplyArgs with_output(const ShrinkArgs& shrink, const Tensor& y) {
  return {shrink, expand_args(shrink.site, y, shrink.plan, shrink.h, shrink.rows)};
}

inline EmbeddingArgs check_embedding(const Tensor& y, const Tensor& ids, const std::vector<Tensor>& weights,
                                     const Tensor& table, const Tensor& plan, int64_t entry,
                                     const std::vector<int64_t>& widths, int64_t vocab, int64_t max_rank) {
  const bool ids64 = ids.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK((ids64 || ids.scalar_type() == ScalarType::Int) && ids.dim() == 1 && ids.is_contiguous(),
                  "ids must be a contiguous int32 or int64 vector");
  const TensorDevice device = y.device();
  check_device(ids, "ids", device);
  STD_TORCH_CHECK(vocab >= 0 && !weights.empty() && vocab <= weights[0].numel(), "a vocabulary of ", vocab,
                  " ids is not in the weights");
  const Site site = site_of(weights, table, entry, widths, vocab, max_rank, device);
  return {expand_args(site, y, plan_view(plan, device), nullptr, ids.size(0)), ids.const_data_ptr(), ids64};
}

// An engine captures its base-only steps through the traced graph of the others: what tells them apart is
// read here, on the host, in every call.
inline bool is_active(const std::optional<Tensor>& active) {
  if (!active) return true;
  STD_TORCH_CHECK(active->is_cpu() && active->scalar_type() == ScalarType::Bool && active->numel() == 1,
                  "active must be one bool on the CPU");
  return *static_cast<const bool*>(active->const_data_ptr());
}

}  // namespace loramux
