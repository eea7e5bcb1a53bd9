// bfloat16 on the tile unit: weights times rows. A tile of weights is 16 ranks of A or 16 columns of B as
// they lie in memory; rows of x or h are packed into the columns of a tile, up to 16 of them.
//
// A sum goes over steps of 32 values in turn, and the unit adds the products of a step in an order of its
// own, whatever else the tiles hold.
#include "kernels.h"

#ifdef LORAMUX_X86
#pragma GCC target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16,tune=icelake-server")
// GCC 12 takes the undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define LORAMUX_AVX512
#define LORAMUX_AVX512_BF16
#include "kernels.inl"

namespace loramux {
namespace {

constexpr int64_t kTile = 16;        // rows of a tile
constexpr int64_t kTileStep = 32;    // bfloat16 values of a row of a tile
constexpr int64_t kWeightRows = 64;  // what four tiles hold
constexpr int64_t kXValues = 1024;   // of a row of x that are packed at a time: 32 KB for 16 rows

static_assert(kXValues / 2 * kTile + kTaskRows * kWeightRows + kWeightRows * kTileStep / 2 <= kShrinkScratch);
static_assert(kWeightRows * kTile + kWeightRows * kTileStep / 2 <= expand_scratch(0));
static_assert(kHAlign % kTileStep == 0);

// The shapes of the tiles: 0 to 3 sums [weight_rows, width], 4 weights [weight_rows, pairs], 5 and 6 packed
// rows [pairs, width], all in words of four bytes. The thread gets its own shapes back at the end.
class TileShapes {
 public:
  TileShapes() { _tile_storeconfig(before_); }
  ~TileShapes() { _tile_loadconfig(before_); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

  void set(int64_t weight_rows, int64_t pairs, int64_t width) {
    if (weight_rows == weight_rows_ && pairs == pairs_ && width == width_) return;
    weight_rows_ = weight_rows, pairs_ = pairs, width_ = width;
    // Volatile because GCC's intrinsic does not say that all of it is read.
    alignas(64) volatile uint8_t config[64] = {};
    config[0] = 1;  // the palette: 8 tiles of 16 rows of 64 bytes
    const auto shape = [&config](int tile, int64_t rows, int64_t words) {
      config[48 + tile] = static_cast<uint8_t>(rows);
      config[16 + 2 * tile] = static_cast<uint8_t>(4 * words);
    };
    for (int i = 0; i < 4; ++i) shape(i, weight_rows, width);
    shape(4, weight_rows, pairs);
    shape(5, pairs, width);
    shape(6, pairs, width);
    _tile_loadconfig(const_cast<const uint8_t*>(config));
  }

 private:
  alignas(64) uint8_t before_[64];
  int64_t weight_rows_ = 0, pairs_ = 0, width_ = 0;
};

// A tile's number is part of the instruction, so these are branches that go when a loop over `i` is unrolled.
void clear_sums(int i) {
  if (i == 0) _tile_zero(0);
  if (i == 1) _tile_zero(1);
  if (i == 2) _tile_zero(2);
  if (i == 3) _tile_zero(3);
}

void load_sums(int i, const float* from, int64_t width) {
  if (i == 0) _tile_loadd(0, from, width * 4);
  if (i == 1) _tile_loadd(1, from, width * 4);
  if (i == 2) _tile_loadd(2, from, width * 4);
  if (i == 3) _tile_loadd(3, from, width * 4);
}

void store_sums(int i, float* to, int64_t width) {
  if (i == 0) _tile_stored(0, to, width * 4);
  if (i == 1) _tile_stored(1, to, width * 4);
  if (i == 2) _tile_stored(2, to, width * 4);
  if (i == 3) _tile_stored(3, to, width * 4);
}

template <int Terms>
void multiply_add(int i) {
  if (i == 0) _tile_dpbf16ps(0, 4, 5);
  if (i == 1) _tile_dpbf16ps(1, 4, 5);
  if (i == 2) _tile_dpbf16ps(2, 4, 5);
  if (i == 3) _tile_dpbf16ps(3, 4, 5);
  if (Terms == 1) return;
  if (i == 0) _tile_dpbf16ps(0, 4, 6);
  if (i == 1) _tile_dpbf16ps(1, 4, 6);
  if (i == 2) _tile_dpbf16ps(2, 4, 6);
  if (i == 3) _tile_dpbf16ps(3, 4, 6);
}

// sums[m, width] += weights[m, values] @ packed[values, width], `packed` being the sum of Terms bfloat16.
struct Product {
  const BF16* weights;
  int64_t stride;
  int64_t rows;         // of weights
  const float* packed;  // [steps, Terms, 16, width] words
  int64_t width;
  float* sums;
  bool fresh;                        // sums are zero, whatever the memory holds
  Prefetcher* prefetcher = nullptr;  // of the weights
  int64_t tile_bytes = 0;            // what it is told of a tile

