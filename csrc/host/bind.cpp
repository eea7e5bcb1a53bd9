// The Python module `_host`: planner and packer over addresses of memory that the caller owns.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

#include "host/pack.h"
#include "host/plan.h"

namespace loramux {
namespace {

namespace py = pybind11;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw py::value_error(message.str());
}

// The items of a list or tuple where they are, of any other iterable as a list.
class Items {
 public:
  explicit Items(py::handle sequence)
      : items_(py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "not a sequence"))) {
    if (!items_) throw py::error_already_set();
  }

  int64_t size() const { return PySequence_Fast_GET_SIZE(items_.ptr()); }
  PyObject* operator[](int64_t i) const { return PySequence_Fast_GET_ITEM(items_.ptr(), i); }

 private:
  py::object items_;
};

int32_t to_int32(const char* name, int64_t i, PyObject* item) {
  const long value = PyLong_AsLong(item);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (value != static_cast<int32_t>(value))
    refuse(name, "[", i, "] is ", value, ", which does not fit 32 bits");
  return static_cast<int32_t>(value);
}

float to_float(PyObject* item) {
  if (PyFloat_CheckExact(item)) return static_cast<float>(PyFloat_AS_DOUBLE(item));
  const double value = PyFloat_AsDouble(item);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return static_cast<float>(value);
}

void check_shape(int64_t rows, int64_t num_slots) {
  if (rows < 0 || rows > kMaxInt32 || num_slots < 1 || num_slots > kMaxInt32)
    refuse("a plan has 0 to ", kMaxInt32, " rows over 1 to ", kMaxInt32, " slots; found ", rows,
           " rows over ", num_slots, " slots");
}

// What the planner plans: the segments of a step under one row grouping.
class Segments {
 public:
  explicit Segments(std::vector<PlanSegment> items) : items_(std::move(items)) {
    for (const PlanSegment& segment : items_) rows_ += segment.rows;
  }

  static Segments read(py::handle slot_items, py::handle row_items, py::handle scale_items) {
    const Items slots(slot_items), rows(row_items), scales(scale_items);
    if (slots.size() != rows.size() || slots.size() != scales.size())
      refuse("slots, rows and scales have one item per segment; found ", slots.size(), ", ", rows.size(),
             " and ", scales.size(), " items");
    std::vector<PlanSegment> items;
    items.reserve(slots.size());
    for (int64_t i = 0; i < slots.size(); ++i)
      items.push_back({to_int32("slots", i, slots[i]), to_int32("rows", i, rows[i]), to_float(scales[i])});
    return Segments(std::move(items));
  }

  // By the adapter of each row, at scale 1: neighbours of one adapter become one segment.
  static Segments of_rows(py::handle adapter_items, const py::dict& slots) {
    const Items adapters(adapter_items);
    std::vector<PlanSegment> items;
    long last = 0;
    for (int64_t i = 0; i < adapters.size(); ++i) {
      const long adapter = PyLong_AsLong(adapters[i]);
      if (adapter == -1 && PyErr_Occurred()) throw py::error_already_set();
      if (!items.empty() && adapter == last) {
        ++items.back().rows;
        continue;
      }
      PyObject* const slot = PyDict_GetItemWithError(slots.ptr(), py::int_(adapter).ptr());
      if (slot == nullptr) {
        if (PyErr_Occurred()) throw py::error_already_set();
        refuse("adapters[", i, "] is ", adapter, ", which holds no slot: make it resident first");
      }
      items.push_back({to_int32("slots", i, slot), 1, 1.0f});
      last = adapter;
    }
    return Segments(std::move(items));
  }

  const std::vector<PlanSegment>& items() const { return items_; }
  int64_t rows() const { return rows_; }

 private:
  std::vector<PlanSegment> items_;
  int64_t rows_ = 0;
};

