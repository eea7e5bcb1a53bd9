// The kernels behind the CUDA entry points. A launch does the tiles of one kind; a plan may hold both.
#pragma once

#include "lora.h"

namespace loramux {

struct Device;  // launch.cuh

enum class TileKind { decode, prefill };

// LORAMUX_PORTABLE in the environment leaves the tuned kernels out, to compare results and speed with them.
bool is_portable_forced();

// For every architecture, dtype, shape and alignment.
int shrink_portable(TileKind kind, const ShrinkArgs& args, void* stream);
int expand_portable(TileKind kind, const ExpandArgs& args, void* stream);
int embedding_portable(TileKind kind, const EmbeddingArgs& args, void* stream);

// Tuned, for bfloat16 and float16 on sm_90 and later. Whether they serve a call depends on the device, the
// shapes and the alignments, never on the batch.
bool shrink_decode_serves(const ShrinkArgs& args, const Device& device);
bool shrink_prefill_serves(const ShrinkArgs& args, const Device& device);
bool expand_serves(const ExpandArgs& args, const Device& device);
bool apply_decode_serves(const ApplyArgs& args, const Device& device);
int shrink_decode(const ShrinkArgs& args, void* stream);
int shrink_prefill(const ShrinkArgs& args, void* stream);
// h_parts: arrays [rows, num_slices, max_rank] behind one another at args.h, whose sum is h. More than one
// only at rank 64 and below.
int expand_decode(const ExpandArgs& args, int h_parts, void* stream);
// Whether h of a tile of the site finds room in shared memory.
bool expand_prefill_has_room(const Site& site, const Device& device);
int expand_prefill(const ExpandArgs& args, void* stream);
// Where expand_serves, of a vocabulary that fits 32 bits.
int embedding_decode(const EmbeddingArgs& args, void* stream);
int embedding_prefill(const EmbeddingArgs& args, void* stream);
// Both halves in one launch, where no plan of these rows has prefill tiles.
int apply_decode(const ApplyArgs& args, void* stream);

}  // namespace loramux
