// The only file that knows torch: schemas, checks, dispatch to the kernels' launchers. Written against
// torch's stable ABI, so that one binary serves every torch >= 2.11 and every Python. No ATen call is made
// from here: their error text would be lost.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#ifdef LORAMUX_CUDA
#include <dlfcn.h>
#endif

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "lora.h"

namespace loramux {
namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kStackedUnit = 16;  // bytes that a table offset counts over stacked tensors
constexpr int64_t kMaxRank = 1 << 20, kMaxWidth = int64_t{1} << 40;  // no product of sizes overflows

DType dtype_of(const Tensor& t, const char* name) {
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
void check_device(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.device() == like.device(), name, " is on another device than the output");
}

// Plan records, table entries and weights are read 16 bytes at a time.
void check_aligned(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                  " must start on 16 bytes: give the whole tensor, not a view into it");
}

PlanView plan_view(const Tensor& plan, const Tensor& like) {
  check_device(plan, "plan", like);
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Int && plan.dim() == 1 && plan.is_contiguous(),
                  "plan must be a contiguous int32 vector");
  STD_TORCH_CHECK(plan.numel() >= 4 && plan.numel() % 4 == 0, "plan has ", plan.numel(),
                  " words; want a multiple of 4, the header's 4 included");
  check_aligned(plan, "plan");
  return {static_cast<const int32_t*>(plan.const_data_ptr()), plan.numel()};
}