// A step's segments as its caller has them, (adapter, tokens, scale): read once for all row groupings.
class Step {
 public:
  explicit Step(py::handle sequence) {
    const Items items(sequence);
    segments_.reserve(items.size());
    py::dict indices;
    for (int64_t i = 0; i < items.size(); ++i) {
      PyObject* item = items[i];
      if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3)
        throw py::type_error("a segment is a tuple of adapter, tokens and scale");
      const int32_t tokens = to_int32("tokens", i, PyTuple_GET_ITEM(item, 1));
      const float scale = to_float(PyTuple_GET_ITEM(item, 2));
      PyObject* adapter = PyTuple_GET_ITEM(item, 0);
      segments_.push_back(
          {tokens == 0 || adapter == Py_None ? kBase : index(indices, adapter), tokens, scale});
    }
  }

  // Distinct adapters of the segments that have tokens, in order of their first.
  const py::list& adapters() const { return adapters_; }

  int64_t rows(int64_t grouping) const {
    int64_t total = 0;
    for (const Segment& segment : segments_) {
      if (segment.tokens < 0 || (grouping > 1 && segment.tokens % grouping != 0))
        refuse("a segment of ", segment.tokens, " tokens has no whole rows of ",
               std::max<int64_t>(grouping, 1), " tokens");
      total += rows_of(segment, grouping);
    }
    if (total > kMaxInt32)
      refuse("the step has ", total, " rows, and a plan holds at most ", kMaxInt32, ": split the step");
    return total;
  }

  Segments grouped(int64_t grouping, py::handle slot_items) const {
    const Items slots(slot_items);
    if (slots.size() != static_cast<int64_t>(adapters_.size()))
      refuse("the step names ", adapters_.size(), " adapters; found ", slots.size(), " slots");
    std::vector<int32_t> slot_of(slots.size());
    for (int64_t i = 0; i < slots.size(); ++i) slot_of[i] = to_int32("slots", i, slots[i]);
    rows(grouping);
    std::vector<PlanSegment> items;
    items.reserve(segments_.size());
    for (const Segment& segment : segments_)
      items.push_back({segment.adapter == kBase ? 0 : slot_of[segment.adapter], rows_of(segment, grouping),
                       segment.scale});
    return Segments(std::move(items));
  }

 private:
  static constexpr int32_t kBase = -1;

  struct Segment {
    int32_t adapter;  // index in adapters_, or kBase
    int32_t tokens;
    float scale;
  };

  static int32_t rows_of(const Segment& segment, int64_t grouping) {
    return static_cast<int32_t>(grouping == 0 ? segment.tokens != 0 : segment.tokens / grouping);
  }

  int32_t index(const py::dict& indices, PyObject* adapter) {
    if (PyObject* known = PyDict_GetItemWithError(indices.ptr(), adapter))
      return static_cast<int32_t>(PyLong_AsLong(known));
    if (PyErr_Occurred()) throw py::error_already_set();
    const auto next = static_cast<int32_t>(adapters_.size());
    indices[py::handle(adapter)] = next;
    adapters_.append(py::handle(adapter));
    return next;
  }

  std::vector<Segment> segments_;
  py::list adapters_;
};

class BoundPlanner {
 public:
  int64_t plan(const Segments& segments, int64_t num_slots, uintptr_t address, int64_t capacity) {
    if (address % alignof(PlanHeader) != 0 || capacity < 0 || capacity % 4 != 0)
      refuse("a plan's buffer starts on ", alignof(PlanHeader),
             " bytes and holds a multiple of 4 words; found address ", address, " and ", capacity, " words");
    auto* words = reinterpret_cast<int32_t*>(address);
    const auto& items = segments.items();
    const PlanStatus status =
        planner_.plan(items.data(), static_cast<int64_t>(items.size()), num_slots, words, capacity);
    if (status != PlanStatus::ok) refuse_plan(segments, status, num_slots, capacity);
    return int64_t{words[0]} + words[1];
  }

 private:
  [[noreturn]] static void refuse_plan(const Segments& segments, PlanStatus status, int64_t num_slots,
                                       int64_t capacity) {
    const auto& items = segments.items();
    for (size_t i = 0; i < items.size(); ++i) {
      const auto& [slot, rows, scale] = items[i];
      if (status == PlanStatus::bad_slot && slot >= num_slots)
        refuse("slots[", i, "] is ", slot, ", and there are ", num_slots, " slots: name one below that");
      if (rows < 0) refuse("rows[", i, "] is ", rows, ": a segment has 0 rows or more");
    }
    const int64_t total = segments.rows();
    if (status == PlanStatus::bad_rows)
      refuse("the segments have ", total, " rows, and a plan holds at most ", kMaxInt32, ": split the step");
    refuse("the plan of ", total, " rows does not fit the buffer of ", capacity,
           " words: give it plan_capacity(", total, ", ", num_slots, ") = ", plan_capacity(total, num_slots),
           " words");
  }

  Planner planner_;
};

DType to_dtype(int code) {
  if (code < 0 || code > static_cast<int>(DType::bf16))
    refuse("a dtype code is 0 (float32), 1 (float16) or 2 (bfloat16); found ", code);
  return static_cast<DType>(code);
}

