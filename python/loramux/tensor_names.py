"""What the tensor names of a checkpoint say: PEFT's LoRA factors, or which other layout it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

MAX_NAME_CHARS = 256
_NAMES_KEPT = 8192
_NO_NAME = (
    f"no module names; expected printable parts joined by dots, at most {MAX_NAME_CHARS} "
    "characters: rename them"
)
LINEAR = ("lora_A", "lora_B")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<factor>lora_[AB]|lora_embedding_[AB]|alpha)"
    r"(?:\.(?P<adapter>[^.]+))??(?P<weight>\.weight)?"
)
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")
_PATH = re.compile(r"[^./\\]+(\.[^./\\]+)*")

_PLAIN = "expected lora_A and lora_B alone: export the adapter as a plain LoRA"
_PEFTS = "expected PEFT's names"

# What else is in the wild, none of it served. No name that is served matches any of these.
_LAYOUTS = [
    (re.compile(pattern), what)
    for pattern, what in (
        (r"\.hada_", f"LoHa factors; {_PLAIN}"),
        (r"\.lokr_", f"LoKr factors; {_PLAIN}"),
        (r"\.(dora_scale|lora_magnitude_vector)\b", f"DoRA magnitudes; {_PLAIN}"),
        (r"\.lora_mid\b", f"a Tucker core of a convolution; {_PLAIN}"),
        (
            r"^lora_[^.]+\.|\.lora_(down|up)\b|^diffusion_model\.",
            f"kohya layout, whose names are ambiguous; {_PEFTS}: name every module with "
            "convert_keys=converters.kohya(name_map)",
        ),
        (
            r"^(transformer|unet|text_encoder|text_encoder_2)\.",
            f"Diffusers layout; {_PEFTS}: read a LoRA of linears with "
            "convert_keys=converters.diffusers()",
        ),
        (
            r"\.lora_[ab]$",
            f"MLX layout, A and B transposed; {_PEFTS}: read with "
            "convert_keys=converters.mlx(scale=...)",
        ),
        (
            r"\.adapter\.linear_(in|out)\.|\.lora_kqv_adapter\.",
            f"Megatron layout; {_PEFTS}: export the adapter to PEFT",
        ),
        (
            r"(\.base_layer|\bexperts)\.lora_",
            f"expert parameters, which are not served; {_PLAIN}, without target_parameters",
        ),
        (
            r"\.lora_B(\.[^.]+)?\.bias$",
            f"LoRA bias, which is not served; {_PLAIN}, without lora_bias",
        ),
        (
            r"trainable_tokens_",
            f"trained token embeddings, which are not served; {_PLAIN}, without "
            "trainable_token_indices",
        ),
        (
            r"\.base_layer\.(weight|bias)$",
            "a copy of base weights; expected none, or one known to equal the model's: save with "
            "save_embedding_layers=False, or read with convert_keys=drop_base_copies(base)",
        ),
    )
]


def group_factors(names: Iterable[str], problems: list[str]) -> dict[str, dict[str, str]]:
    """Module name to factor (``lora_A``, ..., ``alpha``) to tensor name. Others are problems."""
    groups: dict[str, dict[str, str]] = {}
    foreign: dict[str, list[str]] = {}
    adapters = set()
    for name in names:
        match = _identify(name)
        if isinstance(match, str):
            foreign.setdefault(match, []).append(name[:MAX_NAME_CHARS])
            continue
        factor = match["factor"]
        parts = groups.setdefault(match["module"], {})
        if factor in parts:
            problems.append(
                f"tensors {parts[factor]!r} and {name!r} are both one {factor}; expected one: "
                "remove either"
            )
        parts[factor] = name
        if factor != "alpha":
            adapters.add(match["adapter"] or "")
    problems += [f"tensors {found}: {what}" for what, found in foreign.items()]
    if len(adapters) > 1:
        problems.append(
            f"tensors of the adapters {sorted(adapters)}; expected one adapter: save each alone"
        )
    return groups


def copied_module(name: str) -> str | None:
    """The module whose base weight a tensor is PEFT's copy of."""
    match = _BASE_COPY.fullmatch(name)
    return match["module"] if match else None


def _identify(name: str) -> re.Match[str] | str:
    """A served tensor's parts, or what the tensor is instead."""
    if len(name) > MAX_NAME_CHARS:
        return _NO_NAME
    return _identify_short(name)


@lru_cache(_NAMES_KEPT)  # a model's adapters have their names in common
def _identify_short(name: str) -> re.Match[str] | str:
    if not name.isprintable() or not _PATH.fullmatch(name):
        return _NO_NAME
    for pattern, what in _LAYOUTS:
        if pattern.search(name):
            return what
    match = _TENSOR.fullmatch(name)
    if match and bool(match["weight"]) == (match["factor"] in LINEAR):
        return match
    if name.endswith((".weight", ".bias")):
        return f"full weights (modules_to_save), which are not served; {_PLAIN}"
    return (
        "no LoRA tensors; expected base_model.model.<module>.lora_A.weight and lora_B.weight: "
        "remove them, or read another layout with one of loramux.converters"
    )