void set_weights(Site& site, const std::vector<Tensor>& tensors, const Tensor& like) {
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
Site site_of(const std::vector<Tensor>& weights, const Tensor& table, int64_t entry, int64_t slices,
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

void set_widths(Site& site, const std::vector<int64_t>& widths) {
  int64_t column = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    STD_TORCH_CHECK(widths[i] >= 1 && widths[i] <= kMaxWidth, "slice ", i, " has width ", widths[i]);
    site.slices[i].width = widths[i];
    site.slices[i].offset = column;
    column += widths[i];
  }
}

// x [rows, columns] or y [rows, sum of widths]: a row stride is welcome, a column stride is not.
int64_t check_matrix(const Tensor& t, const char* name, const Site& site) {
  STD_TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; want [rows, columns]");
  STD_TORCH_CHECK(dtype_of(t, name) == site.dtype, name, " has another dtype than the weights");
  STD_TORCH_CHECK(t.size(1) <= 1 || t.stride(1) == 1, name, " must have unit column stride, has ",
                  t.stride(1));
  return t.size(0) > 1 ? t.stride(0) : t.size(1);  // one row's may be anything
}

// t [rows, sum of the widths]; its row stride.
int64_t check_columns(const Tensor& t, const char* name, const Site& site) {
  const int64_t stride = check_matrix(t, name, site);
  const Slice& last = site.slices[site.num_slices - 1];
  const int64_t width = last.offset + last.width;
  STD_TORCH_CHECK(t.size(1) == width, name, " has ", t.size(1), " columns, the site's slices ", width);
  return stride;
}

int64_t check_y(const Tensor& y, const Site& site, int64_t rows) {
  const int64_t stride = check_columns(y, "y", site);
  STD_TORCH_CHECK(y.size(0) == rows, "y has ", y.size(0), " rows, the input ", rows);
  STD_TORCH_CHECK(rows <= 1 || stride >= y.size(1), "rows of y overlap: stride ", stride, " for ", y.size(1),
                  " columns");
  return stride;
}

ShrinkArgs shrink_args(const Site& site, const Tensor& x, const PlanView& plan, float* h) {
  return {site, plan, x.const_data_ptr(), check_matrix(x, "x", site), x.size(0), h};
}

ExpandArgs expand_args(const Site& site, const Tensor& y, const PlanView& plan, const float* h,
                       int64_t rows) {
  const int64_t stride = check_y(y, site, rows);
  return {site, plan, h, y.mutable_data_ptr(), stride, rows};
}

ShrinkArgs check_shrink(const Tensor& h, const Tensor& x, const std::vector<Tensor>& weights,
                        const Tensor& table, const Tensor& plan, int64_t entry) {
  STD_TORCH_CHECK(h.scalar_type() == ScalarType::Float && h.dim() == 3 && h.is_contiguous(),
                  "h must be contiguous float32 [rows, num_slices, max_rank]");
  STD_TORCH_CHECK(x.dim() == 2 && h.size(0) == x.size(0), "h has ", h.size(0), " rows, x ", x.size(0));
  check_device(x, "x", h);
  const Site site = site_of(weights, table, entry, h.size(1), x.size(1), h.size(2), h);
  return shrink_args(site, x, plan_view(plan, h), static_cast<float*>(h.mutable_data_ptr()));
}

ExpandArgs check_expand(const Tensor& y, const Tensor& h, const std::vector<Tensor>& weights,
                        const Tensor& table, const Tensor& plan, int64_t entry,
                        const std::vector<int64_t>& widths) {
  STD_TORCH_CHECK(h.scalar_type() == ScalarType::Float && h.dim() == 3 && h.is_contiguous(),
                  "h must be contiguous float32 [rows, num_slices, max_rank]");
  STD_TORCH_CHECK(h.size(1) == static_cast<int64_t>(widths.size()), "h has ", h.size(1), " slices, widths ",
                  widths.size());
  check_device(h, "h", y);
  Site site = site_of(weights, table, entry, h.size(1), 0, h.size(2), y);
  set_widths(site, widths);
  return expand_args(site, y, plan_view(plan, y), static_cast<const float*>(h.const_data_ptr()), h.size(0));
}

// All of an apply but where its deltas go. `like` is what the operator writes.
ShrinkArgs check_input(const Tensor& scratch, const Tensor& x, const std::vector<Tensor>& weights,
                       const Tensor& table, const Tensor& plan, int64_t entry,
                       const std::vector<int64_t>& widths, int64_t max_rank, const Tensor& like) {
  STD_TORCH_CHECK(x.dim() == 2, "x has ", x.dim(), " dimensions; want [rows, in]");
  check_device(x, "x", like);
  check_device(scratch, "scratch", like);
  const int64_t slices = static_cast<int64_t>(widths.size());
  Site site = site_of(weights, table, entry, slices, x.size(1), max_rank, like);
  set_widths(site, widths);
  const int64_t need = x.size(0) * slices * max_rank;
  STD_TORCH_CHECK(
      scratch.scalar_type() == ScalarType::Float && scratch.is_contiguous() && scratch.numel() >= need,
      "scratch must be contiguous float32 of at least rows * slices * max_rank = ", need, " values, has ",
      scratch.numel());
  return shrink_args(site, x, plan_view(plan, like), static_cast<float*>(scratch.mutable_data_ptr()));
}

ApplyArgs with_output(const ShrinkArgs& shrink, const Tensor& y) {
  return {shrink, expand_args(shrink.site, y, shrink.plan, shrink.h, shrink.rows)};
}

EmbeddingArgs check_embedding(const Tensor& y, const Tensor& ids, const std::vector<Tensor>& weights,
                              const Tensor& table, const Tensor& plan, int64_t entry,
                              const std::vector<int64_t>& widths, int64_t vocab, int64_t max_rank) {
  const bool ids64 = ids.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK((ids64 || ids.scalar_type() == ScalarType::Int) && ids.dim() == 1 && ids.is_contiguous(),
                  "ids must be a contiguous int32 or int64 vector");
  check_device(ids, "ids", y);
  STD_TORCH_CHECK(vocab >= 0 && !weights.empty() && vocab <= weights[0].numel(), "a vocabulary of ", vocab,
                  " ids is not in the weights");
  Site site = site_of(weights, table, entry, static_cast<int64_t>(widths.size()), vocab, max_rank, y);
  set_widths(site, widths);
  const int64_t stride = check_y(y, site, ids.size(0));
  return {site, plan_view(plan, y), ids.const_data_ptr(), ids64, y.mutable_data_ptr(), stride, ids.size(0)};
}

// An engine captures its base-only steps through the traced graph of the others: what tells them apart is
// read here, on the host, in every call.
bool is_active(const std::optional<Tensor>& active) {
  if (!active) return true;
  STD_TORCH_CHECK(active->is_cpu() && active->scalar_type() == ScalarType::Bool && active->numel() == 1,
                  "active must be one bool on the CPU");
  return *static_cast<const bool*>(active->const_data_ptr());
}

STABLE_TORCH_LIBRARY(loramux, m) {
  m.def("lora_shrink(Tensor(a!) h, Tensor x, Tensor[] weights, Tensor table, Tensor plan, int entry) -> ()");
  m.def(
      "lora_expand_(Tensor(a!) y, Tensor h, Tensor[] weights, Tensor table, Tensor plan, int entry, "
      "int[] widths) -> ()");
  m.def(
      "lora_apply_(Tensor(a!) y, Tensor(b!) scratch, Tensor x, Tensor[] weights, Tensor table, Tensor plan, "
      "int entry, int[] widths, int max_rank, Tensor? active=None) -> ()");
  m.def(
      "lora_start(Tensor(a!) delta, Tensor(b!) scratch, Tensor x, Tensor[] weights, Tensor table, "
      "Tensor plan, int entry, int[] widths, int max_rank, Tensor? active=None) -> ()");
  m.def(
      "lora_finish_(Tensor(a!) y, Tensor delta, Tensor(b!) scratch, Tensor x, Tensor[] weights, "
      "Tensor table, Tensor plan, int entry, int[] widths, int max_rank, Tensor? active=None) -> ()");
  m.def(
      "lora_embedding_(Tensor(a!) y, Tensor ids, Tensor[] weights, Tensor table, Tensor plan, int entry, "
      "int[] widths, int vocab, int max_rank, Tensor? active=None) -> ()");
}

// ---- CPU ----

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, count, grain, body);
}

