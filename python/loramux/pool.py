"""Per-request LoRA adapters resident in a fixed set of device slots.

A step's adapters must hold slots before its kernels run: ``begin_step`` makes them resident, leases
their slots and writes one plan per row grouping. On a CUDA device images are copied on a side
stream; the compute stream waits for them, and a copy for the last steps of what it overwrites.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from . import _host
from ._host import Slot
from .arena import Arena, Arrival
from .backend import resolve_backend
from .config import LoraBaseOnly, LoraSpec, LoraStep, Registration
from .errors import LoraError, PlanMismatch, PoolExhausted, SpecError
from .plan import PlanMemory, StepPlan
from .resource import Hold, Resource
from .site import LoraSite
from .store import LoraImage, LoraStore, SlotLayout

_MAX_ROWS = 2**31 - 1  # of a plan


class LoraLease(Hold):
    """A step's hold on the slots of its adapters.

    Until it is released they stay in their slots. With ``LoraSpec.arena_bytes`` a later step may
    move them within the arena, behind the kernels that are enqueued when it begins.
    """

    def __init__(self, pool: LoraPool, base_only: bool) -> None:
        self.base_only = base_only
        self._pool = pool
        self._slots: list[Slot] = []  # emptied by the release
        self._arriving: list[Arrival] = []  # of all slots, by layer

    def plan(self, row_grouping: int) -> StepPlan:
        """This step's plan for a row grouping.

        Raises:
            PlanMismatch: another step has begun since, or the lease is released: the buffers hold
                other rows, and the slots may hold other adapters.
        """
        if self._pool.current is not self:
            raise PlanMismatch(
                "this step is over: plans are valid until release or the next begin_step"
            )
        return self._pool.plan(row_grouping)

    def release(self) -> None:
        """End the step's use of its slots. Releasing twice is harmless.

        On a CUDA device the stream that ran the step's kernels must be current: the slots may be
        overwritten once it gets here.
        """
        self._pool._release(self)


class LoraPool(Resource):
    """Adapters of one spec on one device, in ``max_slots`` slots beside the zero adapter.

    Steps of one pool run one after another: begin a step once the kernels of the previous one are
    enqueued (on the CPU: have run). On a CUDA device they all run on one stream. Loads, prefetches
    and unloads may come from any thread.

    Args:
        spec: what is served; adapters registered with it later are served too.
        device: where the weights lie.
        dtype: the model's, used where the spec names none.
        rank: this process's tensor-parallel rank.
        world_size: tensor-parallel ranks.
        max_rows: rows that a step may have in any grouping. With it the plans' buffers have fixed
            addresses, as a CUDA graph needs; without, they grow with the largest step.

    Attributes:
        active: a step is begun and some row of it names an adapter.
        current: the lease of the step begun last, until it is released.
        arriving: some layer of that step may still wait for its weights (``wait_layer``).

    Raises:
        BackendUnavailable: the spec's backend cannot serve the device and dtype.
    """

    # Steps write to what is allocated here, in inference mode or not: never an inference tensor.
    @torch.inference_mode(False)
    def __init__(
        self,
        spec: LoraSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world_size: int = 1,
        max_rows: int | None = None,
    ) -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.dtype = spec.dtype or dtype
        backend = resolve_backend(spec.backend, self.device, self.dtype)
        layout = SlotLayout(spec, self.dtype, rank, world_size)
        on_cuda = self.device.type == "cuda"
        self._layout = layout
        self._store = LoraStore(layout, pin=on_cuda)
        self._slots = [Slot(i + 1) for i in range(spec.max_slots)]
        self._arena = Arena(layout, self._slots, self.device, spec.arena_bytes)
        self.device = self._arena.weights.device  # other threads may have other current devices
        self._sites = {
            (site.target, site.layer): LoraSite(
                weights=[self._arena.weights],
                table=self._arena.table,
                entry=site.entry,
                in_features=site.local.in_features,
                widths=list(site.local.out_slices),
                max_rank=layout.max_rank,
                backend=backend,
            )
            for site in layout.sites
        }
        scratch_widths: dict[int, int] = {}
        for site in layout.sites:
            grouping = site.local.row_grouping
            width = site.local.num_slices * layout.max_rank
            scratch_widths[grouping] = max(width, scratch_widths.get(grouping, 0))
        self._fixed_rows = max_rows
        self._plan_memory = PlanMemory(self.device)
        self._plans = {
            grouping: StepPlan(max_rows or 1, spec.num_slots, self.device, width, self._plan_memory)
            for grouping, width in scratch_widths.items()
        }
        self._groupings = list(self._plans)
        self._slot_of: dict[Registration, Slot] = {}
        self._lock = threading.Lock()
        self._is_open = True
        self._clock = 0
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loramux-prefetch")
        self._counts = dict.fromkeys(
            ("hits", "misses", "evictions", "copies", "copied_bytes", "moves", "moved_bytes"), 0
        )
        self.current: LoraLease | None = None
        self.active = self.arriving = False

    @classmethod
    def build(cls, spec: LoraSpec, **placement: Any) -> LoraPool:
        """Build the pool that ``spec`` declares; ``placement`` as the constructor takes it."""
        return cls(spec, **placement)

    def site(self, target: str, layer: int) -> LoraSite:
        """What the ops read of one target at one layer.

        Raises:
            KeyError: the spec has no such site.
        """
        return self._sites[target, layer]

    def plan(self, row_grouping: int) -> StepPlan:
        """The plan of a row grouping: one object for the pool's life, rewritten by each step."""
        return self._plans[row_grouping]

    @property
    def counters(self) -> Mapping[str, Any]:
        """hits, misses, evictions, copies and moves with their bytes, load_seconds, names held."""
        with self._lock:
            return {
                **self._counts,
                "load_seconds": self._store.load_seconds,
                "resident": [slot.holds.name for slot in self._slots if slot.holds],
                "on_host": self._store.names,
            }

    def capture_key(self, step: LoraStep, key: Any) -> Any:
        """``LoraBaseOnly(key)`` when no row of the step names an adapter, else ``key``."""
        segments = step.segments or ()
        named = any(adapter is not None and length for adapter, length, _ in segments)
        return key if named else LoraBaseOnly(key)

    def begin_step(self, step: LoraStep, *, layerwise: bool = False) -> LoraLease:
        """Make the step's adapters resident, lease their slots and write its plans.

        Absent adapters take the place of those used longest ago, of as many as leave slots and
        bytes. Where images lie does not matter: they are moved to join the gaps between them, those
        of earlier steps too, whose kernels read them before they move.

        Args:
            layerwise: on a CUDA device have the current stream wait for an adapter's weights layer
                by layer (``wait_layer``), not for the whole of them now: the first layer of an
                adapter that was absent runs as soon as its own part is there. Bound modules that
                run eagerly do the waiting. A step that replays or captures a CUDA graph, or runs
                compiled modules, must leave this out: a graph cannot wait for an event that is
                made after it.

        Raises:
            UnknownAdapter: a segment's adapter is none that the spec serves.
            AdapterError: an adapter's file cannot be served.
            PoolExhausted: more distinct adapters than slots, more bytes than the arena has, or too
                few of either that no other step leases.
            PlanMismatch: a segment length below 0 or not a multiple of a target's token_fold, or
                more rows than ``max_rows``.
            In each case the pool is as it was.
        """
        segments, rows = self._read(step)
        wanted = self.spec.registrations(segments.adapters)
        lease = LoraLease(self, base_only=not wanted)
        try:
            self._acquire(wanted, lease._slots)
            self._set_current(None)  # its plans are about to be overwritten
            for plan, total in zip(self._plans.values(), rows, strict=True):
                if total > plan.max_rows:
                    plan.reserve(min(1 << (total - 1).bit_length(), _MAX_ROWS))
            self._plan_memory.write(
                _host.Planner.plan_step, segments, lease._slots, self._groupings
            )
            lease._arriving = self._arena.arriving(lease._slots, layerwise=layerwise)
            if not layerwise:
                self._wait(lease, self.spec.num_layers)
            self._set_current(lease)
        except BaseException as error:
            lease.release()
            if isinstance(error, Exception):
                self._check_open()
            raise
        return lease

    def wait_layer(self, layer: int) -> None:
        """Have the current stream wait for the current step's weights at ``layer`` and before.

        For an engine with layers of its own, before the first LoRA op of a layer, while
        ``arriving``; a bound module does it by itself. All ops of a step run on one stream.

        Raises:
            SpecError: the caller is compiled, or the stream captured.
        """
        if self.current is not None and self.arriving:
            if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
                raise SpecError(
                    "a step begun layerwise runs modules that are neither compiled nor captured, "
                    "for they wait for weights on their way: begin this one without layerwise"
                )
            self._wait(self.current, layer)
            self.arriving = bool(self.current._arriving)

    def prefetch(self, names: Iterable[str]) -> None:
        """Start making adapters resident ahead of the step that names them.

        Only slots and bytes that no step leases are used; without them the adapter stops at the
        host. Let none be under way while a CUDA graph is captured.

        Raises:
            UnknownAdapter: a name that the spec does not serve.
            PoolExhausted: the pool is closed.
        """
        registrations = [self.spec.registration(name) for name in names]
        with self._lock:
            self._check_open()
            for registration in registrations:
                self._loader.submit(self._prefetch, registration)

    def read(self, path: str) -> LoraImage:
        """Read, check and pack the adapter at ``path``, which need not be registered yet.

        Raises:
            AdapterError: it cannot be served. Nothing was changed.
            PoolExhausted: the pool is closed.
        """
        self._check_open()
        return self._store.read(path)

    def adopt(self, registration: Registration, image: LoraImage) -> None:
        """Keep on the host what ``read`` returned for the path that was then registered."""
        self._store.put(registration, image)

    def unload(self, name: str) -> None:
        """Free what ``name`` stood for, once the spec no longer serves it.

        That is its images now, and a leased slot when its last lease ends.
        """
        self._store.drop(name)
        with self._lock:
            for slot in self._slots:
                held = slot.holds
                if held is not None and held.name == name and not self.spec.serves(held):
                    self._forget(slot)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
        self._loader.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._arena.close()
            self._plan_memory.close()
            self._store.close()
            for site in self._sites.values():  # bound modules hold them
                site.close()
            self._sites.clear()
            self._slot_of.clear()
            self._slots.clear()
            self.current, self.active, self.arriving = None, False, False

    def _check_open(self) -> None:
        if not self._is_open:
            raise PoolExhausted("the pool is closed: build another")

    def _read(self, step: LoraStep) -> tuple[_host.Step, list[int]]:
        """A step's segments, and the rows that a linear of each row grouping sees of them."""
        try:
            segments = _host.Step(step.segments or ())
            rows = segments.rows(self._groupings)
        except ValueError as error:
            raise PlanMismatch(str(error)) from None
        if self._fixed_rows is not None and (most := max(rows, default=0)) > self._fixed_rows:
            raise PlanMismatch(
                f"the step has {most} rows, the pool's max_rows is {self._fixed_rows}: "
                "split the step or build the pool with more"
            )
        return segments, rows

    def _set_current(self, lease: LoraLease | None) -> None:
        with self._lock:
            self._check_open()
            self.current, self.active = lease, lease is not None and not lease.base_only
            self.arriving = lease is not None and bool(lease._arriving)

    def _acquire(self, wanted: list[Registration], held: list[Slot] | None) -> None:
        """Install the adapters that have no slot; lease the slots of all, appended to ``held``.

        Images are read without the lock, so residency is looked at again after every read.

        Args:
            held: ``None`` leases nothing.
        """
        images: dict[Registration, LoraImage] = {}
        while True:
            with self._lock:
                self._check_open()
                is_done = _host.lease(self._slot_of, wanted, self._clock + 1, held)
                missing = {}
                if not is_done:
                    missing = dict.fromkeys(r for r in wanted if r not in self._slot_of)
                    kept = {self._slot_of[r] for r in wanted if r in self._slot_of}
                    free = self._free_slots(kept, len(missing))
                    if all(registration in images for registration in missing):
                        installed = {r: images[r] for r in missing}
                        self._install(installed, free, move_leased=held is not None)
                        is_done = _host.lease(self._slot_of, wanted, self._clock + 1, held)
                if is_done:
                    self._clock += 1
                    self._counts["hits"] += len(wanted) - len(missing)
                    self._counts["misses"] += len(missing)
                    for registration in missing:
                        if not self.spec.serves(registration):  # it was unloaded meanwhile
                            self._forget(self._slot_of[registration])
                    return
            for registration in missing:
                if registration not in images:
                    images[registration] = self._store.get(registration)

    def _free_slots(self, kept: Set[Slot], count: int) -> list[Slot]:
        """The slots to install in, at least ``count``: empty ones, then by their last use."""
        distinct = count + len(kept)
        if distinct > len(self._slots):
            raise PoolExhausted(
                f"the step names {distinct} adapters, the pool has {len(self._slots)} slots: "
                "split the step or raise max_slots"
            )
        free = [slot for slot in self._slots if slot.leases == 0 and slot not in kept]
        if len(free) < count:
            raise PoolExhausted(
                f"{count} adapters need slots, {len(free)} of {len(self._slots)} are not "
                "leased: release earlier steps first or raise max_slots"
            )
        free.sort(key=lambda slot: (slot.holds is not None, slot.used_at))
        return free

    def _install(
        self, images: Mapping[Registration, LoraImage], free: Sequence[Slot], *, move_leased: bool
    ) -> None:
        """Copy each image to one of ``free``, evicting others of them where slots or bytes lack.

        A step that begins may have what earlier steps lease moved, for their kernels are enqueued
        and the move follows them; a prefetch, which comes at any time, may not.
        """
        fixed = {slot.index for slot in self._slots if slot.leases and not move_leased}
        plan = self._arena.plan(list(images.values()), free, fixed)
        for slot in plan.evicted:
            self._forget(slot)
        try:
            for registration, slot in zip(images, plan.slots, strict=True):
                slot.holds = registration
            self._arena.install(plan)
        except BaseException:  # what may be half written serves nobody
            for slot in (*plan.slots, *(slot for slot, _ in plan.moves)):
                self._forget(slot)
            raise
        self._slot_of.update(zip(images, plan.slots, strict=True))
        self._counts["evictions"] += len(plan.evicted)
        self._counts["copies"] += len(plan.images)
        self._counts["copied_bytes"] += sum(image.data.numel() for image in plan.images)
        self._counts["moves"] += len(plan.moves)
        self._counts["moved_bytes"] += sum(len(move.source) for _, move in plan.moves)

    def _wait(self, lease: LoraLease, layer: int) -> None:
        """Have the current stream wait for what of a lease's images is at ``layer`` and before."""
        while lease._arriving and lease._arriving[0][0] <= layer:
            torch.cuda.current_stream(self.device).wait_event(lease._arriving.pop(0)[1])

    def _forget(self, slot: Slot) -> None:
        """Let no later step find what a slot holds; it is free once no step leases it."""
        if slot.holds is not None:
            if self._slot_of.get(slot.holds) is slot:
                del self._slot_of[slot.holds]
            if slot.leases == 0:
                self._arena.vacate(slot)

    def _prefetch(self, registration: Registration) -> None:
        with suppress(LoraError):  # the step that names it will say what is wrong
            try:
                self._acquire([registration], None)
            except PoolExhausted:
                self._store.get(registration)

    def _release(self, lease: LoraLease) -> None:
        with self._lock:
            idle = None
            if self._arena.stream is not None and lease._slots:
                idle = self._arena.mark()
            for slot in _host.release(lease._slots, idle, self._slot_of):
                self._arena.vacate(slot)  # it was unloaded while leased
            if self.current is lease:
                self.current, self.active, self.arriving = None, False, False
