// The Python module `_host`: planner and packer over addresses of memory that the caller owns.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <sstream>
#include <tuple>
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
  const double value = PyFloat_AsDouble(item);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return static_cast<float>(value);
}

void check_shape(int64_t rows, int64_t num_slots) {
  if (rows < 0 || rows > kMaxInt32 || num_slots < 1 || num_slots > kMaxInt32)
    refuse("a plan has 0 to ", kMaxInt32, " rows over 1 to ", kMaxInt32, " slots; found ", rows,
           " rows over ", num_slots, " slots");
}

class BoundPlanner {
 public:
  int64_t plan(py::handle slots, py::handle rows, py::handle scales, int64_t num_slots, uintptr_t address,
               int64_t capacity) {
    read_segments(Items(slots), Items(rows), Items(scales));
    if (address % alignof(PlanHeader) != 0 || capacity < 0 || capacity % 4 != 0)
      refuse("a plan's buffer starts on ", alignof(PlanHeader),
             " bytes and holds a multiple of 4 words; found address ", address, " and ", capacity, " words");
    auto* words = reinterpret_cast<int32_t*>(address);
    const PlanStatus status =
        planner_.plan(segments_.data(), static_cast<int64_t>(segments_.size()), num_slots, words, capacity);
    if (status != PlanStatus::ok) refuse_plan(status, num_slots, capacity);
    return int64_t{words[0]} + words[1];
  }

 private:
  void read_segments(const Items& slots, const Items& rows, const Items& scales) {
    if (slots.size() != rows.size() || slots.size() != scales.size())
      refuse("slots, rows and scales have one item per segment; found ", slots.size(), ", ", rows.size(),
             " and ", scales.size(), " items");
    segments_.clear();
    for (int64_t i = 0; i < slots.size(); ++i)
      segments_.push_back(
          {to_int32("slots", i, slots[i]), to_int32("rows", i, rows[i]), to_float(scales[i])});
  }

  [[noreturn]] void refuse_plan(PlanStatus status, int64_t num_slots, int64_t capacity) const {
    int64_t total = 0;
    for (size_t i = 0; i < segments_.size(); ++i) {
      const auto& [slot, rows, scale] = segments_[i];
      if (status == PlanStatus::bad_slot && slot >= num_slots)
        refuse("slots[", i, "] is ", slot, ", and there are ", num_slots, " slots: name one below that");
      if (rows < 0) refuse("rows[", i, "] is ", rows, ": a segment has 0 rows or more");
      total += rows;
    }
    if (status == PlanStatus::bad_rows)
      refuse("the segments have ", total, " rows, and a plan holds at most ", kMaxInt32, ": split the step");
    refuse("the plan of ", total, " rows does not fit the buffer of ", capacity,
           " words: give it plan_capacity(", total, ", ", num_slots, ") = ", plan_capacity(total, num_slots),
           " words");
  }

  Planner planner_;
  std::vector<PlanSegment> segments_;
};

DType to_dtype(int code) {
  if (code < 0 || code > static_cast<int>(DType::bf16))
    refuse("a dtype code is 0 (float32), 1 (float16) or 2 (bfloat16); found ", code);
  return static_cast<DType>(code);
}

// source, dtype, rows, cols, row_stride, col_stride, padded_rows, padded_cols, offset: the fields of Block.
using BlockTuple = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Block to_block(const BlockTuple& fields) {
  return std::apply(
      [](uintptr_t source, int dtype, auto... rest) {
        return Block{reinterpret_cast<const std::byte*>(source), to_dtype(dtype), rest...};
      },
      fields);
}

// Returns where the block ends in the image.
int64_t check_block(size_t i, const Block& block, int64_t previous_end, int64_t bytes, DType dtype) {
  if (block.rows < 0 || block.cols < 0 || block.rows > block.padded_rows || block.cols > block.padded_cols)
    refuse("blocks[", i, "] has ", block.rows, " x ", block.cols, " elements, which cannot be padded to ",
           block.padded_rows, " x ", block.padded_cols);
  if (block.offset % kBlockAlign != 0 || block.offset < previous_end)
    refuse("blocks[", i, "] starts at byte ", block.offset, ": expected a multiple of ", kBlockAlign,
           " that is at least ", previous_end, ", where the block before it ends");
  const int64_t room = (bytes - block.offset) / item_size(dtype);
  if (block.offset > bytes || (block.padded_rows > 0 && block.padded_cols > room / block.padded_rows))
    refuse("blocks[", i, "] has ", block.padded_rows, " x ", block.padded_cols, " elements at byte ",
           block.offset, ", which do not fit an image of ", bytes, " bytes");
  return block.offset + block.padded_rows * block.padded_cols * item_size(dtype);
}

std::tuple<int, int64_t, int64_t> pack_image(uintptr_t image, int64_t bytes, int dtype_code,
                                             const std::vector<BlockTuple>& tuples, int threads) {
  const DType dtype = to_dtype(dtype_code);
  if (bytes < 0 || threads < 1)
    refuse("an image has 0 bytes or more and is packed by at least 1 thread; found ", bytes, " bytes and ",
           threads, " threads");
  std::vector<Block> blocks;
  int64_t end = 0;
  for (const BlockTuple& fields : tuples) {
    blocks.push_back(to_block(fields));
    end = check_block(blocks.size() - 1, blocks.back(), end, bytes, dtype);
  }
  py::gil_scoped_release release;
  const PackResult result = pack(reinterpret_cast<std::byte*>(image), bytes, dtype, blocks, threads);
  return {static_cast<int>(result.fault), result.block, result.index};
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

  py::class_<BoundPlanner>(m, "Planner")
      .def(py::init<>())
      .def("plan", &BoundPlanner::plan, py::arg("slots"), py::arg("rows"), py::arg("scales"),
           py::arg("num_slots"), py::arg("address"), py::arg("capacity"));

  m.def("pack", &pack_image, py::arg("image"), py::arg("bytes"), py::arg("dtype"), py::arg("blocks"),
        py::arg("threads"));
}

}  // namespace loramux
