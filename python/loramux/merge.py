"""The static merge of one adapter into base weights."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from .adapter_files import new_folder, parse_json, read_safetensors, write_safetensors
from .checkpoint import LoraAdapter, LoraModule, read_lora_file
from .errors import AdapterError

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf")


def merge_adapter(
    state: MutableMapping[str, torch.Tensor],
    adapter: LoraAdapter,
    fan_in_fan_out: Collection[str] = (),
) -> None:
    """Replace every weight the adapter touches by ``W + scale * B @ A``.

    Computed in float32 (float64 for a float64 weight) on the weight's device and rounded once to
    its dtype. The old tensors are not written to. An embedding's weight ``[vocab, dim]`` gets
    ``scale * (B @ A)^T``.

    Args:
        state: a ``state_dict``: ``<module>.weight`` is ``[out, in]``.
        fan_in_fan_out: modules whose weight is ``[in, out]``, as in transformers' ``Conv1D``.

    Raises:
        AdapterError: modules that the state lacks, that do not fit their weight, or whose weight is
            tied to another name's. Nothing was replaced.
    """
    problems = _misfits(state, adapter, fan_in_fan_out)
    problems += _tied({name: tensor.data_ptr() for name, tensor in state.items()}, adapter)
    if problems:
        raise AdapterError(adapter.path, problems)
    for module, lora in adapter.modules.items():
        weight = state[f"{module}.weight"]
        state[f"{module}.weight"] = _merged(weight, lora, _transposed(module, lora, fan_in_fan_out))


def merge_files(
    model: str, adapter: LoraAdapter, out: str, fan_in_fan_out: Collection[str] = ()
) -> None:
    """Write the model in the folder ``model`` to the new folder ``out``, the adapter merged.

    One safetensors file of the model is in memory at a time. What else is in the folder is copied
    last, folders, other files of weights and what describes them excepted: what a failure leaves
    has no config.

    Args:
        fan_in_fan_out: as for :func:`merge_adapter`.

    Raises:
        AdapterError: as :func:`merge_adapter`, before anything is written; or a file that cannot
            be read or written, or a folder ``out`` that exists.
    """
    files = _weight_files(Path(model))
    headers = [read_safetensors(str(file), weights=False)[0] for file in files]
    state = {name: tensor for header in headers for name, tensor in header.items()}
    if problems := _misfits(state, adapter, fan_in_fan_out):
        raise AdapterError(adapter.path, problems)
    with new_folder(out):
        for file in tqdm(files, desc="merge", unit="file"):
            _merge_file(file, adapter, os.path.join(out, file.name), fan_in_fan_out)
        stale = {"adapter_config.json"}  # of weights that are not copied
        if files == [Path(model) / _SINGLE]:
            stale.add(_INDEX)
        for file in Path(model).iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and file.name not in stale:
                shutil.copy(file, out)


def run(args: argparse.Namespace) -> int:
    """``loramux merge``: a transformers model's folder and an adapter's, to a new folder."""
    from .skeleton import drop_copies_of, load_skeleton

    skeleton = load_skeleton(args.model)
    adapter = read_lora_file(args.adapter, drop_copies_of(args.model))
    # A model that was saved without its head has its files' names without this.
    prefix = f"{skeleton.base_model_prefix}."
    parameters = skeleton.named_parameters(remove_duplicate=False)
    identities = {name: id(parameter) for name, parameter in parameters}
    headless = {name.removeprefix(prefix): identity for name, identity in identities.items()}
    if problems := _tied(identities, adapter) or _tied(headless, adapter):
        raise AdapterError(args.adapter, problems)
    modules = skeleton.named_modules()
    conv1d = {name for name, module in modules if type(module).__name__ == "Conv1D"}
    conv1d |= {name.removeprefix(prefix) for name in conv1d}
    merge_files(args.model, adapter, args.out, conv1d)
    return 0


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads. Others beside them may hold the same weights again."""
    index, single = folder / _INDEX, folder / _SINGLE
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(parse_json(index.read_bytes())["weight_map"].values())
        if odd := sorted(name for name in names if os.path.basename(name) != name):
            raise ValueError(f"files that are not in the folder itself: {odd[:3]}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AdapterError(
            str(index),
            [f"it has {error}; expected a weight_map to files in the folder: save the model anew"],
        ) from error
    return sorted(folder / name for name in names)


def _merge_file(
    file: Path, adapter: LoraAdapter, out: str, fan_in_fan_out: Collection[str]
) -> None:
    state, _ = read_safetensors(str(file))
    here = {name: m for name, m in adapter.modules.items() if f"{name}.weight" in state}
    merge_adapter(state, replace(adapter, modules=here), fan_in_fan_out)
    write_safetensors(state, out)


def _misfits(
    state: Mapping[str, torch.Tensor], adapter: LoraAdapter, fan_in_fan_out: Collection[str]
) -> list[str]:
    problems = []
    for module, lora in adapter.modules.items():
        weight = state.get(f"{module}.weight")
        if weight is None:
            problems.append(
                f"module {module!r} has no {module + '.weight'!r} in the state; expected the names "
                "that the adapter was trained on: save the model with its head, then merge"
            )
            continue
        shape = (lora.out_features, lora.in_features)
        expected = shape[::-1] if _transposed(module, lora, fan_in_fan_out) else shape
        if weight.shape != expected or weight.dtype not in _DTYPES:
            problems.append(
                f"module {module!r} has a delta {list(expected)}, the weight is "
                f"{list(weight.shape)} {weight.dtype}; expected equal shapes and one of {_DTYPES}"
            )
    return problems


def _tied(identities: Mapping[str, int], adapter: LoraAdapter) -> list[str]:
    """Faults of modules whose weight is another name's too, from what tells weights apart."""
    names: dict[int, list[str]] = {}
    for name, identity in identities.items():
        names.setdefault(identity, []).append(name)
    weights = [f"{module}.weight" for module in adapter.modules]
    shared = [names[identities[weight]] for weight in weights if weight in identities]
    return [
        f"the weights {tied} are one tensor: clone them in the state, or save the model untied"
        for tied in shared
        if len(tied) > 1
    ]


def _transposed(module: str, lora: LoraModule, fan_in_fan_out: Collection[str]) -> bool:
    return lora.embedding or module in fan_in_fan_out


@torch.no_grad()
def _merged(weight: torch.Tensor, lora: LoraModule, transposed: bool) -> torch.Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    b, a = (factor.to(weight.device, dtype) for factor in (lora.b, lora.a))
    delta = b @ a
    return weight.to(dtype).add(delta.T if transposed else delta, alpha=lora.scale).to(weight.dtype)
