"""The packer against torch's own conversions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
    source: torch.Tensor, padded: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Pack a source as the second block of an image: the block's bytes, and its fault."""
    size = math.prod(padded) * dtype.itemsize
    end = -(-size // _host.BLOCK_ALIGN) * _host.BLOCK_ALIGN
    image = torch.full((end + 2 * _host.BLOCK_ALIGN,), 0xFF, dtype=torch.uint8)
    item = (
        source.data_ptr(),
        CODES[source.dtype],
        source.shape,
        source.stride(),
        padded,
        _host.BLOCK_ALIGN,
    )
    faults = _host.pack(image.data_ptr(), len(image), CODES[dtype], [item])
    before, block, after = image.split([_host.BLOCK_ALIGN, end, _host.BLOCK_ALIGN])
    assert bool((before == 0xFF).all() and (after == 0xFF).all())
    assert [i for i, _, _ in faults] == [0] * len(faults)
    return block, faults[0][1:] if faults else (0, -1)


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
    block, result = pack(x, padded, to_dtype)
    assert result == (0, -1)
    want = torch.zeros(padded, dtype=to_dtype)
    want[:ROWS, :COLS] = x.to(to_dtype)
    expected = torch.zeros_like(block)
    expected[: want.numel() * to_dtype.itemsize] = want.flatten().view(torch.uint8)
    assert torch.equal(block, expected)


def test_a_source_may_start_at_any_byte() -> None:
    x = values(torch.float32)[:32, :8].contiguous()
    memory = torch.zeros(x.numel() * 4 + 1, dtype=torch.uint8)
    memory[1:] = x.flatten().view(torch.uint8)
    image = torch.empty(x.numel() * 4, dtype=torch.uint8)
    code, shape = CODES[x.dtype], (32, 8)
    source = memory.data_ptr() + 1
    block = (source, code, shape, (8, 1), shape, 0)
    assert _host.pack(image.data_ptr(), len(image), code, [block]) == []
    assert torch.equal(image, memory[1:])
    assert _host.all_finite(source, code, x.numel())


@pytest.mark.parametrize("position", [0, 1023, 1024, 2999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", CODES)
def test_one_value_that_is_not_finite_is_found(
    dtype: torch.dtype, value: float, position: int
) -> None:
    x = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
    x[::2] *= -1
    assert _host.all_finite(x.data_ptr(), CODES[dtype], len(x))
    x[position] = value
    assert not _host.all_finite(x.data_ptr(), CODES[dtype], len(x))
    assert _host.all_finite(x.data_ptr(), CODES[dtype], position)


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
    _, result = pack(SOURCES[source](bad), (ROWS, COLS + 5), to_dtype)
    assert result == ((fault, 70 * COLS + 3) if fault else (0, -1))


def test_every_block_that_cannot_be_served_is_named() -> None:
    x = torch.ones(4, 8, 16)
    x[1, 2, 3], x[3, 0, 1] = math.nan, 1e38
    image = torch.empty(4 * 256, dtype=torch.uint8)
    shape, strides = (8, 16), (16, 1)
    blocks = [(x[i].data_ptr(), 0, shape, strides, shape, 256 * i) for i in range(4)]
    faults = _host.pack(image.data_ptr(), len(image), CODES[torch.float16], blocks)
    assert faults == [(1, NOT_FINITE, 2 * 16 + 3), (3, OVERFLOW, 1)]
    good = image.view(torch.float16).view(4, 8, 16)[::2]
    assert torch.equal(good, torch.ones(2, 8, 16, dtype=torch.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 3}, "found 3"),
        ({"source_dtype": -1}, "found -1"),
        ({"shape": (2, 5)}, "a block of 2 x 5 elements cannot be padded to 2 x 4"),
        ({"shape": (-1, 4)}, "a block of -1 x 4 elements"),
        ({"offset": 64}, "a multiple of 128 bytes; found 64 and 128"),
        ({"offset": -128}, "a multiple of 128 bytes; found -128 and 128"),
        ({"bytes": 100}, "a multiple of 128 bytes; found 0 and 100"),
        ({"offset": 256}, "does not fit an image of 128 bytes"),
        ({"offset": 256, "shape": (0, 4), "padded": (0, 4)}, "does not fit an image of 128 bytes"),
        ({"padded": (2**40, 2**40)}, "does not fit an image of 128 bytes"),
        ({"padded": (9, 4)}, "does not fit an image of 128 bytes"),
    ],
)
def test_refuses_a_block_that_leaves_the_image(change: dict[str, Any], message: str) -> None:
    x = torch.ones(2, 4)
    image = torch.full((128,), 0xFF, dtype=torch.uint8)
    sizes = {"bytes": 128, "dtype": 0}
    block = {
        "source": x.data_ptr(),
        "source_dtype": 0,
        "shape": (2, 4),
        "strides": (4, 1),
        "padded": (2, 4),
        "offset": 0,
    }
    bad = tuple((block | {k: v for k, v in change.items() if k in block}).values())
    sizes |= {k: v for k, v in change.items() if k in sizes}
    with pytest.raises(ValueError, match=message):
        _host.pack(image.data_ptr(), blocks=[tuple(block.values()), bad], **sizes)
    assert bool((image == 0xFF).all())