// On the CPU the plan can be read here, so that one for more rows is refused instead of partly used. Rows
// past the plan's are in no tile: an engine pads a step to the size of a captured graph.
void check_plan_rows(const PlanView& plan, int64_t rows) {
  STD_TORCH_CHECK(plan.words[2] <= rows, "the plan is for ", plan.words[2], " rows, the call has ", rows);
}

void check_ids(const EmbeddingArgs& args) {
  for (int64_t i = 0; i < args.rows; ++i) {
    const int64_t id =
        args.ids64 ? static_cast<const int64_t*>(args.ids)[i] : static_cast<const int32_t*>(args.ids)[i];
    STD_TORCH_CHECK(id >= -1 && id < args.site.in_features, "token id ", id, " at row ", i,
                    " is outside the vocabulary of ", args.site.in_features);
  }
}

void shrink_on_cpu(const Tensor& h, const Tensor& x, std::vector<Tensor> weights, const Tensor& table,
                   const Tensor& plan, int64_t entry) {
  const ShrinkArgs args = check_shrink(h, x, weights, table, plan, entry);
  check_plan_rows(args.plan, args.rows);
  shrink_cpu(args, parallel_for);
}

void expand_on_cpu(const Tensor& y, const Tensor& h, std::vector<Tensor> weights, const Tensor& table,
                   const Tensor& plan, int64_t entry, std::vector<int64_t> widths) {
  const ExpandArgs args = check_expand(y, h, weights, table, plan, entry, widths);
  check_plan_rows(args.plan, args.rows);
  expand_cpu(args, parallel_for);
}

void apply_on_cpu(const Tensor& y, const Tensor& scratch, const Tensor& x, std::vector<Tensor> weights,
                  const Tensor& table, const Tensor& plan, int64_t entry, std::vector<int64_t> widths,
                  int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active)) return;
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, y);
  const ApplyArgs args = with_output(input, y);
  check_plan_rows(input.plan, input.rows);
  apply_cpu(args, parallel_for);
}

// Nothing runs beside the caller here: lora_finish_ computes all.
void start_on_cpu(const Tensor&, const Tensor&, const Tensor&, std::vector<Tensor>, const Tensor&,
                  const Tensor&, int64_t, std::vector<int64_t>, int64_t, std::optional<Tensor>) {}

void finish_on_cpu(const Tensor& y, const Tensor&, const Tensor& scratch, const Tensor& x,
                   std::vector<Tensor> weights, const Tensor& table, const Tensor& plan, int64_t entry,
                   std::vector<int64_t> widths, int64_t max_rank, std::optional<Tensor> active) {
  apply_on_cpu(y, scratch, x, std::move(weights), table, plan, entry, std::move(widths), max_rank,
               std::move(active));
}

void embedding_on_cpu(const Tensor& y, const Tensor& ids, std::vector<Tensor> weights, const Tensor& table,
                      const Tensor& plan, int64_t entry, std::vector<int64_t> widths, int64_t vocab,
                      int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active)) return;
  const EmbeddingArgs args = check_embedding(y, ids, weights, table, plan, entry, widths, vocab, max_rank);
  check_plan_rows(args.plan, args.rows);
  check_ids(args);
  embedding_cpu(args, parallel_for);
}

STABLE_TORCH_LIBRARY_IMPL(loramux, CPU, m) {
  m.impl("lora_shrink", TORCH_BOX(&shrink_on_cpu));
  m.impl("lora_expand_", TORCH_BOX(&expand_on_cpu));
  m.impl("lora_apply_", TORCH_BOX(&apply_on_cpu));
  m.impl("lora_start", TORCH_BOX(&start_on_cpu));
  m.impl("lora_finish_", TORCH_BOX(&finish_on_cpu));
  m.impl("lora_embedding_", TORCH_BOX(&embedding_on_cpu));
}

// ---- CUDA ----

