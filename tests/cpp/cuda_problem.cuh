// What the tests of the CUDA kernels share: guarded device memory, and problems with their results by
// definition, in double precision. Unless a shape says otherwise its numbers are small integers and powers of
// two, so that every float32 sum is exact in any order: kernels must give equal results, not close ones.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/launch.cuh"
#include "host/plan.h"
#include "lora.h"

namespace loramux {

inline constexpr int64_t kGuard = 256;  // bytes
inline constexpr int32_t kSlots = 4;

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  }
};

using AllTypes = testing::Types<float, __half, __nv_bfloat16>;
using HalfTypes = testing::Types<__half, __nv_bfloat16>;

// Whether the device at hand runs the kernels tuned for it.
inline bool has_tuned_kernels() {
  cudaDeviceProp device;
  return !is_portable_forced() && cudaGetDeviceProperties(&device, 0) == cudaSuccess && device.major >= 9;
}

#define EXPECT_CUDA(call) EXPECT_EQ(static_cast<cudaError_t>(call), cudaSuccess)

// Everything runs on a stream that does not wait for the default one.
inline cudaStream_t stream() {
  static const cudaStream_t created = [] {
    cudaStream_t stream = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }();
  return created;
}

// Device memory between two guards. Their bits are NaNs, which poison what a stray read goes into; a stray
// write is found by read().
template <typename T>
class Buffer {
 public:
  explicit Buffer(const std::vector<T>& values) : bytes_(values.size() * sizeof(T)) {
    EXPECT_CUDA(cudaMalloc(&memory_, bytes_ + 2 * kGuard));
    EXPECT_CUDA(cudaMemsetAsync(memory_, 0xff, bytes_ + 2 * kGuard, stream()));
    write(values);
  }
  ~Buffer() { cudaFree(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return reinterpret_cast<T*>(memory_ + kGuard); }
  int64_t size() const { return bytes_ / static_cast<int64_t>(sizeof(T)); }

  void write(const std::vector<T>& values) {
    ASSERT_EQ(static_cast<int64_t>(values.size()), size());
    EXPECT_CUDA(cudaMemcpyAsync(data(), values.data(), bytes_, cudaMemcpyHostToDevice, stream()));
    EXPECT_CUDA(cudaStreamSynchronize(stream()));
  }

  std::vector<T> read() const {
    std::vector<unsigned char> all(bytes_ + 2 * kGuard);
    EXPECT_CUDA(cudaMemcpyAsync(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost, stream()));
    EXPECT_CUDA(cudaStreamSynchronize(stream()));
    const std::vector<unsigned char> guard(kGuard, 0xff);
    EXPECT_TRUE(std::equal(guard.begin(), guard.end(), all.begin())) << "written before the buffer";
    EXPECT_TRUE(std::equal(guard.begin(), guard.end(), all.end() - kGuard)) << "written past the buffer";
    std::vector<T> values(size());
    std::memcpy(values.data(), all.data() + kGuard, bytes_);
    return values;
  }

 private:
  int64_t bytes_;
  std::byte* memory_ = nullptr;
};

template <typename T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0)
        << "element " << i << " is " << static_cast<float>(got[i]) << ", want "
        << static_cast<float>(want[i]);
  }
}

enum class Kind {
  linear,
  stacked,  // a linear with weights in tensors [slots, max_rank, in] and [slots, width, max_rank]
  embedding,
};

struct Shape {
  int64_t in_features;  // an embedding's vocabulary
  std::vector<int64_t> widths;
  std::vector<int32_t> ranks;  // dealt in turn to slots and slices; in an arena rounded up, with zeros
  int64_t max_rank;
  int64_t pad;  // elements in front of the used columns of each row of x and y
  Kind kind = Kind::linear;
  bool exact = true;  // else fractions, whose float32 sums depend on the order

  int slices() const { return static_cast<int>(widths.size()); }
  int64_t width() const { return std::accumulate(widths.begin(), widths.end(), int64_t{0}); }
  int32_t rank(int slot, int slice) const {
    const int32_t rank = ranks[(slot - 1 + slice) % ranks.size()];
    return kind == Kind::stacked ? rank : (rank + kRankAlign - 1) / kRankAlign * kRankAlign;
  }
  float scale(int slot, int slice) const { return std::ldexp(1.f, -slot - slice); }

  float x(int64_t row, int64_t k) const { return number(0, row, k); }
  float y(int64_t row, int64_t n) const { return -number(1, row, n) / 8; }  // -0 shows an addition of 0
  float a(int slot, int slice, int64_t r, int64_t k) const {
    return r < ranks[(slot - 1 + slice) % ranks.size()] ? number(2 + 16 * slot + slice, r, k) : 0.f;
  }
  float b(int slot, int slice, int64_t n, int64_t r) const { return number(10 + 16 * slot + slice, n, r); }

