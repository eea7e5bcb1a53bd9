// The kernels for one instruction set, which the including file selects for simd.h.
//
// The order of additions of a result depends on the length of its dot product only: not on the rows beside
// it, nor on how the work is cut.
//
// All that runs has internal linkage, so nothing of std does: of several builds of an inline function the
// linker keeps one, perhaps one that the processor cannot run.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels.h"
#include "prefetch.h"
#include "simd.h"

namespace loramux {
namespace {

constexpr int kBlockRows = 8;  // most rows that share a load of a weight
constexpr int64_t kStep = 2 * kLanes;

int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// How many vectors of weights to work on at once for `rows` rows.
consteval int vectors_for(int rows, int most) {
  return std::min(most, static_cast<int>(std::bit_floor(static_cast<unsigned>(kAccumulators / rows))));
}

// kStep values as two vectors, in an order that is the same for all tensors of a dtype.
template <typename T>
void load_step(const T* p, V& first, V& second) {
  first = load(p);
  second = load(p + kLanes);
}
inline void load_step(const BF16* p, V& first, V& second) {
  unpack(load(reinterpret_cast<const float*>(p)), p, first, second);
}

// ---- Shrink: in_features in the lanes. x in float32 and the partial sums stay in the caches. ----

template <typename T>
void pack_step(const T* x, float* out) {
  V first, second;
  load_step(x, first, second);
  store(out, first);
  store(out + kLanes, second);
}

template <typename T>
void pack_x(const T* x, int64_t count, float* out) {
  const int64_t whole = count / kStep * kStep;
  for (int64_t k = 0; k < whole; k += kStep) pack_step(x + k, out + k);
  if (whole == count) return;
  alignas(64) T tail[kStep] = {};
  std::memcpy(tail, x + whole, (count - whole) * sizeof(T));
  pack_step(tail, out + whole);
}

// sums[r][c] += x[r] * a[c], lane by lane, for one step.
template <typename T, int R, int C>
void dot_step(const float* x, int64_t x_stride, const T* a, int64_t a_stride, V (&sums)[R][C]) {
  V first[C], second[C];
  for (int c = 0; c < C; ++c) load_step(a + c * a_stride, first[c], second[c]);
  for (int r = 0; r < R; ++r) {
    const V x_first = load(x + r * x_stride), x_second = load(x + r * x_stride + kLanes);
    for (int c = 0; c < C; ++c) sums[r][c] = fma(x_first, first[c], sums[r][c]);
    for (int c = 0; c < C; ++c) sums[r][c] = fma(x_second, second[c], sums[r][c]);
  }
}

// partial[r][c] += x[r] * a[c], lane by lane, for `count` values of each. As many bytes of `next` and the
// seven rows behind it are asked for as are read.
template <typename T, int R, int C>
void dot(const float* x, int64_t x_stride, const T* a, int64_t a_stride, int64_t count, float* partial,
         const T* next) {
  V sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(partial + (r * kRankBlock + c) * kLanes);
  const int64_t whole = count / kStep * kStep;
  size_t asked = 0;
  for (int64_t k = 0; k < whole; k += kStep) {
    for (const size_t read = (k + kStep) * C * sizeof(T); C < kStreams && asked < read; asked += kTurn)
      prefetch_turn(reinterpret_cast<const char*>(next) + asked / kStreams, a_stride * sizeof(T));
    dot_step<T, R, C>(x + k, x_stride, a + k, a_stride, sums);
  }
  if (whole < count) {
    alignas(64) T tail[C * kStep] = {};
    for (int c = 0; c < C; ++c)
      std::memcpy(tail + c * kStep, a + c * a_stride + whole, (count - whole) * sizeof(T));
    dot_step<T, R, C>(x + whole, x_stride, tail, kStep, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(partial + (r * kRankBlock + c) * kLanes, sums[r][c]);
}

template <typename T, int R>
void dot_rows(const float* x, int64_t x_stride, const T* a, int64_t a_stride, int64_t count, int64_t ranks,
              float* partial) {
  constexpr int C = vectors_for(R, 8);
  constexpr int64_t kAhead = kStreams;
  const auto dots = [&]<int N>(int64_t j) {
    const int64_t next = (j / kAhead + 1) * kAhead;  // after the last rank, the first one's next chunk
    const T* ahead = (next < ranks ? a + next * a_stride : a + count) + j % kAhead * count / kAhead;
    dot<T, R, N>(x, x_stride, a + j * a_stride, a_stride, count, partial + j * kLanes, ahead);
  };
  int64_t j = 0;
  for (; j + C <= ranks; j += C) dots.template operator()<C>(j);
  for (; j < ranks; ++j) dots.template operator()<1>(j);
}

template <typename T>
constexpr decltype(&dot_rows<T, 1>) kDotRows[kBlockRows] = {
    dot_rows<T, 1>, dot_rows<T, 2>, dot_rows<T, 3>, dot_rows<T, 4>,
    dot_rows<T, 5>, dot_rows<T, 6>, dot_rows<T, 7>, dot_rows<T, 8>,
};

template <typename T>
void shrink_ranks(const ShrinkTask& t, const T* a, int64_t ranks, float* h) {
  float* const x = t.scratch;
  float* const partial = t.scratch + kXFloats;  // [count, kRankBlock, kLanes]
  std::memset(partial, 0, t.count * kRankBlock * kLanes * sizeof(float));
  const int64_t chunk = kXFloats / smaller(t.count, kBlockRows) / kStep * kStep;
  for (int64_t k = 0; k < t.in_features; k += chunk) {
    const int64_t count = smaller(chunk, t.in_features - k);
    for (int64_t i = 0; i < t.count; i += kBlockRows) {
      const int64_t block = smaller(kBlockRows, t.count - i);
      for (int64_t r = 0; r < block; ++r)
        pack_x(static_cast<const T*>(t.x) + t.rows[i + r].row * t.x_stride + k, count, x + r * chunk);
      float* const sums = partial + i * kRankBlock * kLanes;
      kDotRows<T>[block - 1](x, chunk, a + k, t.in_features, count, ranks, sums);
    }
  }
  for (int64_t i = 0; i < t.count; ++i)
    for (int64_t j = 0; j < ranks; ++j)
      h[t.rows[i].row * t.h_stride + j] = sum(load(partial + (i * kRankBlock + j) * kLanes));
}

template <typename T>
void shrink_task(const ShrinkTask& t) {
  for (int64_t j = 0; j < t.ranks; j += kRankBlock) {
    const T* a = static_cast<const T*>(t.a) + j * t.in_features;
    shrink_ranks(t, a, smaller(kRankBlock, t.ranks - j), t.h + j);
  }
}

// ---- Expand: columns of y in the lanes. A block of B is transposed into a panel [rank, kColumnBlock]. ----

constexpr int64_t kQuadBytes = 16;

template <typename T>
constexpr int64_t kQuad = kQuadBytes / sizeof(T);  // values

// kQuad values each of kLanes rows of B to kQuad rows of the panel.
template <typename T>
void pack_quads(const T* b, int64_t b_stride, float* panel) {
  const int64_t row_bytes = b_stride * sizeof(T);
  V words[4];
  for (int k = 0; k < 4; ++k)
    words[k] = load_quads(reinterpret_cast<const char*>(b) + k * row_bytes, 4 * row_bytes);
  transpose_quads(words);
  for (int k = 0; k < 4; ++k) {
    if constexpr (sizeof(T) == 4) {
      store(panel + k * kColumnBlock, words[k]);
    } else {
      V low, high;
      unpack(words[k], b, low, high);
      store(panel + 2 * k * kColumnBlock, low);
      store(panel + (2 * k + 1) * kColumnBlock, high);
    }
  }
}

// The same at the edge of B, where fewer rows or values are left.
template <typename T>
[[gnu::noinline]] void pack_edge(const T* b, int64_t b_stride, int64_t rows, int64_t values, float* panel) {
  alignas(64) T edge[kLanes * kQuad<T>] = {};
  for (int64_t i = 0; i < smaller(kLanes, rows); ++i)
    std::memcpy(edge + i * kQuad<T>, b + i * b_stride, smaller(kQuad<T>, values) * sizeof(T));
  pack_quads(edge, kQuad<T>, panel);
}

template <typename T>
void pack_panel(const T* b, int64_t b_stride, int64_t rank, int64_t columns, float* panel,
                Prefetcher& prefetcher) {
  const size_t bytes = kLanes * b_stride * sizeof(T) * kQuad<T> / rank;  // of the rows, by quad
  for (int64_t n = 0; n < columns; n += kLanes) {
    const T* rows = b + n * b_stride;
    const int64_t whole = n + kLanes <= columns ? rank / kQuad<T> * kQuad<T> : 0;
    for (int64_t j = 0; j < whole; j += kQuad<T>) {
      prefetcher.read(bytes);
      pack_quads(rows + j, b_stride, panel + j * kColumnBlock + n);
    }
    for (int64_t j = whole; j < rank; j += kQuad<T>)
      pack_edge(rows + j, b_stride, columns - n, rank - j, panel + j * kColumnBlock + n);
  }
}

template <typename T>
[[gnu::noinline]] void add_edge(T* y, V scale, V delta, int64_t count) {
  alignas(64) T edge[kLanes] = {};
  std::memcpy(edge, y, count * sizeof(T));
  store(edge, fma(scale, delta, load(edge)));
  std::memcpy(y, edge, count * sizeof(T));
}

// y += scale * delta, for `left` values if there are fewer than kLanes.
template <typename T>
void add(T* y, V scale, V delta, int64_t left) {
  if (left >= kLanes)
    store(y, fma(scale, delta, load(y)));
  else
    add_edge(y, scale, delta, left);
}

// Asks for a block of y while the products for it are summed.
template <typename T>
void prefetch_y(const ExpandTask& t, int64_t i, int64_t rows, int64_t n, int64_t columns) {
  for (int64_t r = i; r < i + rows; ++r) {
    const char* y =
        reinterpret_cast<const char*>(static_cast<const T*>(t.y) + t.rows[r].row * t.y_stride + n);
    for (int64_t at = 0; at < columns * int64_t{sizeof(T)}; at += 64) __builtin_prefetch(y + at, 1, 2);
  }
}

// R rows of y, `columns` columns from n on, from the panel that holds those columns of B.
template <typename T, int R>
void expand_rows(const ExpandTask& t, int64_t i, int64_t n, int64_t columns) {
  constexpr int C = vectors_for(R, kColumnBlock / kLanes);
  const float* const h = t.h + i * t.h_stride;
  prefetch_y<T>(t, i, R, n, columns);
  for (int64_t m = 0; m < columns; m += C * kLanes) {
    V sums[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = zero();
    for (int64_t j = 0; j < t.rank; ++j) {
      V b[C];
      for (int c = 0; c < C; ++c) b[c] = load(t.scratch + j * kColumnBlock + m + c * kLanes);
      for (int r = 0; r < R; ++r) {
        const V value = broadcast(h[r * t.h_stride + j]);
        for (int c = 0; c < C; ++c) sums[r][c] = fma(value, b[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; ++r) {
      const GatheredRow& row = t.rows[i + r];
      T* y = static_cast<T*>(t.y) + row.row * t.y_stride + n + m;
      const V scale = broadcast(t.scale * row.scale);
      for (int c = 0; c < C && m + c * kLanes < columns; ++c)
        add(y + c * kLanes, scale, sums[r][c], columns - m - c * kLanes);
    }
  }
}

using ExpandRows = void (*)(const ExpandTask&, int64_t, int64_t, int64_t);

template <typename T>
constexpr ExpandRows kExpandRows[kBlockRows] = {
    expand_rows<T, 1>, expand_rows<T, 2>, expand_rows<T, 3>, expand_rows<T, 4>,
    expand_rows<T, 5>, expand_rows<T, 6>, expand_rows<T, 7>, expand_rows<T, 8>,
};

template <typename T>
void expand_task(const ExpandTask& t) {
  Prefetcher prefetcher(t.b, t.columns * t.b_stride * sizeof(T));
  for (int64_t n = 0; n < t.columns; n += kColumnBlock) {
    const int64_t columns = smaller(kColumnBlock, t.columns - n);
    const T* b = static_cast<const T*>(t.b) + n * t.b_stride;
    pack_panel(b, t.b_stride, t.rank, columns, t.scratch, prefetcher);
    for (int64_t i = 0; i < t.count; i += kBlockRows)
      kExpandRows<T>[smaller(kBlockRows, t.count - i) - 1](t, i, n, columns);
  }
}

}  // namespace
}  // namespace loramux
