"""The step plan: which rows each slot serves, in the buffer that the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from . import _host
from .errors import PlanMismatch


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
        memory: where the buffer lies, perhaps beside those of plans that are written together with
            it; ``update`` then plans them all alike.

    Attributes:
        buffer: int32 ``[capacity]`` on ``device``.
        scratch: float32 ``[max_rows * scratch_width]`` on ``device``.
        rows: rows of the step it was written for, base rows included.
        base_only: no row of that step has an adapter.
    """

    max_rows: int
    rows: int
    base_only: bool
    buffer: torch.Tensor
    scratch: torch.Tensor

    def __init__(
        self,
        max_rows: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        scratch_width: int = 0,
        memory: PlanMemory | None = None,
    ) -> None:
        self.num_slots, self.scratch_width = num_slots, scratch_width
        self._memory = memory or PlanMemory(device)
        self._memory.place(self, max_rows)

    def reserve(self, max_rows: int) -> None:
        """Hold at least ``max_rows`` rows from now on.

        Growing moves the buffers, those of plans in the same memory too: all must be written anew.
        """
        if max_rows > self.max_rows:
            self._memory.place(self, max_rows)

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
        self._memory.write(_host.Planner.plan, slots, rows, scales)

    def update_rows(self, adapters: Sequence[int], slots: Mapping[int, int]) -> None:
        """Plan a step by the adapter id of each row; ``slots`` has every id's slot.

        Raises:
            PlanMismatch: as ``update``, or an id that is not in ``slots``.
        """
        self._memory.write(_host.Planner.plan_rows, adapters, slots)

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


class PlanMemory:
    """Where plans lie that are written together, and on the host what is copied there.

    Not from pinned memory. A pinned copy waits its turn in the copy engine: 1.4 ms behind an
    adapter of 84 MB for another stream, measured on an H200. Of memory that is not pinned CUDA
    reads up to 64 KB before the call returns, and takes them along with the command: 2 to 7 us on
    an idle stream, 11 to 25 beside such an adapter.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._planner = _host.Planner([], 0)
        self._plans: list[StepPlan] = []
        self._words = self._staged = torch.empty(0, dtype=torch.int32, device=self._device)

    # Written to by later steps, in inference mode or not: never an inference tensor.
    @torch.inference_mode(False)
    def place(self, plan: StepPlan, max_rows: int) -> None:
        """Give a plan buffers for ``max_rows`` rows. Moves those of the others, and empties all."""
        plans = dict.fromkeys([*self._plans, plan])
        places, end = [], 0
        for one in plans:
            rows = max_rows if one is plan else one.max_rows
            capacity = _host.plan_capacity(rows, one.num_slots)
            places.append(_host.Place(rows, one.num_slots, end, capacity))
            end += capacity
        words = torch.zeros(end, dtype=torch.int32, device=self._device)
        scratch = torch.empty(
            max_rows * plan.scratch_width, dtype=torch.float32, device=self._device
        )
        staged = words
        if words.is_cuda:
            staged = torch.zeros(end, dtype=torch.int32, device="cpu")
            for old in (self._words, *(one.scratch for one in self._plans)):
                old.record_stream(torch.cuda.current_stream(words.device))  # kernels may read them
        self._planner = _host.Planner([], 0)  # no step is planned if what follows is broken off
        for one, place in zip(plans, places, strict=True):
            one.buffer = words[place.start : place.start + place.capacity]
            one.rows, one.base_only = 0, True
        plan.max_rows, plan.scratch = max_rows, scratch
        self._plans, self._words, self._staged = list(plans), words, staged
        self._planner = _host.Planner(places, staged.data_ptr())

    def close(self) -> None:
        """Give the memory back."""
        self._planner = _host.Planner([], 0)
        for plan in self._plans:
            plan.buffer = plan.scratch = torch.empty(0)
        self._words = self._staged = torch.empty(0)

    def write(self, method: Callable[..., Sequence[tuple[int, int]]], *step: object) -> None:
        """Write every plan.

        On a CUDA device the copy is enqueued on the current stream.

        Args:
            method: of the planner.
            step: what it plans.

        Raises:
            PlanMismatch: as ``StepPlan.update``.
        """
        try:
            written = method(self._planner, *step)
        except ValueError as error:
            raise PlanMismatch(str(error)) from None
        if self._staged is not self._words:
            for start, stop in self._planner.copies:
                self._words[start:stop].copy_(self._staged[start:stop], non_blocking=True)
        for plan, (rows, tiles) in zip(self._plans, written, strict=True):
            plan.rows, plan.base_only = rows, tiles == 0
