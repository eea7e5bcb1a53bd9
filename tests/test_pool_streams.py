"""The pool's stream order without a GPU: its copies and a model's kernels run in any order allowed.

A simulated stream holds back what is enqueued on it, and a scheduler runs the heads of the streams
in random turns, held up only by the events that they wait for. A wait that the pool forgets shows
as a row computed from bytes that are not there yet or no longer there.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.overrides import TorchFunctionMode

from common import random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, StepPlan, lora_apply_
from loramux.config import LoraModuleRef
from loramux.errors import PoolExhausted, SpecError

WIDTH, LAYERS, ROWS = 16, 4, 3
RANKS = dict(zip("abcdefgh", [8, 8, 16, 24, 8, 32, 16, 24], strict=True))
LAYER_BYTES = 2 * WIDTH * 4  # of an adapter of rank 1
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
# Bytes that five of the eight fit in on average; and slots of the highest rank for three.
POOLS = [dict(max_slots=8, arena_bytes=LAYERS * LAYER_BYTES * 80), dict(max_slots=3)]


class Event:
    def __init__(self):
        self.done = False

    def query(self):
        return self.done

    def happens(self):
        self.done = True


class Stream:
    """What is enqueued and has not run: operations, and events to wait for."""

    def __init__(self):
        self.queue = deque()

    def record_event(self):
        event = Event()
        self.queue.append(event.happens)
        return event

    def wait_event(self, event):
        self.queue.append(event)

    def advance(self):
        """Run the next operation if it may; returns whether it did."""
        if not self.queue or (isinstance(self.queue[0], Event) and not self.queue[0].done):
            return False
        head = self.queue.popleft()
        if not isinstance(head, Event):
            head()
        return True

    def synchronize(self):
        while self.queue:
            assert any(stream.advance() for stream in Streams.all), "the streams wait in a circle"


class Enqueued(TorchFunctionMode):
    """Holds back what writes to tensors."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.copy_, torch.Tensor.sub_):
            self.stream.queue.append(partial(func, *args))
            return args[0]
        return func(*args, **(kwargs or {}))


class Streams:
    all: tuple[Stream, ...] = ()


