"""Checkpoints of other layouts under PEFT's names: ``convert_keys`` for those a caller names.

No layout is guessed. A converter takes what its layout defines and leaves every other tensor under
its own name, so that the reader refuses that by name. No input is written to. A ``scale`` is
stated through alpha = scale * r, so it holds where no sidecar says ``use_rslora``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import torch

from .checkpoint import ConvertKeys, Tensors
from .errors import AdapterError
from .tensor_names import MAX_NAME_CHARS

_KOHYA = re.compile(r"(?P<module>.+)\.(?P<part>lora_down\.weight|lora_up\.weight|alpha)")
_DIFFUSERS = re.compile(r"(?P<module>.+)\.(?P<part>lora(_linear_layer)?\.(down|up)\.weight)")
_BARE_PEFT = re.compile(
    r"(?!base_model\.)(?P<module>.+)\.(?P<part>lora_[AB](?:\.[^.]+)?\.weight|alpha)"
)
_MLX = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ab])")
_ANY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<part>alpha|(?:lora_|base_layer\.).*)"
)
_A = re.compile(r"(?P<module>.+)\.(?:lora_A(?:\.[^.]+)?\.weight|lora_embedding_A(?:\.[^.]+)?)")

_PEFT_PARTS = {
    "lora_down.weight": "lora_A.weight",
    "lora_up.weight": "lora_B.weight",
    "lora.down.weight": "lora_A.weight",
    "lora.up.weight": "lora_B.weight",
    "lora_linear_layer.down.weight": "lora_A.weight",
    "lora_linear_layer.up.weight": "lora_B.weight",
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
}


def kohya(name_map: Mapping[str, str], *, scale: float | None = None) -> ConvertKeys:
    """Files of kohya's sd-scripts and of ComfyUI.

    ``<module>.lora_down.weight`` ``[r, in]`` and ``lora_up`` ``[out, r]``, or ``lora_A`` and
    ``lora_B``, with a scalar ``<module>.alpha`` that is r where it is absent. The scale is alpha/r.

    Args:
        name_map: the file's module names (``lora_unet_mid_block_attn_to_q``) to the base model's.
            Their underscores stand for dots or for themselves, so only a caller knows.
        scale: every module's, in place of the file's alphas, for a producer of another formula.
    """

    def convert(tensors: Tensors) -> Tensors:
        renamed = _renamed(tensors, (_KOHYA, _BARE_PEFT), name_map.get)
        return _with_alphas(renamed, renamed.keys() - tensors.keys(), scale)

    return convert


def diffusers(
    components: Collection[str] = ("transformer", "unet"), *, scale: float | None = None
) -> ConvertKeys:
    """Files of Diffusers: ``<component>.<module>.lora_A.weight``, ``lora_B`` and ``alpha``.

    ``lora.down`` and ``lora.up``, or ``lora_linear_layer.down`` and ``up``, are A and B too. Where
    the file's metadata has a config, the reader has made alphas of it. A module without an alpha
    has the scale 1, whatever its rank and the order of the keys.

    Args:
        components: what to leave out of the names. Modules of other components keep theirs
            (``text_encoder.encoder.layers.0.q_proj``): ``LoraSpec.ignored_modules`` can leave them
            to another spec.
        scale: every module's, in place of the file's alphas.
    """

    def module_name(name: str) -> str:
        component, _, rest = name.partition(".")
        return rest if component in components and rest else name

    def convert(tensors: Tensors) -> Tensors:
        renamed = _renamed(tensors, (_BARE_PEFT, _DIFFUSERS), module_name)
        return _with_alphas(renamed, renamed.keys() - tensors.keys(), scale)

    return convert


def mlx(*, scale: float | None = None) -> ConvertKeys:
    """Files of mlx-lm: ``<module>.lora_a`` ``[in, r]`` and ``lora_b`` ``[r, out]``.

    Both are transposed, which the shape of a square factor would not show.

    Args:
        scale: every module's: ``lora_parameters.scale`` in mlx-lm's config, which is the factor
            itself. ``None`` takes PEFT's sidecar.
    """

    def convert(tensors: Tensors) -> Tensors:
        turned = {
            name: tensor.T.contiguous() if _MLX.fullmatch(name) and tensor.dim() == 2 else tensor
            for name, tensor in tensors.items()
        }
        renamed = _renamed(turned, (_MLX,), lambda name: name)
        return renamed if scale is None else _with_alphas(renamed, renamed, scale)

    return convert


def rename(module_name: Callable[[str], str]) -> ConvertKeys:
    """PEFT's layout with other module names.

    Every tensor of a module moves with it: A, B, alpha and PEFT's copy of the base weight.

    Args:
        module_name: the file's module name, without ``base_model.model.``, to the base model's.
    """
    return lambda tensors: _renamed(tensors, (_ANY,), module_name)


def _renamed(
    tensors: Tensors,
    layouts: Collection[re.Pattern[str]],
    module_name: Callable[[str], str | None],
) -> Tensors:
    """The tensors that a layout and ``module_name`` have a name for under PEFT's, others as is.

    Raises:
        AdapterError: several tensors that would have one name.
    """
    sources: dict[str, list[str]] = {}
    for name in tensors:
        sources.setdefault(_new_name(name, layouts, module_name), []).append(name)
    problems = [
        f"tensors {names} would all be {new_name!r}; expected one: correct the map of names"
        for new_name, names in sources.items()
        if len(names) > 1
    ]
    if problems:
        raise AdapterError("tensors given to convert_keys", problems)
    return {new_name: tensors[names[0]] for new_name, names in sources.items()}


def _new_name(
    name: str,
    layouts: Collection[re.Pattern[str]],
    module_name: Callable[[str], str | None],
) -> str:
    if len(name) > MAX_NAME_CHARS:  # the reader refuses it
        return name
    for layout in layouts:
        if match := layout.fullmatch(name):
            module, part = module_name(match["module"]), match["part"]
            if module is not None:
                return f"base_model.model.{module}.{_PEFT_PARTS.get(part, part)}"
    return name


def _with_alphas(tensors: Tensors, converted: Collection[str], scale: float | None) -> Tensors:
    """The alphas that a scale says, ``scale * r``; with none, r for the converted that lack one."""
    alphas = {}
    for name in converted if scale is None else tensors:
        if (match := _A.fullmatch(name)) and tensors[name].dim():
            alpha = f"{match['module']}.alpha"
            if scale is not None or alpha not in tensors:
                rank = tensors[name].shape[0]
                value = rank if scale is None else scale * rank
                alphas[alpha] = torch.tensor(value, dtype=torch.float64, device="cpu")
    return tensors | alphas
