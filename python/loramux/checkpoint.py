"""Reading LoRA checkpoints: PEFT's layout, checked whole, and placed on a model's targets.

Every tensor of a file is used or refused; nothing is skipped in silence. The tensors are the truth,
the sidecar ``adapter_config.json`` gives the scale.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import _host
from .adapter_files import SafetensorsFile, in_parallel, read_safetensors, read_sidecar
from .config import AdapterInfo, LoraSpec, resolve_adapter_path
from .diffusers_config import metadata_alphas
from .errors import AdapterError
from .peft_config import PeftConfig, is_alpha, parse_peft_config
from .target import LoraTarget
from .tensor_names import EMBEDDING, LINEAR, copied_module, group_factors

Tensors = dict[str, torch.Tensor]
ConvertKeys = Callable[[Tensors], Tensors]

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType of csrc/lora.h
_DTYPES = tuple(DTYPE_CODES)


@dataclass(frozen=True, eq=False)
class LoraModule:
    """One module's LoRA: ``delta = scale * B @ A``.

    Attributes:
        a: A ``[r, in]``; an embedding's is PEFT's ``lora_embedding_A`` ``[r, vocab]``.
        b: B ``[out, r]``.
        alpha: of the scale.
        rslora: the scale is rank-stabilised.
        embedding: A's columns are token vectors.
    """

    a: torch.Tensor
    b: torch.Tensor
    alpha: float
    rslora: bool = False
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def in_features(self) -> int:
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        return self.b.shape[0]

    @property
    def scale(self) -> float:
        """``alpha / r``; for rsLoRA ``alpha / sqrt(r)`` (https://arxiv.org/abs/2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A checked adapter.

    Attributes:
        modules: by name in the base model, e.g. ``model.layers.0.self_attn.q_proj``.
        path: where it was read from, for errors.
        notes: what the sidecar states that the tensors do not bear out, and defaults taken.
    """

    modules: dict[str, LoraModule]
    path: str = "in-memory tensors"
    notes: tuple[str, ...] = ()

    @property
    def factors(self) -> list[torch.Tensor]:
        """A and B of every module, in order of the modules' names."""
        modules = [module for _, module in sorted(self.modules.items())]
        return [factor for module in modules for factor in (module.a, module.b)]

    @property
    def rank(self) -> int:
        """The largest over all modules."""
        return max((module.rank for module in self.modules.values()), default=0)

    def info(self, spec: LoraSpec) -> AdapterInfo:
        """What ``spec.check_adapter`` needs to know of it.

        Its misfits include two modules on one slice, and that no name at all is the model's.
        """
        return _place(self, spec)[1]


class PlacedSlice(NamedTuple):
    """What one adapter adds to one slice of a site.

    Attributes:
        module: the checkpoint module it comes from.
        a: A ``[r, in]``, unsharded; shared by the slices of a packed module.
        b: B ``[width of the slice, r]``, unsharded.
        scale: of the product.
    """

    module: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def read_lora_file(path: str, convert_keys: ConvertKeys | None = None) -> LoraAdapter:
    """Read a PEFT directory, or a safetensors file with PEFT's sidecar beside it.

    Without a sidecar every module must have a scalar tensor ``<module>.alpha``, or the file the
    config that Diffusers keeps in its metadata; with a sidecar, such a tensor comes first. Every
    byte is read once, so what is returned is what a digest of it names.

    Args:
        convert_keys: applied to the file's tensors first; returns tensors under PEFT's names, as
            those of ``loramux.converters`` do. The sidecar's patterns then apply to the new module
            names.

    Returns:
        The adapter in the file's dtypes, on the CPU, aliasing nothing of the file.

    Raises:
        AdapterError: the file cannot be served; says everything that is wrong with it.
    """
    path = os.fspath(path)
    file = resolve_adapter_path(path)
    return _parse(path, *read_safetensors(file), read_sidecar(file), convert_keys)


@contextmanager
def open_lora_file(
    path: str, convert_keys: ConvertKeys | None = None
) -> Iterator[tuple[LoraAdapter, SafetensorsFile]]:
    """:func:`read_lora_file` that leaves A and B in the file, to be read and checked by its user.

    They are tensors of ``SafetensorsFile.outline``; but those that ``convert_keys`` returned, which
    may look at values, are read.
    """
    path = os.fspath(path)
    with SafetensorsFile(resolve_adapter_path(path)) as file:
        tensors = file.outline() if convert_keys is None else file.tensors()
        sidecar = read_sidecar(file.path)
        yield _parse(path, tensors, file.metadata, sidecar, convert_keys), file


def lora_adapter_from_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, object] | None,
    convert_keys: ConvertKeys | None = None,
) -> LoraAdapter:
    """:func:`read_lora_file` of tensors and a config at hand. The inputs are not written to.

    The adapter shares memory with the tensors that are on the CPU.
    """
    held = {name: tensor.detach().cpu().resolve_neg() for name, tensor in tensors.items()}
    return _parse(LoraAdapter.path, held, {}, config, convert_keys)


