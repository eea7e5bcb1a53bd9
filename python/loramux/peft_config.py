"""What PEFT's ``adapter_config.json`` says about the scale of an adapter's modules.

Fields and their meaning are those of ``LoraConfig`` in PEFT 0.21. The file is data: nothing in it
is imported, called or opened.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

_DEFAULT_ALPHA = 8.0  # LoraConfig.lora_alpha

# These say how the adapter was made; what came of it is in its tensors.
_INFORMATION = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "velora_config",
}
_INVOCATION = "alora_invocation_tokens"
_READ = {
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "use_rslora",
}
_FEATURES = {
    _INVOCATION: "activated LoRA",
    "arrow_config": "Arrow routing",
    "ensure_weight_tying": "tied adapters",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "lora_bias": "LoRA bias",
    "megatron_config": "Megatron layers",
    "modules_to_save": "full weights beside LoRA",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "expert parameters",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
}
_RANK = "a whole number of at least 1"
_ALPHA = "a finite number"
_CORRECT = "write what the adapter was trained with"
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_ANY_CASE = ("gaussian", "mica")
_PLAIN_KEY = re.compile(r"[\w.-]+")

# Python's re backtracks: every group and repeat of a pattern multiplies the time of a match.
_MAX_CHOICES = 3
_MAX_PATTERN_CHARS = 256
_MAX_PATTERN_SECONDS = 10.0


@dataclass(frozen=True)
class PeftConfig:
    """The fields that a delta depends on, checked.

    Attributes:
        rank: ``r``, of the modules that ``rank_pattern`` leaves; ``None``: not stated.
        alpha: ``lora_alpha``, of the modules that ``alpha_pattern`` leaves; ``None``: no sidecar.
        use_rslora: the scale is alpha / sqrt(rank), not alpha / rank.
        target_modules: the names listed, none where they are a regular expression.
        peft_version: whether the writer's version is stated, as recent ones do.
        notes: defaults taken.
    """

    rank: int | None = None
    alpha: float | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] = ()
    peft_version: bool = False
    notes: tuple[str, ...] = ()

    def alphas(
        self, ranks: Mapping[str, int | None], problems: list[str], notes: list[str]
    ) -> tuple[dict[str, float | None], list[str]]:
        """Each module's alpha, and a sentence for each pattern that matches none.

        Args:
            ranks: of the modules' tensors, which must be those stated; ``None``: not known.
        """
        by_rank, idle_ranks = keys_by_module(self.rank_pattern, ranks, problems)
        by_alpha, idle_alphas = keys_by_module(self.alpha_pattern, ranks, problems)
        crossed = []
        for name, rank in ranks.items():
            stated = self.rank_pattern[by_rank[name]] if name in by_rank else self.rank
            if rank is not None and stated not in (None, rank):
                problems.append(
                    f"module {name!r} has rank {rank}; expected {stated}, as the config says: "
                    "bring weights and config of one adapter together"
                )
            if by_rank.get(name) != by_alpha.get(name) and name in by_rank and name in by_alpha:
                crossed.append(name)
        if crossed and not self.peft_version:
            notes.append(
                "a PEFT before 0.14 took one key for both patterns, so that the alpha of "
                f"{crossed} may have been another in training"
            )
        idle = [f"the pattern {key!r} matches no module" for key in idle_ranks + idle_alphas]
        alphas = {
            name: self.alpha_pattern[by_alpha[name]] if name in by_alpha else self.alpha
            for name in ranks
        }
        return alphas, idle


def parse_peft_config(config: object, problems: list[str]) -> PeftConfig:
    """Check a sidecar's value, or a ``LoraConfig.to_dict()``. Faults go to ``problems``."""
    if not (isinstance(config, Mapping) and config.keys() & {"peft_type", "r", "lora_alpha"}):
        problems.append(
            f"the config is {short(config)}; expected PEFT's LoraConfig as a mapping: save the "
            "adapter with PEFT"
        )
        return PeftConfig()

    def checked(name: str, default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        if name not in config or is_valid(config[name]):
            return config.get(name, default)
        problems.append(f"config field {name!r} is {short(config[name])}; expected {expected}")
        return default

    for name, value in config.items():
        if name not in _INFORMATION | _READ and not (value is None or value in (False, (), [], {})):
            feature = _FEATURES.get(name, "a feature loramux does not know")
            remedy = "export the adapter as a plain LoRA"
            if name == _INVOCATION:
                remedy = "remove the field if rows before the invocation are sent as the base's"
            problems.append(
                f"config field {str(name)[:256]!r} is {short(value)}: {feature} is not served; "
                f"expected none or its default: {remedy}"
            )
    checked(
        "peft_type",
        "LORA",
        lambda v: v == "LORA",
        "'LORA', the one method served: export the adapter as a plain LoRA",
    )
    checked(
        "bias",
        "none",
        lambda v: v == "none",
        "'none', trained biases are not served: train without them",
    )
    checked(
        "init_lora_weights",
        True,
        lambda v: v in _PLAIN_INITS or (isinstance(v, str) and v.lower() in _ANY_CASE),
        f"one of {_PLAIN_INITS}: others train against an altered base; save with PEFT's "
        "path_initial_model_for_weight_conversion",
    )
    targets = config.get("target_modules")
    names = targets if isinstance(targets, (list, tuple, set)) else ()
    return PeftConfig(
        rank=checked("r", None, _is_rank, f"{_RANK}: {_CORRECT}"),
        alpha=checked("lora_alpha", _DEFAULT_ALPHA, is_alpha, f"{_ALPHA}: {_CORRECT}"),
        use_rslora=checked(
            "use_rslora", False, lambda v: isinstance(v, bool), f"true or false: {_CORRECT}"
        ),
        rank_pattern=_pattern("rank_pattern", config, _is_rank, _RANK, problems),
        alpha_pattern=_pattern("alpha_pattern", config, is_alpha, _ALPHA, problems),
        target_modules=tuple(name for name in names if isinstance(name, str)),
        peft_version=bool(config.get("peft_version")),
        notes=() if "lora_alpha" in config else (f"lora_alpha is absent: {_DEFAULT_ALPHA:g}",),
    )


def keys_by_module(
    pattern: Collection[str], modules: Collection[str], problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """The key of ``pattern`` that matches each module, of those that have one; the idle keys.

    The rule is that of PEFT's ``get_pattern_key``: the first key that matches the name's end.
    """
    places = {key: i for i, key in enumerate(pattern)}
    plain = {key: i for key, i in places.items() if _PLAIN_KEY.fullmatch(key)}
    compiled = [
        (i, key, re.compile(rf"(.*\.)?({key})$")) for key, i in places.items() if key not in plain
    ]
    names = _PlainKeys(plain)
    deadline = time.monotonic() + _MAX_PATTERN_SECONDS
    keys: dict[str, str] = {}
    for module in modules:
        first, key_of_first = names.first(module)
        if key_of_first is not None:
            keys[module] = key_of_first
        for i, key, regex in compiled:
            if i > first:
                break
            if time.monotonic() > deadline:
                problems.append(
                    f"{len(pattern)} patterns for {len(modules)} modules take more than "
                    f"{_MAX_PATTERN_SECONDS:g} s to match; expected less: name the modules in full"
                )
                return {}, []
            if regex.match(module):
                keys[module] = key
                break
    used = set(keys.values())
    return keys, [key for key in pattern if key not in used]


class _PlainKeys:
    """The keys that are names, found without trying each: there may be one for every module.

    A dot of theirs stands for any character, as in a regular expression.

    Args:
        places: of each key in its pattern.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        self._alike: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}  # by length and dots
        for key, place in places.items():
            dots = tuple(at for at, character in enumerate(key) if character == ".")
            self._alike.setdefault((len(key), dots), {})[key] = place

    def first(self, module: str) -> tuple[float, str | None]:
        """The place of the first key that matches the module's end, and the key; else infinity."""
        first: tuple[float, str | None] = math.inf, None
        for (length, dots), places in self._alike.items():
            start = len(module) - length
            if start < 0 or (start > 0 and module[start - 1] != "."):
                continue
            end = [*module[start:]]
            for at in dots:
                end[at] = "."
            place = places.get(key := "".join(end), math.inf)
            if place < first[0]:
                first = place, key
        return first


def is_alpha(value: Any) -> bool:
    """Whether ``value`` is a number that a float32 scale can come from."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -1e38 < value < 1e38


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 1


def _pattern(
    name: str,
    config: Mapping[str, Any],
    is_number: Callable[[object], bool],
    expected: str,
    problems: list[str],
) -> dict[str, Any]:
    """The entries of a ``rank_pattern`` or ``alpha_pattern`` that are safe to match with."""
    entries = config.get(name) or {}
    if not isinstance(entries, Mapping):
        problems.append(
            f"config field {name!r} is {short(entries)}; expected a mapping: {_CORRECT}"
        )
        return {}
    pattern = {}
    for key, number in entries.items():
        if fault := _key_fault(key):
            problems.append(f"config field {name!r} has the key {short(key)}, {fault}")
        elif not is_number(number):
            problems.append(
                f"config field {name!r} has {short(number)} for the key {short(key)}; expected "
                f"{expected}: {_CORRECT}"
            )
        else:
            pattern[key] = number
    return pattern


def _key_fault(key: object) -> str | None:
    if not isinstance(key, str):
        return "which is no string; expected a module's name: name it"
    plain = key.replace("(?:", "(")
    choices = len(re.findall(r"[*+(]", plain))
    if len(key) > _MAX_PATTERN_CHARS or choices > _MAX_CHOICES or re.search(r"[?{]|\)[*+]", plain):
        return (
            "which can take too long to match; expected a name, or a pattern of at most "
            f"{_MAX_CHOICES} groups and repeats, no group repeated: name the modules instead"
        )
    try:
        re.compile(key)
    except (re.error, FutureWarning) as error:
        return f"which is no regular expression ({error}); expected a module's name: name it"
    return None
