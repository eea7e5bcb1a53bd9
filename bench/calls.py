"""What must not cost: slots that a step does not use, decode rows beside prefills more than the two
alone, and the host's side of a call."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from loramux import StepPlan, lora_apply_

from .common import COLD_BYTES, SITES, SiteShape, arena_sites, graphs_us, write_results
from .kernels import call_us

ADAPTERS, RANK = 8, 16
ROWS = (8, 2048)  # of a step in pools
POOLS = (8, 64, 512)
RUN = 100  # eager calls at a time, too few to fill the queue
DECODE = [(slot, 1) for slot in range(9, 65)]  # of a mixed step, (slot, rows) each
PREFILL = [(slot, 249) for slot in range(1, 9)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=10000, help="calls of the dispatch figure")


def run(options: argparse.Namespace) -> None:
    rows = [row for name in SITES for count in ROWS for row in pool_sizes(name, count)]
    for row in rows:
        print("{site:8} {rows:4} rows, 8 adapters in {slots:4} slots: {us:7.3f} us".format(**row))
    for name in SITES:
        for rank in (16, 64):
            rows.append(mixed_step(name, rank))
            print(
                "{site:8} r{rank}, decode rows {decode_us:.2f} us, prefills {prefill_us:.2f}, "
                "both in one step {us:.2f}".format(**rows[-1])
            )
    rows.append(dispatch(options.turns))
    print("eager lora_apply_: {us:.2f} us of host time, y.add_(y): {add_us:.2f}".format(**rows[-1]))
    write_results(options.json, rows)


def pool_sizes(name: str, rows: int) -> list[dict[str, Any]]:
    """The same step of 8 adapters in pools of several sizes that take turns."""
    shape = SITES[name]
    layers = math.ceil(COLD_BYTES / (ADAPTERS * shape.weight_bytes(RANK)))

    def call(slots: int) -> Callable[[int], Any]:
        sites, plan, x, y = _step(shape, rows, slots, layers)
        return lambda i: lora_apply_(y, x, sites[i], plan)

    times = graphs_us([call(slots) for slots in POOLS], layers, 35)
    return [
        {"figure": "pool_size", "site": name, "rows": rows, "slots": slots, "us": round(us, 3)}
        for slots, us in zip(POOLS, times, strict=True)
    ]


def mixed_step(name: str, rank: int) -> dict[str, Any]:
    """Decode rows and prefills in one step, and each of them alone."""

    def us(segments: list[tuple[int, int]]) -> float:
        case = {
            "site": name,
            "rows": sum(count for _, count in segments),
            "adapters": len(segments),
            "slots": len(DECODE) + len(PREFILL),
            "rank": rank,
            "segments": segments,
        }
        return round(call_us(case, None)[0], 2)

    return {
        "figure": "mixed_step",
        "site": name,
        "rank": rank,
        "us": us([*DECODE, *PREFILL]),
        "decode_us": us(DECODE),
        "prefill_us": us(PREFILL),
    }


def dispatch(turns: int) -> dict[str, Any]:
    """Host time of an eager call, and of torch's simplest one, by turns."""
    sites, plan, x, y = _step(SITES["qkv"], ADAPTERS, ADAPTERS, 1)
    calls = {"us": lambda: lora_apply_(y, x, sites[0], plan), "add_us": lambda: y.add_(y)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns // RUN):
        for name, call in calls.items():
            times[name].append(_host_us(call))
    us = {name: round(median(of_call), 2) for name, of_call in times.items()}
    return {"figure": "dispatch", "site": "qkv", "slots": ADAPTERS, **us}


def _host_us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(RUN):
        call()
    return (time.perf_counter() - start) / RUN * 1e6


def _step(shape: SiteShape, rows: int, slots: int, layers: int) -> tuple[Any, StepPlan, Any, Any]:
    dtype = torch.bfloat16
    sites = arena_sites(shape, slots, RANK, layers, dtype, "cuda")
    plan = StepPlan(rows, slots + 1, "cuda", len(shape.widths) * RANK)
    used = [1 + i * (slots // ADAPTERS) for i in range(ADAPTERS)]
    plan.update(used, [rows // ADAPTERS] * ADAPTERS, [1.0] * ADAPTERS)
    x = torch.randn(rows, shape.width_in, dtype=dtype, device="cuda")
    y = torch.randn(rows, sum(shape.widths), dtype=dtype, device="cuda")
    return sites, plan, x, y