void check_block(const Block& block, int64_t bytes, DType dtype) {
  if (block.rows < 0 || block.cols < 0 || block.rows > block.padded_rows || block.cols > block.padded_cols)
    refuse("a block of ", block.rows, " x ", block.cols, " elements cannot be padded to ", block.padded_rows,
           " x ", block.padded_cols);
  if (block.offset % kBlockAlign != 0 || block.offset < 0 || bytes % kBlockAlign != 0)
    refuse("a block starts at, and an image has, a multiple of ", kBlockAlign, " bytes; found ", block.offset,
           " and ", bytes);
  const int64_t room = (bytes - block.offset) / item_size(dtype);
  if (block.offset > bytes || (block.padded_rows > 0 && block.padded_cols > room / block.padded_rows))
    refuse("a block of ", block.padded_rows, " x ", block.padded_cols, " elements at byte ", block.offset,
           " does not fit an image of ", bytes, " bytes");
}

using Pair = std::tuple<int64_t, int64_t>;
using PythonBlock = std::tuple<uintptr_t, int, Pair, Pair, Pair, int64_t>;

std::vector<std::tuple<int64_t, int, int64_t>> pack_blocks(uintptr_t image, int64_t bytes, int dtype_code,
                                                           const std::vector<PythonBlock>& items) {
  const DType dtype = to_dtype(dtype_code);
  std::vector<Block> blocks;
  blocks.reserve(items.size());
  for (const auto& [source, source_dtype, shape, strides, padded, offset] : items) {
    const auto [rows, cols] = shape;
    const auto [row_stride, col_stride] = strides;
    const auto [padded_rows, padded_cols] = padded;
    blocks.push_back({reinterpret_cast<const std::byte*>(source), to_dtype(source_dtype), rows, cols,
                      row_stride, col_stride, padded_rows, padded_cols, offset});
    check_block(blocks.back(), bytes, dtype);
  }
  std::vector<std::tuple<int64_t, int, int64_t>> faults;
  py::gil_scoped_release release;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const PackResult result = pack(blocks[i], reinterpret_cast<std::byte*>(image), dtype);
    if (result.fault != PackFault::none) faults.emplace_back(i, static_cast<int>(result.fault), result.index);
  }
  return faults;
}

bool is_finite(uintptr_t values, int dtype, int64_t count) {
  const DType checked = to_dtype(dtype);
  py::gil_scoped_release release;
  return all_finite(reinterpret_cast<const std::byte*>(values), checked, count);
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "The torch-free host code: the step planner and the image packer.";

  m.attr("DECODE_ROWS") = kDecodeRows;
  m.attr("PREFILL_ROWS") = kPrefillRows;
  m.attr("MAX_DECODE_ROWS_OF_SLOT") = kMaxDecodeRowsOfSlot;
  m.attr("BLOCK_ALIGN") = kBlockAlign;
  m.attr("RANK_ALIGN") = kRankAlign;
  m.attr("MAX_SLICES") = kMaxSlices;

  const auto def_bound = [&m](const char* name, int64_t (*bound)(int64_t, int64_t)) {
    m.def(
        name,
        [bound](int64_t rows, int64_t num_slots) {
          check_shape(rows, num_slots);
          return bound(rows, num_slots);
        },
        py::arg("rows"), py::arg("num_slots"));
  };
  def_bound("max_decode_tiles", max_decode_tiles);
  def_bound("max_prefill_tiles", max_prefill_tiles);
  def_bound("plan_capacity", plan_capacity);

  py::class_<Segments>(m, "Segments")
      .def(py::init(&Segments::read), py::arg("slots"), py::arg("rows"), py::arg("scales"))
      .def_static("of_rows", &Segments::of_rows, py::arg("adapters"), py::arg("slots"))
      .def_property_readonly("rows", &Segments::rows);

  py::class_<Step>(m, "Step")
      .def(py::init<py::handle>(), py::arg("segments"))
      .def_property_readonly("adapters", &Step::adapters)
      .def("rows", &Step::rows, py::arg("grouping"))
      .def("grouped", &Step::grouped, py::arg("grouping"), py::arg("slots"));

  py::class_<BoundPlanner>(m, "Planner")
      .def(py::init<>())
      .def("plan", &BoundPlanner::plan, py::arg("segments"), py::arg("num_slots"), py::arg("address"),
           py::arg("capacity"));

  m.def("pack", &pack_blocks, py::arg("image"), py::arg("bytes"), py::arg("dtype"), py::arg("blocks"));
  m.def("all_finite", &is_finite, py::arg("values"), py::arg("dtype"), py::arg("count"));
}

}  // namespace loramux