@contextmanager
def simulated(pool):
    """Give a CPU pool a copy stream; yields the compute stream."""
    compute, copies = Streams.all = Stream(), Stream()
    pool._arena.stream = copies
    with (
        mock.patch("torch.cuda.stream", Enqueued),
        mock.patch("torch.cuda.current_stream", return_value=compute),
        mock.patch("loramux.arena.Arena.mark", side_effect=compute.record_event),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        mock.patch("torch.Tensor.pin_memory", lambda tensor: tensor),
        mock.patch("loramux.arena._FIRST_PART", 1),
    ):
        yield compute


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Paths, and the deltas of ``X`` at each layer."""
    root, paths, deltas = tmp_path_factory.mktemp("adapters"), {}, {}
    for name, rank in RANKS.items():
        pairs = {
            str(layer): random_pair(rank, WIDTH, WIDTH, ord(name) * LAYERS + layer)
            for layer in range(LAYERS)
        }
        paths[name] = save_adapter(root / name, pairs)
        deltas[name] = [X @ a.T @ b.T for a, b in pairs.values()]
    return paths, deltas


@mock.patch("loramux.arena._STAGING_BYTES", 5120)  # some moves are shorter, some longer
def build(paths, **fields):
    return LoraPool.build(
        LoraSpec(
            "lora", {"n"}, LAYERS, {"q": LoraTarget(WIDTH, (WIDTH,))},
            lambda name: LoraModuleRef("q", int(name)), adapters=dict(paths), max_rank=32, **fields,
        )
    )  # fmt: skip


def enqueue(pool, compute, lease, names, deltas, between=lambda: None):
    """The kernels of a step of ``names``, a row each, which check themselves when they run."""
    index = {slot.holds.name: slot.index for slot in lease._slots}
    plan = StepPlan.for_rows([index[name] for name in names], pool.spec.num_slots)
    sites = [pool.site("q", layer) for layer in range(LAYERS)]

    def kernel(layer):
        got = lora_apply_(torch.zeros(len(names), WIDTH), X[: len(names)], sites[layer], plan)
        want = torch.stack([deltas[name][layer][i] for i, name in enumerate(names)])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    for layer in range(LAYERS):
        pool.wait_layer(layer)
        compute.queue.append(partial(kernel, layer))
        between()


def run(pool, compute, deltas, rng, steps):
    """Steps, prefetches and unloads in random turns with the streams; returns what was counted."""
    leases, paths = [], dict(pool.spec.adapters)

    def meanwhile(prefetches):
        if rng.random() < prefetches:
            pool._prefetch(pool.spec.registration(rng.choice(list(paths))))
        for _ in range(rng.choice([0, 0, 3, 30])):
            rng.choice(Streams.all).advance()

    for _ in range(steps):
        names = [rng.choice(list(paths)) for _ in range(rng.randint(1, ROWS))]
        step = LoraStep(tuple(Segment(name, 1) for name in names))
        with suppress(PoolExhausted):
            leases.append(pool.begin_step(step, layerwise=rng.random() < 0.5))
            enqueue(pool, compute, leases[-1], names, deltas, partial(meanwhile, 0.05))
        if rng.random() < 0.1:
            pool.spec.add_adapter(names[0], paths[names[0]])
            pool.unload(names[0])
        while leases and (len(leases) > 2 or rng.random() < 0.5):
            leases.pop(rng.randrange(len(leases))).release()
        meanwhile(0.3)
    for lease in leases:
        lease.release()
    for stream in Streams.all:
        stream.synchronize()
    return pool.counters


@pytest.mark.parametrize("fields", POOLS, ids=["arena_bytes", "slots"])
def test_every_order_of_the_streams_computes_the_same(adapters, fields):
    paths, deltas = adapters
    total = dict.fromkeys(("evictions", "moves"), 0)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32))
    def check(seed):
        pool = build(paths, **fields)
        with simulated(pool) as compute:
            counters = run(pool, compute, deltas, random.Random(seed), 40)
            pool.close()
        for name in total:
            total[name] += counters[name]

    check()
    assert total["evictions"] > 100
    assert total["moves"] > 100 if "arena_bytes" in fields else total["moves"] == 0


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_layer_waits_for_its_own_part_of_the_image(adapters, layerwise):
    paths, deltas = adapters
    pool = build(paths, max_slots=2)
    with simulated(pool) as compute:
        copies = pool._arena.stream
        lease = pool.begin_step(LoraStep((Segment("a", 1),)), layerwise=layerwise)
        assert pool.arriving is layerwise
        enqueue(pool, compute, lease, ["a"], deltas)
        parts = sum(hasattr(op, "__self__") for op in copies.queue)
        assert parts > 1, "the image is copied in several parts"
        ran = []
        while copies.queue:
            copies.advance()
            while compute.advance():
                pass
            ran.append(sum(isinstance(op, partial) for op in compute.queue))
        assert ran[-1] == 0
        assert (LAYERS - 1 in ran) is layerwise, "layer 0 has run, the others have not"
        assert not pool.arriving
        lease.release()
        with pool.begin_step(LoraStep((Segment("a", 1),)), layerwise=True):
            assert not pool.arriving, "all has arrived"
        pool.close()


def test_what_a_graph_runs_is_not_begun_layerwise(adapters):
    pool = build(adapters[0], max_slots=2)
    with simulated(pool):
        for captured in ("torch.cuda.is_current_stream_capturing", "torch.compiler.is_compiling"):
            with (
                pool.begin_step(LoraStep((Segment("a", 1),)), layerwise=True),
                mock.patch(captured, return_value=True),
                pytest.raises(SpecError, match="begin this one without layerwise"),
            ):
                pool.wait_layer(0)
        pool.close()


# The same on a CUDA device, where the streams are real.

WIDE, WIDE_LAYERS = 4096, 16
WIDE_BYTES = WIDE_LAYERS * 2 * WIDE * 2  # of an adapter of rank 1, in bfloat16
WIDE_POOLS = [dict(max_slots=8, arena_bytes=WIDE_BYTES * 80), dict(max_slots=3)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Pools of adapters of 2 to 8 MB, and every layer's deltas of ``x`` for each of them."""
    root, pools = tmp_path_factory.mktemp("wide"), []
    paths = {}
    for name, rank in RANKS.items():
        pairs = {str(i): random_pair(rank, WIDE, WIDE, ord(name) + i) for i in range(WIDE_LAYERS)}
        paths[name] = save_adapter(root / name, pairs)

    def make(**fields):
        spec = LoraSpec(
            "lora", {"n"}, WIDE_LAYERS, {"q": LoraTarget(WIDE, (WIDE,))},
            lambda name: LoraModuleRef("q", int(name)), adapters=dict(paths), max_rank=32,
            dtype=torch.bfloat16, **fields,
        )  # fmt: skip
        pools.append(LoraPool.build(spec, device="cuda", max_rows=ROWS))
        return pools[-1]

    x = torch.randn(ROWS, WIDE, dtype=torch.bfloat16, device="cuda")
    all_resident, deltas = make(max_slots=len(RANKS)), {}
    for name in RANKS:
        with all_resident.begin_step(LoraStep((Segment(name, ROWS),))):
            deltas[name] = layers_of(all_resident, x)
        assert deltas[name].count_nonzero(dim=2).min() > WIDE / 2
    yield make, x, deltas
    for pool in pools:
        pool.close()


