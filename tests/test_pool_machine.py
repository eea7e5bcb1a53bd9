"""The pool against a model of what each row must compute, over random sequences of operations."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from common import random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, StepPlan, lora_apply_
from loramux.config import LoraModuleRef
from loramux.errors import LoraError, PlanMismatch, PoolExhausted, UnknownAdapter

WIDTH, RANK, MAX_SLOTS, CAPACITY = 16, 4, 3, 2
NAMES = "abcd"
TARGETS = {"q": LoraTarget(WIDTH, (WIDTH,)), "v": LoraTarget(WIDTH, (WIDTH,), per_segment=True)}
INPUT = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))

names = st.sampled_from(NAMES)
modules = st.sampled_from(["q", "v", "qv"])
segments = st.lists(
    st.builds(
        Segment,
        st.sampled_from([*NAMES, None]),
        st.integers(0, 4),
        st.sampled_from([1.0, 0.5, -2.0]),
    ),
    max_size=6,
)


class Weights:
    """One registration of a name: what its rows compute."""

    def __init__(self, name, version, modules):
        self.name, self.version = name, version
        self.pairs = {m: random_pair(RANK, WIDTH, WIDTH, 2 * version + (m == "q")) for m in modules}

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
    """What the model knows of a step: ``holds`` in the order its lease has them."""

    def __init__(self, lease, segments, holds):
        self.lease, self.segments, self.holds = lease, segments, holds
        self.released = False


def refuse_image_memory(*shape, pin_memory=None, empty=torch.empty, **options):
    if pin_memory is not None:
        raise torch.OutOfMemoryError("no memory for the image")
    return empty(*shape, **options)


FAULTS = {
    "cut file": lambda path: truncate(path / "adapter_model.safetensors"),
    "disk error": lambda path: mock.patch(
        "loramux.adapter_files._fill", side_effect=OSError(errno.EIO, "Input/output error")
    ),
    "out of host memory": lambda path: mock.patch("torch.empty", refuse_image_memory),
    "out of memory for the table row": lambda path: mock.patch(
        "loramux.store.LoraImage.table_row", side_effect=torch.OutOfMemoryError("no memory")
    ),
}


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])
    return mock.MagicMock()


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.spec = LoraSpec(
            "lora", {"n"}, 1, TARGETS,
            lambda name: LoraModuleRef(name, 0) if name in TARGETS else None,
            max_slots=MAX_SLOTS, max_rank=8, cpu_capacity=CAPACITY,
        )  # fmt: skip
        self.pool = LoraPool.build(self.spec)
        self.served: dict[str, Weights] = {}
        self.holds: list[Hold] = []
        self.steps: list[Begun] = []
        self.current: Begun | None = None
        self.version = 0

    @initialize()
    def register_all(self):
        for name in NAMES:
            self.register(name, "qv")

    @rule(name=names, modules=modules)
    def register(self, name, modules):
        """Again, most often: over the same path, without unloading first."""
        self.served[name] = self.write(name, modules)
        self.spec.add_adapter(name, str(self.root / name))

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

    @rule(wanted=st.lists(names, max_size=3))
    def prefetch(self, wanted):
        if all(name in self.served for name in wanted):
            self.pool.prefetch(wanted)
            self.pool._loader.submit(int).result()
        else:
            with pytest.raises(UnknownAdapter):
                self.pool.prefetch(wanted)

    @rule(segments=segments)
    def begin(self, segments):
        wanted = list(dict.fromkeys(s.adapter for s in segments if s.adapter and s.length))
        step = LoraStep(tuple(segments))
        if not all(name in self.served for name in wanted):
            return self.refused(step, UnknownAdapter)
        held = {hold.weights: hold for hold in self.holds}
        holds = [held.get(self.served[name]) for name in wanted]
        if len(wanted) > MAX_SLOTS or holds.count(None) > MAX_SLOTS - len(self.holds):
            return self.refused(step, PoolExhausted)
        for i, name in enumerate(wanted):
            if holds[i] is None:
                holds[i] = Hold(self.served[name])
                self.holds.append(holds[i])
            holds[i].leases += 1
        self.current = Begun(self.pool.begin_step(step), segments, holds)
        self.steps.append(self.current)
        return None

    @rule(index=st.integers(0, 20))
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

    @rule(beside=segments, fault=st.sampled_from(list(FAULTS)))
    def fail_load(self, beside, fault):
        """A step of any length whose last adapter cannot be loaded."""
        self.write("bad", "qv")
        self.spec.add_adapter("bad", str(self.root / "bad"))
        with FAULTS[fault](self.root / "bad"):
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
        served = {hold.weights.name: hold.weights for hold in self.current.holds}
        for target, grouping in (("q", 1), ("v", 0)):
            want = []
            for name, length, scale in self.current.segments:
                count = length if grouping else min(length, 1)
                x = INPUT[len(want) : len(want) + count]
                want.extend(served[name].delta(target, x) * scale if name in served else 0 * x)
            self.check(target, self.current.lease.plan(grouping), want)

    @invariant()
    def leased_slots_keep_their_weights(self):
        for begun in self.steps:
            if begun.released:
                continue
            indices = [slot.index for slot in begun.lease._slots]
            plan = StepPlan.for_rows(indices, self.spec.num_slots)
            for target in TARGETS:
                rows = zip(begun.holds, INPUT, strict=False)
                self.check(target, plan, [hold.weights.delta(target, x) for hold, x in rows])

    @invariant()
    def nothing_is_kept_without_a_reason(self):
        counters = self.pool.counters
        allowed = set(self.served) | {hold.weights.name for hold in self.holds}
        assert set(counters["resident"]) <= allowed
        assert set(counters["on_host"]) <= set(self.served)
        assert len(counters["on_host"]) <= CAPACITY
        assert sum(slot.leases for slot in self.pool._slots) == sum(h.leases for h in self.holds)
        found = self.pool._slot_of
        for slot in self.pool._slots:
            assert slot.leases or slot.holds is None or found[slot.holds] is slot

    def teardown(self):
        for begun in self.steps:
            begun.lease.release()
        for name in NAMES:
            self.remove(name)
        assert self.pool.counters["resident"] == self.pool.counters["on_host"] == []
        self.pool.close()
        self.folder.cleanup()

    def write(self, name, modules):
        self.version += 1
        weights = Weights(name, self.version, modules)
        save_adapter(self.root / name, weights.pairs)
        return weights

    def refused(self, step, error):
        before = self.device_state()
        with pytest.raises(error):
            self.pool.begin_step(step)
        assert self.device_state() == before

    def device_state(self):
        """All but the host tier, which may keep what it read for a step that was refused."""
        pool, counters = self.pool, self.pool.counters
        del counters["on_host"], counters["load_seconds"]
        slots = [(slot.holds, slot.leases, slot.used_at) for slot in pool._slots]
        plans = [(plan.buffer.tolist(), plan.rows) for plan in pool._plans.values()]
        return counters, slots, plans, pool._arena.tolist(), pool._table.tolist(), pool.current

    def check(self, target, plan, want):
        y = torch.zeros(len(want), WIDTH)
        lora_apply_(y, INPUT[: len(want)], self.pool.site(target, 0), plan)
        if want:
            torch.testing.assert_close(y, torch.stack(want), rtol=1e-4, atol=1e-4)


TestPool_C082_C083_C086_C094_C098_C127_C131 = PoolMachine.TestCase
TestPool_C082_C083_C086_C094_C098_C127_C131.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)
