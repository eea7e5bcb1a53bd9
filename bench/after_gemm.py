"""What a call adds to the base GEMM that it follows: the figure that a user feels.

CUDA graphs over layers whose base weights and adapters are cold in L2: ``y = x @ W^T`` alone,
with ``lora_apply_`` behind each product, and with ``lora_start`` and ``lora_finish_`` around it.
The decode cases of the other benchmarks, and a prefill. The floor is that of the call alone.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from loramux import StepPlan, lora_apply_, lora_finish_, lora_start

from .common import (
    COLD_BYTES,
    SITES,
    arena_sites,
    graphs_us,
    relative_error,
    slots_of_rows,
    write_results,
)

GOALS = {  # added to a layer, in percent, by rows, adapters and rank
    (1, 1, 16): 5,
    (32, 1, 16): 6,
    (32, 4, 16): 8,
    (32, 32, 16): 23,
    (64, 64, 16): 40,
    (32, 4, 64): 14,
    (32, 32, 64): 75,
    (8192, 8, 16): 9.5,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="only sites of this name")


def run(options: argparse.Namespace) -> None:
    cases = json.loads(Path(__file__).with_name("peers_h200.json").read_text())
    print(f"{'case':40} {'GEMM us':>8} {'behind':>8} {'beside':>8} {'floor':>8} {'%':>6} {'%':>6}")
    rows = []
    for case in cases:
        wanted = case["phase"] == "decode" or (case["rows"], case["rank"]) == (8192, 16)
        if wanted and options.only in ("", case["site"]):
            rows.append(measure(case))
            print(_line(rows[-1]))
    for shape in dict.fromkeys(map(_shape, rows)):
        same = [row for row in rows if _shape(row) == shape]
        if len(same) == len(SITES):
            keys = ("gemm_us", "added_us", "beside_us", "floor_us")
            name = "a layer: {} rows, {} of {} adapters, r{}".format(*shape)
            goal = GOALS.get((shape[0], shape[1], shape[3]))
            figures = _figures(name, *(sum(row[key] for row in same) for key in keys))
            print(figures, f" goal {goal}" if goal else "")
    write_results(options.json, rows)


def _shape(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[key] for key in ("rows", "adapters", "slots", "rank"))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    shape, dtype = SITES[case["site"]], torch.bfloat16
    rows, adapters, slots, rank = (case[key] for key in ("rows", "adapters", "slots", "rank"))
    width = sum(shape.widths)
    layers = max(math.ceil(COLD_BYTES / (2 * width * shape.width_in)), 2)
    sites = arena_sites(shape, slots, rank, layers, dtype, "cuda")
    weights = [
        torch.randn(width, shape.width_in, dtype=dtype, device="cuda") / 64 for _ in range(layers)
    ]
    plan = StepPlan(rows, slots + 1, "cuda", len(shape.widths) * rank)
    slot_of_row = slots_of_rows(case)
    plan.update(slot_of_row, [1] * rows, [1.0] * rows)
    x = torch.randn(rows, shape.width_in, dtype=dtype, device="cuda")
    y = torch.empty(rows, width, dtype=dtype, device="cuda")

    def base(i: int) -> None:
        torch.mm(x, weights[i % layers].T, out=y)

    def both(i: int) -> None:
        base(i)
        lora_apply_(y, x, sites[i % layers], plan)

    def beside(i: int) -> None:
        started = lora_start(x, sites[i % layers], plan)
        base(i)
        lora_finish_(y, started)

    for call in (both, beside):
        call(0)
        for row in (0, rows - 1):
            of_x = x[[row]]
            product = of_x.double() @ weights[0].double().T
            error = relative_error(y[[row]], product, of_x, sites[0], slot_of_row[row])
            assert error < 1e-2, f"wrong result: relative error {error:.2e}"
    count = max(layers, 24)
    gemm_us, both_us, beside_us = graphs_us([base, both, beside], count, 15)
    return {
        **{key: case[key] for key in ("site", "rows", "adapters", "slots", "rank", "phase")},
        "dtype": "bfloat16",
        "gemm_us": round(gemm_us, 3),
        "added_us": round(both_us - gemm_us, 3),
        "beside_us": round(beside_us - gemm_us, 3),
        "floor_us": round(shape.floor_us(rows, adapters, rank), 3),
    }


def _line(row: dict[str, Any]) -> str:
    name = "{site} {rows} rows, {adapters} of {slots} adapters, r{rank}".format(**row)
    return _figures(name, row["gemm_us"], row["added_us"], row["beside_us"], row["floor_us"])


def _figures(name: str, gemm: float, behind: float, beside: float, floor: float) -> str:
    shares = f"{100 * behind / gemm:6.1f} {100 * beside / gemm:6.1f}"
    return f"{name:40} {gemm:8.2f} {behind:8.2f} {beside:8.2f} {floor:8.2f} {shares}"
