"""Where one form of a call takes over from another: csrc/cuda/forms.h, measured anew.

Each limit is tried by a process of its own, which takes it from the environment; the best in
geometric mean over the decode calls of a rank is what the table should have.
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

from .common import write_results
from .kernels import call_us

FORM = "LORAMUX_ONE_KERNEL"
LIMITS = (0, 0.5, 1, 1.5, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    peers = json.loads(Path(__file__).with_name("peers_h200.json").read_text())
    cases = [peer for peer in peers if peer["phase"] == "decode"]
    if options.child:
        print(json.dumps([call_us(case, None)[0] for case in cases]))
        return
    write_results(options.json, measure(cases))


def measure(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Microseconds of every case under every limit, and the best limit of each rank."""
    measured = []
    for limit in LIMITS:
        done = subprocess.run(
            [sys.executable, "-m", "bench", "forms", "--child"],
            env={**os.environ, FORM: str(limit)},
            stdout=subprocess.PIPE,
            check=True,
        )
        measured.append(json.loads(done.stdout))
    rows = [
        {
            "form": FORM,
            **{key: case[key] for key in ("site", "rows", "adapters", "slots", "rank")},
            "us": {str(limit): round(us[i], 3) for limit, us in zip(LIMITS, measured, strict=True)},
        }
        for i, case in enumerate(cases)
    ]
    for rank in sorted({row["rank"] for row in rows}):
        means = {}
        for limit in LIMITS:
            logs = [math.log(row["us"][str(limit)]) for row in rows if row["rank"] == rank]
            means[limit] = math.exp(sum(logs) / len(logs))
        best = min(LIMITS, key=means.__getitem__)
        print(
            f"{FORM} rank {rank}: {{{rank}, {best}}}", *(f"{k}: {v:.3f}" for k, v in means.items())
        )
    return rows
