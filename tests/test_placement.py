"""Placing images in an arena, against a memory whose every byte says whose it is."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from loramux.errors import PoolExhausted
from loramux.placement import Move, Placement

SIZE = 32
inserts = st.tuples(st.just("insert"), st.integers(0, SIZE), st.sets(st.integers(0, 40)))
removes = st.tuples(st.just("remove"), st.integers(0, 40), st.none())


def widest_between(placement, fixed):
    """The widest gap that can be made where only ``fixed`` images stay."""
    spans = sorted(placement.spans.items(), key=lambda item: (item[1].start, item[1].stop))
    widest, start, taken = 0, 0, 0
    for key, span in [*spans, (None, range(placement.size, placement.size))]:
        if key is None or key in fixed:
            widest = max(widest, span.start - start - taken)
            start, taken = span.stop, 0
        else:
            taken += len(span)
    return widest


@given(st.lists(st.one_of(inserts, removes), max_size=40))
def test_what_fits_by_its_bytes_is_placed_and_no_byte_is_lost(operations):
    placement, memory = Placement(SIZE), [None] * SIZE
    for key, (kind, number, fixed) in enumerate(operations):
        held = list(placement.spans)
        if kind == "remove":
            if held:
                placement.remove(held[number % len(held)])
            continue
        fixed = {held[i % len(held)] for i in fixed} if held else set()
        before = placement.copy()
        fits = number <= widest_between(placement, fixed)
        assert fits or fixed or number > placement.free
        try:
            moves = placement.insert(key, number, fixed)
        except PoolExhausted:
            assert not fits
            assert placement.spans == before.spans
            continue
        assert fits
        for move in moves:
            assert move.key not in fixed
            assert move.target.start < move.source.start
            taken = [memory[at] for at in move.source]
            memory[move.target.start : move.target.stop] = taken
        memory[placement.spans[key].start : placement.spans[key].stop] = [key] * number
        for owner, span in placement.spans.items():
            assert 0 <= span.start <= span.stop <= SIZE
            assert [memory[at] for at in span] == [owner] * len(span)
        assert placement.free == SIZE - sum(map(len, placement.spans.values()))


def test_the_first_gap_that_holds_it_is_taken():
    placement = Placement(10, {0: range(2, 4), 1: range(7, 8)})
    assert placement.insert(2, 2) == []
    assert placement.insert(3, 3) == []
    assert placement.spans == {0: range(2, 4), 1: range(7, 8), 2: range(0, 2), 3: range(4, 7)}


def test_the_fewest_bytes_are_moved():
    spans = {0: range(2, 6), 1: range(8, 9), 2: range(11, 16), 3: range(18, 20)}
    placement = Placement(20, spans)
    assert placement.insert(4, 4) == [Move(1, range(8, 9), range(6, 7))]
    assert placement.spans == {**spans, 1: range(6, 7), 4: range(7, 11)}


def test_an_image_that_stays_divides_the_arena():
    placement = Placement(10, {0: range(4, 6)})
    with pytest.raises(PoolExhausted, match="takes 5 bytes in one piece, 4 can be had"):
        placement.insert(1, 5, fixed={0})
    assert placement.insert(1, 5) == [Move(0, range(4, 6), range(0, 2))]
