// With arguments.h all that knows torch: schemas, and dispatch to the kernels' launchers. Written against
// torch's stable ABI, so that one binary serves every torch >= 2.11 and every Python.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef LORAMUX_CUDA
#include <dlfcn.h>
#endif

#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "arguments.h"
#include "lora.h"

namespace loramux {
namespace {

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
  // lora_apply_ in less host time: most of a call's goes into handing over the parts of a site. Only for
  // calls that are not traced, since a graph would keep the site's addresses.
  m.def(
      "lora_pack_site(Tensor[] weights, Tensor table, int entry, int[] widths, int in_features, "
      "int max_rank) -> Tensor");
  m.def("lora_apply_packed_(Tensor(a!) y, Tensor(b!) scratch, Tensor x, Tensor plan, Tensor site) -> ()");
}

Tensor pack_site(std::vector<Tensor> weights, const Tensor& table, int64_t entry, std::vector<int64_t> widths,
                 int64_t in_features, int64_t max_rank) {
  const PackedSite packed = check_site(weights, table, entry, widths, in_features, max_rank);
  Tensor bytes = torch::stable::empty({sizeof(packed)}, ScalarType::Byte);
  std::memcpy(bytes.mutable_data_ptr(), &packed, sizeof(packed));
  return bytes;
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
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, y.device());
  const ApplyArgs args = with_output(input, y);
  check_plan_rows(input.plan, input.rows);
  apply_cpu(args, parallel_for);
}

void apply_packed_on_cpu(const Tensor& y, const Tensor& scratch, const Tensor& x, const Tensor& plan,
                         const Tensor& site) {
  const ApplyArgs args = with_output(check_packed_input(scratch, x, plan, site, y.device()), y);
  check_plan_rows(args.shrink.plan, args.shrink.rows);
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
  m.impl("lora_pack_site", TORCH_BOX(&pack_site));
  m.impl("lora_apply_packed_", TORCH_BOX(&apply_packed_on_cpu));
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

// Makes a tensor's device the current one. A guard costs the host more than to ask whether one is needed.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) : device_(t.get_device_index()) {
    if (current_cuda_device() != device_) guard_.emplace(device_);
  }
  void* stream() const { return current_stream(device_); }

 private:
  int32_t device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

template <typename Kernel, typename Args>
void launch(Kernel kernel, const Args& args, const Tensor& on) {
  const OnDeviceOf device(on);
  const int error = kernel(args, device.stream());
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
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, y.device());
  launch(apply_cuda, with_output(input, y), y);
}

void apply_packed_on_cuda(const Tensor& y, const Tensor& scratch, const Tensor& x, const Tensor& plan,
                          const Tensor& site) {
  launch(apply_cuda, with_output(check_packed_input(scratch, x, plan, site, y.device()), y), y);
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
  check_device(delta, "delta", scratch.device());
  const int64_t columns = check_columns(delta, "delta", site).columns;
  const int64_t need = kBesideParts * input.rows * site.num_slices * site.max_rank;
  STD_TORCH_CHECK(scratch.numel() >= need, "scratch has ", scratch.numel(), " values, lora_start needs ",
                  need, ", or a delta of fewer rows");
  const OnDeviceOf device(delta);
  const ApplyArgs args = {input, {site, input.plan, input.h, delta.mutable_data_ptr(), columns, input.rows}};
  return beside_serves(args) ? std::optional(args) : std::nullopt;
}

void start_on_cuda(const Tensor& delta, const Tensor& scratch, const Tensor& x, std::vector<Tensor> weights,
                   const Tensor& table, const Tensor& plan, int64_t entry, std::vector<int64_t> widths,
                   int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active) || !has_room(delta, x)) return;
  const ShrinkArgs input =
      check_input(scratch, x, weights, table, plan, entry, widths, max_rank, delta.device());
  if (const auto made = with_delta(input, delta, scratch)) launch(start_cuda, *made, delta);
}

void finish_on_cuda(const Tensor& y, const Tensor& delta, const Tensor& scratch, const Tensor& x,
                    std::vector<Tensor> weights, const Tensor& table, const Tensor& plan, int64_t entry,
                    std::vector<int64_t> widths, int64_t max_rank, std::optional<Tensor> active) {
  if (!is_active(active)) return;
  const ShrinkArgs input = check_input(scratch, x, weights, table, plan, entry, widths, max_rank, y.device());
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
  m.impl("lora_pack_site", TORCH_BOX(&pack_site));
  m.impl("lora_apply_packed_", TORCH_BOX(&apply_packed_on_cuda));
  m.impl("lora_start", TORCH_BOX(&start_on_cuda));
  m.impl("lora_finish_", TORCH_BOX(&finish_on_cuda));
  m.impl("lora_embedding_", TORCH_BOX(&embedding_on_cuda));
}
#endif

}  // namespace
}  // namespace loramux
