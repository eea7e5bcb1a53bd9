"""The torch-free host code: the step planner and the image packer, over addresses of host memory.

Dtype codes are ``DType`` of csrc/lora.h: 0 float32, 1 float16, 2 bfloat16.
"""

from collections.abc import Sequence
from typing import Final

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

class Planner:
    """Writes step plans. Keeps its scratch memory between calls."""

    def __init__(self) -> None: ...
    def plan(
        self,
        slots: Sequence[int],
        rows: Sequence[int],
        scales: Sequence[float],
        num_slots: int,
        address: int,
        capacity: int,
    ) -> int:
        """Plan a step of segments, each ``rows[i]`` rows of ``slots[i]``, in packed order.

        Lists and tuples are read in place; anything else is copied to a list first.

        Args:
            slots: one per segment; 0 and below are base rows.
            rows: rows per segment, 0 or more.
            scales: factor on the delta per segment.
            num_slots: slots of the table, the zero adapter's included.
            address: of the int32 buffer to write, 16-byte aligned.
            capacity: of the buffer in words, a multiple of 4.

        Returns:
            Tiles in the plan; 0 if every row is the base's.

        Raises:
            ValueError: sequences of different lengths, a slot outside the table, rows that are
                negative or do not sum to an int32, a misaligned buffer, or one that is too small.
                Nothing is written.
        """

def pack(
    image: int, bytes: int, dtype: int, blocks: Sequence[tuple[int, ...]], threads: int
) -> tuple[int, int, int]:
    """Fill an image from matrices, rounding to nearest even. Releases the GIL.

    Args:
        image: address of the image.
        bytes: its size. What no block covers becomes zeros.
        dtype: code of the image's dtype.
        blocks: ``(source, dtype, rows, cols, row_stride, col_stride, padded_rows, padded_cols,
            offset)`` in ascending order: the source's address (0: zeros), dtype code, shape and
            strides in elements, the shape it is padded to with zeros, and where that lies in the
            image, in bytes, a multiple of ``BLOCK_ALIGN``.
        threads: how many may run, 1 or more.

    Returns:
        ``(fault, block, index)``: ``(0, -1, -1)``, or fault 1 for a NaN or Inf and 2 for a value
        that rounds to Inf, with the first offender's position in ``blocks`` and in its source
        (``row * cols + col``). The image is then undefined.

    Raises:
        ValueError: an unknown dtype code, blocks that overlap or leave the image, or no thread.
            Nothing is written.
    """
