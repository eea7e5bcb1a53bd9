"""loramux: many LoRA adapters over one base model, in one batch.

Every public name imports from here; each is loaded with its module on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "checkpoint": (
        "LoraAdapter",
        "LoraModule",
        "drop_base_copies",
        "lora_adapter_from_tensors",
        "read_lora_file",
    ),
    "config": (
        "AdapterInfo",
        "LoraBaseOnly",
        "LoraModuleRef",
        "LoraReqConfig",
        "LoraSpec",
        "LoraStep",
        "LoraTarget",
        "Segment",
        "lora_enabled",
        "node_capture_key",
        "resolve_adapter_path",
        "served_lora_adapters",
    ),
    "errors": (
        "AdapterError",
        "BackendUnavailable",
        "LoraError",
        "PlanMismatch",
        "PoolExhausted",
        "SpecError",
        "UnknownAdapter",
    ),
    "identity": (
        "AdapterPrefixRoots",
        "adapter_digest",
        "adapter_prefix_root",
        "prefix_block_keys",
        "read_adapter_digest",
    ),
    "merge": ("merge_adapter",),
    "modules": ("ModuleLoraMap", "module_lora_spec"),
    "ops": (
        "lora_apply_",
        "lora_embedding_",
        "lora_expand_",
        "lora_finish_",
        "lora_shrink",
        "lora_start",
    ),
    "plan": ("StepPlan",),
    "pool": ("LoraLease", "LoraPool"),
    "serving": (
        "declared_lora_specs",
        "drop_lora_specs_without_targets",
        "lora_specs",
        "served_lora_targets",
        "size_lora_specs",
        "validate_deployment",
    ),
    "runtime": ("AdapterHold", "LoraRuntime", "ServedAdapter"),
    "site": ("LoraSite",),
    "store": ("LoraImage", "LoraStore"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