  Product from_row(int64_t row) const {
    Product p = *this;
    p.weights += row * stride;
    p.sums += row * width;
    return p;
  }
};

// 16 * Tiles rows of weights. The compiler does not know what tile loads read: all of it is written before
// the call.
template <int Tiles, int Terms>
[[gnu::noinline]] void multiply_tiles(const Product& p, int64_t steps) {
  const int64_t tile = kTile * p.width;
  for (int i = 0; i < Tiles; ++i) {
    if (p.fresh)
      clear_sums(i);
    else
      load_sums(i, p.sums + i * tile, p.width);
  }
  const float* packed = p.packed;
  for (int64_t step = 0; step < steps; ++step, packed += Terms * tile) {
    _tile_loadd(5, packed, p.width * 4);
    if (Terms == 2) _tile_loadd(6, packed + tile, p.width * 4);
#pragma GCC unroll 4
    for (int i = 0; i < Tiles; ++i) {
      const BF16* weights = p.weights + i * kTile * p.stride + step * kTileStep;
      _tile_loadd(4, weights, p.stride * 2);
      multiply_add<Terms>(i);
      if (p.prefetcher != nullptr) p.prefetcher->read(p.tile_bytes);
    }
  }
  for (int i = 0; i < Tiles; ++i) store_sums(i, p.sums + i * tile, p.width);
}

// A shrink's four tiles would read from 64 rows far apart, more than the hardware's prefetchers follow: it
// takes two.
template <int Terms>
void multiply_steps(TileShapes& shapes, const Product& p, int64_t steps, int64_t pairs) {
  constexpr int kMost = Terms == 1 ? 2 : 4;
  int64_t row = 0;
  if (p.rows >= kTile) shapes.set(kTile, pairs, p.width);
  for (; row + kMost * kTile <= p.rows; row += kMost * kTile)
    multiply_tiles<kMost, Terms>(p.from_row(row), steps);
  for (; row + kTile <= p.rows; row += kTile) multiply_tiles<1, Terms>(p.from_row(row), steps);
  if (row == p.rows) return;
  shapes.set(p.rows - row, pairs, p.width);
  multiply_tiles<1, Terms>(p.from_row(row), steps);
}

template <int Terms>
void multiply(TileShapes& shapes, Product p, int64_t values, BF16* edge) {
  const int64_t steps = values / kTileStep, left = values % kTileStep;
  if (steps > 0) multiply_steps<Terms>(shapes, p, steps, kTile);
  if (left == 0) return;
  p.fresh = p.fresh && steps == 0;
  p.weights += steps * kTileStep;
  p.packed += steps * Terms * kTile * p.width;
  if (left % 2 == 1) {  // the tile's rows end within a word: the weights behind them must not come in
    for (int64_t i = 0; i < p.rows; ++i) {
      std::memcpy(edge + i * kTileStep, p.weights + i * p.stride, left * sizeof(BF16));
      edge[i * kTileStep + left] = {};
    }
    p.weights = edge;
    p.stride = kTileStep;
  }
  multiply_steps<Terms>(shapes, p, 1, (left + 1) / 2);
}

// Width of the tiles that hold `rows` rows.
int64_t width_for(int64_t rows) {
  return (smaller(rows, kTile) + 3) / 4 * 4;
}

// kTileStep values, or the last `count` of a row followed by zeros.
V load_words(const BF16* p, int64_t count) {
  if (count >= kTileStep) return load(reinterpret_cast<const float*>(p));
  alignas(64) BF16 tail[kTileStep] = {};
  std::memcpy(tail, p, count * sizeof(BF16));
  return load(reinterpret_cast<const float*>(tail));
}

// `count` values of `rows` rows to tiles [16, width] that lie `step_floats` apart: a row's words become a
// column.
template <typename RowAt>
void pack_rows(RowAt row_at, int64_t rows, int64_t count, int64_t step_floats, float* out) {
  const int64_t width = width_for(rows);
  for (int64_t k = 0; k < count; k += kTileStep, out += step_floats) {
    for (int64_t r = 0; r < width; r += 4) {
      V words[4];
      for (int i = 0; i < 4; ++i) words[i] = r + i < rows ? load_words(row_at(r + i) + k, count - k) : zero();
      transpose_quads(words);
      for (int i = 0; i < 4; ++i) store_quads(out + i * width + r, 4 * width, words[i]);
    }
  }
}

void shrink_ranks(TileShapes& shapes, const ShrinkTask& t, const BF16* a, int64_t ranks, float* h) {
  const BF16* const x = static_cast<const BF16*>(t.x);
  float* const packed = t.scratch;                                             // [kXValues / 2, width]
  float* const sums = packed + kXValues / 2 * kTile;                           // [kTaskRows / 16, 64, width]
  BF16* const edge = reinterpret_cast<BF16*>(sums + kTaskRows * kWeightRows);  // [64, 32]
  if (t.in_features == 0) std::memset(sums, 0, kTaskRows * kWeightRows * sizeof(float));
  for (int64_t k = 0; k < t.in_features; k += kXValues) {
    const int64_t count = smaller(kXValues, t.in_features - k);
    for (int64_t i = 0; i < t.count; i += kTile) {
      const int64_t rows = smaller(kTile, t.count - i), width = width_for(rows);
      const auto row_at = [&](int64_t r) { return x + t.rows[i + r].row * t.x_stride + k; };
      pack_rows(row_at, rows, count, kTile * width, packed);
      multiply<1>(shapes, {a + k, t.in_features, ranks, packed, width, sums + i * kWeightRows, k == 0}, count,
                  edge);
    }
  }
  for (int64_t i = 0; i < t.count; ++i) {
    const int64_t first = i / kTile * kTile, width = width_for(t.count - first);
    const float* column = sums + first * kWeightRows + i - first;
    for (int64_t j = 0; j < ranks; ++j) h[t.rows[i].row * t.h_stride + j] = column[j * width];
  }
}

// h to tiles [row tiles, steps, 2, 16, width], as a bfloat16 and another for what the first leaves out: 16
// bits of a float32's 24.
void pack_h(const ExpandTask& t, float* packed, BF16* high, BF16* low) {
  for (int64_t i = 0; i < t.count * t.h_stride; i += kLanes) {
    const V value = load(t.h + i);
    store(high + i, value);
    const V rest = value - load(high + i);  // none where `high` is infinite
    store(low + i, _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest - rest, zero(), _CMP_EQ_OQ), rest));
  }
  for (int64_t i = 0; i < t.count; i += kTile) {
    const int64_t rows = smaller(kTile, t.count - i), tile = kTile * width_for(rows);
    float* out = packed + i * t.h_stride;
    pack_rows([&](int64_t r) { return high + (i + r) * t.h_stride; }, rows, t.h_stride, 2 * tile, out);
    pack_rows([&](int64_t r) { return low + (i + r) * t.h_stride; }, rows, t.h_stride, 2 * tile, out + tile);
  }
}

// y[rows, columns] += scale * sums[columns, width]^T for rows i to i + rows of the task.
void add_sums(const ExpandTask& t, int64_t i, int64_t rows, int64_t n, int64_t columns, const float* sums) {
  const int64_t width = width_for(rows);
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t m = 0; m < columns; m += kLanes) {
      V delta[4];
      for (int k = 0; k < 4; ++k)
        delta[k] = load_quads(reinterpret_cast<const char*>(sums + (m + k) * width + r), 16 * width);
      transpose_quads(delta);
      for (int64_t k = 0; k < smaller(4, rows - r); ++k) {
        const GatheredRow& row = t.rows[i + r + k];
        BF16* y = static_cast<BF16*>(t.y) + row.row * t.y_stride + n + m;
        add(y, broadcast(t.scale * row.scale), delta[k], columns - m);
      }
    }
  }
}

}  // namespace

