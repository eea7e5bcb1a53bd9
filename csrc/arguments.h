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

// `like` is the tensor that the operator writes: everything else must be where it is.
inline void check_device(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.device() == like.device(), name, " is on another device than the output");
}

// Plan records, table entries and weights are read 16 bytes at a time.
inline void check_aligned(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                  " must start on 16 bytes: give the whole tensor, not a view into it");
}

inline PlanView plan_view(const Tensor& plan, const Tensor& like) {
  check_device(plan, "plan", like);
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Int && plan.dim() == 1 && plan.is_contiguous(),
                  "plan must be a contiguous int32 vector");
  STD_TORCH_CHECK(plan.numel() >= 4 && plan.numel() % 4 == 0, "plan has ", plan.numel(),
                  " words; want a multiple of 4, the header's 4 included");
  check_aligned(plan, "plan");
  return {static_cast<const int32_t*>(plan.const_data_ptr()), plan.numel()};
}

inline void set_weights(Site& site, const std::vector<Tensor>& tensors, const Tensor& like) {
  STD_TORCH_CHECK(!tensors.empty(), "weights has no tensor");
  const int64_t slices = site.num_slices;
  const bool arena = tensors.size() == 1;
  STD_TORCH_CHECK(arena || static_cast<int64_t>(tensors.size()) == 2 * slices, "weights has ", tensors.size(),
                  " tensors; want the arena alone, or A and B of each of ", slices, " slices");
  for (const Tensor& t : tensors) {
    check_device(t, "weights", like);
    STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == tensors[0].scalar_type(),
                    "weights must be contiguous and of one dtype");
    check_aligned(t, "weights");
  }
  site.dtype = dtype_of(tensors[0], "weights");
  site.offset_unit = arena ? kBlockAlign : kStackedUnit;
  site.rank_stride = arena ? 0 : site.max_rank;
  const int64_t item = item_size(site.dtype);
  for (int64_t i = 0; i < slices; ++i) {
    const Tensor& a = tensors[arena ? 0 : i];
    const Tensor& b = tensors[arena ? 0 : slices + i];
    Slice& slice = site.slices[i];
    slice.a = static_cast<const std::byte*>(a.const_data_ptr());
    slice.b = static_cast<const std::byte*>(b.const_data_ptr());
    slice.a_bytes = a.numel() * item;
    slice.b_bytes = b.numel() * item;
  }
}

// Everything about a site but the widths, which only an expand has.
inline Site site_of(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry, int64_t slices,
                    int64_t in_features, int64_t max_rank, const Tensor& like) {
  check_device(table, "table", like);
  STD_TORCH_CHECK(slices >= 1 && slices <= kMaxSlices, "a site of ", slices, " slices; want 1 to ",
                  kMaxSlices);
  STD_TORCH_CHECK(max_rank >= 1 && max_rank <= kMaxRank, "max_rank is ", max_rank, "; want 1 to ", kMaxRank);
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int && table.dim() == 3 && table.size(2) == 4 &&
                      table.is_contiguous(),
                  "table must be contiguous int32 [num_slots, num_entries, 4]");
  check_aligned(table, "table");
  STD_TORCH_CHECK(entry >= 0 && entry <= table.size(1) - slices, "entries ", entry, " to ",
                  entry + slices - 1, " are not among the table's ", table.size(1));
  Site site{};
  site.table = static_cast<const SlotEntry*>(table.const_data_ptr());
  site.num_slots = table.size(0);
  site.num_entries = table.size(1);
  site.entry = entry;
  site.max_rank = max_rank;
  site.in_features = in_features;
  site.num_slices = static_cast<int32_t>(slices);
  set_weights(site, weights, like);
  return site;
}

// The same with the widths.
inline Site site_of(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry,
                    const std::vector<int64_t>& widths, int64_t in_features, int64_t max_rank,
                    const Tensor& like) {
  Site site =
      site_of(weights, table, entry, static_cast<int64_t>(widths.size()), in_features, max_rank, like);
  int64_t column = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    STD_TORCH_CHECK(widths[i] >= 1 && widths[i] <= kMaxWidth, "slice ", i, " has width ", widths[i]);
    site.slices[i].width = widths[i];
    site.slices[i].offset = column;
    column += widths[i];
  }
  return site;
}

// x [rows, columns] or y [rows, sum of widths]: a row stride is welcome, a column stride is not.
inline int64_t check_matrix(const Tensor& t, const char* name, const Site& site) {
  STD_TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; want [rows, columns]");
  STD_TORCH_CHECK(dtype_of(t, name) == site.dtype, name, " has another dtype than the weights");
  STD_TORCH_CHECK(t.size(1) <= 1 || t.stride(1) == 1, name, " must have unit column stride, has ",
                  t.stride(1));
  return t.size(0) > 1 ? t.stride(0) : t.size(1);  // one row's may be anything
}

// t [rows, sum of the widths]; its row stride.
inline int64_t check_columns(const Tensor& t, const char* name, const Site& site) {
  const int64_t stride = check_matrix(t, name, site);
  const Slice& last = site.slices[site.num_slices - 1];
  const int64_t width = last.offset + last.width;
  STD_TORCH_CHECK(t.size(1) == width, name, " has ", t.size(1), " columns, the site's slices ", width);
  return stride;
}

