"""``python -m bench NAME``: each benchmark is a module with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "after-gemm": "what a decode call adds to the base GEMM that it follows",
    "calls": "a call's cost in pools of many slots, and its host time",
    "cpu": "CPU kernels beside grouped and gathered torch, over decode steps",
    "embedding": "CUDA kernels of a token embedding, over decode and prefill steps",
    "kernels": "CUDA kernels over the decode and prefill grids, beside the recorded peers",
    "forms": "where one form of a call takes over from another: the table of csrc/cuda/forms.h",
    "engine": "a vLLM engine with its own LoRA kernels and with loramux",
    "residency": "host cost of a step and of a load; on CUDA also of swapping adapters",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="name", required=True)
    modules = {}
    for name, text in BENCHMARKS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", help="write the rows to this file as well")
        modules[name] = importlib.import_module(f".{name.replace('-', '_')}", __package__)
        modules[name].add_arguments(command)
    options = parser.parse_args()
    modules[options.name].run(options)


if __name__ == "__main__":
    main()
