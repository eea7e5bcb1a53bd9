"""The torch-free host code: the step planner and the image packer, over addresses of host memory.

Dtype codes are ``DType`` of csrc/lora.h: 0 float32, 1 float16, 2 bfloat16.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

DECODE_ROWS: Final[int]
PREFILL_ROWS: Final[int]
MAX_DECODE_ROWS_OF_SLOT: Final[int]
BLOCK_ALIGN: Final[int]  # bytes
RANK_ALIGN: Final[int]
MAX_SLICES: Final[int]

def max_decode_tiles(rows: int, num_slots: int) -> int:
    """Most decode tiles of a step of ``rows`` rows over ``num_slots`` slots, slot 0 included.

    Raises:
        ValueError: negative rows, no slot, or more than an int32 of either.
    """

def max_prefill_tiles(rows: int, num_slots: int) -> int:
    """Most prefill tiles of such a step. Raises as ``max_decode_tiles``."""

def plan_capacity(rows: int, num_slots: int) -> int:
    """Int32 words that hold the plan of any such step. Raises as ``max_decode_tiles``."""

class Segments:
    """What a planner plans: the segments of a step under one row grouping, in packed order.

    Lists and tuples are read in place; anything else is copied to a list first.

    Args:
        slots: one per segment; 0 and below are base rows.
        rows: rows per segment, 0 or more.
        scales: factor on the delta per segment.

    Attributes:
        rows: of all segments.

    Raises:
        ValueError: sequences of different lengths, or a number that does not fit 32 bits.
    """

    def __init__(
        self, slots: Sequence[int], rows: Sequence[int], scales: Sequence[float]
    ) -> None: ...
    @staticmethod
    def of_rows(adapters: Sequence[int], slots: Mapping[int, int]) -> Segments:
        """Segments by the adapter of each row, at scale 1.0: neighbours of one become one segment.

        Args:
            adapters: one id per row, of any integer type.
            slots: the slot of every id among them, as a dict; 0 and below are base rows.

        Raises:
            ValueError: an id without a slot.
        """

    @property
    def rows(self) -> int: ...

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
    def adapters(self) -> list[Any]: ...
    def rows(self, grouping: int) -> int:
        """Rows that a linear of a row grouping sees: 1 per token, k per k tokens, 0 per segment.

        Raises:
            ValueError: a negative segment, one of no whole rows, or more rows than an int32.
        """

    def grouped(self, grouping: int, slots: Sequence[int]) -> Segments:
        """The segments as the planner takes them, ``slots[i]`` being that of ``adapters[i]``.

        Raises:
            ValueError: as ``rows``, or another number of slots than of adapters.
        """

class Planner:
    """Writes step plans. Keeps its scratch memory between calls."""

    def __init__(self) -> None: ...
    def plan(self, segments: Segments, num_slots: int, address: int, capacity: int) -> int:
        """Plan a step.

        Args:
            num_slots: slots of the table, the zero adapter's included.
            address: of the int32 buffer to write, 16-byte aligned.
            capacity: of the buffer in words, a multiple of 4.

        Returns:
            Tiles in the plan; 0 if every row is the base's.

        Raises:
            ValueError: a slot outside the table, rows that are negative or do not sum to an int32,
                a misaligned buffer, or one that is too small. Nothing is written.
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
