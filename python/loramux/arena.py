"""A pool's device memory: the arena of images, the slot table over it, and the copies into both.

On a CUDA device one side stream does all that is written there, in the order it was decided, and
events keep it and the steps' streams apart:

- Before it writes, it waits for the last step of every image that was given up since its last
  write, and of those that it moves: no step finds its bytes or its table row overwritten.
- Every part of an image has an event behind it, and a step's stream waits for that before a kernel
  reads the part (``Arena.arriving``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from . import _host
from ._host import Slot
from .errors import PoolExhausted
from .placement import Move, Placement
from .store import LoraImage, SlotLayout

_FIRST_PART, _LAST_PART = 1 << 20, 16 << 20  # least bytes of the parts an image is copied in
_STAGING_BYTES = 16 << 20  # through which an image moves to bytes that overlap its own

Arrival = tuple[int, "torch.cuda.Event"]  # the first layer of a part of an image, and its event


class Installation(NamedTuple):
    """What it takes to install images, decided before anything is done."""

    images: Sequence[LoraImage]
    slots: Sequence[Slot]  # of each image
    rows: Sequence[torch.Tensor]  # of the slot table, of each image
    evicted: Sequence[Slot]  # whose images go, slots of the new ones among them
    moves: Sequence[tuple[Slot, Move]]  # of images that stay, to be done first, in order
    placement: Placement  # then


class Arena:
    """Images in device memory, each at a place of its own that its row of the slot table names.

    Args:
        layout: of the images.
        slots: the pool's; slot ``i`` has index ``i + 1``.
        device: where the memory is.
        size: bytes of images, of which each takes its own. ``None``: enough for any image in every
            slot, where each takes as much as the largest, so that none is ever moved.

    Attributes:
        weights: ``[bytes / item size]`` of the layout's dtype.
        table: int32 ``[slots + 1, num_entries, 4]``; row 0 is the zero adapter's.
        stream: what copies, on a CUDA device.
    """

    def __init__(
        self,
        layout: SlotLayout,
        slots: Sequence[Slot],
        device: torch.device,
        size: int | None = None,
    ) -> None:
        self._slots = slots
        self._least_bytes = layout.slot_bytes if size is None else 0
        bytes_ = len(slots) * layout.slot_bytes if size is None else size
        bytes_ -= bytes_ % _host.BLOCK_ALIGN
        self.weights = torch.zeros(
            bytes_ // layout.dtype.itemsize, dtype=layout.dtype, device=device
        )
        self._bytes = self.weights.view(torch.uint8)
        self._staging = self._bytes.new_empty(0 if size is None else min(bytes_, _STAGING_BYTES))
        self.table = torch.zeros(
            len(slots) + 1, layout.num_entries, 4, dtype=torch.int32, device=device
        )
        self._placement = Placement(bytes_)  # by slot index
        self._layers = [  # of each but the first, and its first table entry
            (site.layer, site.entry)
            for before, site in pairwise(layout.sites)
            if site.layer > before.layer
        ]
        self._arriving: dict[Slot, list[Arrival]] = {}  # parts that may not be there yet
        self._readers: list[torch.Event] = []  # last steps of images given up
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:  # no copy may pass the zeros above
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def plan(
        self, images: Sequence[LoraImage], free: Sequence[Slot], fixed: Container[int]
    ) -> Installation:
        """Find each image one of the first slots of ``free``, and bytes.

        Images in ``free`` are evicted in its order, no more than leave the slots and the bytes;
        all others stay, though they may be moved. All that can fail on the host is done here.

        Args:
            fixed: indices of slots whose images are not to be moved.

        Raises:
            PoolExhausted: there are not so many bytes. Nothing was changed.
        """
        slots = free[: len(images)]
        sizes = [max(image.data.numel(), self._least_bytes) for image in images]
        placement, evicted = self._placement.copy(), []
        wanted, found = sum(sizes), placement.free
        for i, slot in enumerate(free):
            if i >= len(slots) and found >= wanted:
                break
            if slot.holds is not None:
                found += len(placement.spans[slot.index])
                placement.remove(slot.index)
                evicted.append(slot)
        if found < wanted:
            raise PoolExhausted(
                f"{wanted} bytes of adapters are to be installed, {found} of the arena's "
                f"{placement.size} can be had beside the step's other adapters and those that "
                "steps lease: release earlier steps first, split the step or raise arena_bytes"
            )
        moves = []
        for slot, size in zip(slots, sizes, strict=True):
            moves += placement.insert(slot.index, size, fixed)
        rows = [
            image.table_row(placement.spans[slot.index].start // _host.BLOCK_ALIGN)
            for image, slot in zip(images, slots, strict=True)
        ]
        if self.stream is not None:
            rows = [row.pin_memory() for row in rows]
        moved = [(self._slots[move.key - 1], move) for move in moves]
        staying = [(slot, move) for slot, move in moved if slot not in slots]
        return Installation(images, slots, rows, evicted, staying, placement)

    def install(self, plan: Installation) -> None:
        """Move and copy as planned, once the evicted slots are vacated."""
        self._placement = plan.placement
        if self.stream is not None:
            for slot in dict.fromkeys(slot for slot, _ in plan.moves):
                if slot.leases:  # the kernels of its steps are enqueued by now
                    slot.idle = self.mark()
                if slot.idle is not None:
                    self._readers.append(slot.idle)
            for idle in self._readers:
                self.stream.wait_event(idle)
            self._readers.clear()
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for slot, move in plan.moves:
                self._move(slot, move)
            for image, slot, row in zip(plan.images, plan.slots, plan.rows, strict=True):
                self._copy(image, slot, row)

    def vacate(self, slot: Slot) -> None:
        """Give up a slot's image. No step that leases the slot remains to be released."""
        slot.holds = None
        self._placement.remove(slot.index)
        if slot.idle is not None:
            self._readers.append(slot.idle)
            slot.idle = None

    def arriving(self, slots: Iterable[Slot], *, layerwise: bool) -> list[Arrival]:
        """What to wait for before the images of ``slots`` are whole or, by layer, before parts are.

        Ordered by layer. What has arrived is left out.
        """
        if not self._arriving:
            return []
        arriving: list[Arrival] = []
        for slot in slots:
            parts = self._arriving.get(slot, [])
            if parts and parts[-1][1].query():
                parts = []
                del self._arriving[slot]
            arriving += parts if layerwise else parts[-1:]
        return sorted(arriving, key=itemgetter(0))

    def mark(self) -> torch.Event:
        """An event behind all that the current stream of the CUDA device was given."""
        event = torch.Event("cuda")
        event.record(torch.accelerator.current_stream(self.table.device.index))
        return event

    def close(self) -> None:
        """Give the memory back, once no copy and no step that was released uses it."""
        if self.stream is not None:
            for idle in (*self._readers, *(slot.idle for slot in self._slots)):
                if idle is not None:
                    self.stream.wait_event(idle)
            self.stream.synchronize()
        self.weights = self.table = self._bytes = self._staging = torch.empty(0)
        self._readers.clear()
        self._arriving.clear()

    def _move(self, slot: Slot, move: Move) -> None:
        """Move an image down, in pieces that overlap neither themselves nor what is still to go."""
        old, new, size = move.source.start, move.target.start, len(move.source)
        piece = max(old - new, self._staging.numel())
        for start in range(0, size, piece):
            stop = min(start + piece, size)
            source = self._bytes[old + start : old + stop]
            if old - new < piece:
                source = self._staging[: stop - start].copy_(source)
            self._bytes[new + start : new + stop].copy_(source)
        self.table[slot.index, :, :2].sub_((old - new) // _host.BLOCK_ALIGN)
        self._arriving.pop(slot, None)
        self._arrives(slot, 0)

    def _copy(self, image: LoraImage, slot: Slot, row: torch.Tensor) -> None:
        """The table row first, then the image in parts."""
        self.table[slot.index].copy_(row, non_blocking=True)
        at = self._placement.spans[slot.index].start
        self._arriving.pop(slot, None)
        for layer, start, stop in self._parts(image):
            self._bytes[at + start : at + stop].copy_(image.data[start:stop], non_blocking=True)
            self._arrives(slot, layer)

    def _parts(self, image: LoraImage) -> Iterator[tuple[int, int, int]]:
        """Parts of whole layers, each its first layer and where in the image it starts and stops.

        They double in size, so that the first is soon there and they are few.
        """
        first, start, least = 0, 0, _FIRST_PART
        for layer, entry in self._layers:
            at = image.entries[entry][0] * _host.BLOCK_ALIGN  # where the layer begins
            if at - start >= least:
                yield first, start, at
                first, start, least = layer, at, min(2 * least, _LAST_PART)
        yield first, start, image.data.numel()

    def _arrives(self, slot: Slot, layer: int) -> None:
        """Mark what was just enqueued as a slot's image from ``layer`` on."""
        if self.stream is not None:
            self._arriving.setdefault(slot, []).append((layer, self.stream.record_event()))
