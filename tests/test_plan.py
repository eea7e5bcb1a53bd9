"""The planner's law: every adapter row is in exactly one tile, and no plan leaves its buffer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux import _host

Segment = tuple[int, int, float]  # slot, rows, scale
Step = tuple[int, list[Segment]]  # slots of the table, segments

CANARY = 0x5A5A5A5A
MARGIN = 4  # canary words on each side of the buffer, 16 bytes


class Tile(NamedTuple):
    slot: int
    rows: list[int]
    scales: list[float]
    contiguous: bool


class Plan:
    """A buffer between canaries, and a plain reader of the format in csrc/lora.h."""

    def __init__(self, capacity: int) -> None:
        self.memory = torch.full((capacity + 2 * MARGIN,), CANARY, dtype=torch.int32)
        self.words = self.memory[MARGIN : MARGIN + capacity]

    def write(self, segments: list[Segment], num_slots: int) -> int:
        return _host.Planner().plan(
            _host.Segments(
                [slot for slot, _, _ in segments],
                [rows for _, rows, _ in segments],
                [scale for _, _, scale in segments],
            ),
            num_slots,
            self.words.data_ptr(),
            len(self.words),
        )

    @property
    def untouched(self) -> bool:
        return bool((self.memory == CANARY).all())

    @property
    def canaries_intact(self) -> bool:
        return bool(
            (self.memory[:MARGIN] == CANARY).all() and (self.memory[-MARGIN:] == CANARY).all()
        )

    @property
    def header(self) -> list[int]:
        return self.words[:4].tolist()

    def decode_tiles(self) -> list[Tile]:
        return [self._tile(4 * (1 + i)) for i in range(self.header[0])]

    def prefill_tiles(self) -> list[Tile]:
        return [self._tile(len(self.words) - 4 * (1 + i)) for i in range(self.header[1])]

    def _tile(self, at: int) -> Tile:
        floats = self.words.view(torch.float32)
        slot, first, count = self.words[at : at + 3].tolist()
        if count > 0:
            rows = list(range(first, first + count))
            return Tile(slot, rows, [floats[at + 3].item()] * count, True)
        assert first % 2 == 0, "gathered rows are aligned to 8 bytes"
        assert 4 + 4 * self.header[0] <= first <= len(self.words) - 4 * self.header[1] + 2 * count
        gathered = slice(first, first - 2 * count)
        return Tile(
            slot, self.words[gathered][::2].tolist(), floats[gathered][1::2].tolist(), False
        )


def segments_over(num_slots: int) -> st.SearchStrategy[list[Segment]]:
    rows = st.integers(0, 3) | st.integers(0, 40) | st.integers(60, 200)
    return st.lists(
        st.tuples(st.integers(-1, num_slots - 1), rows, st.sampled_from([1.0, 0.5, -2.0])),
        max_size=40,
    )


steps = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), segments_over(n)))


@settings(deadline=None)
@given(steps)
def test_every_adapter_row_is_in_one_tile_of_its_slot(
    step: Step,
) -> None:
    num_slots, segments = step
    total = sum(rows for _, rows, _ in segments)
    plan = Plan(_host.plan_capacity(total, num_slots))
    tiles = plan.write(segments, num_slots)

    rows_of_slot: dict[int, list[tuple[int, float]]] = {}
    row = 0
    for slot, rows, scale in segments:
        if slot > 0 and rows > 0:
            rows_of_slot.setdefault(slot, []).extend((row + i, scale) for i in range(rows))
        row += rows

    decode, prefill = plan.decode_tiles(), plan.prefill_tiles()
    assert plan.canaries_intact
    assert plan.header[2] == total
    assert tiles == len(decode) + len(prefill)
    assert len(decode) <= _host.max_decode_tiles(total, num_slots)
    assert len(prefill) <= _host.max_prefill_tiles(total, num_slots)

    planned: dict[int, list[tuple[int, float]]] = {}
    for kind, height in ((decode, _host.DECODE_ROWS), (prefill, _host.PREFILL_ROWS)):
        tiles_of_slot: dict[int, int] = {}
        for tile in kind:
            assert 0 < len(tile.rows) <= height
            consecutive = tile.rows[-1] - tile.rows[0] == len(tile.rows) - 1
            assert tile.contiguous == (consecutive and len(set(tile.scales)) == 1)
            planned.setdefault(tile.slot, []).extend(zip(tile.rows, tile.scales, strict=True))
            tiles_of_slot[tile.slot] = tiles_of_slot.get(tile.slot, 0) + 1
        for slot, count in tiles_of_slot.items():
            slot_rows = len(rows_of_slot[slot])
            assert count == -(-slot_rows // height)
            assert (kind is decode) == (slot_rows <= _host.MAX_DECODE_ROWS_OF_SLOT)
    assert {slot: sorted(rows) for slot, rows in planned.items()} == rows_of_slot


@settings(deadline=None)
@given(steps, st.integers(0, 200))
def test_a_plan_fits_its_buffer_or_nothing_is_written(step: Step, quads: int) -> None:
    num_slots, segments = step
    plan = Plan(4 * quads)
    try:
        plan.write(segments, num_slots)
    except ValueError:
        assert plan.untouched
        total = sum(rows for _, rows, _ in segments)
        assert len(plan.words) < _host.plan_capacity(total, num_slots)
    else:
        assert plan.canaries_intact


@given(st.integers(0, 2000), st.integers(1, 600), st.integers(0, 100), st.integers(0, 100))
def test_bounds_grow_with_rows_and_slots(
    rows: int, num_slots: int, more_rows: int, more_slots: int
) -> None:
    for bound in (_host.max_decode_tiles, _host.max_prefill_tiles, _host.plan_capacity):
        assert bound(rows, num_slots) <= bound(rows + more_rows, num_slots + more_slots)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(1, 1, 1.0), (5, 1, 1.0)], r"slots\[1\] is 5, and there are 5 slots"),
        ([(1, -3, 1.0)], r"rows\[0\] is -3"),
        ([(0, 2**31, 1.0)], r"rows\[0\] is 2147483648"),
        ([(0, 2**31 - 1, 1.0), (0, 1, 1.0)], "have 2147483648 rows.* at most 2147483647"),
        ([(1, 64 * 9, 1.0)], r"buffer of 36 words.* plan_capacity\(576, 5\) = \d+ words"),
    ],
)
def test_a_refusal_says_what_was_found(segments: list[Segment], message: str) -> None:
    plan = Plan(36)
    with pytest.raises(ValueError, match=message):
        plan.write(segments, num_slots=5)
    assert plan.untouched


def test_refuses_arguments_that_do_not_belong_together() -> None:
    plan = Plan(64)
    address = plan.words.data_ptr()
    planner = _host.Planner()
    one = _host.Segments([1], [1], [1.0])
    with pytest.raises(ValueError, match="found 2, 1 and 1 items"):
        _host.Segments([1, 1], [1], [1.0])
    with pytest.raises(ValueError, match="starts on 16 bytes"):
        planner.plan(one, 5, address + 4, 60)
    with pytest.raises(ValueError, match="multiple of 4 words"):
        planner.plan(one, 5, address, 63)
    with pytest.raises(TypeError):
        _host.Segments(["1"], [1], [1.0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="found -1 rows over 5 slots"):
        _host.plan_capacity(-1, 5)
    assert plan.untouched


adapters = st.sampled_from(["a", "b", "c", None])
tokens = st.integers(0, 5).map(lambda n: 4 * n)


@given(
    st.lists(st.tuples(adapters, tokens, st.sampled_from([1.0, 0.5]))), st.sampled_from([0, 1, 4])
)
def test_a_steps_segments_are_planned_as_its_slots_and_rows(
    segments: list[tuple[str | None, int, float]], grouping: int
) -> None:
    step = _host.Step(segments)
    named = dict.fromkeys(name for name, length, _ in segments if name is not None and length)
    assert step.adapters == list(named)

    slot_of = dict(zip(named, (5, 2, 7), strict=False))
    rows = [length // grouping if grouping else min(length, 1) for _, length, _ in segments]
    want = Plan(_host.plan_capacity(sum(rows), 8))
    want.write(
        [
            (slot_of.get(name, 0), count, scale)
            for (name, _, scale), count in zip(segments, rows, strict=True)
        ],
        8,
    )
    got = Plan(len(want.words))
    grouped = step.grouped(grouping, list(slot_of.values()))
    assert step.rows(grouping) == grouped.rows == sum(rows)
    _host.Planner().plan(grouped, 8, got.words.data_ptr(), len(got.words))
    assert torch.equal(got.memory, want.memory)


def test_a_step_refuses_segments_that_have_no_rows() -> None:
    with pytest.raises(ValueError, match="a segment of 6 tokens has no whole rows of 4 tokens"):
        _host.Step([("a", 4, 1.0), ("a", 6, 1.0)]).rows(4)
    for grouping in (0, 1):
        with pytest.raises(ValueError, match="a segment of -1 tokens has no whole rows"):
            _host.Step([(None, -1, 1.0)]).rows(grouping)
    with pytest.raises(ValueError, match=r"tokens\[0\] is 2147483648"):
        _host.Step([("a", 2**31, 1.0)])
    with pytest.raises(ValueError, match="the step has 2147483648 rows"):
        _host.Step([("a", 2**31 - 1, 1.0), ("a", 1, 1.0)]).rows(1)
    with pytest.raises(TypeError, match="a tuple of adapter, tokens and scale"):
        _host.Step([("a", 1)])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _host.Step([({}, 1, 1.0)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="names 1 adapters; found 2 slots"):
        _host.Step([("a", 1, 1.0)]).grouped(1, [1, 2])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 70)), max_size=12), st.booleans())
def test_rows_by_adapter_are_the_segments_that_they_form(
    runs: list[tuple[int, int]], are_numpy: bool
) -> None:
    slots = {0: 0, 100: 3, 7: 1, 2**40: 2, 9: 3}  # ids of any size; two may share a slot
    names = list(slots)
    rows = [names[i] for i, count in runs for _ in range(count)]
    spans = [(slots[names[i]], count, 1.0) for i, count in runs]
    by_segment, by_row = (Plan(_host.plan_capacity(len(rows), 4)) for _ in range(2))
    tiles = by_segment.write(spans, 4)
    adapters = tuple(np.array(rows, dtype=np.int64)) if are_numpy else rows
    words = by_row.words
    segments = _host.Segments.of_rows(adapters, slots)
    assert segments.rows == len(rows)
    got = _host.Planner().plan(segments, 4, words.data_ptr(), len(words))
    assert got == tiles
    assert torch.equal(by_row.memory, by_segment.memory)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([0, 0, 5], r"adapters\[2\] is 5, which holds no slot: make it resident first"),
        ([1], r"slots\[0\] is 9, and there are 4 slots"),
    ],
)
def test_a_refused_row_says_which(adapters: list[int], message: str) -> None:
    plan = Plan(64)
    words = plan.words
    with pytest.raises(ValueError, match=message):
        _host.Planner().plan(
            _host.Segments.of_rows(adapters, {0: 0, 1: 9}), 4, words.data_ptr(), len(words)
        )
    assert plan.untouched
