"""Where one form of a call takes over from another: csrc/cuda/forms.h, measured anew.

Each limit is tried by a process of its own, which takes it from the environment; the best in
geometric mean over the cases of a rank is what the table should have.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .common import SITES, write_results
from .kernels import call_us

LIMITS = {
    "LORAMUX_ONE_KERNEL": (0, 0.5, 1, 1.5, 2, 4),
    "LORAMUX_SHORT_STEP": (0, 64, 128, 256, 512, 1024, 4096, 16384),
}
SLOTS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--form", choices=[*LIMITS], help="only this one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.child:
        print(json.dumps([call_us(case, None)[0] for case in cases(options.form)]))
        return
    rows: list[dict[str, Any]] = []
    for form in [options.form] if options.form else LIMITS:
        rows += measure(form)
    write_results(options.json, rows)


def cases(form: str) -> list[dict[str, Any]]:
    """Decode calls of the peers' grid; or long steps: of decode rows, a prefill, and both."""
    if form == "LORAMUX_ONE_KERNEL":
        peers = json.loads(Path(__file__).with_name("peers_h200.json").read_text())
        return [peer for peer in peers if peer["phase"] == "decode"]
    decode = [(slot, 1) for slot in range(1, SLOTS + 1)]
    steps = [decode * (rows // SLOTS) for rows in (64, 128, 256, 512, 1024)]
    for rows in (1024, 2048, 8192):
        prefill = [(slot, rows // 8) for slot in range(1, 9)]
        steps += [prefill, [*decode[8:], *prefill]]
    return [
        {
            "site": site,
            "rows": sum(rows for _, rows in segments),
            "adapters": len({slot for slot, _ in segments}),
            "slots": SLOTS,
            "rank": rank,
            "segments": segments,
            "phase": "mixed",
        }
        for rank in (16, 64)
        for segments in steps
        for site in SITES
    ]


def measure(form: str) -> list[dict[str, Any]]:
    """Microseconds of every case under every limit, and the best limit of each rank."""
    limits, measured = LIMITS[form], []
    for limit in limits:
        command = [sys.executable, "-m", "bench", "forms", "--child", "--form", form]
        environment = {**os.environ, form: str(limit)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        measured.append(json.loads(done.stdout))
    rows = [
        {
            "form": form,
            **{key: case[key] for key in ("site", "rows", "adapters", "slots", "rank")},
            "us": {str(limit): round(us[i], 3) for limit, us in zip(limits, measured, strict=True)},
        }
        for i, case in enumerate(cases(form))
    ]
    for rank in sorted({row["rank"] for row in rows}):
        means = {}
        for limit in limits:
            logs = [math.log(row["us"][str(limit)]) for row in rows if row["rank"] == rank]
            means[limit] = math.exp(sum(logs) / len(logs))
        best = min(limits, key=means.__getitem__)
        print(
            f"{form} rank {rank}: {{{rank}, {best}}}", *(f"{k}: {v:.3f}" for k, v in means.items())
        )
    return rows
