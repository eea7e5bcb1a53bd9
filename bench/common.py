"""What the benchmarks share: the sites, their weights, timing, and result files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from loramux import LoraSite
from loramux._host import BLOCK_ALIGN
from loramux.site import table_row

BYTES_PER_US = 4.2e6  # what an H200 copies, the rate of the floors
COLD_BYTES = 220e6  # weights are rotated through this much, so that none is found in L2


@dataclass(frozen=True)
class SiteShape:
    """A linear of Llama-3.1-8B."""

    name: str
    width_in: int
    widths: tuple[int, ...]

    def weight_bytes(self, rank: int, item: int = 2) -> int:
        """Bytes of one adapter's A and B."""
        return item * rank * (len(self.widths) * self.width_in + sum(self.widths))

    def floor_us(self, rows: int, adapters: int, rank: int, item: int = 2) -> float:
        """The distinct adapters' weights and x once, y read and written, at a copy's speed."""
        traffic = item * rows * (self.width_in + 2 * sum(self.widths))
        return (adapters * self.weight_bytes(rank, item) + traffic) / BYTES_PER_US


SITES = {
    shape.name: shape
    for shape in (
        SiteShape("qkv", 4096, (4096, 1024, 1024)),
        SiteShape("o", 4096, (4096,)),
        SiteShape("gate_up", 4096, (14336, 14336)),
        SiteShape("down", 14336, (4096,)),
    )
}


def arena_sites(
    shape: SiteShape, slots: int, rank: int, layers: int, dtype: torch.dtype, device: str
) -> list[LoraSite]:
    """The site at ``layers`` layers over one arena of ``slots`` adapters with random weights."""
    item = dtype.itemsize
    blocks = [rank * shape.width_in * item] * len(shape.widths)
    blocks += [width * rank * item for width in shape.widths]
    blocks = [-(-size // BLOCK_ALIGN) for size in blocks]
    site_units = sum(blocks)
    offsets = [sum(blocks[:i]) for i in range(len(blocks))]
    arena = torch.empty(
        slots * layers * site_units * BLOCK_ALIGN // item, dtype=dtype, device=device
    )
    arena.uniform_(-0.1, 0.1)
    n = len(shape.widths)
    rows = [torch.zeros(layers * n, 4, dtype=torch.int32)]
    for slot in range(slots):
        bases = [(slot * layers + layer) * site_units for layer in range(layers)]
        entries = [
            (base + offsets[i], base + offsets[n + i], rank, 1.0)
            for base in bases
            for i in range(n)
        ]
        rows.append(table_row(entries))
    table = torch.stack(rows).to(device)
    return [
        LoraSite([arena], table, layer * n, shape.width_in, list(shape.widths), rank)
        for layer in range(layers)
    ]


def grouped_torch(
    site: LoraSite, groups: Sequence[tuple[int, torch.Tensor]]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The definition in torch, rows grouped by slot: gather, two matmuls, index_add."""
    parts = [(rows, list(site.slices(slot))) for slot, rows in groups]

    def call(y: torch.Tensor, x: torch.Tensor) -> None:
        for rows, slices in parts:
            gathered = x[rows]
            for part in slices:
                delta = (gathered @ part.a.T) @ part.b.T
                y[:, part.columns].index_add_(0, rows, delta, alpha=part.scale)

    return call


def graph_us(call: Callable[[int], None], count: int, repeats: int = 7) -> float:
    """Median microseconds of a call, ``count`` different ones in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i)
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / count)
    return median(times)


def write_results(path: str | None, rows: list[dict[str, Any]]) -> None:
    """One object: where and how the rows were measured, and the rows."""
    if path is None:
        return
    on_gpu = torch.cuda.is_available()
    about = {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "cpu": _cpu_name(),
        "torch": torch.__version__,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": commit(),
        "command": "python -m bench " + " ".join(sys.argv[1:]),
    }
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(about, indent=2)[:-2]
    Path(path).write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def commit() -> str | None:
    """What is measured; ``LORAMUX_COMMIT`` says so where there is no repository."""
    return os.environ.get("LORAMUX_COMMIT") or _output("git", "rev-parse", "HEAD")


def _cpu_name() -> str:
    """The processor and how many of its cores this process may use."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return f"{value.strip()}, {os.cpu_count()} cores"
    return platform.machine()


def _output(*command: str) -> str | None:
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
