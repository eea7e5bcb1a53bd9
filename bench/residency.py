"""What residency costs the host: a step whose adapters are all resident, its plan, and one load.

On a CUDA device also what swapping adapters costs (``swaps.py``).

``load_ratio`` compares what the store does with a file (read, validate, convert, pack, digest) with
the least that any loader must do: read the same bytes, in parallel, and hash them. The two take
turns on one file in the page cache, each into memory of its own. A third turn leaves the digest
out, as the store does for an adapter that none is stated of.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from loramux import (
    LoraAdapter,
    LoraModule,
    LoraPool,
    LoraSpec,
    LoraStep,
    LoraTarget,
    Segment,
    StepPlan,
)
from loramux.adapter_files import _parse_known_header
from loramux.config import LoraModuleRef
from loramux.convert import write_peft
from loramux.store import LoraStore, SlotLayout

from .common import write_results
from .swaps import swap_rows

ADAPTERS, SEGMENTS = 64, 256
LAYERS, RANK = 32, 16
LINEARS = {  # of Llama-3.1-8B: inputs and outputs; 84 MB at rank 16 in bfloat16
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}
CHUNK_BYTES = 4 << 20
WIDTH = 32  # of the linears whose weights do not matter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="of the pool's slots")
    parser.add_argument("--turns", type=int, default=1000, help="of each figure but load_ratio")
    parser.add_argument("--loads", type=int, default=11, help="turns of load_ratio")
    parser.add_argument("--swaps", type=int, default=25, help="turns of swap_ratio")


def run(options: argparse.Namespace) -> None:
    print(f"{os.cpu_count()} cores, device {options.device}; medians, of swap_slowdown the least")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in _rows(Path(folder), options):
            rows.append(row)
            figure, value, *about = row.items()
            line = f"{figure[1]:20} {value[1]:8.2f}  {', '.join(f'{k} {v}' for k, v in about)}"
            print(line, flush=True)
    write_results(options.json, rows)


def _rows(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    on_cuda = torch.device(options.device).type == "cuda"
    yield from begin_step_rows(folder, options.device, options.turns)
    yield planner_row("planner_us_256x64", SEGMENTS, 1, options.turns)
    yield planner_row("planner_us_64x128", ADAPTERS, 128, options.turns)
    yield load_row(folder, on_cuda, options.loads)
    if on_cuda:
        yield from swap_rows(str(folder / "large"), LAYERS, options.swaps)


def begin_step_rows(folder: Path, device: str, turns: int) -> list[dict[str, Any]]:
    """256 segments over 64 resident adapters, with one row grouping and with three."""
    one = {"linear": LoraTarget(WIDTH, (WIDTH,))}
    three = {
        **one,
        "folded": LoraTarget(WIDTH, (WIDTH,), token_fold=4),
        "head": LoraTarget(WIDTH, (WIDTH,), per_segment=True),
    }
    names = [f"adapter-{i}" for i in range(ADAPTERS)]
    modules = {"linear": (WIDTH, WIDTH)}
    path = write_adapter(folder / "small", modules, 4, torch.float32)
    rows = []
    for targets, length in ((one, 1), (three, 4)):
        spec = _spec(targets, 1, max_slots=ADAPTERS, adapters=dict.fromkeys(names, path))
        pool = LoraPool.build(spec, device=device)
        step = LoraStep(tuple(Segment(names[i % ADAPTERS], length) for i in range(SEGMENTS)))
        pool.begin_step(step).release()
        begins, releases = [], []
        for _ in range(turns):
            start = time.perf_counter()
            lease = pool.begin_step(step)
            begun = time.perf_counter()
            lease.release()
            begins.append(begun - start)
            releases.append(time.perf_counter() - begun)
        pool.close()
        rows.append(
            {
                "figure": "begin_step_us",
                "value": round(median(begins) * 1e6, 2),
                "release_us": round(median(releases) * 1e6, 2),
                "groupings": len(targets),
                "segments": SEGMENTS,
                "tokens": length,
            }
        )
    return rows


def planner_row(figure: str, segments: int, length: int, turns: int) -> dict[str, Any]:
    """A plan of ``segments`` segments over 64 slots, written to host memory."""
    plan = StepPlan(segments * length, ADAPTERS + 1)
    slots = tuple(1 + i % ADAPTERS for i in range(segments))
    lengths, scales = (length,) * segments, (1.0,) * segments
    seconds = _seconds(lambda: plan.update(slots, lengths, scales), turns)
    return {
        "figure": figure,
        "value": round(median(seconds) * 1e6, 2),
        "segments": segments,
        "tokens": length,
    }


def load_row(folder: Path, pin: bool, turns: int) -> dict[str, Any]:
    """One adapter from file to image, beside a plain read and hash of the file.

    Another with the same header was loaded before, as any of its recipe; ``load_first_ms`` without.
    """
    modules = {f"{i}.{name}": shape for i in range(LAYERS) for name, shape in LINEARS.items()}
    path = write_adapter(folder / "large", modules, RANK, torch.bfloat16)
    targets = {name: LoraTarget(width_in, (out,)) for name, (width_in, out) in LINEARS.items()}
    layout = SlotLayout(_spec(targets, LAYERS, max_rank=RANK), torch.bfloat16)
    store = LoraStore(layout, pin=pin)
    file = os.path.join(path, "adapter_model.safetensors")
    firsts, loads, undigested, reads = [], [], [], []
    for _ in range(turns):
        _parse_known_header.cache_clear()
        firsts += _seconds(lambda: store.read(path), 1)
        loads += _seconds(lambda: store.read(path), 1)
        undigested += _seconds(lambda: store.read(path, digest=False), 1)
        reads += _seconds(lambda: read_and_hash(file), 1)
    return {
        "figure": "load_ratio",
        "value": round(median(loads) / median(reads), 3),
        "load_ms": round(median(loads) * 1e3, 1),
        "load_first_ms": round(median(firsts) * 1e3, 1),
        "load_without_digest_ms": round(median(undigested) * 1e3, 1),
        "read_and_hash_ms": round(median(reads) * 1e3, 1),
        "bytes": os.path.getsize(file),
        "cores": os.cpu_count(),
    }


def read_and_hash(path: str) -> bytes:
    """SHA-256 of a file's chunks, read and hashed on every core."""
    size = os.path.getsize(path)
    memory = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(os.cpu_count()) as threads:

        def digest(start: int) -> bytes:
            chunk = memory[start : start + CHUNK_BYTES]
            os.preadv(file.fileno(), [chunk], start)
            return hashlib.sha256(chunk).digest()

        return b"".join(threads.map(digest, range(0, size, CHUNK_BYTES)))


def write_adapter(
    folder: Path, modules: dict[str, tuple[int, int]], rank: int, dtype: torch.dtype
) -> str:
    """A PEFT directory with random weights for modules of ``(inputs, outputs)``."""
    adapter = LoraAdapter(
        {
            name: LoraModule(
                torch.randn(rank, width_in, dtype=dtype), torch.randn(out, rank, dtype=dtype), rank
            )
            for name, (width_in, out) in modules.items()
        }
    )
    write_peft(adapter, str(folder))
    return str(folder)


def _spec(targets: dict[str, LoraTarget], layers: int, **fields: Any) -> LoraSpec:
    def place(module: str) -> LoraModuleRef:
        layer, _, target = module.rpartition(".")
        return LoraModuleRef(target, int(layer or 0))

    return LoraSpec("lora", {"model"}, layers, targets, place, **fields)


def _seconds(call: Callable[[], object], turns: int) -> Sequence[float]:
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
