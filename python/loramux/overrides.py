"""What a deployment's YAML may say of a LoRA spec, and what is wrong with what it says."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from .errors import SpecError

SIZES = ("max_slots", "max_rank", "cpu_capacity", "arena_bytes")
_SETTINGS = (*SIZES, "adapters", "adapter_digests", "targets")


def check_overrides(block: Mapping[Any, Any], adapters: Collection[str]) -> None:
    """Raise a ``SpecError`` of all :func:`override_problems` that a block has, if any."""
    if problems := override_problems(block, adapters):
        raise SpecError("; ".join(f"{path} {problem}" for path, problem in problems))


def override_problems(
    block: Mapping[Any, Any], adapters: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Everything that ``LoraSpec.apply_yaml_overrides`` refuses of a block, whatever its types.

    Args:
        block: the overrides by name.
        adapters: names served where the block has no ``adapters``.

    Returns:
        Per problem its path within the block, such as ``adapters.sql``, and what is wrong.
    """
    problems = []
    for key in block:
        if key not in _SETTINGS:
            near = difflib.get_close_matches(str(key), _SETTINGS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"use {', '.join(_SETTINGS)}"
            problems.append((str(key), f"is no setting: {meant}"))
    for key in SIZES:
        if (size := size_problem(block.get(key, 1))) is not None:
            problems.append((key, size))
    for key in ("adapters", "adapter_digests"):
        problems += _string_mapping_problems(key, block.get(key, {}))
    served = block.get("adapters", adapters)
    digests = block.get("adapter_digests")
    for name, text in digests.items() if isinstance(digests, Mapping) else ():
        path = f"adapter_digests.{name}"
        if isinstance(text, str) and not _is_digest(text):
            problems.append((path, f"must be 64 hexadecimal digits, got {text!r}"))
        if isinstance(served, Collection) and name not in served:
            problems.append((path, "is of no adapter: add it to adapters or remove its digest"))
    targets = block.get("targets", [])
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        problems.append(("targets", f"must be a list of names, got {targets!r}"))
    return problems


def size_problem(value: object) -> str | None:
    """What is wrong with a size, if anything."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return f"must be a positive integer, got {value!r}"
    return None


def _string_mapping_problems(key: str, value: object) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return [(key, f"must map names to strings, got {value!r}")]
    return [
        (f"{key}.{name}", f"must be a name and a string, got {name!r}: {text!r}")
        for name, text in value.items()
        if not (isinstance(name, str) and name and isinstance(text, str) and text)
    ]


def _is_digest(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == 32
    except ValueError:
        return False
