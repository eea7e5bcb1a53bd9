"""What the benchmarks share: the sites, their weights, timing, and result files."""

from __future__ import annotations

import json
import os
import platform
import shlex
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


def slots_of_rows(case: dict[str, Any]) -> list[int]:
    """A case's rows over its adapters, the last of its slots: in turn, or sorted in a prefill."""
    rows, adapters, slots = (case[key] for key in ("rows", "adapters", "slots"))
    slot_of_row = [slots - adapters + 1 + i % adapters for i in range(rows)]
    return sorted(slot_of_row) if case["phase"] == "prefill" else slot_of_row


def rows_by_slot(slot_of_row: Sequence[int], device: str) -> list[tuple[int, torch.Tensor]]:
    """The slots that rows name, in order, each with its rows."""
    slots = torch.tensor(slot_of_row, device=device)
    return [(slot, (slots == slot).nonzero().flatten()) for slot in sorted(set(slot_of_row))]


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
    """The definition in torch, rows grouped by slot, which are slices where they are neighbours."""
    parts = [(_as_slice(rows), rows, list(site.slices(slot))) for slot, rows in groups]

    def call(y: torch.Tensor, x: torch.Tensor) -> None:
        for neighbours, rows, slices in parts:
            gathered = x[rows if neighbours is None else neighbours]
            for part in slices:
                h = gathered @ part.a.T
                if neighbours is None:
                    y[:, part.columns].index_add_(0, rows, h @ part.b.T, alpha=part.scale)
                else:
                    y[neighbours, part.columns].addmm_(h, part.b.T, alpha=part.scale)

    return call


def _as_slice(rows: torch.Tensor) -> slice | None:
    first, count = int(rows[0]), len(rows)
    return slice(first, first + count) if int(rows[-1]) == first + count - 1 else None


def gathered_torch(
    site: LoraSite, slot_of_row: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The definition in torch, every row's own A and B gathered and contracted in one einsum each.

    The weights are stacked: ``[adapters, rank, in]`` and ``[adapters, width, rank]``.
    """
    adapters = [list(site.slices(slot)) for slot in range(1, site.num_slots)]
    stacked = [
        (parts[0].columns, torch.stack([p.a for p in parts]), torch.stack([p.b for p in parts]))
        for parts in zip(*adapters, strict=True)
    ]
    index = slot_of_row - 1

    def call(y: torch.Tensor, x: torch.Tensor) -> None:
        for columns, a, b in stacked:
            h = torch.einsum("ni,nri->nr", x, a[index])
            y[:, columns] += torch.einsum("nr,nor->no", h, b[index])

    return call


def relative_error(
    got: torch.Tensor, y: torch.Tensor, x: torch.Tensor, site: LoraSite, slot: int
) -> float:
    """How far ``got`` is from the definition in float64, of rows of one slot added to ``y``."""
    want = y.double()
    for part in site.slices(slot):
        want[:, part.columns] += x.double() @ part.a.double().T @ part.b.double().T
    return float((got.double() - want).norm() / want.norm())


def graph_us(call: Callable[[int], None], count: int) -> float:
    """Median microseconds of a call, ``count`` different ones in one CUDA graph."""
    return graphs_us([call], count)[0]


def graphs_us(calls: Sequence[Callable[[int], None]], count: int, repeats: int = 7) -> list[float]:
    """The same of several calls, whose graphs take turns: clocks drift, and for all alike."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphs = [_captured(call, count, stream) for call in calls]
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(repeats):
            for graph, of_graph in zip(graphs, times, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                of_graph.append(start.elapsed_time(end) * 1e3 / count)
    return [median(of_graph) for of_graph in times]


def _captured(
    call: Callable[[int], None], count: int, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            call(i)
    graph.replay()
    return graph


def write_results(path: str | None, rows: list[dict[str, Any]]) -> None:
    """One object: where and how the rows were measured, and the rows."""
    if path is None:
        return
    on_gpu = torch.cuda.is_available()
    about = {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "cpu": _cpu_name(),
        "torch": torch.__version__,
        "driver": _output(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "commit": commit(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("LORAMUX_")},
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
    }
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(about, indent=2)[:-2]
    Path(path).write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def commit() -> str | None:
    """What is measured; ``LORAMUX_COMMIT`` says so where there is no repository."""
    described = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return os.environ.get("LORAMUX_COMMIT") or _output(*described)


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
