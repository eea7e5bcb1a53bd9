// The Python module `_host`: the planner and the packer over addresses of memory that the caller owns, and
// what a step does once for each of its segments and adapters.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/pack.h"
#include "host/plan.h"

namespace loramux {
namespace {

namespace py = pybind11;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

template <class... Parts>  // by value: what a caller passes may stay in its registers
[[noreturn, gnu::noinline, gnu::cold]] void refuse(Parts... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw py::value_error(message.str());
}

// The items of a tuple where they are, of anything else as a copy: reading them may run Python code, which
// may change a list.
class Items {
 public:
  explicit Items(py::handle sequence)
      : items_(py::reinterpret_steal<py::object>(PySequence_Tuple(sequence.ptr()))) {
    if (!items_) throw py::error_already_set();
  }

  int64_t size() const { return PyTuple_GET_SIZE(items_.ptr()); }
  PyObject* operator[](int64_t i) const { return PyTuple_GET_ITEM(items_.ptr(), i); }

 private:
  py::object items_;
};

int32_t to_int32(const char* name, int64_t i, PyObject* item) {
#if PY_VERSION_HEX >= 0x030C0000
  if (PyLong_CheckExact(item)) {  // of one digit, as most are, without a call; a digit has 30 bits
    const auto* const number = reinterpret_cast<const PyLongObject*>(item);
    if (PyUnstable_Long_IsCompact(number)) return static_cast<int32_t>(PyUnstable_Long_CompactValue(number));
  }
#endif
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(item, &overflow);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (overflow != 0 || value != static_cast<int32_t>(value))
    refuse(name, "[", i, "] is ", py::str(item).cast<std::string>(), ", which does not fit 32 bits");
  return static_cast<int32_t>(value);
}

float to_float(PyObject* item) {
  if (PyFloat_CheckExact(item)) return static_cast<float>(PyFloat_AS_DOUBLE(item));
  const double value = PyFloat_AsDouble(item);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return static_cast<float>(value);
}

// The value of one item after another. Neighbours are often one object, whose value is read once.
template <class T>
class SameAgain {
 public:
  template <class Read>
  T of(PyObject* item, const Read& read) {
    if (item != last_) {
      value_ = read(item);
      last_ = item;
    }
    return value_;
  }

