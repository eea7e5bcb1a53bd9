"""The LoRA config that Diffusers keeps in a file's metadata, as the alphas it comes to.

Diffusers (``save_lora_weights`` and ``save_lora_adapter``, see ``diffusers/loaders/lora_base.py``
and ``peft.py`` of 0.42) writes no alphas and no sidecar. The fields of PEFT's ``LoraConfig`` are
JSON in the safetensors metadata, each behind its component's name (``transformer.lora_alpha``), or
behind none where the file is a single model's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from .adapter_files import parse_json
from .peft_config import parse_peft_config

KEY = "lora_adapter_metadata"

_MAX_COMPONENTS = 16  # of a pipeline; each is matched with every module
_A = re.compile(r"(?P<module>.+)\.(lora_A|lora\.down|lora_linear_layer\.down)\.weight")


def metadata_alphas(
    metadata: Mapping[str, str],
    sidecar: object,
    tensors: Mapping[str, torch.Tensor],
    problems: list[str],
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Scalar tensors ``<module>.alpha`` for the modules of ``tensors``, and notes.

    Their ``alpha / r`` is the module's scale, rsLoRA's too. None without such a config.
    """
    if KEY not in metadata:
        return {}, []
    configs = _by_component(metadata[KEY], problems)
    if sidecar is not None:
        problems.append(
            f"the file's metadata {KEY!r} and adapter_config.json both have the config; expected "
            "one: remove either"
        )
    matches = {name: _A.fullmatch(name) for name in tensors}
    ranks = {m["module"]: tensors[n].shape[0] for n, m in matches.items() if m and tensors[n].dim()}
    alphas: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    twice: list[str] = []
    for component, fields in configs.items():
        prefix = f"{component}." if component else ""
        members = {
            module.removeprefix(prefix): rank
            for module, rank in ranks.items()
            if module.startswith(prefix)
        }
        faults: list[str] = []
        config = parse_peft_config(fields, faults)
        stated, idle = config.alphas(members, faults, notes)
        problems += [f"{fault} (metadata {KEY!r}, component {component!r})" for fault in faults]
        notes += [*config.notes, *idle]
        for module, alpha in stated.items():
            if alpha is not None:
                name = f"{prefix}{module}.alpha"
                if name in tensors or name in alphas:
                    twice.append(name)
                value = alpha * (math.sqrt(members[module]) if config.use_rslora else 1.0)
                alphas[name] = torch.tensor(value, dtype=torch.float64, device="cpu")
    if twice:
        problems.append(
            f"the alphas {twice} are in the file's metadata {KEY!r} and its tensors, or twice in "
            "the metadata; expected one of each: remove either"
        )
    if left := [module for module in ranks if f"{module}.alpha" not in alphas]:
        problems.append(
            f"modules {left} have no scale in the file's metadata {KEY!r}, which is for "
            f"{sorted(configs)}; expected one for each: export the adapter anew"
        )
    return alphas, notes


def _by_component(text: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    try:
        fields = parse_json(text.encode(errors="surrogatepass"))
        if not isinstance(fields, dict):
            raise ValueError("no object")
    except ValueError as error:
        problems.append(
            f"the file's metadata {KEY!r} has {error}; expected PEFT's LoraConfig as JSON: export "
            "the adapter anew"
        )
        return {}
    configs: dict[str, dict[str, Any]] = {}
    for key, value in fields.items():
        component, _, field = key.rpartition(".")
        configs.setdefault(component, {})[field] = value
    if len(configs) > _MAX_COMPONENTS:
        problems.append(
            f"the file's metadata {KEY!r} is for {len(configs)} components; expected at most "
            f"{_MAX_COMPONENTS}: export the adapter anew"
        )
        return {}
    return configs