inline int64_t check_y(const Tensor& y, const Site& site, int64_t rows) {
  const int64_t stride = check_columns(y, "y", site);
  STD_TORCH_CHECK(y.size(0) == rows, "y has ", y.size(0), " rows, the input ", rows);
  STD_TORCH_CHECK(rows <= 1 || stride >= y.size(1), "rows of y overlap: stride ", stride, " for ", y.size(1),
                  " columns");
  return stride;
}

inline ShrinkArgs shrink_args(const Site& site, const Tensor& x, const PlanView& plan, float* h) {
  return {site, plan, x.const_data_ptr(), check_matrix(x, "x", site), x.size(0), h};
}

inline ExpandArgs expand_args(const Site& site, const Tensor& y, const PlanView& plan, const float* h,
                              int64_t rows) {
  const int64_t stride = check_y(y, site, rows);
  return {site, plan, h, y.mutable_data_ptr(), stride, rows};
}

inline void check_hidden(const Tensor& h) {
  STD_TORCH_CHECK(h.scalar_type() == ScalarType::Float && h.dim() == 3 && h.is_contiguous(),
                  "h must be contiguous float32 [rows, num_slices, max_rank]");
}

inline ShrinkArgs check_shrink(const Tensor& h, const Tensor& x, const std::vector<Tensor>& weights,
                               const Tensor& table, const Tensor& plan, int64_t entry) {
  check_hidden(h);
  STD_TORCH_CHECK(x.dim() == 2 && h.size(0) == x.size(0), "h has ", h.size(0), " rows, x ", x.size(0));
  check_device(x, "x", h);
  const Site site = site_of(weights, table, entry, h.size(1), x.size(1), h.size(2), h);
  return shrink_args(site, x, plan_view(plan, h), static_cast<float*>(h.mutable_data_ptr()));
}

inline ExpandArgs check_expand(const Tensor& y, const Tensor& h, const std::vector<Tensor>& weights,
                               const Tensor& table, const Tensor& plan, int64_t entry,
                               const std::vector<int64_t>& widths) {
  check_hidden(h);
  STD_TORCH_CHECK(h.size(1) == static_cast<int64_t>(widths.size()), "h has ", h.size(1), " slices, widths ",
                  widths.size());
  check_device(h, "h", y);
  const Site site = site_of(weights, table, entry, widths, 0, h.size(2), y);
  return expand_args(site, y, plan_view(plan, y), static_cast<const float*>(h.const_data_ptr()), h.size(0));
}

inline int64_t columns_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "x has ", x.dim(), " dimensions; want [rows, in]");
  return x.size(1);
}

// All of an apply but where its deltas go, of a site of x's columns. `like` is what the operator writes.
inline ShrinkArgs check_input(const Site& site, const Tensor& scratch, const Tensor& x, const Tensor& plan,
                              const Tensor& like) {
  check_device(x, "x", like);
  check_device(scratch, "scratch", like);
  const int64_t need = x.size(0) * site.num_slices * site.max_rank;
  STD_TORCH_CHECK(
      scratch.scalar_type() == ScalarType::Float && scratch.is_contiguous() && scratch.numel() >= need,
      "scratch must be contiguous float32 of at least rows * slices * max_rank = ", need, " values, has ",
      scratch.numel());
  return shrink_args(site, x, plan_view(plan, like), static_cast<float*>(scratch.mutable_data_ptr()));
}

inline ShrinkArgs check_input(const Tensor& scratch, const Tensor& x, const std::vector<Tensor>& weights,
                              const Tensor& table, const Tensor& plan, int64_t entry,
                              const std::vector<int64_t>& widths, int64_t max_rank, const Tensor& like) {
  const Site site = site_of(weights, table, entry, widths, columns_of(x), max_rank, like);
  return check_input(site, scratch, x, plan, like);
}

// A site, checked once for all calls, as bytes on the CPU. The tensors that it was made of must outlive it.
struct PackedSite {
  Site site;
  int32_t device;
};

inline PackedSite check_site(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry,
                             const std::vector<int64_t>& widths, int64_t in_features, int64_t max_rank) {
  return {site_of(weights, table, entry, widths, in_features, max_rank, table), table.get_device_index()};
}

inline ShrinkArgs check_packed_input(const Tensor& scratch, const Tensor& x, const Tensor& plan,
                                     const Tensor& site, const Tensor& like) {
  STD_TORCH_CHECK(site.is_cpu() && site.numel() == sizeof(PackedSite), "site is not of lora_pack_site");
  const PackedSite& packed = *static_cast<const PackedSite*>(site.const_data_ptr());
  STD_TORCH_CHECK(packed.device == like.get_device_index(), "the site is on another device than the output");
  STD_TORCH_CHECK(columns_of(x) == packed.site.in_features, "x has ", columns_of(x), " columns, the site ",
                  packed.site.in_features);
  return check_input(packed.site, scratch, x, plan, like);
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
  check_device(ids, "ids", y);
  STD_TORCH_CHECK(vocab >= 0 && !weights.empty() && vocab <= weights[0].numel(), "a vocabulary of ", vocab,
                  " ids is not in the weights");
  const Site site = site_of(weights, table, entry, widths, vocab, max_rank, y);
  return {expand_args(site, y, plan_view(plan, y), nullptr, ids.size(0)), ids.const_data_ptr(), ids64};
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
