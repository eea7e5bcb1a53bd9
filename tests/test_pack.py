"""The packer against torch's own conversions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from loramux import _host

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NOT_FINITE, OVERFLOW = 1, 2
ROWS, COLS = 90, 131  # more than a tile of the transpose, and odd

SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "column slice": lambda x: torch.cat([x, x], 1)[:, :COLS],
    "every other column": lambda x: torch.stack([x, x], 2).flatten(1)[:, ::2],
    "transposed slice": lambda x: torch.cat([x, x]).T.contiguous().T[:ROWS],
}


def pack(
    blocks: list[tuple[torch.Tensor, tuple[int, int]]], dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Pack sources, each padded to a shape, one after another: the image and pack's result."""
    entries, end = [], 0
    for source, shape in blocks:
        entries.append(
            (source.data_ptr(), CODES[source.dtype], *source.shape, *source.stride(), *shape, end)
        )
        size = math.prod(shape) * dtype.itemsize
        end += -(-size // _host.BLOCK_ALIGN) * _host.BLOCK_ALIGN
    image = torch.full((end,), 0xFF, dtype=torch.uint8)
    return image, _host.pack(image.data_ptr(), end, CODES[dtype], entries, 1)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of both signs all over float16's range, its subnormals included."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(ROWS, COLS, generator=generator) * 40 - 25
    signs = torch.randint(0, 2, (ROWS, COLS), generator=generator) * 2 - 1
    return (torch.exp2(exponents) * signs).to(dtype)


@pytest.mark.parametrize("padded", [(ROWS, COLS), (ROWS + 6, COLS), (ROWS + 6, COLS + 5)])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("to_dtype", CODES)
@pytest.mark.parametrize("from_dtype", CODES)
def test_a_block_is_torchs_conversion_padded_with_zeros(
    from_dtype: torch.dtype, to_dtype: torch.dtype, source: str, padded: tuple[int, int]
) -> None:
    x = SOURCES[source](values(from_dtype))
    image, result = pack([(x, padded), (x, padded)], to_dtype)
    assert result == (0, -1, -1)
    want = torch.zeros(padded, dtype=to_dtype)
    want[:ROWS, :COLS] = x.to(to_dtype)
    block = torch.zeros(len(image) // 2, dtype=torch.uint8)
    block[: want.numel() * to_dtype.itemsize] = want.flatten().view(torch.uint8)
    assert torch.equal(image, torch.cat([block, block]))


def test_a_source_may_start_at_any_byte() -> None:
    x = values(torch.float32)
    memory = torch.zeros(x.numel() * 4 + 1, dtype=torch.uint8)
    memory[1:] = x.flatten().view(torch.uint8)
    image = torch.empty(x.numel() * 4, dtype=torch.uint8)
    block = (memory.data_ptr() + 1, CODES[x.dtype], ROWS, COLS, COLS, 1, ROWS, COLS, 0)
    _host.pack(image.data_ptr(), len(image), CODES[x.dtype], [block], 1)
    assert torch.equal(image, memory[1:])


@pytest.mark.parametrize("source", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("from_dtype", "to_dtype", "value", "fault"),
    [
        *[
            (a, b, value, NOT_FINITE)
            for a in CODES
            for b in CODES
            for value in (math.nan, -math.inf)
        ],
        (torch.float32, torch.float16, 65519.996, 0),
        (torch.float32, torch.float16, -65520.0, OVERFLOW),
        (torch.bfloat16, torch.float16, 65536.0, OVERFLOW),
        (torch.float32, torch.bfloat16, 3.3961775e38, OVERFLOW),
        (torch.float32, torch.bfloat16, -3.3961773e38, 0),
    ],
)
def test_a_value_that_cannot_be_served_is_found(
    from_dtype: torch.dtype, to_dtype: torch.dtype, value: float, fault: int, source: str
) -> None:
    good = values(from_dtype)
    bad = good.clone()
    bad[70, 3] = bad[71, 0] = value
    shape = (ROWS, COLS + 5)
    _, result = pack([(good, shape), (SOURCES[source](bad), shape), (bad, shape)], to_dtype)
    assert result == ((fault, 1, 70 * COLS + 3) if fault else (0, -1, -1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 3}, "found 3"),
        ({"cols": 5}, r"blocks\[0\] has 2 x 5 elements, which cannot be padded to 2 x 4"),
        ({"rows": -1}, r"blocks\[0\] has -1 x 4 elements"),
        ({"offset": 64}, r"blocks\[0\] starts at byte 64: expected a multiple of 128"),
        ({"offset": -128}, r"blocks\[0\] starts at byte -128"),
        ({"offset": 256}, "do not fit an image of 128 bytes"),
        ({"offset": 256, "rows": 0, "padded_rows": 0}, "do not fit an image of 128 bytes"),
        ({"padded_rows": 2**40, "padded_cols": 2**40}, "do not fit an image of 128 bytes"),
        ({"padded_rows": 9}, "do not fit an image of 128 bytes"),
    ],
)
def test_refuses_blocks_that_leave_the_image(change: dict[str, int], message: str) -> None:
    x = torch.ones(2, 4)
    image = torch.full((128,), 0xFF, dtype=torch.uint8)
    block = {
        "source": x.data_ptr(),
        "dtype": 0,
        "rows": 2,
        "cols": 4,
        "row_stride": 4,
        "col_stride": 1,
        "padded_rows": 2,
        "padded_cols": 4,
        "offset": 0,
    }
    with pytest.raises(ValueError, match=message):
        _host.pack(image.data_ptr(), 128, 0, [tuple((block | change).values())], 1)
    assert bool((image == 0xFF).all())


def test_refuses_overlapping_blocks() -> None:
    x = torch.ones(8, 8)
    image = torch.zeros(1024, dtype=torch.uint8)
    block = (x.data_ptr(), 0, 8, 8, 8, 1, 8, 8)
    with pytest.raises(ValueError, match=r"blocks\[1\] starts at byte 128: .* at least 256"):
        _host.pack(image.data_ptr(), 1024, 0, [(*block, 0), (*block, 128)], 1)
