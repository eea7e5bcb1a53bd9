"""The step plan: which rows each slot serves, in the buffer that the kernels read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from . import _host
from .errors import PlanMismatch

_BUFFERS = 2  # pinned buffers in rotation: one is written while the other's copy may still run


class PlanTile(NamedTuple):
    """The rows of one tile, read back from a plan's buffer."""

    slot: int
    rows: torch.Tensor  # int64 [count]
    scales: torch.Tensor  # float32 [count]


class StepPlan:
    """One row grouping's plan, in a device buffer of fixed address and capacity.

    A CUDA graph captured with the buffer replays with whatever plan was written last. The format is
    ``PlanHeader``, ``Tile`` and ``GatheredRow`` of csrc/lora.h.

    Args:
        max_rows: rows that the plan must hold at most.
        num_slots: slots of the sites it is used with, the zero adapter's included.
        device: where the kernels run.
        scratch_width: float32 values of workspace a row, ``num_slices * max_rank`` of the widest
            site; 0 lets ``lora_apply_`` allocate its own.

    Attributes:
        buffer: int32 ``[capacity]`` on ``device``.
        scratch: float32 ``[max_rows * scratch_width]`` on ``device``.
        rows: rows of the step it was written for, base rows included.
        base_only: no row of that step has an adapter.
    """

    def __init__(
        self,
        max_rows: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        scratch_width: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.rows = 0
        self.base_only = True
        self._device = torch.device(device)
        self._scratch_width = scratch_width
        self._planner = _host.Planner()
        self._allocate(max_rows)

    # Written to by later steps, in inference mode or not: never an inference tensor.
    @torch.inference_mode(False)
    def _allocate(self, max_rows: int) -> None:
        capacity = _host.plan_capacity(max_rows, self.num_slots)
        self.max_rows = max_rows
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self.scratch = torch.empty(
            max_rows * self._scratch_width, dtype=torch.float32, device=self._device
        )
        self._turn = 0
        self._pinned: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if self.buffer.is_cuda:
            self._pinned = [
                (torch.zeros(capacity, dtype=torch.int32, pin_memory=True), torch.cuda.Event())
                for _ in range(_BUFFERS)
            ]

    def reserve(self, max_rows: int) -> None:
        """Hold at least ``max_rows`` rows from now on. Growing moves the buffers."""
        if max_rows > self.max_rows:
            self._allocate(max_rows)

    @classmethod
    def for_rows(
        cls, slots: Sequence[int], num_slots: int, device: torch.device | str = "cpu"
    ) -> StepPlan:
        """A plan of its own for one call: row ``i`` runs under slot ``slots[i]``, 0 the base."""
        plan = cls(max(len(slots), 1), num_slots, device)
        plan.update(slots, [1] * len(slots), [1.0] * len(slots))
        return plan

    def update(self, slots: Sequence[int], rows: Sequence[int], scales: Sequence[float]) -> None:
        """Plan a step of segments, each ``rows[i]`` rows of ``slots[i]``, in packed order.

        On a CUDA device the copy is enqueued on the current stream.

        Raises:
            PlanMismatch: more rows than ``max_rows``, or a slot outside the table. The buffer keeps
                the previous plan.
        """
        try:
            segments = _host.Segments(slots, rows, scales)
        except ValueError as error:
            raise PlanMismatch(str(error)) from None
        self.write(segments)

    def update_rows(self, adapters: Sequence[int], slots: Mapping[int, int]) -> None:
        """Plan a step by the adapter id of each row; ``slots`` has every id's slot.

        Raises:
            PlanMismatch: as ``update``, or an id that is not in ``slots``.
        """
        try:
            segments = _host.Segments.of_rows(adapters, slots)
        except ValueError as error:
            raise PlanMismatch(str(error)) from None
        self.write(segments)

    def write(self, segments: _host.Segments) -> None:
        """:meth:`update` of segments that were read before."""
        if segments.rows > self.max_rows:
            raise PlanMismatch(
                f"the step has {segments.rows} rows, the plan holds {self.max_rows}: "
                "make a larger plan"
            )
        target = self.buffer
        if self._pinned:
            target, copied = self._pinned[self._turn]
            copied.synchronize()
        try:
            tiles = self._planner.plan(segments, self.num_slots, target.data_ptr(), target.numel())
        except ValueError as error:
            raise PlanMismatch(str(error)) from None
        if self._pinned:
            self.buffer.copy_(target, non_blocking=True)
            copied.record()
            self._turn = (self._turn + 1) % _BUFFERS
        self.rows = segments.rows
        self.base_only = tiles == 0

    def tiles(self) -> list[PlanTile]:
        """The tiles in the buffer, decode tiles first. Copies it to the host."""
        words = self.buffer.cpu()
        floats = words.view(torch.float32)
        decode, prefill = int(words[0]), int(words[1])
        records = [4 + 4 * i for i in range(decode)]
        records += [len(words) - 4 - 4 * i for i in range(prefill)]
        tiles = []
        for at in records:
            slot, first, count = words[at : at + 3].tolist()
            if count >= 0:
                rows = torch.arange(first, first + count)
                scales = floats[at + 3].expand(count)
            else:
                rows = words[first : first - 2 * count : 2].long()
                scales = floats[first + 1 : first + 1 - 2 * count : 2]
            tiles.append(PlanTile(slot, rows, scales))
        return tiles