def layers_of(pool, x):
    """The deltas of the current step, bfloat16 ``[layers, rows, WIDE]``."""
    out = torch.zeros(WIDE_LAYERS, len(x), WIDE, dtype=x.dtype, device=x.device)
    for layer in range(WIDE_LAYERS):
        pool.wait_layer(layer)
        lora_apply_(out[layer], x, pool.site("q", layer), pool.plan(1))
    return out


@pytest.mark.cuda
@pytest.mark.parametrize("fields", WIDE_POOLS, ids=["arena_bytes", "slots"])
def test_no_row_is_wrong_while_adapters_rotate_under_a_busy_stream(wide, fields):
    """The host runs ahead of kernels that are held back, and so of copies that wait for them."""
    make, x, deltas = wide
    pool, rng = make(**fields), random.Random(0)
    leases, checks = [], []
    for _ in range(400):
        names = [rng.choice([*RANKS]) for _ in range(ROWS)]
        torch.cuda._sleep(rng.choice([0, 0, 100_000, 1_000_000]))  # to half a millisecond
        step = LoraStep(tuple(Segment(name, 1) for name in names))
        with suppress(PoolExhausted):
            leases.append(pool.begin_step(step, layerwise=rng.random() < 0.5))
            got = layers_of(pool, x)
            want = torch.stack([deltas[name][:, i] for i, name in enumerate(names)], 1)
            checks.append((got != want).any())
        if rng.random() < 0.3:
            pool.prefetch([rng.choice([*RANKS])])
        if rng.random() < 0.05:
            pool.spec.add_adapter(names[0], pool.spec.adapters[names[0]])
            pool.unload(names[0])
        while leases and (len(leases) > 2 or rng.random() < 0.5):
            leases.pop(rng.randrange(len(leases))).release()
    wrong = torch.stack(checks).nonzero().flatten().tolist()
    assert not wrong, f"steps {wrong} of {len(checks)}"
    assert len(checks) > 200
    assert pool.counters["evictions"] > 100
    moves = pool.counters["moves"]
    assert moves > 50 if "arena_bytes" in fields else moves == 0


@pytest.mark.cuda
def test_the_first_layer_is_usable_before_the_image_is_there(wide):
    make, x, deltas = wide
    pool = make(max_slots=1)
    for name in "fe":  # what is timed below are copies alone: the host holds both
        pool.begin_step(LoraStep((Segment(name, ROWS),))).release()
    for name in "fefefef":
        pool._arena.weights.fill_(float("nan"))  # what was not copied yet shows
        torch.cuda.synchronize()
        with torch.cuda.stream(pool._arena.stream):
            torch.cuda._sleep(2_000_000)  # a millisecond, until all is enqueued
        start, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record(pool._arena.stream)
        with pool.begin_step(LoraStep((Segment(name, ROWS),)), layerwise=True):
            assert pool.arriving
            pool.wait_layer(0)
            first.record()
            got = layers_of(pool, x)
            assert not pool.arriving
            last.record()
        torch.cuda.synchronize()
        assert torch.equal(got, deltas[name])
        assert start.elapsed_time(first) < 0.5 * start.elapsed_time(last)
