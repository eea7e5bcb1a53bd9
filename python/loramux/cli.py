"""The ``loramux`` command. A command's own module, with torch, is imported when it runs."""

from __future__ import annotations

import argparse
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
        installation do not serve, said on stderr.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "generate":
        _check_generate(parser, args)
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
        command.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    return parser


def _check_generate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json: give a transformers model's folder")
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


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
