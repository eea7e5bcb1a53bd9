"""The CUDA kernels over the decode and prefill grids that the peers were measured on.

One call is a shrink and an expand of one site, in a CUDA graph of calls on different layers'
weights (more than 200 MB, so that they are cold in L2; x and y are the same in every call);
microseconds are the median of 7 replays. ``torch_us`` is of the definition in torch, the faster of
rows grouped by adapter and, in decode steps, of every row's own weights gathered.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from loramux import StepPlan, lora_apply_, lora_expand_, lora_shrink

from .common import (
    COLD_BYTES,
    SITES,
    arena_sites,
    gathered_torch,
    graph_us,
    grouped_torch,
    relative_error,
    rows_by_slot,
    slots_of_rows,
    write_results,
)

PEERS = ("vllm", "csgmv", "csgmv_graph256", "triton_v2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--phase", choices=["decode", "prefill"], help="only this table")
    parser.add_argument(
        "--only", help="only cases whose name contains one of these texts, set apart by |"
    )
    parser.add_argument(
        "--part",
        choices=["shrink", "expand", "pair"],
        help="time this half alone; pair: both as two calls, to see where one kernel for both pays",
    )
    parser.add_argument("--no-torch", action="store_true", help="leave the torch column out")


def run(options: argparse.Namespace) -> None:
    peers = json.loads(Path(__file__).with_name("peers_h200.json").read_text())
    titles = [("us", 8), ("floor", 8), ("x floor", 8), ("GB/s", 6), ("x torch", 8), ("x peer", 7)]
    print(" ".join([f"{'case':38}", *(f"{title:>{width}}" for title, width in titles)]), " goal")
    rows = []
    for peer in peers:
        name = _name(peer)
        wanted = any(text in name for text in (options.only or "").split("|"))
        if options.phase in (None, peer["phase"]) and wanted:
            rows.append(measure(peer, options.part, with_torch=not options.no_torch))
            print(_line(name, rows[-1]))
    for phase in ("decode", "prefill"):
        chosen = [row for row in rows if row["phase"] == phase and row["peer_us"]]
        if chosen:
            print(_summary(phase, chosen))
    write_results(options.json, rows)


def measure(peer: dict[str, Any], part: str | None, *, with_torch: bool) -> dict[str, Any]:
    """One row of the grid."""
    us, torch_us = call_us(peer, part, with_torch=with_torch)
    floor_us = SITES[peer["site"]].floor_us(*(peer[key] for key in ("rows", "adapters", "rank")))
    is_whole = part in (None, "pair")  # only then can it be compared
    return {
        **{key: peer[key] for key in ("site", "rows", "adapters", "slots", "rank", "phase")},
        "dtype": "bfloat16",
        "us": round(us, 3),
        "floor_us": round(floor_us, 3),
        "torch_us": torch_us and round(torch_us, 2),
        "peer_us": min(peer[name] for name in PEERS if peer[name]) if is_whole else None,
        "goal_us": round(_goal(peer, floor_us), 2) if is_whole else None,
        **({"part": part} if part else {}),
    }


def call_us(
    case: dict[str, Any], part: str | None, *, with_torch: bool = False
) -> tuple[float, float | None]:
    """Microseconds of a call, and of the same in grouped torch.

    A case has the fields of a row of the grid, or ``segments``, slots and rows, for its phase.
    """
    shape, dtype = SITES[case["site"]], torch.bfloat16
    rows, adapters, slots, rank = (case[key] for key in ("rows", "adapters", "slots", "rank"))
    layers = min(max(math.ceil(COLD_BYTES / (adapters * shape.weight_bytes(rank))), 4), 1024)
    sites = arena_sites(shape, slots, rank, layers, dtype, "cuda")
    if "segments" in case:
        slot_of_row = [slot for slot, count in case["segments"] for _ in range(count)]
    else:
        slot_of_row = slots_of_rows(case)
    plan = StepPlan(rows, slots + 1, "cuda", len(shape.widths) * rank)
    plan.update(slot_of_row, [1] * rows, [1.0] * rows)
    x = torch.randn(rows, shape.width_in, dtype=dtype, device="cuda")
    y = torch.randn(rows, sum(shape.widths), dtype=dtype, device="cuda")
    groups = rows_by_slot(slot_of_row, "cuda")
    _check(sites[0], x, y, plan, groups)
    count = max(layers, 24)
    h = lora_shrink(x, sites[0], plan)
    call = {
        None: lambda i: lora_apply_(y, x, sites[i % layers], plan),
        "shrink": lambda i: lora_shrink(x, sites[i % layers], plan, h),
        "expand": lambda i: lora_expand_(y, h, sites[i % layers], plan),
        "pair": lambda i: lora_expand_(
            y, lora_shrink(x, sites[i % layers], plan, h), sites[i % layers], plan
        ),
    }[part]
    us = graph_us(call, count)
    torch_us = None
    if with_torch and part in (None, "pair"):
        of_torch = [[grouped_torch(site, groups) for site in sites]]
        if case["phase"] == "decode":
            index = torch.tensor(slot_of_row, device="cuda")
            of_torch.append([gathered_torch(site, index) for site in sites])
        count = layers if case["phase"] == "decode" else min(layers, 16)
        torch_us = min(
            graph_us(lambda i, calls=calls: calls[i % layers](y, x), count)  # type: ignore[misc]
            for calls in of_torch
        )
    return us, torch_us


def _check(site: Any, x: torch.Tensor, y: torch.Tensor, plan: StepPlan, groups: Any) -> None:
    """The measured call computes the definition: a few rows against float64."""
    got = lora_apply_(y.clone(), x, site, plan)
    for slot, rows in groups[:2] + groups[-1:]:
        some = rows[[0, -1]]
        error = relative_error(got[some], y[some], x[some], site, slot)
        assert error < 5e-3, f"wrong result: relative error {error:.2e}"


def _goal(peer: dict[str, Any], floor_us: float) -> float:
    if peer["phase"] == "decode":
        return max(3.0, 1.15 * floor_us + 1.5)
    return 1.15 * floor_us + (4 if peer["rows"] <= 2048 else 0)


def _name(peer: dict[str, Any]) -> str:
    of = f" of {peer['slots']}" if peer["slots"] != peer["adapters"] else ""
    return f"{peer['site']} {peer['rows']} rows, {peer['adapters']}{of} adapters, r{peer['rank']}"


def _line(name: str, row: dict[str, Any]) -> str:
    us, floor = row["us"], row["floor_us"]
    if row["peer_us"] is None:
        return f"{name:38} {us:8.2f}"
    to_torch = f"{row['torch_us'] / us:8.1f}" if row["torch_us"] else " " * 8
    return (
        f"{name:38} {us:8.2f} {floor:8.2f} {us / floor:8.2f} {floor * 4200 / us:6.0f} {to_torch} "
        f"{row['peer_us'] / us:7.2f}  {row['goal_us']:.2f}{' met' if us <= row['goal_us'] else ''}"
    )


def _summary(phase: str, rows: list[dict[str, Any]]) -> str:
    ratios = [row["peer_us"] / row["us"] for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    met = sum(row["us"] <= row["goal_us"] for row in rows)
    return (
        f"{phase}: {mean:.2f} times the best peer in geometric mean, least {min(ratios):.2f}; "
        f"{met} of {len(rows)} goals met"
    )
