"""What a deployment would decide about an adapter's path, as data and as text."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from .checkpoint import LoraAdapter, LoraModule, read_lora_file
from .config import LoraSpec
from .errors import AdapterError
from .identity import adapter_digest
from .store import SlotLayout, pack_image


@dataclass(frozen=True)
class ModuleReport:
    """One module of an adapter.

    Attributes:
        target: the spec's target; without a spec, or a place in it, the name without its layer.
        layer: of the stack; ``None`` where the name has no index and no spec gives one.
        scale: ``alpha / r``, or ``alpha / sqrt(r)`` for rsLoRA.
        dtype: of A in the file, e.g. ``"bfloat16"``.
    """

    name: str
    target: str
    layer: int | None
    rank: int
    scale: float
    in_features: int
    out_features: int
    dtype: str
    embedding: bool


@dataclass(frozen=True)
class AdapterReport:
    """What reading, and with a spec placing and packing, an adapter came to.

    Attributes:
        path: as given.
        refusals: everything that is wrong with it; empty where it is served.
        digest: of its weights in hexadecimal; ``None`` where they cannot be read.
        modules: by name; empty where the file is refused.
        parameters: elements of all A and B.
        slot_bytes: what the adapter takes of a slot on one rank, in the spec's dtype; ``None``
            without a spec or a place in it.
        notes: defaults taken, and patterns and targets of the config that match no module.
        unmapped: modules that no target of the spec takes.
        misfits: modules that do not fit their target, with both shapes.
    """

    path: str
    refusals: tuple[str, ...]
    digest: str | None = None
    modules: tuple[ModuleReport, ...] = ()
    parameters: int = 0
    slot_bytes: int | None = None
    notes: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [f"{self.path}: {'refused' if self.refusals else 'served'}"]
        lines += [f"  - {problem}" for problem in self.refusals]
        if self.modules:
            slot = "" if self.slot_bytes is None else f", {self.slot_bytes:,} bytes of a slot"
            lines += [
                f"digest      {self.digest}",
                f"parameters  {self.parameters:,} in {len(self.modules)} modules{slot}",
                *_table(self.modules),
            ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def inspect_adapter(path: str, spec: LoraSpec | None = None) -> AdapterReport:
    """Read the adapter at ``path`` as a deployment does, and report instead of raising.

    Args:
        spec: the deployment's, with its dtype; ``None`` checks the file alone.
    """
    try:
        adapter = read_lora_file(path, spec.convert_keys if spec else None)
    except AdapterError as error:
        return AdapterReport(path, error.problems)
    info = adapter.info(spec) if spec else None
    refusals: tuple[str, ...] = ()
    image = None
    if spec is not None:
        try:
            image = pack_image(adapter, SlotLayout(spec, spec.dtype or _dtype(adapter)))
        except AdapterError as error:
            refusals = error.problems
    return AdapterReport(
        path=path,
        refusals=refusals,
        digest=(image.digest if image else adapter_digest(adapter)).hex(),
        modules=tuple(_report(*item, spec) for item in sorted(adapter.modules.items())),
        parameters=sum(m.a.numel() + m.b.numel() for m in adapter.modules.values()),
        slot_bytes=image.data.numel() if image else None,
        notes=adapter.notes,
        unmapped=info.unmapped if info else (),
        misfits=info.misfits if info else (),
    )


def run(args: argparse.Namespace) -> int:
    """``loramux inspect``: 0 where the adapter is served, 2 where it is refused."""
    report = inspect_adapter(args.path, _model_spec(args.model) if args.model else None)
    print(report.to_json() if args.json else report)
    return 2 if report.refusals else 0


def _model_spec(folder: str) -> LoraSpec:
    """The spec of a transformers model, from its config alone, for adapters of any rank.

    Its weights are read only for an adapter that has copies of some, to compare them.
    """
    from .modules import module_lora_spec
    from .skeleton import drop_copies_of, load_skeleton

    skeleton, convert_keys = load_skeleton(folder), drop_copies_of(folder)
    return module_lora_spec(skeleton, max_rank=sys.maxsize, convert_keys=convert_keys)


def _dtype(adapter: LoraAdapter) -> torch.dtype:
    return next(iter(adapter.modules.values())).a.dtype


def _report(name: str, module: LoraModule, spec: LoraSpec | None) -> ModuleReport:
    target, layer = _place_in_name(name)
    if spec is not None and (ref := spec.module_map(name)) is not None:
        target, layer = ref.target, ref.layer
    return ModuleReport(
        name,
        target,
        layer,
        module.rank,
        module.scale,
        module.in_features,
        module.out_features,
        str(module.a.dtype).removeprefix("torch."),
        module.embedding,
    )


def _place_in_name(name: str) -> tuple[str, int | None]:
    """What follows the layer's index in a module's name, and the index."""
    match = re.fullmatch(r"(?:[^.]+\.)*?(\d{1,9})\.(.+)", name)
    return (match[2], int(match[1])) if match else (name, None)


def _table(modules: Iterable[ModuleReport]) -> list[str]:
    """A line for all layers of a target that are alike."""
    layers: dict[tuple[str, ...], list[int]] = {}
    for module in modules:
        kind = "embedding" if module.embedding else "linear"
        shape = f"{kind} {module.in_features} -> {module.out_features}"
        row = (module.target, shape, str(module.rank), f"{module.scale:.6g}", module.dtype)
        known = layers.setdefault(row, [])
        if module.layer is not None:
            known.append(module.layer)
    rows = [["target", "shape", "rank", "scale", "dtype", "layers"]]
    rows += [[*row, _ranges(sorted(set(known))) or "-"] for row, known in layers.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers in short: ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
