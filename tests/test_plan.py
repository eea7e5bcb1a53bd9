"""The planner's law: every adapter row is in exactly one tile, and no plan leaves its buffer."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux import LoraSite, _host, lora_apply_
from loramux.config import Registration
from loramux.errors import PlanMismatch
from loramux.plan import PlanMemory, PlanTile, StepPlan

Segment = tuple[int, int, float]  # slot, rows, scale
Step = tuple[int, list[Segment]]  # slots of the table, segments

CANARY = 0x5A5A5A5A
MOST_ROWS = 2**31 - 1
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

    def planner(self, num_slots: int) -> _host.Planner:
        place = _host.Place(MOST_ROWS, num_slots, MARGIN, len(self.words))
        return _host.Planner([place], self.memory.data_ptr())

    def write(self, segments: list[Segment], num_slots: int) -> int:
        [(rows, tiles)] = self.planner(num_slots).plan(
            [slot for slot, _, _ in segments],
            [rows for _, rows, _ in segments],
            [scale for _, _, scale in segments],
        )
        assert rows == sum(rows for _, rows, _ in segments)
        return tiles

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
            assert (kind is decode) == (slot_rows <= _host.max_decode_rows_of_slot(total))
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
        ([(0, 2**31 - 1, 1.0), (0, 1, 1.0)], "has 2147483648 rows, the plan holds 2147483647"),
        ([(0, 2**31 - 1, 1.0), (0, 1, 1.0), (0, -1, 1.0)], r"rows\[2\] is -1"),
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
    address = plan.memory.data_ptr()
    with pytest.raises(ValueError, match="found 2, 1 and 1 items"):
        plan.planner(5).plan([1, 1], [1], [1.0])
    with pytest.raises(ValueError, match="starts on 16 bytes"):
        _host.Planner([_host.Place(1, 5, MARGIN, 64)], address + 4).plan([1], [1], [1.0])
    with pytest.raises(ValueError, match="multiple of 4 words"):
        _host.Planner([_host.Place(1, 5, 0, 63)], address).plan([1], [1], [1.0])
    with pytest.raises(ValueError, match="the step has 2 rows, the plan holds 1: make a larger"):
        _host.Planner([_host.Place(1, 5, MARGIN, 64)], address).plan([1], [2], [1.0])
    with pytest.raises(TypeError):
        plan.planner(5).plan(["1"], [1], [1.0])  # type: ignore[list-item]
    for make in (_host.plan_capacity, lambda *shape: _host.Place(*shape, 0, 64)):
        with pytest.raises(ValueError, match="found -1 rows over 5 slots"):
            make(-1, 5)
    assert plan.untouched


def test_numbers_that_are_one_object_and_others_are_read_alike() -> None:
    one, two = Plan(4096), Plan(4096)
    rows, scales = [1, 1, 500, 500, 2], [0.5, 0.5, 2.0, 0.5, 0.5]
    one.write(list(zip([1, 2, 1, 2, 1], rows, scales, strict=True)), 3)
    copies = ([int(str(count)) for count in rows], [float(str(scale)) for scale in scales])
    two.write(list(zip([1, 2, 1, 2, 1], *copies, strict=True)), 3)
    assert one.header[2] == sum(rows)
    assert torch.equal(one.memory, two.memory)


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
    assert step.adapters == tuple(named)

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
    slots = [_host.Slot(i) for i in slot_of.values()]
    assert step.rows([grouping, 0]) == [sum(rows), sum(length > 0 for _, length, _ in segments)]
    written = got.planner(8).plan_step(step, slots, [grouping])
    assert written == [(sum(rows), sum(got.header[:2]))]
    assert torch.equal(got.memory, want.memory)


def test_a_steps_plans_lie_each_in_its_place() -> None:
    step = _host.Step([("a", 4, 1.0), (None, 8, 1.0), ("b", 4, 0.5), ("a", 4, 1.0)])
    groupings = [1, 4, 0]
    alone, together = [Plan(80) for _ in groupings], torch.full((240,), CANARY, dtype=torch.int32)
    places = [_host.Place(MOST_ROWS, 8, start, 80) for start in (160, 0, 80)]
    slots = [_host.Slot(5), _host.Slot(2)]
    written = _host.Planner(places, together.data_ptr()).plan_step(step, slots, groupings)
    assert [rows for rows, _ in written] == step.rows(groupings) == [20, 5, 4]
    for grouping, start, plan in zip(groupings, (160, 0, 80), alone, strict=True):
        plan.planner(8).plan_step(step, slots, [grouping])
        assert torch.equal(together[start : start + 80], plan.words)


@given(steps, st.lists(st.integers(0, 10_000), min_size=1, max_size=4), st.randoms())
def test_copies_take_all_that_a_step_wrote(
    step: Step, spare: list[int], order: random.Random
) -> None:
    num_slots, segments = step
    rows = [rows for _, rows, _ in segments]
    places, end = [], 0
    for quads in spare:
        capacity = _host.plan_capacity(sum(rows), num_slots) + 4 * quads
        places.append(_host.Place(MOST_ROWS, num_slots, end, capacity))
        end += capacity
    order.shuffle(places)
    words, copied = torch.full((2, end), CANARY, dtype=torch.int32)
    planner = _host.Planner(places, words.data_ptr())
    slots, scales = [slot for slot, _, _ in segments], [scale for _, _, scale in segments]
    planner.plan(slots, rows, scales)
    copies = planner.copies
    for start, stop in copies:
        assert 0 < stop - start <= (64 << 10) / words.itemsize
        copied[start:stop] = words[start:stop]
    assert torch.equal(copied, words)
    assert len(copies) <= 2 * len(places)
    assert len(copies) == 1 or end > (32 << 10) / words.itemsize


def slots_and_rows(tiles: list[PlanTile]) -> list[tuple[int, list[int]]]:
    return [(tile.slot, tile.rows.tolist()) for tile in tiles]


def test_plans_that_share_memory_are_written_and_moved_together() -> None:
    memory = PlanMemory("cpu")
    tokens, lengths = (StepPlan(rows, 8, memory=memory) for rows in (4, 2))
    slots = [_host.Slot(5), _host.Slot(2)]

    def write(*segments: tuple[str, int]) -> list[PlanTile]:
        step = _host.Step([(name, count, 1.0) for name, count in segments])
        memory.write(_host.Planner.plan_step, step, slots, [1, 0])
        return tokens.tiles() + lengths.tiles()

    few = [(5, [0, 1, 2]), (2, [3]), (5, [0]), (2, [1])]
    assert slots_and_rows(write(("a", 3), ("b", 1))) == few
    buffers = tokens.buffer, lengths.buffer
    for refused in ([("a", 4), ("b", 1)], [("a", 1), ("b", 1), ("a", 1)]):
        with pytest.raises(PlanMismatch, match=r"the step has \d rows, the plan holds \d"):
            write(*refused)
        assert (tokens.rows, lengths.rows) == (4, 2)
        assert slots_and_rows(tokens.tiles() + lengths.tiles()) == few
    tokens.reserve(40)
    assert (tokens.max_rows, lengths.max_rows) == (40, 2)
    assert (tokens.rows, lengths.rows, tokens.base_only, lengths.base_only) == (0, 0, True, True)
    assert buffers[0].data_ptr() != tokens.buffer.data_ptr()
    assert slots_and_rows(write(("a", 3), ("b", 1))) == few
    many = [(5, [0]), (2, list(range(1, 9))), (5, [0]), (2, [1])]
    assert slots_and_rows(write(("a", 1), ("b", 8))) == many


def test_buffers_that_are_not_the_hosts_get_copies() -> None:
    def written(memory: PlanMemory, plans: list[StepPlan], segments: int) -> list[PlanTile]:
        step = _host.Step([("ab"[i % 2], 4, 1.0) for i in range(segments)])
        slots = [_host.Slot(i) for i in range(1, len(step.adapters) + 1)]
        memory.write(_host.Planner.plan_step, step, slots, [1, 0])
        return [tile for plan in plans for tile in plan.tiles()]

    def plans_of(memory: PlanMemory) -> list[StepPlan]:
        return [StepPlan(20_000, 8, memory=memory), StepPlan(5000, 8, memory=memory)]

    here, there = PlanMemory("cpu"), PlanMemory("cpu")
    plans = plans_of(here), plans_of(there)
    there._words = torch.zeros_like(there._staged)  # as a device's
    for plan in plans[1]:
        start = plan.buffer.storage_offset()
        plan.buffer = there._words[start : start + len(plan.buffer)]
    for segments in (5000, 3, 0, 400):
        want, got = written(here, plans[0], segments), written(there, plans[1], segments)
        assert slots_and_rows(got) == slots_and_rows(want)


class Name(str):
    """Equal to its text, as another object."""

    __slots__ = ()


def test_equal_adapters_are_one_whatever_objects_they_are() -> None:
    names = [f"adapter-{i}" for i in range(300)]
    twice = [*names, *map(Name, names), *(name.encode().decode() for name in reversed(names))]
    keys = [*twice, (1, 2), 2**70, (1, 2), 2**70]
    step = _host.Step([(key, 1, 1.0) for key in keys])
    assert step.adapters == (*names, (1, 2), 2**70)
    plan, slots = Plan(_host.plan_capacity(len(keys), 400)), list(range(1, 303))
    plan.planner(400).plan_step(step, [_host.Slot(i) for i in slots], [1])
    want = Plan(len(plan.words))
    of = dict(zip(step.adapters, slots, strict=True))
    want.write([(of[key], 1, 1.0) for key in keys], 400)
    assert torch.equal(plan.memory, want.memory)


def test_a_step_refuses_segments_that_have_no_rows() -> None:
    with pytest.raises(ValueError, match="a segment of 6 tokens has no whole rows of 4 tokens"):
        _host.Step([("a", 4, 1.0), ("a", 6, 1.0)]).rows([1, 4])
    for grouping in (0, 1):
        with pytest.raises(ValueError, match="a segment of -1 tokens has no whole rows"):
            _host.Step([(None, -1, 1.0)]).rows([grouping])
    with pytest.raises(ValueError, match=r"tokens\[0\] is 2147483648"):
        _host.Step([("a", 2**31, 1.0)])
    with pytest.raises(ValueError, match="the step has 2147483648 rows"):
        _host.Step([("a", 2**31 - 1, 1.0), ("a", 1, 1.0)]).rows([1])
    with pytest.raises(TypeError, match="a tuple of adapter, tokens and scale"):
        _host.Step([("a", 1)])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _host.Step([({}, 1, 1.0)])  # type: ignore[list-item]
    plan, step = Plan(64), _host.Step([("a", 1, 1.0)])
    slot = _host.Slot(1)
    for slots, groupings, message in (
        ([slot, slot], [1], "names 1 adapters; found 2 slots"),
        ([slot], [1, 0], "each row grouping has a place; found 2 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.planner(5).plan_step(step, slots, groupings)
    assert plan.untouched


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
    assert by_row.planner(4).plan_rows(adapters, slots) == [(len(rows), tiles)]
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
    with pytest.raises(ValueError, match=message):
        plan.planner(4).plan_rows(adapters, {0: 0, 1: 9})
    assert plan.untouched


def test_slots_are_leased_all_or_none_and_released_once_each() -> None:
    a, b, c = (Registration(name, "", None) for name in "abc")
    slot_of = {a: _host.Slot(1), b: _host.Slot(2)}
    slot_of[a].holds, slot_of[b].holds = a, b

    def state() -> list[tuple[int, int, object]]:
        return [(slot.leases, slot.used_at, slot.idle) for slot in slot_of.values()]

    once: list[_host.Slot] = []
    twice: list[_host.Slot] = []
    assert not _host.lease(slot_of, [a, c], 7, once)
    assert state() == [(0, 0, None)] * 2
    assert _host.lease(slot_of, [], 7, once)
    assert once == []
    assert _host.lease(slot_of, [a], 7, once)
    assert _host.lease(slot_of, [b, a, a], 8, twice)
    assert once == [slot_of[a]]
    assert twice == [slot_of[b], slot_of[a], slot_of[a]]
    assert state() == [(3, 8, None), (1, 8, None)]
    assert _host.lease(slot_of, [b], 9, None)
    assert state() == [(3, 8, None), (1, 9, None)]
    still = {b: slot_of[b]}  # a is unloaded
    assert _host.release(once, "first", still) == []  # type: ignore[arg-type]
    assert _host.release(twice, "second", still) == [slot_of[a]]  # type: ignore[arg-type]
    assert _host.release(twice, "third", still) == []  # type: ignore[arg-type]
    assert once == twice == []
    assert state() == [(0, 8, "second"), (0, 9, "second")]


def test_lists_that_change_while_they_are_read_are_read_as_they_were() -> None:
    class Growing(str):
        def __hash__(self) -> int:
            segments.extend([("more", 1, 1.0)] * 1000)
            return super().__hash__()

    segments: list[tuple[str, int, float]] = []
    segments += [(Growing("a"), 1, 1.0), ("b", 2, 1.0)]
    step = _host.Step(segments)
    assert step.adapters == ("a", "b")
    assert step.rows([1]) == [3]


def test_a_number_past_64_bits_is_refused_as_one_past_32() -> None:
    with pytest.raises(
        ValueError, match=r"tokens\[0\] is 9223372036854775808, which does not fit 32"
    ):
        _host.Step([("a", 2**63, 1.0)])


@pytest.mark.cuda
def test_a_plan_waits_for_no_other_streams_copy() -> None:
    plan = StepPlan(64, 9, "cuda")
    adapters = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)  # copied in 5 ms
    arena = torch.empty_like(adapters, device="cuda")
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        arena.copy_(adapters, non_blocking=True)
        copied = beside.record_event()
    plan.update([2], [3], [1.0])
    torch.cuda.current_stream().synchronize()
    assert not copied.query()
    assert slots_and_rows(plan.tiles()) == [(2, [0, 1, 2])]


@pytest.mark.cuda
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(("rows", "count"), [(160, 1000), (40_000, 20)])
def test_every_call_of_a_stream_has_its_own_plan(rows: int, count: int, is_kept: bool) -> None:
    slots, width, rng = 9, 8, random.Random(0)
    a, b = torch.zeros(2, slots - 1, 8, width, dtype=torch.float16, device="cuda")
    a[:, 0], b[:, :, 0] = 1 / width, torch.arange(1, slots)[:, None]  # slot s adds s to ones
    site, kept = LoraSite.stacked([a], [b]), StepPlan(rows, slots, "cuda")
    steps = [[rng.randrange(slots) for _ in range(rows)] for _ in range(count)]
    for step in steps[::3]:  # a prefill among other rows
        step[20:120] = [step[20]] * 100
    y = torch.zeros(count, rows, width, dtype=torch.float16, device="cuda")
    x = torch.ones_like(y[0])
    for i, step in enumerate(steps):
        if i % 20 == 0:
            torch.cuda._sleep(10_000_000)  # 5 ms, in which the host gets ahead
        if is_kept:
            kept.update(step, [1] * rows, [1.0] * rows)
        lora_apply_(y[i], x, site, kept if is_kept else StepPlan.for_rows(step, slots, "cuda"))
    want = torch.tensor(steps, dtype=y.dtype, device="cuda")[:, :, None].expand_as(y)
    assert torch.equal(y, want)
