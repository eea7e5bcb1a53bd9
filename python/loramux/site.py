"""What the kernels read of one site: where its slots' weights lie, and the slot table over them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from . import _host
from .errors import SpecError

STACKED_UNIT = 16  # bytes that an offset counts over stacked tensors


def table_row(entries: Sequence[tuple[int, int, int, float]]) -> torch.Tensor:
    """One slot's table row, int32 ``[num_entries, 4]``, from ``(a, b, rank, scale)`` per entry.

    Offsets are unsigned 32-bit counts of the site's offset unit; the scale is float32 by its bits
    (``SlotEntry`` in csrc/lora.h).
    """
    packed = b"".join(struct.pack("<IIif", *entry) for entry in entries)
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).view(-1, 4)


@dataclass(frozen=True, eq=False)
class SiteSlice:
    """One slice's weights in one slot, as views; A is ``[vocab, rank]`` for an embedding."""

    index: int
    columns: slice  # of y
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [width, rank]
    scale: float


@dataclass(frozen=True, eq=False)
class LoraSite:
    """One target at one stack layer, over the slots of a pool or an engine's stacked tensors.

    Attributes:
        weights: the arena alone (1-D), or, over stacked tensors, every slice's A ``[slots, r, in]``
            and then every slice's B ``[slots, out, r]``.
        table: int32 ``[num_slots, num_entries, 4]``, on the weights' device.
        entry: the table entry of the first slice; the others follow it.
        in_features: columns of x; an embedding's vocabulary.
        widths: columns of y per slice.
        max_rank: largest rank any slot may have.
        backend: which implementation the ops use.
        scratch_width: float32 values of h a row, over all slices.
    """

    weights: list[torch.Tensor]
    table: torch.Tensor
    entry: int
    in_features: int
    widths: list[int]
    max_rank: int
    backend: Literal["native", "torch"] = "native"
    scratch_width: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scratch_width", len(self.widths) * self.max_rank)

    @cached_property
    def num_slots(self) -> int:
        """Slots, the zero adapter's included."""
        return self.table.shape[0]

    @cached_property
    def packed(self) -> torch.Tensor:
        """What ``lora_apply_packed_`` takes of the site; ``PackedSite`` of csrc/arguments.h."""
        packed: torch.Tensor = torch.ops.loramux.lora_pack_site(
            self.weights, self.table, self.entry, self.widths, self.in_features, self.max_rank
        )
        return packed

    def follow_memory(self) -> None:
        """Forget ``packed`` where an engine has given its stacked tensors other memory."""
        addresses = [weights.data_ptr() for weights in self.weights]
        if vars(self).get("_addresses") != addresses:
            self._forget_packed()
            vars(self)["_addresses"] = addresses

    def close(self) -> None:
        """Let the weights go: calls from now on are refused."""
        self.weights.clear()
        self._forget_packed()

    def _forget_packed(self) -> None:
        vars(self).pop("packed", None)

    def __getstate__(self) -> dict[str, object]:
        """All but ``packed``, which has addresses of these very tensors."""
        return {name: value for name, value in vars(self).items() if name != "packed"}

    @classmethod
    def stacked(
        cls,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        *,
        ranks: Sequence[int] | None = None,
        scales: Sequence[float] | None = None,
        embedding: bool = False,
        backend: Literal["native", "torch"] = "native",
    ) -> LoraSite:
        """A site over an engine's own stacked weights, without copying them.

        Slot ``i`` of the tensors is slot ``i + 1`` of the site: slot 0 is the base model.

        Args:
            a: per slice ``[slots, r, in]`` (an embedding: ``[slots, vocab, r]``), contiguous.
            b: per slice ``[slots, out, r]``, contiguous.
            ranks: each slot's true rank, at most ``r``; ``None``: ``r`` for all.
            scales: each slot's factor; ``None``: 1.0 for all.

        Raises:
            SpecError: shapes that disagree, or a slot size that is no multiple of 16 bytes.
        """
        slots, in_features, max_rank = _check_stacked(a, b, embedding)
        strides = [_slot_units(tensor) for tensor in (*a, *b)]
        rows = [torch.zeros(len(a), 4, dtype=torch.int32, device="cpu")]
        for slot in range(slots):
            rank = max_rank if ranks is None else ranks[slot]
            scale = 1.0 if scales is None else scales[slot]
            if not 0 <= rank <= max_rank:
                raise SpecError(f"slot {slot} has rank {rank}; the tensors hold 0 to {max_rank}")
            units = [slot * stride for stride in strides]
            rows.append(
                table_row([(units[i], units[len(a) + i], rank, scale) for i in range(len(a))])
            )
        return cls(
            weights=[*a, *b],
            table=torch.stack(rows).to(a[0].device),
            entry=0,
            in_features=in_features,
            widths=[tensor.shape[1] for tensor in b],
            max_rank=max_rank,
            backend=backend,
        )

    def slices(self, slot: int, *, embedding: bool = False) -> Iterator[SiteSlice]:
        """The slices that ``slot``'s adapter touches, as the slot table locates them."""
        num_slices = len(self.widths)
        entries = self.table[slot, self.entry : self.entry + num_slices].cpu()
        column = 0
        for i, (row, width) in enumerate(zip(entries, self.widths, strict=True)):
            a_units, b_units, rank, scale = struct.unpack("<IIif", row.numpy().tobytes())
            if rank > 0:
                if len(self.weights) == 1:
                    a, b, unit, stride = *self.weights * 2, _host.BLOCK_ALIGN, rank
                else:
                    a, b = self.weights[i], self.weights[num_slices + i]
                    unit, stride = STACKED_UNIT, self.max_rank
                a_at = a.storage_offset() + a_units * unit // a.element_size()
                b_at = b.storage_offset() + b_units * unit // b.element_size()
                a_shape = (self.in_features, rank) if embedding else (rank, self.in_features)
                a_stride = (stride, 1) if embedding else (self.in_features, 1)
                yield SiteSlice(
                    index=i,
                    columns=slice(column, column + width),
                    a=a.as_strided(a_shape, a_stride, a_at),
                    b=b.as_strided((width, rank), (stride, 1), b_at),
                    scale=scale,
                )
            column += width


def _check_stacked(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], embedding: bool
) -> tuple[int, int, int]:
    """``(slots, in_features, max_rank)`` of stacked tensors that agree."""
    if not a or len(a) != len(b) or len(a) > _host.MAX_SLICES:
        raise SpecError(
            f"got {len(a)} A and {len(b)} B tensors; want one of each for 1 to "
            f"{_host.MAX_SLICES} slices"
        )
    slots, *shape = a[0].shape
    in_features, max_rank = shape if embedding else reversed(shape)
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        if left.shape != a[0].shape or right.shape != (slots, right.shape[1], max_rank):
            raise SpecError(
                f"slice {i}: A is {tuple(left.shape)} and B {tuple(right.shape)}; want "
                f"{tuple(a[0].shape)} and ({slots}, out, {max_rank})"
            )
        if not (left.is_contiguous() and right.is_contiguous()):
            raise SpecError(f"slice {i}: A and B must be contiguous")
    return slots, in_features, max_rank


def _slot_units(tensor: torch.Tensor) -> int:
    size = tensor.stride(0) * tensor.element_size()
    if size % STACKED_UNIT:
        raise SpecError(
            f"a slot of {tuple(tensor.shape)} takes {size} bytes, no multiple of {STACKED_UNIT}: "
            "pad the width or the rank"
        )
    return size // STACKED_UNIT
