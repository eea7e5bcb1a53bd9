"""Write an adapter, of whatever layout it was read from, as a PEFT directory."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from .adapter_files import new_folder, parse_json, write_safetensors
from .checkpoint import ConvertKeys, LoraAdapter, Tensors, read_lora_file
from .converters import diffusers, kohya, mlx
from .errors import AdapterError, SpecError
from .peft_config import keys_by_module
from .tensor_names import EMBEDDING

_KEY = re.compile(r"[\w.-]+")  # matches itself as a regular expression

N = TypeVar("N", int, float)


def write_peft(adapter: LoraAdapter, folder: str) -> None:
    """Write ``adapter`` to the new PEFT directory ``folder``, in the adapter's dtypes.

    A rank or alpha that most modules share is the config's; others are in its patterns. The config
    comes last, so that what a failure leaves has no scale and is refused.

    Raises:
        AdapterError: the folder exists or cannot be written, or a module's name cannot be the key
            of a pattern.
    """
    config = json.dumps(_config(adapter), indent=2)
    with new_folder(folder):
        write_safetensors(_tensors(adapter), os.path.join(folder, "adapter_model.safetensors"))
        with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
            file.write(config)


def run(args: argparse.Namespace) -> int:
    """``loramux convert``."""
    adapter = read_lora_file(args.path, _converter(args))
    write_peft(adapter, args.out)
    print(f"{args.out}: {len(adapter.modules)} modules, rank {adapter.rank}")
    return 0


def _converter(args: argparse.Namespace) -> ConvertKeys:
    if args.layout == "kohya":
        return kohya(_read_names(args.names), scale=args.scale)
    return (diffusers if args.layout == "diffusers" else mlx)(scale=args.scale)


def _read_names(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            names = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise SpecError(f"--names {path} cannot be read: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise SpecError(f"--names {path} must be a JSON object of the file's names to the model's")
    return names


def _config(adapter: LoraAdapter) -> dict[str, Any]:
    """The fields of PEFT's ``LoraConfig`` that the delta and PEFT's own loading depend on."""
    modules = adapter.modules
    problems: list[str] = []
    rank, ranks = _with_exceptions({name: m.rank for name, m in modules.items()}, problems)
    alpha, alphas = _with_exceptions({name: m.alpha for name, m in modules.items()}, problems)
    kinds = {module.rslora for module in modules.values()}
    if len(kinds) > 1:
        problems.append(
            "its modules are rank-stabilised in part; expected all or none, as one config can say: "
            "convert them apart"
        )
    if problems:
        raise AdapterError(adapter.path, problems)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": kinds.pop(),
        "target_modules": sorted(modules),
    }


def _with_exceptions(numbers: Mapping[str, N], problems: list[str]) -> tuple[N, dict[str, N]]:
    """The most common number, and a pattern for the modules of another.

    A key also matches every module whose name ends like it. Those have keys of their own, ahead.
    """
    ((common, _),) = Counter(numbers.values()).most_common(1)
    others = {name: number for name, number in numbers.items() if number != common}
    keys_that_fit = [name for name in others if _KEY.fullmatch(name)]
    matched, _ = keys_by_module(keys_that_fit, numbers, problems)
    if unfit := [name for name in {**others, **matched} if not _KEY.fullmatch(name)]:
        problems.append(
            f"modules {unfit} of another rank or alpha, or with a name that ends like theirs; "
            f"expected names as {_KEY.pattern}: rename them"
        )
        return common, {}
    keys = sorted(matched, key=lambda name: (-len(name), name.count(".")))
    return common, {name: numbers[name] for name in keys}


def _tensors(adapter: LoraAdapter) -> Tensors:
    tensors = {}
    for name, module in sorted(adapter.modules.items()):
        names = EMBEDDING if module.embedding else ("lora_A.weight", "lora_B.weight")
        for factor, tensor in zip(names, (module.a, module.b), strict=True):
            tensors[f"base_model.model.{name}.{factor}"] = tensor
    return tensors