 private:
  PyObject* last_ = nullptr;
  T value_{};
};

// What a dict has of a key, or null.
PyObject* find(const py::dict& items, py::handle key) {
  PyObject* const found = PyDict_GetItemWithError(items.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// Numbers objects in the order they first come, equal ones alike, at less cost than a dict of integers.
class Numbering {
 public:
  explicit Numbering(int64_t most) : table_(std::bit_ceil(static_cast<size_t>(2 * most + 1))) {}

  int32_t of(PyObject* object) {
    const Py_hash_t hash = PyObject_Hash(object);
    if (hash == -1) throw py::error_already_set();
    for (size_t at = hash;; ++at) {
      Entry& entry = table_[at & (table_.size() - 1)];
      if (entry.object == nullptr) {
        entry = {object, static_cast<uint32_t>(hash), static_cast<int32_t>(objects_.size())};
        objects_.append(py::handle(object));
      } else if (entry.object != object &&
                 !(entry.hash == static_cast<uint32_t>(hash) && equal(entry.object, object))) {
        continue;
      }
      return entry.index;
    }
  }

  const py::list& objects() const { return objects_; }

 private:
  struct Entry {
    PyObject* object;  // objects_ keeps it alive
    uint32_t hash;     // what fits of it
    int32_t index;
  };

  static bool equal(PyObject* a, PyObject* b) {
    const int result = PyObject_RichCompareBool(a, b, Py_EQ);
    if (result < 0) throw py::error_already_set();
    return result != 0;
  }

  std::vector<Entry> table_;  // by hash, open, at most half full
  py::list objects_;
};

void check_shape(int64_t rows, int64_t num_slots) {
  if (rows < 0 || rows > kMaxInt32 || num_slots < 1 || num_slots > kMaxInt32)
    refuse("a plan has 0 to ", kMaxInt32, " rows over 1 to ", kMaxInt32, " slots; found ", rows,
           " rows over ", num_slots, " slots");
}

// A step's segments under one row grouping, and their rows in all.
struct Grouped {
  std::vector<PlanSegment> segments;
  int64_t rows = 0;
};

Grouped read_segments(py::handle slot_items, py::handle row_items, py::handle scale_items) {
  const Items slots(slot_items), rows(row_items), scales(scale_items);
  if (slots.size() != rows.size() || slots.size() != scales.size())
    refuse("slots, rows and scales have one item per segment; found ", slots.size(), ", ", rows.size(),
           " and ", scales.size(), " items");
  Grouped result;
  result.segments.resize(slots.size());
  SameAgain<int32_t> count;
  SameAgain<float> scale;
  for (int64_t i = 0; i < slots.size(); ++i) {
    PlanSegment& segment = result.segments[i];
    segment.slot = to_int32("slots", i, slots[i]);
    segment.rows = count.of(rows[i], [i](PyObject* item) { return to_int32("rows", i, item); });
    segment.scale = scale.of(scales[i], to_float);
    result.rows += segment.rows;
  }
  return result;
}

// By the adapter of each row, at scale 1: neighbours of one adapter become one segment.
Grouped read_rows(py::handle adapter_items, const py::dict& slots) {
  const Items adapters(adapter_items);
  Grouped result;
  result.rows = adapters.size();
  long last = 0;
  for (int64_t i = 0; i < adapters.size(); ++i) {
    const long adapter = PyLong_AsLong(adapters[i]);
    if (adapter == -1 && PyErr_Occurred()) throw py::error_already_set();
    if (i > 0 && adapter == last) {
      ++result.segments.back().rows;
      continue;
    }
    PyObject* const slot = find(slots, py::int_(adapter));
    if (slot == nullptr)
      refuse("adapters[", i, "] is ", adapter, ", which holds no slot: make it resident first");
    result.segments.push_back({to_int32("slots", i, slot), 1, 1.0f});
    last = adapter;
  }
  return result;
}

// A step's segments as its caller has them, (adapter, tokens, scale): read once for all row groupings.
class Step {
 public:
  explicit Step(py::handle sequence) {
    const Items items(sequence);
    segments_.resize(items.size());
    SameAgain<int32_t> tokens;
    SameAgain<float> scale;
    Numbering adapters(items.size());
    for (int64_t i = 0; i < items.size(); ++i) {
      PyObject* item = items[i];
      if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3)
        throw py::type_error("a segment is a tuple of adapter, tokens and scale");
      Segment& segment = segments_[i];
      segment.tokens =
          tokens.of(PyTuple_GET_ITEM(item, 1), [i](PyObject* count) { return to_int32("tokens", i, count); });
      segment.scale = scale.of(PyTuple_GET_ITEM(item, 2), to_float);
      PyObject* adapter = PyTuple_GET_ITEM(item, 0);
      segment.adapter = segment.tokens == 0 || adapter == Py_None ? kBase : adapters.of(adapter);
    }
    adapters_ = py::tuple(adapters.objects());
  }

  // Distinct adapters of the segments that have tokens, in order of their first.
  const py::tuple& adapters() const { return adapters_; }

  std::vector<int64_t> rows(const std::vector<int64_t>& groupings) const {
    std::vector<int64_t> rows;
    for (int64_t grouping : groupings) {
      rows.push_back(for_rows(grouping, [](const Segment&, int32_t) {}));
      if (rows.back() > kMaxInt32)
        refuse("the step has ", rows.back(), " rows, and a plan holds at most ", kMaxInt32,
               ": split the step");
    }
    return rows;
  }

  // `slots` has those of the adapters.
  Grouped grouped(int64_t grouping, const std::vector<int32_t>& slots) const {
    Grouped result;
    result.segments.resize(segments_.size());
    PlanSegment* next = result.segments.data();
    result.rows = for_rows(grouping, [&](const Segment& segment, int32_t rows) {
      *next++ = {segment.adapter == kBase ? 0 : slots[segment.adapter], rows, segment.scale};
    });
    return result;
  }

 private:
  static constexpr int32_t kBase = -1;

  struct Segment {
    int32_t adapter;  // index in adapters_, or kBase
    int32_t tokens;
    float scale;
  };

  // Calls use(segment, its rows) for every segment; the sum of the rows.
  template <class Use>
  int64_t for_rows(int64_t grouping, const Use& use) const {
    int64_t total = 0;
    for (const Segment& segment : segments_) {
      if (segment.tokens < 0 || (grouping > 1 && segment.tokens % grouping != 0))
        refuse("a segment of ", segment.tokens, " tokens has no whole rows of ",
               std::max<int64_t>(grouping, 1), " tokens");
      const int64_t rows = grouping == 0   ? segment.tokens != 0
                           : grouping == 1 ? segment.tokens
                                           : segment.tokens / grouping;
      use(segment, static_cast<int32_t>(rows));
      total += rows;
    }
    return total;
  }

  std::vector<Segment> segments_;
  py::tuple adapters_;
};

// One device slot: whose weights it holds, and who is using them.
struct Slot {
  explicit Slot(int64_t index) : index(index) {}

  int64_t index;
  int64_t leases = 0;
  int64_t used_at = 0;
  py::object holds = py::none();
  py::object idle = py::none();
};

// Where one plan lies in memory that plans share, and what it may hold.
struct Place {
  int64_t max_rows, num_slots;
  int64_t start, capacity;  // words
};

// Words of a memory, from the first up to the second.
using Span = std::pair<int64_t, int64_t>;

// The driver takes a copy of at most 64 KB from memory that is not pinned along with its commands, past the
// copy engine; one copy more costs the host about as much as 32 KB more.
constexpr int64_t kCopyWords = (64 << 10) / sizeof(int32_t), kGapWords = (32 << 10) / sizeof(int32_t);

// The copies that take what was written to a device.
std::vector<Span> copies_of(std::vector<Span> written) {
  std::sort(written.begin(), written.end());
  std::vector<Span> copies;
  for (auto [begin, end] : written) {
    if (!copies.empty() && begin - copies.back().second <= kGapWords) {
      auto& [first, last] = copies.back();
      begin = last = std::min(end, first + kCopyWords);
    }
    for (; begin < end; begin = copies.back().second)
      copies.emplace_back(begin, std::min(end, begin + kCopyWords));
  }
  return copies;
}

class BoundPlanner {
 public:
  using Written = std::pair<int64_t, int64_t>;  // rows, and tiles

  BoundPlanner(std::vector<Place> places, uintptr_t address)
      : places_(std::move(places)), address_(address) {}

  std::vector<Written> plan(py::handle slots, py::handle rows, py::handle scales) {
    const Grouped grouped = read_segments(slots, rows, scales);
    return write_all([&](size_t) -> const Grouped& { return grouped; });
  }

  std::vector<Written> plan_rows(py::handle adapters, const py::dict& slots) {
    const Grouped grouped = read_rows(adapters, slots);
    return write_all([&](size_t) -> const Grouped& { return grouped; });
  }

  std::vector<Written> plan_step(const Step& step, py::handle slot_items,
                                 const std::vector<int64_t>& groupings) {
    const Items items(slot_items);
    if (items.size() != static_cast<int64_t>(step.adapters().size()))
      refuse("the step names ", step.adapters().size(), " adapters; found ", items.size(), " slots");
    if (groupings.size() != places_.size())
      refuse("each row grouping has a place; found ", groupings.size(), " and ", places_.size());
    std::vector<int32_t> slots(items.size());
    for (int64_t i = 0; i < items.size(); ++i)
      slots[i] = static_cast<int32_t>(py::handle(items[i]).cast<const Slot&>().index);
    std::vector<Grouped> grouped;
    for (const int64_t grouping : groupings) grouped.push_back(step.grouped(grouping, slots));
    return write_all([&](size_t i) -> const Grouped& { return grouped[i]; });
  }

  std::vector<Span> copies() const { return copies_of(spans_); }

 private:
  // grouped_of(i): the segments of place i. Nothing is written unless all of it can be.
  template <class GroupedOf>
  std::vector<Written> write_all(const GroupedOf& grouped_of) {
    for (size_t i = 0; i < places_.size(); ++i) check(grouped_of(i), places_[i]);
    std::vector<Written> written;
    spans_.clear();
    for (size_t i = 0; i < places_.size(); ++i) {
      const std::vector<PlanSegment>& segments = grouped_of(i).segments;
      const Place& place = places_[i];
      auto* words = reinterpret_cast<int32_t*>(address_) + place.start;
      const PlanStatus status = planner_.plan(segments.data(), static_cast<int64_t>(segments.size()),
                                              place.num_slots, words, place.capacity);
      if (status != PlanStatus::ok)
        refuse("a plan of ", grouped_of(i).rows, " rows has more words than int32 counts: split the step");
      const auto& [decode_tiles, prefill_tiles, rows, gathered] = *reinterpret_cast<PlanHeader*>(words);
      const int64_t end = place.start + place.capacity;
      spans_.emplace_back(place.start, place.start + kTileWords * (1 + decode_tiles) + kRowWords * gathered);
      if (prefill_tiles > 0) spans_.emplace_back(end - kTileWords * prefill_tiles, end);
      written.emplace_back(rows, int64_t{decode_tiles} + prefill_tiles);
    }
    return written;
  }

  void check(const Grouped& grouped, const Place& place) const {
    const auto& [max_rows, num_slots, start, capacity] = place;
    for (size_t i = 0; i < grouped.segments.size(); ++i) {
      const auto& [slot, rows, scale] = grouped.segments[i];
      if (slot >= num_slots)
        refuse("slots[", i, "] is ", slot, ", and there are ", num_slots, " slots: name one below that");
      if (rows < 0) refuse("rows[", i, "] is ", rows, ": a segment has 0 rows or more");
    }
    if (grouped.rows > max_rows)
      refuse("the step has ", grouped.rows, " rows, the plan holds ", max_rows, ": make a larger plan");
    const uintptr_t address = address_ + start * sizeof(int32_t);
    if (address % alignof(PlanHeader) != 0 || capacity % 4 != 0)
      refuse("a plan's buffer starts on ", alignof(PlanHeader),
             " bytes and holds a multiple of 4 words; found address ", address, " and ", capacity, " words");
    const int64_t need = plan_capacity(grouped.rows, num_slots);
    if (capacity < std::min(need, kMaxInt32 + 1))
      refuse("the plan of ", grouped.rows, " rows does not fit the buffer of ", capacity,
             " words: give it plan_capacity(", grouped.rows, ", ", num_slots, ") = ", need, " words");
  }

  std::vector<Place> places_;
  uintptr_t address_;  // of the memory that they are in
  Planner planner_;
  std::vector<Span> spans_;  // that the last step wrote
};

bool lease(const py::dict& slot_of, const py::list& wanted, int64_t used_at, std::optional<py::list> held) {
  std::vector<py::object> slots(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    PyObject* const slot = find(slot_of, wanted[i]);
    if (slot == nullptr) return false;
    slots[i] = py::reinterpret_borrow<py::object>(slot);
  }
  for (const py::object& item : slots) {
    Slot& slot = item.cast<Slot&>();
    slot.used_at = used_at;
    if (held) {
      held->append(item);
      ++slot.leases;
    }
  }
  return true;
}

py::list release(const py::list& held, const py::object& idle, const py::dict& slot_of) {
  py::list unloaded;
  for (py::handle item : held) {
    Slot& slot = item.cast<Slot&>();
    slot.idle = idle;
    if (--slot.leases == 0 && find(slot_of, slot.holds) != item.ptr()) unloaded.append(item);
  }
  held.attr("clear")();
  return unloaded;
}

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
  m.doc() = "The torch-free host code: slots, the step planner and the image packer.";

  m.attr("DECODE_ROWS") = kDecodeRows;
  m.attr("PREFILL_ROWS") = kPrefillRows;
  m.attr("BLOCK_ALIGN") = kBlockAlign;
  m.attr("RANK_ALIGN") = kRankAlign;
  m.attr("MAX_SLICES") = kMaxSlices;

  m.def("max_decode_rows_of_slot", max_decode_rows_of_slot, py::arg("rows"));
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

  py::class_<Step>(m, "Step")
      .def(py::init<py::handle>(), py::arg("segments"))
      .def_property_readonly("adapters", &Step::adapters)
      .def("rows", &Step::rows, py::arg("groupings"));

  py::class_<Place>(m, "Place")
      .def(py::init([](int64_t max_rows, int64_t num_slots, int64_t start, int64_t capacity) {
             check_shape(max_rows, num_slots);
             return Place{max_rows, num_slots, start, capacity};
           }),
           py::arg("max_rows"), py::arg("num_slots"), py::arg("start"), py::arg("capacity"))
      .def_readonly("start", &Place::start)
      .def_readonly("capacity", &Place::capacity);

  py::class_<BoundPlanner>(m, "Planner")
      .def(py::init<std::vector<Place>, uintptr_t>(), py::arg("places"), py::arg("address"))
      .def("plan", &BoundPlanner::plan, py::arg("slots"), py::arg("rows"), py::arg("scales"))
      .def("plan_rows", &BoundPlanner::plan_rows, py::arg("adapters"), py::arg("slots"))
      .def("plan_step", &BoundPlanner::plan_step, py::arg("step"), py::arg("slots"), py::arg("groupings"))
      .def_property_readonly("copies", &BoundPlanner::copies);

  py::class_<Slot>(m, "Slot")
      .def(py::init<int64_t>(), py::arg("index"))
      .def_readonly("index", &Slot::index)
      .def_readonly("leases", &Slot::leases)
      .def_readonly("used_at", &Slot::used_at)
      .def_readwrite("holds", &Slot::holds)
      .def_readwrite("idle", &Slot::idle);
  m.def("lease", &lease, py::arg("slot_of"), py::arg("wanted"), py::arg("used_at"), py::arg("held"));
  m.def("release", &release, py::arg("held"), py::arg("idle"), py::arg("slot_of"));

  m.def("pack", &pack_blocks, py::arg("image"), py::arg("bytes"), py::arg("dtype"), py::arg("blocks"));
  m.def("all_finite", &is_finite, py::arg("values"), py::arg("dtype"), py::arg("count"));
}

}  // namespace loramux