  // Element (i, j) of one of these matrices.
  float number(uint64_t matrix, int64_t i, int64_t j) const {
    uint64_t hash = (matrix << 48 ^ i << 24 ^ j) * 0x9e3779b97f4a7c15u;
    hash = ((hash ^ hash >> 32) * 0xbf58476d1ce4e5b9u) >> 40;
    return exact ? static_cast<float>(hash % 5) - 2.f : static_cast<float>(hash) / (1 << 24) - 0.5f;
  }
};

// A site's slot table, and its weights in one stretch of elements with NaN wherever no element belongs.
template <typename T>
struct HostWeights {
  std::vector<T> elements;
  std::vector<SlotEntry> table;
  int64_t a_at[kMaxSlices] = {},
          b_at[kMaxSlices] = {};  // first elements of the slices' tensors; 0 in an arena
  int64_t a_size[kMaxSlices] = {}, b_size[kMaxSlices] = {};

  explicit HostWeights(const Shape& shape) {
    const bool stacked = shape.kind == Kind::stacked;
    const SlotEntry other_site{UINT32_MAX, UINT32_MAX, INT32_MAX, NAN};
    const int64_t entries = shape.slices() + 2;
    table.resize(kSlots * entries, other_site);
    for (int i = 0; i < shape.slices() && stacked; ++i) {
      a_size[i] = kSlots * shape.max_rank * shape.in_features;
      b_size[i] = kSlots * shape.max_rank * shape.widths[i];
      a_at[i] = allocate(a_size[i]);
      b_at[i] = allocate(b_size[i]);
    }
    for (int slot = 1; slot < kSlots; ++slot) {
      for (int i = 0; i < shape.slices(); ++i) {
        const int64_t rank = shape.rank(slot, i);
        const int64_t in = shape.in_features, width = shape.widths[i];
        const int64_t a = stacked ? slot * shape.max_rank * in : allocate(rank * in);
        const int64_t b = stacked ? slot * shape.max_rank * width : allocate(rank * width);
        const int64_t unit = (stacked ? 16 : kBlockAlign) / sizeof(T);
        table[slot * entries + 1 + i] = {static_cast<uint32_t>(a / unit), static_cast<uint32_t>(b / unit),
                                         static_cast<int32_t>(rank), shape.scale(slot, i)};
        const int64_t stride = stacked ? shape.max_rank : rank;
        for (int64_t r = 0; r < rank; ++r) {
          for (int64_t k = 0; k < in; ++k) {
            const int64_t at = shape.kind == Kind::embedding ? k * stride + r : r * in + k;
            elements[a_at[i] + a + at] = static_cast<T>(shape.a(slot, i, r, k));
          }
          for (int64_t n = 0; n < width; ++n) {
            elements[b_at[i] + b + n * stride + r] = static_cast<T>(shape.b(slot, i, n, r));
          }
        }
      }
    }
    for (int i = 0; i < shape.slices() && !stacked; ++i) a_size[i] = b_size[i] = elements.size();
  }

 private:
  int64_t allocate(int64_t count) {
    const int64_t align = kBlockAlign / sizeof(T);
    const int64_t at = elements.size();
    elements.resize(at + (count + align - 1) / align * align, static_cast<T>(NAN));
    return at;
  }
};

template <typename T, typename Number>
std::vector<T> make_matrix(int64_t rows, int64_t columns, const Number& number) {
  std::vector<T> matrix;
  for (int64_t i = 0; i < rows * columns; ++i)
    matrix.push_back(static_cast<T>(number(i / columns, i % columns)));
  return matrix;
}

// A site with its input and output on the device, and what the operators must make of them.
template <typename T>
struct Problem {
  Problem(const Shape& shape, int64_t rows) : Problem(shape, rows, HostWeights<T>(shape)) {}

  Problem(const Shape& shape, int64_t rows, const HostWeights<T>& host)
      : shape(shape),
        rows(rows),
        x_stride(shape.pad + shape.in_features),
        y_stride(shape.pad + shape.width()),
        ids(rows),
        y_before(make_matrix<T>(rows, y_stride,
                                [&](int64_t row, int64_t n) { return shape.y(row, n - shape.pad); })),
        h_before(rows * shape.slices() * shape.max_rank, NAN),
        x(make_matrix<T>(
            rows, x_stride,
            [&](int64_t row, int64_t k) { return k < shape.pad ? NAN : shape.x(row, k - shape.pad); })),
        y(y_before),
        h(h_before),
        plan(std::vector<int32_t>(plan_capacity(rows, kSlots))),
        weights(host.elements),
        table(host.table) {
    site.table = table.data();
    site.num_slots = kSlots;
    site.num_entries = shape.slices() + 2;
    site.entry = 1;
    site.max_rank = shape.max_rank;
    site.in_features = shape.in_features;
    site.num_slices = shape.slices();
    site.dtype = std::is_same_v<T, float> ? DType::f32 : std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
    site.offset_unit = shape.kind == Kind::stacked ? 16 : kBlockAlign;
    site.rank_stride = shape.kind == Kind::stacked ? shape.max_rank : 0;
    for (int i = 0, column = 0; i < shape.slices(); column += shape.widths[i++]) {
      site.slices[i].width = shape.widths[i];
      site.slices[i].offset = column;
      site.slices[i].a = reinterpret_cast<const std::byte*>(weights.data() + host.a_at[i]);
      site.slices[i].b = reinterpret_cast<const std::byte*>(weights.data() + host.b_at[i]);
      site.slices[i].a_bytes = host.a_size[i] * sizeof(T);
      site.slices[i].b_bytes = host.b_size[i] * sizeof(T);
    }
  }

