"""What swapping adapters costs a CUDA device: the copy, its first layer, and the steps beside it.

Adapters of 84 MB rotate through fewer slots than there are adapters. The steps are of a stand-in
for Llama-3.1-8B: its linears with random weights in bfloat16, each with its site, over all layers.

- ``swap_ratio``: the time of one pinned copy of an adapter's bytes over that of a swap-in of them.
- ``first_layer_us``: from the copy's start until a step's stream may read the first layer.
- ``swap_slowdown``: decode steps replayed from one CUDA graph, an adapter swapped in every 10 of
  them, over the same without swaps: prefetched a few steps ahead, and by the step that names it.
- ``prefetch_exposed_us``: by how much later a decode step behind a 1k-token prefill ends when its
  adapter is prefetched as the prefill begins, over one that is resident. By the events of the two
  streams the copy ends ``ahead_us`` before the prefill does; ``host_us`` is what the prefetch adds
  to the time in which the host enqueues the prefill.

All but the slowdown hold a stream back until the host is ahead, so that they time the device alone.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, lora_apply_
from loramux.config import LoraModuleRef

from .common import SITES

SLICES = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
NAMES = [f"adapter-{i}" for i in range(12)]
ACTIVE, SLOTS = 8, 9  # adapters in a step; one slot is free to swap into
ROWS, PREFILL_ROWS = 32, 1024
STEPS, EVERY, AHEAD = 1000, 10, 5  # a prefetch is AHEAD steps before its adapter's first step
ROUNDS = 2  # of the decode loops, which take turns
HELD_CYCLES = 2_000_000  # about a millisecond


@torch.inference_mode()
def swap_rows(path: str, layers: int, turns: int) -> Iterator[dict[str, Any]]:
    """All figures, of one adapter under many names: modules ``{layer}.{slice}`` at ``path``."""
    pool = build_pool(path, layers)
    absent = itertools.cycle(NAMES)  # in turn, of more than there are slots: never resident
    yield swap_row(pool, absent, turns)
    yield first_layer_row(pool, absent, layers, turns)
    stack = Stack(pool, layers)
    graph = capture(pool, stack)
    yield slowdown_row(pool, graph)
    yield exposed_row(pool, stack, graph, turns)
    pool.close()


def build_pool(path: str, layers: int) -> LoraPool:
    """A pool with every adapter in host memory."""
    target_of = {part: name for name, parts in SLICES.items() for part in parts}

    def place(module: str) -> LoraModuleRef:
        layer, _, part = module.partition(".")
        return LoraModuleRef(target_of[part], int(layer), part)

    targets = {
        shape.name: LoraTarget(shape.width_in, shape.widths, slice_names=SLICES[shape.name])
        for shape in SITES.values()
    }
    spec = LoraSpec(
        "lora", {"model"}, layers, targets, place, max_slots=SLOTS, max_rank=16,
        cpu_capacity=len(NAMES), adapters=dict.fromkeys(NAMES, path), dtype=torch.bfloat16,
    )  # fmt: skip
    pool = LoraPool.build(spec, device="cuda", max_rows=PREFILL_ROWS)
    for name in NAMES:
        use(pool, name)
    return pool


class Stack:
    """The decoder's linears, their sites and what little joins them; attention is left out."""

    def __init__(self, pool: LoraPool, layers: int) -> None:
        self.plan = pool.plan(1)
        self.decode_x, self.prefill_x = (
            torch.randn(rows, SITES["qkv"].width_in, dtype=torch.bfloat16, device="cuda")
            for rows in (ROWS, PREFILL_ROWS)
        )
        self.layers = [
            {
                name: (pool.site(name, layer), random_weight(sum(shape.widths), shape.width_in))
                for name, shape in SITES.items()
            }
            for layer in range(layers)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            qkv = self.linear(layer["qkv"], x)
            x = x + self.linear(layer["o"], qkv[:, : x.shape[1]])
            gate, up = self.linear(layer["gate_up"], F.rms_norm(x, x.shape[1:])).chunk(2, 1)
            x = F.rms_norm(x + self.linear(layer["down"], F.silu(gate) * up), x.shape[1:])
        return x

    def linear(self, weights: tuple[Any, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        site, weight = weights
        return lora_apply_(F.linear(x, weight), x, site, self.plan)


def random_weight(out: int, width_in: int) -> torch.Tensor:
    return torch.empty(out, width_in, dtype=torch.bfloat16, device="cuda").normal_(
        std=width_in**-0.5
    )


def use(pool: LoraPool, *names: str) -> None:
    """A step of no kernel: makes adapters resident, and those used last."""
    pool.begin_step(decode_step(names)).release()


def decode_step(names: Sequence[str]) -> LoraStep:
    """A row each for ``ROWS`` requests, over adapters in turn."""
    return LoraStep(tuple(Segment(names[i % len(names)], 1) for i in range(ROWS)))


def events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def held(stream: torch.cuda.Stream, start: torch.cuda.Event) -> None:
    """Let what is enqueued on ``stream`` from now on start a millisecond later, at ``start``."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HELD_CYCLES)
        start.record()


def swap_row(pool: LoraPool, absent: Iterator[str], turns: int) -> dict[str, Any]:
    copies = pool._arena.stream
    image = pool._store.get(pool.spec.registration(NAMES[0])).data
    target = torch.empty_like(image, device="cuda")

    def copy() -> None:
        with torch.cuda.stream(copies):
            target.copy_(image, non_blocking=True)

    def us(enqueue: Callable[[], None]) -> float:
        start, end = events(2)
        held(copies, start)
        enqueue()
        end.record(copies)
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    before, swaps, plain = pool.counters["copies"], [], []
    for _ in range(turns):
        swaps.append(us(lambda: use(pool, next(absent))))
        plain.append(us(copy))
    assert pool.counters["copies"] == before + turns, "every turn swaps an adapter in"
    return {
        "figure": "swap_ratio",
        "value": round(median(plain) / median(swaps), 4),
        "swap_us": round(median(swaps), 1),
        "copy_us": round(median(plain), 1),
        "bytes": image.numel(),
        "copy_gb_s": round(image.numel() / median(plain) / 1e3, 1),
    }


def first_layer_row(
    pool: LoraPool, absent: Iterator[str], layers: int, turns: int
) -> dict[str, Any]:
    copies = pool._arena.stream
    firsts, wholes, from_begins = [], [], []
    for turn in range(2 * turns):
        start, first, whole = events(3)
        hold = turn % 2 == 0  # else timed from begin_step on, as an engine sees it
        if hold:
            held(copies, start)
        else:
            torch.cuda.synchronize()
            start.record()
        with pool.begin_step(decode_step([next(absent)]), layerwise=True):
            assert pool.arriving
            pool.wait_layer(0)
            first.record()
            pool.wait_layer(layers - 1)
            whole.record()
        torch.cuda.synchronize()
        (firsts if hold else from_begins).append(start.elapsed_time(first) * 1e3)
        if hold:
            wholes.append(start.elapsed_time(whole) * 1e3)
    return {
        "figure": "first_layer_us",
        "value": round(median(firsts), 1),
        "whole_us": round(median(wholes), 1),
        "from_begin_step_us": round(median(from_begins), 1),
        "worst_us": round(max(firsts), 1),
    }


def capture(pool: LoraPool, stack: Stack) -> torch.cuda.CUDAGraph:
    """A decode step, to be replayed with any plan of ``ROWS`` rows."""
    with pool.begin_step(decode_step(NAMES[:ACTIVE])):
        stack(stack.decode_x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stack(stack.decode_x)
    return graph


def slowdown_row(pool: LoraPool, graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    times: dict[str, list[float]] = {"no swap": [], "prefetched": [], "by the step": []}
    for kind in list(times) * ROUNDS:
        use(pool, NAMES[-1])
        use(pool, *NAMES[:ACTIVE])  # and all slots are taken
        before = pool.counters["copies"]
        times[kind].append(decode_ms(pool, graph, kind) / STEPS * 1e3)
        swaps = pool.counters["copies"] - before
        assert swaps == (0 if kind == "no swap" else STEPS // EVERY), f"{kind}: {swaps} swaps"
    base = min(times["no swap"])
    return {
        "figure": "swap_slowdown",
        "value": round(min(times["prefetched"]) / base, 4),
        "by_the_step": round(min(times["by the step"]) / base, 4),
        "step_us": [round(us, 1) for us in times["no swap"]],
        "prefetched_step_us": [round(us, 1) for us in times["prefetched"]],
        "by_the_step_us": [round(us, 1) for us in times["by the step"]],
        "steps": STEPS,
        "swaps": STEPS // EVERY,
        "rows": ROWS,
        "adapters": ACTIVE,
    }


def decode_ms(pool: LoraPool, graph: torch.cuda.CUDAGraph, kind: str) -> float:
    """Milliseconds of ``STEPS`` steps, the oldest adapter replaced in every ``EVERY``-th.

    The host is one step ahead of the device, as an engine is that samples.
    """
    active, others = NAMES[:ACTIVE], itertools.cycle(NAMES[ACTIVE:] + NAMES[:ACTIVE])
    step, coming = decode_step(active), next(others)
    start, end = events(2)
    done: deque[torch.cuda.Event] = deque()
    torch.cuda.synchronize()
    start.record()
    for i in range(STEPS):
        if len(done) == 2:
            done.popleft().synchronize()
        if kind == "prefetched" and i % EVERY == EVERY - 1 - AHEAD:
            pool.prefetch([coming])
        if kind != "no swap" and i % EVERY == EVERY - 1:
            active = [*active[1:], coming]
            step, coming = decode_step(active), next(others)
        with pool.begin_step(step):
            graph.replay()
        done.extend(events(1))
        done[-1].record()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def exposed_row(
    pool: LoraPool, stack: Stack, graph: torch.cuda.CUDAGraph, turns: int
) -> dict[str, Any]:
    """A prefill, then a decode step of another adapter: resident, prefetched or absent."""
    copies, first, then = pool._arena.stream, NAMES[0], NAMES[1]
    totals: dict[str, list[float]] = {"resident": [], "prefetched": [], "absent": []}
    enqueuings: dict[str, list[float]] = {kind: [] for kind in totals}
    prefills, aheads = [], []
    for kind in list(totals) * turns:
        for name in [*NAMES[2:], first]:
            use(pool, name)
        if kind == "resident":
            use(pool, then)
        assert (then in pool.counters["resident"]) == (kind == "resident")
        begun, prefilled, copied, decoded = events(4)
        held(torch.cuda.current_stream(), begun)
        enqueuing = time.perf_counter()
        with pool.begin_step(LoraStep((Segment(first, PREFILL_ROWS),))):
            if kind == "prefetched":
                pool.prefetch([then])
            stack(stack.prefill_x)
            prefilled.record()
        enqueuings[kind].append((time.perf_counter() - enqueuing) * 1e6)
        pool._loader.submit(int).result()  # until the prefetch has enqueued its copies
        copied.record(copies)
        with pool.begin_step(decode_step([then])):
            graph.replay()
            decoded.record()
        torch.cuda.synchronize()
        totals[kind].append(begun.elapsed_time(decoded) * 1e3)
        if kind == "prefetched":
            prefills.append(begun.elapsed_time(prefilled) * 1e3)
            aheads.append(copied.elapsed_time(prefilled) * 1e3)
    resident, prefetched, absent = (median(us) for us in totals.values())
    host_us = median(enqueuings["prefetched"]) - median(enqueuings["resident"])
    return {
        "figure": "prefetch_exposed_us",
        "value": round(prefetched - resident, 1),
        "without_prefetch_us": round(absent - resident, 1),
        "ahead_us": round(min(aheads), 1),
        "host_us": round(host_us, 1),
        "prefill_us": round(median(prefills), 1),
        "prefill_rows": PREFILL_ROWS,
        "resident_us": round(resident, 1),
        "prefetched_us": round(prefetched, 1),
        "absent_us": round(absent, 1),
    }
