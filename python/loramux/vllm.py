"""The plugin that makes loramux the LoRA backend of vLLM, loaded by its entry point.

vLLM calls ``register`` in every process (group ``vllm.general_plugins``). It only changes which
wrapper the platform names for LoRA and the key of vLLM's compile cache, so that an engine without
LoRA never sees more of loramux. What the wrapper replaces is listed in ``loramux.punica``.

Turned off by ``LORAMUX_VLLM=0``, or by a ``VLLM_PLUGINS`` that does not name ``loramux``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
from typing import Any

from . import __version__

VERSION = "0.24."  # of vLLM, whose contract with a LoRA backend is known
WRAPPER = "loramux.punica.PunicaWrapper"

# What punica.py relies on, by module.
_CONTRACT = {
    "vllm.lora.punica_wrapper.punica_gpu": ("PunicaWrapperGPU.update_metadata",),
    "vllm.lora.layers": (
        "BaseLayerWithLoRA.set_mapping",
        "ColumnParallelLinearWithLoRA",
        "LogitsProcessorWithLoRA.set_lora",
        "MergedColumnParallelLinearVariableSliceWithLoRA",
        "MergedColumnParallelLinearWithLoRA.set_lora",
        "MergedQKVParallelLinearWithLoRA",
        "QKVParallelLinearWithLoRA",
        "ReplicatedLinearWithLoRA",
        "RowParallelLinearWithLoRA.reset_lora",
        "VocabParallelEmbeddingWithLoRA.forward",
    ),
    "vllm.lora.layers.base_linear": (
        "BaseLinearLayerWithLoRA._apply_sync",
        "BaseLinearLayerWithLoRA._get_quant_method",
    ),
    "vllm.lora.layers.column_parallel_linear": ("_mcp_apply",),
    "vllm.lora.model_manager": ("LoRAModelManager.activate_adapter",),
    "vllm.model_executor.layers.linear": ("ReplicatedLinear",),
}

logger = logging.getLogger("vllm.plugins.loramux")


@functools.cache
def register() -> None:
    """Offer loramux's wrapper to this process's vLLM. Calling it again changes nothing.

    A vLLM of another version keeps its own kernels, and one warning says so.
    """
    import vllm

    if os.environ.get("LORAMUX_VLLM") == "0":
        logger.info("loramux is turned off by LORAMUX_VLLM=0")
        return
    if not vllm.__version__.startswith(VERSION):
        _keep_own_kernels(f"it knows vLLM {VERSION}*, this is {vllm.__version__}")
        return
    from vllm.config.lora import LoRAConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    current_platform.get_punica_wrapper = functools.partial(
        _wrapper, current_platform.get_punica_wrapper
    )
    LoRAConfig.compute_hash = _with_wrapper(LoRAConfig.compute_hash)


def _wrapper(own: Any) -> str:
    """The name of the wrapper to use: loramux's, or what ``own()`` returns."""
    missing = _missing()
    if missing:
        _keep_own_kernels(missing)
        return str(own())
    return WRAPPER


@functools.cache
def _missing() -> str | None:
    """What stands in the way of serving this vLLM, if anything does."""
    for module, paths in _CONTRACT.items():
        for path in paths:
            try:
                functools.reduce(getattr, path.split("."), importlib.import_module(module))
            except (ImportError, AttributeError) as error:
                return f"{module}.{path} is not as expected ({error})"
    return _why_no_kernels()


def _why_no_kernels() -> str | None:
    from vllm.platforms import current_platform

    from .backend import why_no_cuda

    reason = why_no_cuda(current_platform.get_device_capability())
    return reason and f"{reason} (see python -m loramux.collect_env)"


@functools.cache
def _keep_own_kernels(reason: str) -> None:
    logger.warning(
        "loramux %s does not serve this vLLM: %s. vLLM's own LoRA kernels are used.",
        __version__,
        reason,
    )


def _with_wrapper(compute_hash: Any) -> Any:
    """The key of a compiled graph: the configuration, and whose operators the graph calls.

    Without this a graph compiled before loramux was installed would run with it, and the reverse.
    """

    @functools.wraps(compute_hash)
    def keyed(config: Any) -> str:
        from vllm.platforms import current_platform

        factors = (compute_hash(config), current_platform.get_punica_wrapper(), __version__)
        return hashlib.sha256(repr(factors).encode()).hexdigest()

    return keyed
