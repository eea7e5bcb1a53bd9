"""``lora_embedding_`` over decode and prefill steps of a token embedding of Llama-3.1-8B's width.

As in ``bench kernels`` a call is a node of a CUDA graph, on other weights than the call before it,
cold in L2. The floor is every adapter's B once, a vector of A for each row, and y read and written.
``torch_us`` is of the definition in torch, rows grouped by adapter.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from loramux import LoraSite, StepPlan, lora_embedding_

from .common import BYTES_PER_US, COLD_BYTES, graph_us, rows_by_slot, slots_of_rows, write_results

WIDTH, VOCABULARY = 4096, 32768
CASES = [  # rows, adapters, rank, phase
    (1, 1, 16, "decode"),
    (32, 4, 16, "decode"),
    (32, 32, 16, "decode"),
    (32, 32, 64, "decode"),
    (2048, 8, 16, "prefill"),
    (8192, 8, 16, "prefill"),
    (8192, 8, 64, "prefill"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-torch", action="store_true", help="leave the torch column out")


def run(options: argparse.Namespace) -> None:
    rows = [measure(*case, with_torch=not options.no_torch) for case in CASES]
    for row in rows:
        print(
            "{rows:5} rows, {adapters:2} adapters, r{rank:2}: {us:7.2f} us, floor {floor_us:6.2f}, "
            "torch {torch_us}".format(**row)
        )
    write_results(options.json, rows)


def measure(rows: int, adapters: int, rank: int, phase: str, *, with_torch: bool) -> dict[str, Any]:
    dtype = torch.bfloat16
    b_bytes = adapters * WIDTH * rank * dtype.itemsize
    vector_bytes, y_bytes = rows * rank * dtype.itemsize, 2 * rows * WIDTH * dtype.itemsize
    layers = min(math.ceil(COLD_BYTES / (b_bytes + vector_bytes)), 2048)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda").uniform_(-0.1, 0.1)

    # Of A the rows differ from call to call, which makes them cold as well.
    a = random(adapters, VOCABULARY, rank)
    bs = [random(adapters, WIDTH, rank) for _ in range(layers)]
    sites = [LoraSite.stacked([a], [b], embedding=True) for b in bs]
    ids = torch.randint(VOCABULARY, (layers, rows), device="cuda")
    y = random(rows, WIDTH)
    slots = slots_of_rows({"rows": rows, "adapters": adapters, "slots": adapters, "phase": phase})
    plan = StepPlan(rows, adapters + 1, "cuda")
    plan.update(slots, [1] * rows, [1.0] * rows)
    groups = rows_by_slot(slots, "cuda")

    def in_torch(y: torch.Tensor, ids: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for slot, group in groups:
            y.index_add_(0, group, a[slot - 1, ids[group]].to(y) @ b[slot - 1].T.to(y))
        return y

    want = in_torch(y.double(), ids[0], bs[0])
    error = (lora_embedding_(y.clone(), ids[0], sites[0], plan) - want).norm() / want.norm()
    assert error < 5e-3, f"wrong result: relative error {error:.2e}"

    us = graph_us(lambda i: lora_embedding_(y, ids[i], sites[i], plan), layers)
    torch_us = None
    if with_torch:
        torch_us = graph_us(lambda i: in_torch(y, ids[i], bs[i]), min(layers, 16))
    return {
        "rows": rows,
        "adapters": adapters,
        "rank": rank,
        "phase": phase,
        "dtype": "bfloat16",
        "us": round(us, 3),
        "floor_us": round((b_bytes + vector_bytes + y_bytes) / BYTES_PER_US, 3),
        "torch_us": torch_us and round(torch_us, 2),
    }
