"""Where images lie in an arena: the first gap that is wide enough, or one made by moving images.

An image goes into the first gap that holds it. Where none does though enough bytes are free, images
that lie side by side are moved down until the gaps among them are one: those that take the fewest
bytes to move. So what fits by its bytes can be placed, whatever the order of arrivals was.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from .errors import PoolExhausted


class Move(NamedTuple):
    """An image's bytes go from ``source`` to ``target``, which is lower and may overlap it."""

    key: int
    source: range
    target: range


class Placement:
    """Which bytes of an arena each image takes. A plain value: plan on a copy, then keep it.

    Args:
        size: bytes of the arena.
        spans: the bytes of each image by its key, disjoint.
    """

    def __init__(self, size: int, spans: Mapping[int, range] | None = None) -> None:
        self.size = size
        self.spans = dict(spans or {})

    def copy(self) -> Placement:
        return Placement(self.size, self.spans)

    @property
    def free(self) -> int:
        """Bytes that no image takes, in however many gaps."""
        return self.size - sum(map(len, self.spans.values()))

    def remove(self, key: int) -> None:
        """Give up the bytes of ``key``, if it has any."""
        self.spans.pop(key, None)

    def insert(self, key: int, size: int, fixed: Container[int] = ()) -> list[Move]:
        """Place an image of ``size`` bytes; returns the moves to make first, in order.

        No move writes to bytes of an image that the moves before it have not taken away.

        Args:
            fixed: keys of images that stay where they are. With none, a ``size`` of at most
                ``free`` can always be placed.

        Raises:
            PoolExhausted: no gap can be made wide enough. Nothing was changed.
        """
        order = sorted(self.spans, key=lambda key: (self.spans[key].start, self.spans[key].stop))
        starts = [*(self.spans[key].start for key in order), self.size]
        ends = [0, *(self.spans[key].stop for key in order)]
        gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        at = next((end for end, gap in zip(ends, gaps, strict=True) if gap >= size), None)
        moves = []
        if at is None:
            run = self._cheapest_run(order, gaps, size, fixed)
            at = ends[run.start]
            for moved in order[run.start : run.stop]:
                source = self.spans[moved]
                self.spans[moved] = range(at, at + len(source))
                moves.append(Move(moved, source, self.spans[moved]))
                at += len(source)
        self.spans[key] = range(at, at + size)
        return moves

    def _cheapest_run(
        self, order: list[int], gaps: list[int], size: int, fixed: Container[int]
    ) -> range:
        """The neighbours in ``order`` to move down for a gap of ``size`` behind them.

        ``gaps[i]`` lies before image ``i``, the last gap behind all of them.
        """
        best: tuple[int, range] | None = None
        first, width, widest, moved = 0, gaps[0], gaps[0], 0
        for last, key in enumerate(order):
            if key in fixed:
                first, width, moved = last + 1, gaps[last + 1], 0
                widest = max(widest, width)
                continue
            width += gaps[last + 1]
            moved += len(self.spans[key])
            widest = max(widest, width)
            while width - gaps[first] >= size:  # it is wide enough without the first
                width -= gaps[first]
                moved -= len(self.spans[order[first]])
                first += 1
            if width >= size and (best is None or moved < best[0]):
                best = moved, range(first, last + 1)
        if best is None:
            raise PoolExhausted(
                f"an adapter takes {size} bytes in one piece, {widest} can be had between those "
                "that steps lease: release earlier steps first or raise arena_bytes"
            )
        return best[1]
