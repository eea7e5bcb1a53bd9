"""The ``loramux`` command. A command's own module, with torch, is imported when it runs."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from .errors import LoraError

_DEMO_PACKAGES = ("transformers", "peft")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 where the demo's output differs from PEFT's; 2 where the arguments, an adapter or the
        installation do not serve, said on stderr (by ``inspect`` on stdout).
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "generate":
        _check_generate(parser, args)
    elif args.command == "merge" or (args.command == "inspect" and args.model is not None):
        _check_model(parser, args.model)
    elif args.command == "convert" and (args.layout == "kohya") != (args.names is not None):
        parser.error("--names goes with --layout kohya, whose names only a caller can map")
    try:
        return int(import_module(f".{args.command}", __package__).run(args))
    except LoraError as error:
        print(f"loramux: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name not in _DEMO_PACKAGES:
            raise
        print(
            f"loramux: {args.command} needs {error.name}: pip install loramux[demo]",
            file=sys.stderr,
        )
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loramux", description="Serve many LoRA adapters over one base model, in one batch."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="train four small adapters, serve them in one batch, compare with PEFT"
    )
    demo.add_argument(
        "--steps", type=_count, default=250, help="training steps of each (%(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0)

    generate = commands.add_parser("generate", help="run prompts under adapters, in one batch")
    generate.add_argument("--model", required=True, metavar="DIR", help="a transformers model")
    generate.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=_pair("NAME=DIR"),
        metavar="NAME=DIR",
        help="a PEFT adapter and the name prompts use for it; may be repeated",
    )
    generate.add_argument(
        "--prompt",
        action="append",
        required=True,
        type=_pair("NAME:TEXT"),
        metavar="NAME:TEXT",
        help="a row of the batch; the name 'base', or none, runs the base model; may be repeated",
    )
    generate.add_argument(
        "--max-new-tokens", type=_count, default=64, metavar="N", help="(%(default)s)"
    )
    generate.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto"
    )
    for command in (demo, generate):
        command.add_argument(
            "--device", type=_device, default="cpu", help="cpu or cuda (%(default)s)"
        )

    inspect = commands.add_parser("inspect", help="what a deployment would decide of an adapter")
    inspect.add_argument("path", metavar="PATH", help="a PEFT directory or a safetensors file")
    inspect.add_argument(
        "--model", metavar="DIR", help="a transformers model to place the adapter on"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")

    merge = commands.add_parser("merge", help="write a model's folder with an adapter merged")
    merge.add_argument("--model", required=True, metavar="DIR", help="a transformers model")
    merge.add_argument("--adapter", required=True, metavar="DIR", help="a PEFT adapter")
    merge.add_argument("--out", required=True, metavar="DIR", help="the folder to make")

    convert = commands.add_parser("convert", help="write a PEFT directory from another layout")
    convert.add_argument("path", metavar="FILE", help="a safetensors file")
    convert.add_argument("out", metavar="DIR", help="the folder to make")
    convert.add_argument("--layout", required=True, choices=("kohya", "diffusers", "mlx"))
    convert.add_argument(
        "--names",
        metavar="JSON",
        help="for kohya: an object of the file's module names to the base model's",
    )
    convert.add_argument(
        "--scale",
        type=_finite,
        help="every module's, in place of the file's alphas; MLX files state none",
    )
    return parser


def _check_model(parser: argparse.ArgumentParser, folder: str) -> None:
    if not (Path(folder) / "config.json").is_file():
        parser.error(f"--model {folder} has no config.json: give a transformers model's folder")


def _check_generate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    _check_model(parser, args.model)
    names = [name for name, _ in args.adapter]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"--adapter names {', '.join(repeated)} more than once")
    if taken := [name for name in names if name in ("", "base")]:
        parser.error(f"--adapter cannot be named {taken[0]!r}: that is the base model")
    if unknown := sorted({name for name, _ in args.prompt} - {*names, "", "base"}):
        parser.error(f"--prompt names {', '.join(unknown)}; adapters: {', '.join(names) or 'none'}")


def _pair(form: str) -> Callable[[str], tuple[str, str]]:
    separator = form.removeprefix("NAME")[0]

    def parse(text: str) -> tuple[str, str]:
        name, found, value = text.partition(separator)
        if not found or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not {form}")
        return name, value

    return parse


def _device(text: str) -> str:
    if text == "cpu":
        return text
    found = re.fullmatch(r"cuda(?::(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda nor cuda:INDEX")
    import torch

    count = torch.cuda.device_count()
    if int(found[1] or 0) >= count:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not there: torch {torch.__version__} finds {count} CUDA devices"
        )
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value