#ifdef LORAMUX_CUDA
// The stream getter lives in libtorch_cuda.so, which a CPU build of torch lacks, so it is looked up at the
// first CUDA call instead of being linked.
void* current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* lib = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return lib ? reinterpret_cast<Getter>(dlsym(lib, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(getter, "this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

template <typename Kernel, typename Args>
void launch(Kernel kernel, const Args& args, const Tensor& on) {
  const int32_t device = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int error = kernel(args, current_stream(device));
  STD_TORCH_CHECK(error == 0, "a LoRA kernel could not be launched: ", take_cuda_error(error));
}

void shrink_on_cuda(const Tensor& h, const Tensor& x, std::vector<Tensor> weights, const Tensor& table,
                    const Tensor& plan, int64_t entry) {
  launch(shrink_cuda, check_shrink(h, x, weights, table, plan, entry), h);
}

void expand_on_cuda(const Tensor& y, const Tensor& h, std::vector<Tensor> weights, const Tensor& table,
                    const Tensor& plan, int64_t entry, std::vector<int64_t> widths) {
  launch(expand_cuda, check_expand(y, h, weights, table, plan, entry, widths), y);
}

void apply_on_cuda(const Tensor& y, const Tensor& scratch, const Tensor& x, std::vector<Tensor> weights,
                   const Tensor& table, const Tensor& plan, int64_t entry, std::vector<int64_t> widths,
                   int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active)) return;
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, y);
  launch(apply_cuda, with_output(input, y), y);
}

// Whether delta has the rows of the step. lora_finish_ does all of a longer one.
bool has_room(const Tensor& delta, const Tensor& x) {
  STD_TORCH_CHECK(delta.dim() == 2 && delta.is_contiguous() && x.dim() == 2,
                  "x and delta must be [rows, columns], delta contiguous");
  return x.size(0) <= delta.size(0);
}

// The deltas that lora_start makes for lora_finish_ to add; none where lora_finish_ does all.
std::optional<ApplyArgs> with_delta(const ShrinkArgs& input, const Tensor& delta, const Tensor& scratch) {
  const Site& site = input.site;
  check_device(delta, "delta", scratch);
  check_columns(delta, "delta", site);
  const int64_t need = kBesideParts * input.rows * site.num_slices * site.max_rank;
  STD_TORCH_CHECK(scratch.numel() >= need, "scratch has ", scratch.numel(), " values, lora_start needs ",
                  need, ", or a delta of fewer rows");
  const ApplyArgs args = {input,
                          {site, input.plan, input.h, delta.mutable_data_ptr(), delta.size(1), input.rows}};
  return beside_serves(args) ? std::optional(args) : std::nullopt;
}

void start_on_cuda(const Tensor& delta, const Tensor& scratch, const Tensor& x, std::vector<Tensor> weights,
                   const Tensor& table, const Tensor& plan, int64_t entry, std::vector<int64_t> widths,
                   int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active) || !has_room(delta, x)) return;
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, delta);
  if (const auto made = with_delta(input, delta, scratch)) launch(start_cuda, *made, delta);
}

void finish_on_cuda(const Tensor& y, const Tensor& delta, const Tensor& scratch, const Tensor& x,
                    std::vector<Tensor> weights, const Tensor& table, const Tensor& plan, int64_t entry,
                    std::vector<int64_t> widths, int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active)) return;
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, y);
  const ApplyArgs args = with_output(input, y);
  const auto made = has_room(delta, x) ? with_delta(input, delta, scratch) : std::nullopt;
  if (!made) return launch(apply_cuda, args, y);
  const auto add = [&](const ExpandArgs& expand, void* stream) {
    return finish_cuda(expand, args.expand.y, args.expand.y_stride, stream);
  };
  launch(add, made->expand, y);
}

void embedding_on_cuda(const Tensor& y, const Tensor& ids, std::vector<Tensor> weights, const Tensor& table,
                       const Tensor& plan, int64_t entry, std::vector<int64_t> widths, int64_t vocab,
                       int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active)) return;
  launch(embedding_cuda, check_embedding(y, ids, weights, table, plan, entry, widths, vocab, max_rank), y);
}

STABLE_TORCH_LIBRARY_IMPL(loramux, CUDA, m) {
  m.impl("lora_shrink", TORCH_BOX(&shrink_on_cuda));
  m.impl("lora_expand_", TORCH_BOX(&expand_on_cuda));
  m.impl("lora_apply_", TORCH_BOX(&apply_on_cuda));
  m.impl("lora_start", TORCH_BOX(&start_on_cuda));
  m.impl("lora_finish_", TORCH_BOX(&finish_on_cuda));
  m.impl("lora_embedding_", TORCH_BOX(&embedding_on_cuda));
}
#endif

}  // namespace
}  // namespace loramux
