// What the op layer hands to the kernels, and the binary formats that they read: the slot table and the
// step plan. Plain C++ structs: no torch, no Python, and the same on the host and on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace loramux {

enum class DType : int32_t { f32, f16, bf16 };

constexpr int64_t item_size(DType dtype) {
  return dtype == DType::f32 ? 4 : 2;
}

inline constexpr int kMaxSlices = 8;         // slices of one fused site
inline constexpr int64_t kBlockAlign = 128;  // bytes; every block of a slot image starts on this
inline constexpr int64_t kRankAlign = 8;     // an image's ranks are rounded up to this, with zeros

// ---- Slot table: int32 [num_slots, num_entries, 4], one entry per (site, slice) of a slot. ----
// Row 0 is the zero adapter of base rows: all zeros.
struct alignas(16) SlotEntry {
  uint32_t a;    // A block, in offset units from Slice::a
  uint32_t b;    // B block, in offset units from Slice::b
  int32_t rank;  // rows of A and columns of B to read, in an arena a multiple of kRankAlign; 0: the adapter
                 // does not touch the slice
  float scale;   // alpha / r or alpha / sqrt(r), in float32
};
static_assert(sizeof(SlotEntry) == 16);

// ---- Step plan: int32 [capacity], written by host/plan.h, read by every kernel. ----
// Words 0..3 are the header. Decode tiles follow it, growing upwards; prefill tiles grow downwards from
// the end of the buffer; the gathered rows lie between. So the capacity alone locates everything.
struct alignas(16) PlanHeader {
  int32_t decode_tiles;   // tiles of at most kDecodeRows rows: tile i at word 4 * (1 + i)
  int32_t prefill_tiles;  // tiles of at most kPrefillRows rows: tile i at word capacity - 4 * (1 + i)
  int32_t rows;           // rows that the plan was made for, base rows included; x and y may have more
  int32_t gathered;       // entries of the gathered list, which begins where the decode tiles end
};

struct alignas(16) Tile {
  int32_t slot;   // > 0
  int32_t first;  // contiguous: the first row. gathered: word offset in the plan of its first GatheredRow
  int32_t count;  // contiguous: rows. gathered: minus the rows
  float scale;    // contiguous: the segment's factor. gathered: unused, each row has its own
};

struct alignas(8) GatheredRow {
  int32_t row;
  float scale;
};
static_assert(sizeof(PlanHeader) == 16 && sizeof(Tile) == 16 && sizeof(GatheredRow) == 8);
inline constexpr int64_t kTileWords = sizeof(Tile) / sizeof(int32_t);  // of the header too
inline constexpr int64_t kRowWords = sizeof(GatheredRow) / sizeof(int32_t);

inline constexpr int kDecodeRows = 8;
inline constexpr int kPrefillRows = 64;
inline constexpr int64_t kLongStepRows = 512;
// A slot with more rows than this in a step of `rows` is planned in prefill tiles, any other in decode tiles:
// these read its weights anew for every 8 rows, but where they are few they are done sooner.
constexpr int64_t max_decode_rows_of_slot(int64_t rows) {
  return rows < kLongStepRows ? 64 : 32;
}

// ---- Arguments of the kernels. ----

// One slice of a site: where its weights lie, and its columns of y. Together in memory, because a kernel
// waits for every line of its arguments.
struct Slice {
  const std::byte* a;
  const std::byte* b;
  int64_t a_bytes, b_bytes;  // size of each allocation: nothing outside it is read
  int64_t width;             // columns of y
  int64_t offset;            // first column of y
};

// In an arena of slot images every slice's pointers are the arena, offsets count kBlockAlign bytes and B's
// rows are packed. Over an engine's stacked tensors A [slots, r, in] and B [slots, out, r] every slice has
// pointers of its own, offsets count 16 bytes and rows keep the full r.
struct Site {
  const SlotEntry* table;  // [num_slots, num_entries]
  int64_t num_slots, num_entries;
  int64_t entry;        // of the site's first slice; the others follow
  int64_t offset_unit;  // bytes
  int64_t rank_stride;  // elements between rows of B (and of an embedding's A); 0: the entry's own rank
  int64_t max_rank;
  int64_t in_features;  // columns of x; an embedding's vocabulary
  int32_t num_slices;
  DType dtype;  // of weights, x and y
  Slice slices[kMaxSlices];
};

struct PlanView {
  const int32_t* words;
  int64_t capacity;  // words, a multiple of 4
};

// h[row, slice, :rank] = x[row] @ A^T in float32, for every row in a tile. Rows in no tile, and ranks past
// the slot's own, are left as they are.
struct ShrinkArgs {
  Site site;
  PlanView plan;
  const void* x;  // [rows, in_features], unit column stride
  int64_t x_stride;
  int64_t rows;
  float* h;  // [rows, num_slices, max_rank], contiguous
};

// y[row, slice] += entry.scale * row scale * (h[row, slice, :rank] @ B^T), rounded once to y's dtype.
struct ExpandArgs {
  Site site;
  PlanView plan;
  const float* h;  // [rows, num_slices, max_rank], contiguous
  void* y;         // [rows, sum of widths], unit column stride
  int64_t y_stride;
  int64_t rows;
};

// Shrink into h, then expand from it.
struct ApplyArgs {
  ShrinkArgs shrink;
  ExpandArgs expand;
};

// With A's vector of a row's token in place of h, which is null. An id outside [0, vocabulary) touches
// nothing.
struct EmbeddingArgs : ExpandArgs {
  const void* ids;  // [rows], int32 or int64, contiguous
  bool ids64;
};

// Runs body(begin, end) over parts of [0, count) of at least `grain` items, perhaps in parallel.
using ParallelFor =
    std::function<void(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body)>;

// The caller has checked plan.words[2] <= rows: on the CPU a plan for more rows is refused.
void shrink_cpu(const ShrinkArgs& args, const ParallelFor& parallel_for);
void expand_cpu(const ExpandArgs& args, const ParallelFor& parallel_for);
void apply_cpu(const ApplyArgs& args, const ParallelFor& parallel_for);
void embedding_cpu(const EmbeddingArgs& args, const ParallelFor& parallel_for);

// Enqueue on `stream`, a cudaStream_t; return a cudaError_t. Nothing outside the tensors is touched,
// whatever the plan and the table hold; nothing at all if the plan is for more rows.
int shrink_cuda(const ShrinkArgs& args, void* stream);
int expand_cuda(const ExpandArgs& args, void* stream);
int apply_cuda(const ApplyArgs& args, void* stream);
int embedding_cuda(const EmbeddingArgs& args, void* stream);
// The same in two halves, for what the caller enqueues on `stream` between them to run beside the first:
// start makes the deltas in delta.expand.y, [rows, width], contiguous; finish adds them to y. delta.shrink.h
// is kBesideParts arrays behind one another. Only where beside_serves says so.
inline constexpr int64_t kBesideRows = 32;  // of a call at most: never in a prefill tile
inline constexpr int64_t kBesideParts = 8;
bool beside_serves(const ApplyArgs& delta);
int start_cuda(const ApplyArgs& delta, void* stream);
int finish_cuda(const ExpandArgs& delta, void* y, int64_t y_stride, void* stream);
// -1 where there is none.
int current_cuda_device();
// What an error says. The runtime forgets it, or torch would report it of its own next kernel.
const char* take_cuda_error(int error);

}  // namespace loramux