def read_adapter_info(path: str, spec: LoraSpec) -> AdapterInfo:
    """What ``spec.check_adapter`` needs to know of an adapter, from its header and sidecar.

    ``spec.convert_keys`` is given meta tensors, but of those of one element.

    Raises:
        AdapterError: the file cannot be read, whatever the spec.
    """
    path = os.fspath(path)
    file = resolve_adapter_path(path)
    header = read_safetensors(file, weights=False)
    return _parse(path, *header, read_sidecar(file), spec.convert_keys).info(spec)


def drop_base_copies(base: Mapping[str, torch.Tensor]) -> ConvertKeys:
    """A ``convert_keys`` that leaves out copies of base weights that equal the base's own.

    PEFT saves ``<module>.base_layer.weight`` beside the LoRA of an embedding or LM head. A copy
    that differs stays in, to be refused. (A header read without weights compares shapes only.)

    Args:
        base: the base model's ``state_dict``.
    """

    def is_copy(name: str, tensor: torch.Tensor) -> bool:
        weight = base.get(f"{copied_module(name)}.weight")
        if weight is None or (weight.shape, weight.dtype) != (tensor.shape, tensor.dtype):
            return False
        return tensor.is_meta or torch.equal(weight.to(tensor.device), tensor)

    return lambda tensors: {n: tensor for n, tensor in tensors.items() if not is_copy(n, tensor)}


def place_modules(adapter: LoraAdapter, spec: LoraSpec) -> dict[tuple[str, int, int], PlacedSlice]:
    """What the adapter adds to each ``(target, layer, slice index)`` that it touches.

    Raises:
        AdapterError: as ``spec.check_adapter``: a module that has no place or does not fit.
    """
    placed, info = _place(adapter, spec)
    spec.check_adapter(adapter.path, info)
    return placed


def _place(
    adapter: LoraAdapter, spec: LoraSpec
) -> tuple[dict[tuple[str, int, int], PlacedSlice], AdapterInfo]:
    placed: dict[tuple[str, int, int], PlacedSlice] = {}
    unmapped, misfits = [], []
    sites = set(spec.sites())
    for name, module in sorted(adapter.modules.items()):
        ref = spec.module_map(name)
        if ref is None or (ref.target, ref.layer) not in sites:
            if spec.ignored_modules is None or not spec.ignored_modules(name):
                unmapped.append(name)
            continue
        target = spec.targets[ref.target]
        slices = target.module_slices(ref.shard_id)
        widths = [target.out_slices[i] for i in slices]
        if misfit := _misfit(name, module, target, sum(widths)):
            misfits.append(misfit)
            continue
        rows_of_slices = torch.split(module.b, widths) if len(widths) > 1 else [module.b]
        for i, rows in zip(slices, rows_of_slices, strict=True):
            part = PlacedSlice(name, module.a, rows, module.scale)
            other = placed.setdefault((ref.target, ref.layer, i), part)
            if other is not part:
                misfits.append(
                    f"modules {other.module!r} and {name!r} are both slice {i} of target "
                    f"{ref.target!r}, layer {ref.layer}; expected one: export the adapter anew"
                )
    nothing_placed = bool(unmapped) and not placed and not misfits
    if nothing_placed and all(spec.module_map(name) is None for name in unmapped):
        known = list(getattr(spec.module_map, "module_names", ()))
        misfits.append(
            f"0 of {len(adapter.modules)} modules matched: the adapter has {unmapped[:3]}, the "
            f"model {known[:3] or sorted(spec.targets)}; expected the model's names: bring them in "
            "line with convert_keys"
        )
    return placed, AdapterInfo(adapter.rank, tuple(unmapped), tuple(misfits))


def _misfit(name: str, module: LoraModule, target: LoraTarget, width: int) -> str | None:
    if module.embedding != (target.kind == "embedding"):
        found = "embedding" if module.embedding else "linear"
        return (
            f"module {name!r} has the LoRA of a {found}; expected its target's kind, "
            f"{target.kind}: serve it on the model it was trained on"
        )
    if (module.in_features, module.out_features) != (target.in_features, width):
        return (
            f"module {name!r} has A {list(module.a.shape)} and B {list(module.b.shape)}; expected "
            f"[r, {target.in_features}] and [{width}, r]: serve it on the model it was trained on"
        )
    return None