  // Row i is of slot slots[i % slots.size()].
  void set_plan(const std::vector<int32_t>& slots) {
    segments.clear();
    for (int64_t row = 0; row < rows; ++row) {
      const bool varied = shape.exact && slots.size() > 1;
      segments.push_back({slots[row % slots.size()], 1, varied ? std::ldexp(1.f, row % 3 - 1) : 0.5f});
    }
    std::vector<int32_t> words(plan.size());
    ASSERT_EQ(Planner().plan(segments.data(), rows, kSlots, words.data(), plan.size()), PlanStatus::ok);
    plan.write(words);
  }

  void reset() {
    y.write(y_before);
    h.write(h_before);
  }

  ApplyArgs args() const {
    const PlanView view{plan.data(), plan.size()};
    return {{site, view, x.data() + shape.pad, x_stride, rows, h.data()},
            {site, view, h.data(), y.data() + shape.pad, y_stride, rows}};
  }

  EmbeddingArgs embedding_args(const void* device_ids, bool ids64) const {
    ExpandArgs expand = args().expand;
    expand.h = nullptr;
    return {expand, device_ids, ids64};
  }

  std::vector<float> want_h() const {
    std::vector<float> want = h_before;
    for (int64_t row = 0; row < rows; ++row) {
      for (int slice = 0; slice < shape.slices(); ++slice) {
        const std::vector<double> h = operand(row, slice);
        std::copy(h.begin(), h.end(), want.begin() + (row * shape.slices() + slice) * shape.max_rank);
      }
    }
    return want;
  }

  // The tuned expand rounds its operand, h, to T.
  std::vector<T> want_y() const {
    const bool rounds_h = !is_portable_forced() && shape.kind != Kind::embedding &&
                          expand_serves(args().expand, current_device());
    std::vector<T> want = y_before;
    for (int64_t row = 0; row < rows; ++row) {
      for (int slice = 0; slice < shape.slices(); ++slice) {
        const std::vector<double> h = operand(row, slice);
        for (int64_t n = 0; n < shape.widths[slice] && !h.empty(); ++n) {
          T& y = want[row * y_stride + shape.pad + site.slices[slice].offset + n];
          y = static_cast<T>(static_cast<float>(static_cast<float>(y) + delta(row, slice, n, h, rounds_h)));
        }
      }
    }
    return want;
  }

  // What is added to column n of a slice. h: the row's operand.
  double delta(int64_t row, int slice, int64_t n, const std::vector<double>& h, bool rounds_h) const {
    const int32_t slot = segments[row].slot;
    double sum = 0;
    for (size_t r = 0; r < h.size(); ++r) {
      const double factor = rounds_h ? static_cast<float>(static_cast<T>(static_cast<float>(h[r]))) : h[r];
      sum += factor * shape.b(slot, slice, n, r);
    }
    return static_cast<double>(shape.scale(slot, slice) * segments[row].scale) * sum;
  }

  // What B multiplies: x @ A^T, or A's vector of the row's id. Empty where nothing is to be done.
  std::vector<double> operand(int64_t row, int slice) const {
    const int32_t slot = segments[row].slot;
    const bool embedding = shape.kind == Kind::embedding;
    if (slot == 0 || (embedding && (ids[row] < 0 || ids[row] >= shape.in_features))) return {};
    std::vector<double> h(shape.rank(slot, slice));
    for (size_t r = 0; r < h.size(); ++r) {
      if (embedding) h[r] = shape.a(slot, slice, r, ids[row]);
      for (int64_t k = 0; k < shape.in_features && !embedding; ++k) {
        h[r] += shape.x(row, k) * shape.a(slot, slice, r, k);
      }
    }
    return h;
  }

  Shape shape;
  int64_t rows, x_stride, y_stride;
  std::vector<PlanSegment> segments;  // one a row
  std::vector<int64_t> ids;           // an embedding's
  std::vector<T> y_before;
  std::vector<float> h_before;
  Buffer<T> x, y;
  Buffer<float> h;
  Buffer<int32_t> plan;
  Buffer<T> weights;
  Buffer<SlotEntry> table;
  Site site = {};
};

}  // namespace loramux