void shrink_amx(const ShrinkTask& t) {
  TileShapes shapes;
  for (int64_t j = 0; j < t.ranks; j += kWeightRows) {
    const BF16* a = static_cast<const BF16*>(t.a) + j * t.in_features;
    shrink_ranks(shapes, t, a, smaller(kWeightRows, t.ranks - j), t.h + j);
  }
}

void expand_amx(const ExpandTask& t) {
  const BF16* const b = static_cast<const BF16*>(t.b);
  float* const sums = t.scratch;                     // [64, width]
  float* const packed = sums + kWeightRows * kTile;  // [row tiles, steps, 2, 16, width]
  BF16* const high = reinterpret_cast<BF16*>(packed + kTaskRows * t.h_stride);
  BF16* const low = high + kTaskRows * t.h_stride;
  BF16* const edge = low + kTaskRows * t.h_stride;  // [64, 32]
  pack_h(t, packed, high, low);
  Prefetcher prefetcher(b, t.columns * t.b_stride * sizeof(BF16));
  const int64_t tile_bytes = kTile * t.b_stride * sizeof(BF16) * kTileStep / t.h_stride;
  TileShapes shapes;
  for (int64_t n = 0; n < t.columns; n += kWeightRows) {
    const int64_t columns = smaller(kWeightRows, t.columns - n);
    for (int64_t i = 0; i < t.count; i += kTile) {
      const int64_t rows = smaller(kTile, t.count - i);
      Product product{b + n * t.b_stride, t.b_stride, columns, packed + i * t.h_stride,
                      width_for(rows),    sums,       true};
      if (i == 0) product.prefetcher = &prefetcher, product.tile_bytes = tile_bytes;
      prefetch_y<BF16>(t, i, rows, n, columns);
      multiply<2>(shapes, product, t.rank, edge);
      add_sums(t, i, rows, n, columns, sums);
    }
  }
}

}  // namespace loramux
#endif