def _parse(
    path: str,
    tensors: Tensors,
    metadata: Mapping[str, str],
    config: object,
    convert_keys: ConvertKeys | None,
) -> LoraAdapter:
    problems: list[str] = []
    alphas_stated, notes = metadata_alphas(metadata, config, tensors, problems)
    tensors = tensors | alphas_stated
    if config is None or _is_mlx(config):
        sidecar = PeftConfig()
    else:
        sidecar = parse_peft_config(config, problems)
    names_in_file = set(tensors)
    if convert_keys is not None:
        try:
            tensors = convert_keys(tensors)
        except AdapterError as error:
            raise AdapterError(path, [*problems, *error.problems]) from error
    groups = group_factors(tensors, problems)
    if not groups and not problems:
        problems.append(
            f"none of its {len(tensors)} tensors is a LoRA's; expected A and B: give the path of "
            "an adapter"
        )
    factors = {name: _factors(name, parts, tensors, problems) for name, parts in groups.items()}
    ranks = {name: pair[0].shape[0] if pair else None for name, pair in factors.items()}
    alphas, idle = sidecar.alphas(ranks, problems, notes)
    if tensors.keys() - names_in_file:
        problems += [
            f"{text} as convert_keys names them; expected one: rename it in the config"
            for text in idle
        ]

    modules: dict[str, LoraModule] = {}
    without_alpha = []
    for name, parts in groups.items():
        alpha = _alpha(parts, tensors, alphas[name], problems)
        if alpha is None:
            without_alpha.append(name)
        elif (pair := factors[name]) is not None:
            modules[name] = LoraModule(*pair, alpha, sidecar.use_rslora, EMBEDDING[0] in parts)
    if without_alpha:
        problems.append(
            f"modules {without_alpha} have no scale; expected a config or alphas: put PEFT's "
            "adapter_config.json beside the file, or give every module a scalar <module>.alpha"
        )
    problems += _not_finite(modules, groups, tensors)
    if problems:
        raise AdapterError(path, problems)
    notes += [*sidecar.notes, *idle, *_absent_targets(sidecar, modules)]
    return LoraAdapter(modules, path, tuple(notes))


def _is_mlx(config: object) -> bool:
    """Whether a sidecar is mlx-lm's, whose scale ``converters.mlx`` is to be given."""
    if not isinstance(config, Mapping) or config.keys() & {"peft_type", "r", "lora_alpha"}:
        return False
    return config.get("fine_tune_type") == "lora"


def _factors(
    name: str, parts: dict[str, str], tensors: Tensors, problems: list[str]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A module's A and B, if both are what they should be."""
    wanted = LINEAR if parts.keys().isdisjoint(EMBEDDING) else EMBEDDING
    if parts.keys() - {"alpha"} != set(wanted):
        problems.append(
            f"module {name!r} has {sorted(parts)}; expected {wanted[0]} and {wanted[1]}: export "
            "the adapter whole"
        )
        return None
    a, b = (tensors[parts[factor]] for factor in wanted)
    known = len(problems)
    for tensor_name, tensor in ((parts[wanted[0]], a), (parts[wanted[1]], b)):
        if tensor.dtype not in _DTYPES:
            problems.append(
                f"tensor {tensor_name!r} is {tensor.dtype}; expected one of {_DTYPES}: save it as "
                "one of them"
            )
        elif tensor.dim() != 2:
            problems.append(
                f"tensor {tensor_name!r} has shape {list(tensor.shape)}; expected a matrix, LoRA "
                "of convolutions and experts is not served: export that of linears alone"
            )
    if len(problems) > known:
        return None
    if a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
        problems.append(
            f"module {name!r} has A {list(a.shape)} and B {list(b.shape)}; expected [r, in] and "
            "[out, r] with one r of at least 1: export the adapter anew"
        )
        return None
    return a, b


def _alpha(
    parts: dict[str, str], tensors: Tensors, stated: float | None, problems: list[str]
) -> float | None:
    """The module's own alpha tensor, else the sidecar's number."""
    if "alpha" not in parts:
        return None if stated is None else float(stated)
    tensor = tensors[parts["alpha"]]
    value = float(tensor) if tensor.numel() == 1 else math.nan
    if not is_alpha(value):
        problems.append(
            f"tensor {parts['alpha']!r} has shape {list(tensor.shape)} or no finite value; "
            "expected one finite number: correct it"
        )
    return value


def _not_finite(
    modules: Iterable[str], groups: Mapping[str, Mapping[str, str]], tensors: Tensors
) -> list[str]:
    names = [
        name for module in modules for factor, name in groups[module].items() if factor != "alpha"
    ]
    names = [name for name in names if not tensors[name].is_meta]
    finite = in_parallel(_is_finite, [tensors[name] for name in names])
    return [
        f"tensor {name!r} has a NaN or Inf; expected finite values: export the adapter anew"
        for name, is_finite in zip(names, finite, strict=True)
        if not is_finite
    ]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value of a CPU tensor is a NaN or Inf."""
    dense = tensor.contiguous()
    return _host.all_finite(dense.data_ptr(), DTYPE_CODES[dense.dtype], dense.numel())


def _absent_targets(sidecar: PeftConfig, modules: Iterable[str]) -> list[str]:
    """Notes on the ``target_modules`` that no tensor bears out. A target is the end of a name."""
    absent = dict.fromkeys(sidecar.target_modules)
    for module in modules:
        if not absent:
            break
        path = module.split(".")
        for i in range(len(path)):
            absent.pop(".".join(path[i:]), None)
    return [f"target module {target!r} has no tensor" for target in absent]
