"""What the tensor names of a checkpoint say: PEFT's LoRA factors, or which other layout it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAME_CHARS = 256
LINEAR = ("lora_A", "lora_B")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<factor>lora_[AB]|lora_embedding_[AB]|alpha)"
    r"(?:\.(?P<adapter>[^.]+))??(?P<weight>\.weight)?"
)
_BASE_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")
_PATH = re.compile(r"[^./\\]+(\.[^./\\]+)*")

# What else is in the wild, none of it served. No name that is served matches any of these.
_LAYOUTS = [
    (re.compile(pattern), what)
    for pattern, what in (
        (r"\.hada_", "LoHa factors, which are no plain LoRA"),
        (r"\.lokr_", "LoKr factors, which are no plain LoRA"),
        (r"\.(dora_scale|lora_magnitude_vector)\b", "DoRA magnitudes; DoRA is not served"),
        (r"\.lora_mid\b", "a Tucker core of a convolution, which is no plain LoRA"),
        (
            r"^lora_[^.]+\.|\.lora_(down|up)\b|^diffusion_model\.",
            "kohya layout, whose names are ambiguous: name every module with "
            "convert_keys=converters.kohya(name_map)",
        ),
        (
            r"^(transformer|unet|text_encoder|text_encoder_2)\.",
            "Diffusers layout: read with convert_keys=converters.diffusers()",
        ),
        (
            r"\.lora_[ab]$",
            "MLX layout, A and B transposed: read with convert_keys=converters.mlx(scale=...)",
        ),
        (r"\.(linear_in|linear_out|lora_kqv_adapter)\.", "Megatron layout: export to PEFT"),
        (r"(\.base_layer|\bexperts)\.lora_", "expert parameters, which are not served"),
        (r"\.lora_B(\.[^.]+)?\.bias$", "LoRA bias, which is not served"),
        (r"trainable_tokens_", "trained token embeddings, which are not served"),
        (
            r"\.base_layer\.(weight|bias)$",
            "a copy of base weights, not known to equal the model's: save with "
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
            problems.append(f"tensors {parts[factor]!r} and {name!r} are both one {factor}")
        parts[factor] = name
        if factor != "alpha":
            adapters.add(match["adapter"] or "")
    problems += [f"tensors {found}: {what}" for what, found in foreign.items()]
    if len(adapters) > 1:
        problems.append(f"tensors of the adapters {sorted(adapters)}; expected one adapter")
    return groups


def copied_module(name: str) -> str | None:
    """The module whose base weight a tensor is PEFT's copy of."""
    match = _BASE_COPY.fullmatch(name)
    return match["module"] if match else None


def _identify(name: str) -> re.Match[str] | str:
    """A served tensor's parts, or what the tensor is instead."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable() or not _PATH.fullmatch(name):
        return f"no name; expected printable parts joined by dots, at most {MAX_NAME_CHARS} long"
    for pattern, what in _LAYOUTS:
        if pattern.search(name):
            return what
    match = _TENSOR.fullmatch(name)
    if match and bool(match["weight"]) == (match["factor"] in LINEAR):
        return match
    if name.endswith((".weight", ".bias")):
        return "full weights (modules_to_save), which are not served"
    return "no LoRA tensor; expected base_model.model.<module>.lora_A.weight or lora_B.weight"
