"""The torch-free host code: slots, and the step planner and image packer over host memory.

Dtype codes are ``DType`` of csrc/lora.h: 0 float32, 1 float16, 2 bfloat16.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from torch import Event

from .config import Registration

DECODE_ROWS: Final[int]
PREFILL_ROWS: Final[int]
BLOCK_ALIGN: Final[int]  # bytes
RANK_ALIGN: Final[int]
MAX_SLICES: Final[int]

def max_decode_rows_of_slot(rows: int) -> int:
    """Rows of a slot, in a step of ``rows`` rows, beyond which they are in prefill tiles."""

def max_decode_tiles(rows: int, num_slots: int) -> int:
    """Most decode tiles of a step of ``rows`` rows over ``num_slots`` slots, slot 0 included.

    Raises:
        ValueError: negative rows, no slot, or more than an int32 of either.
    """

def max_prefill_tiles(rows: int, num_slots: int) -> int:
    """Most prefill tiles of such a step. Raises as ``max_decode_tiles``."""

def plan_capacity(rows: int, num_slots: int) -> int:
    """Int32 words that hold the plan of any such step. Raises as ``max_decode_tiles``."""

class Step:
    """A step's segments as its caller has them, read once for all row groupings.

    Args:
        segments: ``(adapter, tokens, scale)``; the adapter is hashable, ``None`` the base model.

    Attributes:
        adapters: distinct adapters of the segments that have tokens, in order of their first.

    Raises:
        TypeError: no such tuples.
        ValueError: a number of tokens that does not fit 32 bits.
    """

    def __init__(self, segments: Sequence[tuple[Hashable | None, int, float]]) -> None: ...
    @property
    def adapters(self) -> tuple[Any, ...]: ...
    def rows(self, groupings: Sequence[int]) -> list[int]:
        """Rows that a linear of each row grouping sees: 1 per token, k per k tokens, 0 per segment.

        Raises:
            ValueError: a negative segment, one of no whole rows, or more rows than an int32.
        """

class Slot:
    """One device slot: whose weights it holds, and who is using them.

    Attributes:
        index: its row of the slot table.
        leases: steps that use it (``lease``, ``release``).
        used_at: the pool's clock at its last use.
        holds: whose weights are in it.
        idle: the last step that used it is done.
    """

    def __init__(self, index: int) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def used_at(self) -> int: ...
    holds: Registration | None
    idle: Event | None

def lease(
    slot_of: dict[Registration, Slot],
    wanted: list[Registration],
    used_at: int,
    held: list[Slot] | None,
) -> bool:
    """Mark the slots of ``wanted`` as used at ``used_at``; lease each, appending it to ``held``.

    ``False``, and nothing is done, where one has no slot.
    """

def release(held: list[Slot], idle: Event | None, slot_of: dict[Registration, Slot]) -> list[Slot]:
    """End one lease of each slot in ``held``, which a step used that is done at ``idle``; empty it.

    Returns:
        Those without a lease whose weights ``slot_of`` no longer finds.
    """

class Place:
    """Where one plan lies in the memory of several.

    Args:
        max_rows: that it may have.
        num_slots: slots of the table, the zero adapter's included.
        start: its first word.
        capacity: its words, a multiple of 4.

    Raises:
        ValueError: as ``plan_capacity``.
    """

    def __init__(self, max_rows: int, num_slots: int, start: int, capacity: int) -> None: ...
    @property
    def start(self) -> int: ...
    @property
    def capacity(self) -> int: ...

class Planner:
    """Writes step plans into their places in int32 memory at ``address``, which must outlive it.

    Keeps its scratch memory between calls. Tuples are read in place; other sequences are copied
    first. For each place come back the rows that were planned, and the plan's tiles: 0 if every
    row is the base's.

    Raises:
        ValueError: more rows than a place holds, a slot outside the table, rows that are
            negative, a plan that is not 16-byte aligned, or a place that is too small. All places
            are left as they were.
    """

    def __init__(self, places: Sequence[Place], address: int) -> None: ...
    @property
    def copies(self) -> list[tuple[int, int]]:
        """Where the last step wrote, as ``(start, stop)`` in words from ``address`` on.

        In few stretches of at most 64 KB: a copy of so much that is not pinned goes to a CUDA
        device with its command.
        """

    def plan(
        self, slots: Sequence[int], rows: Sequence[int], scales: Sequence[float]
    ) -> list[tuple[int, int]]:
        """Plan segments in packed order.

        Args:
            slots: one per segment; 0 and below are base rows.
            rows: rows per segment, 0 or more.
            scales: factor on the delta per segment.

        Raises:
            ValueError: sequences of different lengths, or a number that does not fit 32 bits.
        """

    def plan_rows(self, adapters: Sequence[int], slots: Mapping[int, int]) -> list[tuple[int, int]]:
        """Plan rows, at scale 1.0, by the adapter of each.

        Args:
            adapters: one id per row, of any integer type.
            slots: the slot of every id among them, as a dict; 0 and below are base rows.

        Raises:
            ValueError: an id without a slot.
        """

    def plan_step(
        self, step: Step, slots: Sequence[Slot], groupings: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Plan a step for each of its row groupings, ``slots[i]`` being that of ``adapters[i]``.

        Raises:
            ValueError: as ``Step.rows``, another number of slots than of adapters, or of places
                than of groupings.
        """

def pack(
    image: int,
    bytes: int,
    dtype: int,
    blocks: Sequence[tuple[int, int, Sequence[int], Sequence[int], Sequence[int], int]],
) -> list[tuple[int, int, int]]:
    """Fill blocks of an image from a matrix each, rounding to nearest even. Releases the GIL.

    Args:
        image: address of the image.
        bytes: its size, a multiple of ``BLOCK_ALIGN``.
        dtype: code of the image's dtype.
        blocks: ``(source, dtype, shape, strides, padded, offset)`` of each: the matrix's address,
            the code of its dtype, its rows and columns, its strides in elements; the rows and
            columns of the block, of which those the matrix lacks, up to the next multiple of
            ``BLOCK_ALIGN``, become zeros; and where the block starts, a multiple of
            ``BLOCK_ALIGN`` bytes.

    Returns:
        ``(i, fault, index)`` of every block that is not as it should be, and then undefined: fault
        1 for a NaN or Inf and 2 for a value that rounds to Inf, with the first offender's place in
        the matrix (``row * columns + column``).

    Raises:
        ValueError: an unknown dtype code, or a block that leaves the image. Nothing is written.
    """

def all_finite(values: int, dtype: int, count: int) -> bool:
    """Whether none of ``count`` values at an address is a NaN or Inf. Releases the GIL.

    Raises:
        ValueError: an unknown dtype code.
    """
