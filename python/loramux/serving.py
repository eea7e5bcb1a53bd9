"""Which LoRA specs a deployment builds from its serving config's ``resources: lora:`` block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import LoraSpec
from .resource import NodeResourceSpec

_LATER = "deployments are not served yet: build a LoraSpec and its LoraPool yourself"


def declared_lora_specs(model: Any, model_config: Mapping[str, Any]) -> list[LoraSpec]:
    """The model's LoRA specs, the one keyed ``lora`` first. Not implemented yet."""
    raise NotImplementedError(_LATER)


def drop_lora_specs_without_targets(specs: list[NodeResourceSpec]) -> list[NodeResourceSpec]:
    """Leave out the LoRA specs whose targets were all dropped. Not implemented yet."""
    raise NotImplementedError(_LATER)


def lora_specs(model: Any, model_config: Mapping[str, Any] | None) -> list[LoraSpec]:
    """The deployment's LoRA specs with its YAML applied. Not implemented yet."""
    raise NotImplementedError(_LATER)


def served_lora_targets(lora: list[LoraSpec]) -> list[str] | None:
    """The targets that a configured adapter touches. Not implemented yet."""
    raise NotImplementedError(_LATER)


def size_lora_specs(lora: list[LoraSpec], model_config: Mapping[str, Any]) -> None:
    """Size the LoRA specs keyed apart from ``lora``. Not implemented yet."""
    raise NotImplementedError(_LATER)
