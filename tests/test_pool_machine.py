"""The pool against a model of what each row must compute, over random sequences of operations.

On a CUDA device nothing waits for its kernels until a sequence ends, and both streams are held up,
so that a copy or a kernel that does not wait for the other finds the wrong weights.
``LORAMUX_TEST_STEPS`` sets how many operations are run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from common import LOAD_FAULTS, random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, StepPlan, lora_apply_
from loramux.config import LoraModuleRef, Registration
from loramux.errors import LoraError, PlanMismatch, PoolExhausted, UnknownAdapter

STEPS, STEPS_A_SEQUENCE = int(os.environ.get("LORAMUX_TEST_STEPS", 1200)), 30
WIDTH, RANKS, MAX_SLOTS, CAPACITY = 16, (4, 20, 10), 3, 2
UNIT = 2 * 8 * WIDTH * 4  # bytes of A and B of a module at a padded rank of 8, in float32
HELD_UP = 200_000  # clock cycles, about 0.1 ms
NAMES = "abcd"
TARGETS = {"q": LoraTarget(WIDTH, (WIDTH,)), "v": LoraTarget(WIDTH, (WIDTH,), per_segment=True)}
INPUT = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))

names = st.sampled_from(NAMES)
modules = st.sampled_from(["q", "v", "qv"])
indices = st.integers(0, 20)
segments = st.lists(
    st.builds(
        Segment,
        st.sampled_from([*NAMES, None]) | indices,  # an index is of a registration that is held
        st.integers(0, 4),
        st.sampled_from([1.0, 0.5, -2.0]),
    ),
    max_size=6,
)


class Weights:
    """One registration of a name: what its rows compute."""

    def __init__(self, name, version, modules):
        self.name, self.version = name, version
        rank = RANKS[version % len(RANKS)]
        self.pairs = {m: random_pair(rank, WIDTH, WIDTH, 2 * version + (m == "q")) for m in modules}
        self.bytes = -(-rank // 8) * UNIT * len(modules)

    def delta(self, target, x):
        if target not in self.pairs:
            return torch.zeros_like(x)
        a, b = self.pairs[target]
        return x @ a.T @ b.T


class Hold:
    """What the model knows of a leased slot."""

    def __init__(self, weights):
        self.weights, self.leases = weights, 0


class Begun:
    """What the model knows of a step: ``rows`` are (weights or none, length, scale) a segment,
    ``holds`` come in the order its lease has them."""

    def __init__(self, lease, rows, holds):
        self.lease, self.rows, self.holds = lease, rows, holds
        self.released = False


class PoolMachine(RuleBasedStateMachine):
    device = "cpu"
    max_slots, arena_bytes = MAX_SLOTS, None

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.spec = LoraSpec(
            "lora", {"n"}, 1, TARGETS,
            lambda name: LoraModuleRef(name, 0) if name in TARGETS else None,
            max_slots=self.max_slots, arena_bytes=self.arena_bytes, max_rank=24,
            cpu_capacity=CAPACITY,
        )  # fmt: skip
        if self.device == "cuda":
            self.stream_before = torch.cuda.current_stream()
            torch.cuda.set_stream(torch.cuda.Stream())
        self.pool = LoraPool.build(self.spec, device=self.device)
        self.input = INPUT.to(self.device)
        self.served: dict[str, Weights] = {}
        self.weights: dict[Registration, Weights] = {}
        self.held: list[Registration] = []  # once for every hold
        self.holds: list[Hold] = []
        self.steps: list[Begun] = []
        self.current: Begun | None = None
        self.unchecked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.version = 0

    @initialize()
    def register_all(self):
        for name in NAMES:
            self.register(name, "qv")

    @rule(name=names, modules=modules)
    def register(self, name, modules):
        """Again, most often: without unloading first, and over the same path unless it is held."""
        path = self.root / name
        if any(str(path) == registration.path for registration in self.held):
            path = self.root / f"{name}{self.version}"
        self.served[name] = self.write(path, name, modules)
        registration = self.spec.add_adapter(name, str(path))
        self.weights[registration] = self.served[name]

    @rule(name=names)
    def hold(self, name):
        """A request is admitted."""
        if name in self.served:
            registration = self.spec.hold(name)
            assert self.weights[registration] is self.served[name]
            self.held.append(registration)
        else:
            with pytest.raises(UnknownAdapter):
                self.spec.hold(name)

    @rule(index=indices)
    @precondition(lambda self: self.held)
    def release_hold(self, index):
        """A request ends: what only it held is gone."""
        registration = self.held.pop(index % len(self.held))
        self.spec.release(registration)
        if registration in self.held or self.is_current(registration):
            assert self.spec.serves(registration)
        else:
            self.pool.unload(registration.name)
            self.refused(LoraStep((Segment(registration, 1),)), UnknownAdapter)

    @rule(name=names)
    def remove(self, name):
        if name in self.served:
            del self.served[name]
            self.spec.remove_adapter(name)
        self.unload(name)

    @rule(name=names)
    def unload(self, name):
        """Frees what the name stood for before; nothing of what it stands for now."""
        self.pool.unload(name)

    @rule(wanted=st.lists(names | indices, max_size=3))
    def prefetch(self, wanted):
        wanted = [adapter for adapter in map(self.named, wanted) if adapter is not None]
        self.hold_up_copies()
        if all(self.weights_of(adapter) for adapter in wanted):
            self.pool.prefetch(wanted)
            self.pool._loader.submit(int).result()
        else:
            with pytest.raises(UnknownAdapter):
                self.pool.prefetch(wanted)

    @rule(segments=segments)
    def begin(self, segments):
        segments = [segment._replace(adapter=self.named(segment.adapter)) for segment in segments]
        named = list(dict.fromkeys(s.adapter for s in segments if s.adapter and s.length))
        step = LoraStep(tuple(segments))
        wanted = [self.weights_of(adapter) for adapter in named]
        if None in wanted:
            return self.refused(step, UnknownAdapter)
        holds = {hold.weights: hold for hold in self.holds}
        leased_then = {*holds, *wanted}
        fits = self.arena_bytes is None or sum(w.bytes for w in leased_then) <= self.arena_bytes
        if not fits or len(leased_then) > self.max_slots:
            return self.refused(step, PoolExhausted)
        for weights in wanted:
            if weights not in holds:
                holds[weights] = Hold(weights)
                self.holds.append(holds[weights])
            holds[weights].leases += 1
        self.hold_up_copies()
        rows = [(self.weights_of(s.adapter), s.length, s.scale) for s in segments]
        lease = self.pool.begin_step(step)
        self.current = Begun(lease, rows, [holds[weights] for weights in wanted])
        self.steps.append(self.current)
        return None

    @rule(index=indices)
    @precondition(lambda self: self.steps)
    def release(self, index):
        """Of any step, one that was released before included."""
        begun = self.steps[index % len(self.steps)]
        begun.lease.release()
        if begun.released:
            return
        begun.released = True
        for hold in begun.holds:
            hold.leases -= 1
        self.holds = [hold for hold in self.holds if hold.leases]
        if self.current is begun:
            self.current = None

    @rule(wanted=st.lists(names, min_size=1, max_size=4))
    def run(self, wanted):
        """Steps that each end before the next: adapters rotate through the slots."""
        for name in wanted:
            before = len(self.steps)
            self.begin([Segment(name, 1)])
            if len(self.steps) > before:
                self.release(before)

    @rule(beside=segments, fault=st.sampled_from(list(LOAD_FAULTS)))
    def fail_load(self, beside, fault):
        """A step of any length whose last adapter cannot be loaded."""
        beside = [segment._replace(adapter=self.named(segment.adapter)) for segment in beside]
        self.write(self.root / "bad", "bad", "qv")
        self.spec.add_adapter("bad", str(self.root / "bad"))
        with LOAD_FAULTS[fault](self.root / "bad"):
            step = LoraStep((*beside, Segment("bad", 40)))
            self.refused(step, (LoraError, torch.OutOfMemoryError))
            self.pool.prefetch(["bad"])
            self.pool._loader.submit(int).result()
        self.spec.remove_adapter("bad")
        self.pool.unload("bad")

    @invariant()
    def rows_of_the_current_step(self):
        for begun in self.steps:
            if begun is not self.current:
                with pytest.raises(PlanMismatch):
                    begun.lease.plan(1)
        assert self.pool.active == bool(self.current and self.current.holds)
        if self.current is None:
            return
        for target, grouping in (("q", 1), ("v", 0)):
            want = []
            for weights, length, scale in self.current.rows:
                count = length if grouping else min(length, 1)
                x = INPUT[len(want) : len(want) + count]
                want.extend(weights.delta(target, x) * scale if weights else 0 * x)
            self.check(target, self.current.lease.plan(grouping), want)

    @invariant()
    def leased_slots_keep_their_weights(self):
        for begun in self.steps:
            if begun.released:
                continue
            indices = [slot.index for slot in begun.lease._slots]
            plan = StepPlan.for_rows(indices, self.spec.num_slots, self.device)
            for target in TARGETS:
                rows = zip(begun.holds, INPUT, strict=False)
                self.check(target, plan, [hold.weights.delta(target, x) for hold, x in rows])

    @invariant()
    def nothing_is_kept_without_a_reason(self):
        counters = self.pool.counters
        served = {*self.served, *(registration.name for registration in self.held)}
        assert set(counters["resident"]) <= served | {hold.weights.name for hold in self.holds}
        assert set(counters["on_host"]) <= served
        assert len(counters["on_host"]) <= CAPACITY
        assert sum(slot.leases for slot in self.pool._slots) == sum(h.leases for h in self.holds)
        found = self.pool._slot_of
        for slot in self.pool._slots:
            assert slot.leases or slot.holds is None or found[slot.holds] is slot
        placed = self.pool._arena._placement.spans
        assert set(placed) == {slot.index for slot in self.pool._slots if slot.holds}

    def teardown(self):
        self.check_rows()
        for begun in self.steps:
            begun.lease.release()
        while self.held:
            self.release_hold(0)
        for name in NAMES:
            self.remove(name)
        assert self.pool.counters["resident"] == self.pool.counters["on_host"] == []
        self.pool.close()
        self.folder.cleanup()
        if self.device == "cuda":
            torch.cuda.set_stream(self.stream_before)

    def write(self, path, name, modules):
        self.version += 1
        weights = Weights(name, self.version, modules)
        save_adapter(path, weights.pairs)
        return weights

    def named(self, adapter):
        """What a segment names: a held registration for an index, none where nothing is held."""
        if isinstance(adapter, int):
            return self.held[adapter % len(self.held)] if self.held else None
        return adapter

    def weights_of(self, adapter):
        held = isinstance(adapter, Registration)
        return self.weights[adapter] if held else self.served.get(adapter)

    def is_current(self, registration):
        return self.served.get(registration.name) is self.weights[registration]

    def refused(self, step, error):
        before = self.device_state()
        with pytest.raises(error):
            self.pool.begin_step(step)
        assert self.device_state() == before

    def device_state(self):
        """All but the host tier, which may keep what it read for a step that was refused."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        pool, counters = self.pool, self.pool.counters
        del counters["on_host"], counters["load_seconds"]
        slots = [(slot.holds, slot.leases, slot.used_at) for slot in pool._slots]
        plans = [(plan.buffer.tolist(), plan.rows) for plan in pool._plans.values()]
        return (
            counters,
            slots,
            plans,
            pool._arena.weights.tolist(),
            pool._arena.table.tolist(),
            pool.current,
        )

    def hold_up_copies(self):
        if self.device == "cuda":
            with torch.cuda.stream(self.pool._arena.stream):
                torch.cuda._sleep(HELD_UP)

    def check(self, target, plan, want):
        if self.device == "cuda":
            torch.cuda._sleep(HELD_UP)
        y = torch.zeros(len(want), WIDTH, device=self.device)
        lora_apply_(y, self.input[: len(want)], self.pool.site(target, 0), plan)
        if want:
            self.unchecked.append((y, torch.stack(want)))
        if self.device == "cpu":
            self.check_rows()

    def check_rows(self):
        for y, want in self.unchecked:
            torch.testing.assert_close(y.cpu(), want, rtol=1e-4, atol=1e-4)
        self.unchecked.clear()


class ArenaMachine(PoolMachine):
    """Adapters of 1 to 6 units in the bytes of 9: they fit if their bytes do."""

    max_slots, arena_bytes = 6, 9 * UNIT + 100


class CudaPoolMachine(PoolMachine):
    device = "cuda"


class CudaArenaMachine(ArenaMachine):
    device = "cuda"


for machine in (PoolMachine, ArenaMachine, CudaPoolMachine, CudaArenaMachine):
    machine.TestCase.settings = settings(
        max_examples=-(-STEPS // STEPS_A_SEQUENCE),
        stateful_step_count=STEPS_A_SEQUENCE,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
TestPool_C082_C083_C086_C094_C098_C127_C131 = PoolMachine.TestCase
TestArena_C082_C083_C086_C094_C098_C127_C131 = ArenaMachine.TestCase
TestCudaPool_C082_C083_C086_C094_C098_C127_C131 = pytest.mark.cuda(CudaPoolMachine.TestCase)
TestCudaArena_C082_C083_C086_C094_C098_C127_C131 = pytest.mark.cuda(CudaArenaMachine.TestCase)
