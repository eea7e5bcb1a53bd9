"""The CPU kernels over decode steps of up to 32 rows, beside two ways to write the same in torch.

One call is a shrink and an expand of one site. ``grouped`` is the definition with rows grouped by
adapter; ``gathered`` copies every row's own A and B and contracts them in one einsum each. The
three take turns, each on the weights of another layer, in rotation; microseconds are the least of
all turns, for other processes only ever add to them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loramux import LoraSite, StepPlan, lora_apply_

from .common import (
    SITES,
    SiteShape,
    arena_sites,
    gathered_torch,
    grouped_torch,
    rows_by_slot,
    write_results,
)

RANKS = (16, 64)
ROWS_AND_ADAPTERS = ((1, 1), (8, 1), (8, 8), (32, 1), (32, 4), (32, 32))
ROTATED_BYTES = 64e6  # more than the L2 caches of a few cores
MAX_LAYERS = 256
MIN_TURNS, MAX_TURNS = 5, 300

Call = Callable[[torch.Tensor, torch.Tensor], object]  # adds to y, from x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", default="bfloat16,float32", help="names, set apart by commas")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="to spend on a case")


def run(options: argparse.Namespace) -> None:
    print(f"{torch.get_num_threads()} threads; us of a call, and how many times faster than torch")
    print(
        f"{'case':34} {'us':>8} {'grouped':>9} {'gathered':>9} {'x grouped':>10} {'x gathered':>11}"
    )
    rows = []
    grid = itertools.product(options.dtypes.split(","), SITES.values(), RANKS, ROWS_AND_ADAPTERS)
    for dtype, shape, rank, (count, adapters) in grid:
        name = f"{shape.name} {count}/{adapters} r{rank} {dtype}"
        if options.only in name:
            rows.append(measure(shape, count, adapters, rank, dtype, options.seconds))
            print(_line(name, rows[-1]), flush=True)
    for key in ("grouped", "gathered") if rows else ():
        ratios = [row[f"{key}_us"] / row["us"] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"x {key}: {mean:.2f} in geometric mean, least {min(ratios):.2f}")
    write_results(options.json, rows)


@torch.inference_mode()
def measure(
    shape: SiteShape, rows: int, adapters: int, rank: int, dtype_name: str, seconds: float
) -> dict[str, Any]:
    """One row of the grid."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    layers = math.ceil(ROTATED_BYTES / (adapters * shape.weight_bytes(rank, dtype.itemsize)))
    sites = arena_sites(shape, adapters, rank, min(layers, MAX_LAYERS), dtype, "cpu")
    slots = [1 + i % adapters for i in range(rows)]
    plan = StepPlan(rows, adapters + 1, "cpu", len(shape.widths) * rank)
    plan.update(slots, [1] * rows, [1.0] * rows)
    x = torch.randn(rows, shape.width_in, dtype=dtype)
    y = torch.randn(rows, sum(shape.widths), dtype=dtype)
    slot_of_row = torch.tensor(slots)
    groups = rows_by_slot(slots, "cpu")
    calls: list[list[Call]] = [
        [native(site, plan) for site in sites],
        [grouped_torch(site, groups) for site in sites],
        [gathered_torch(site, slot_of_row) for site in sites],
    ]
    _check([call[0] for call in calls], y, x)
    native_us, grouped_us, gathered_us = _least_us(calls, y, x, seconds)
    return {
        "site": shape.name,
        "rows": rows,
        "adapters": adapters,
        "rank": rank,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "us": round(native_us, 1),
        "grouped_us": round(grouped_us, 1),
        "gathered_us": round(gathered_us, 1),
    }


def native(site: LoraSite, plan: StepPlan) -> Call:
    return lambda y, x: lora_apply_(y, x, site, plan)


def _check(calls: Sequence[Call], y: torch.Tensor, x: torch.Tensor) -> None:
    """All compute the same."""
    results = [y.clone() for _ in calls]
    for call, result in zip(calls, results, strict=True):
        call(result, x)
    for want in results[1:]:
        error = float((results[0].double() - want.double()).norm() / want.double().norm())
        assert error < 1e-2, f"wrong result: relative error {error:.2e}"


def _least_us(
    calls: Sequence[Sequence[Call]], y: torch.Tensor, x: torch.Tensor, seconds: float
) -> list[float]:
    """The least microseconds of a call of each kind; ``calls[kind][layer]``."""
    least = [math.inf] * len(calls)
    end = time.perf_counter() + seconds
    for turn in range(MAX_TURNS):
        for kind, layers in enumerate(calls):
            call = layers[(turn + kind * len(layers) // len(calls)) % len(layers)]
            start = time.perf_counter()
            call(y, x)
            least[kind] = min(least[kind], time.perf_counter() - start)
        if turn >= MIN_TURNS and time.perf_counter() > end:
            break
    return [1e6 * value for value in least]


def _line(name: str, row: dict[str, Any]) -> str:
    us, grouped, gathered = row["us"], row["grouped_us"], row["gathered_us"]
    return (
        f"{name:34} {us:8.1f} {grouped:9.1f} {gathered:9.1f} "
        f"{grouped / us:10.2f} {gathered / us:11.2f}"
    )
