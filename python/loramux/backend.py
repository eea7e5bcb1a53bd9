"""Which code adds a batch's LoRA deltas: the compiled kernels, or the plain definition below.

The definition is what every kernel is compared with: ``h = x @ A^T``, then ``y += s * h @ B^T``, in
float32 with one rounding when the delta is added to y.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Literal

import torch

from .errors import BackendUnavailable
from .plan import StepPlan
from .site import LoraSite

torch.ops.load_library(str(Path(__file__).with_name("_ops.so")))

logger = logging.getLogger("loramux")

NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ARCHITECTURE = re.compile(r"(\d+)(\d)(a?)(-real|-virtual)?")  # as CMake names them


def resolve_backend(
    backend: Literal["auto", "torch", "native"], device: torch.device, dtype: torch.dtype
) -> Literal["torch", "native"]:
    """What serves ``backend`` on ``device`` with weights of ``dtype``.

    Raises:
        BackendUnavailable: ``"native"`` where this build has no kernel for them.
    """
    if backend == "torch":
        return "torch"
    reason = _why_not_native(device, dtype)
    if reason is None:
        return "native"
    if backend == "native":
        raise BackendUnavailable(f"backend='native': {reason}; use 'auto' or 'torch'")
    _log_fallback(reason)
    return "torch"


def _why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in NATIVE_DTYPES:
        return f"the kernels serve {', '.join(map(str, NATIVE_DTYPES))}, not {dtype}"
    if device.type == "cuda":
        return why_no_cuda(torch.cuda.get_device_capability(device))
    return None if device.type == "cpu" else f"there is no kernel for the device {device.type!r}"


def why_no_cuda(capability: tuple[int, int] | None) -> str | None:
    """What keeps this build's CUDA kernels from a device of that compute capability, if anything.

    Args:
        capability: ``None`` where it is not known; the device is then taken to be served.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key("loramux::lora_apply_", "CUDA"):
        return "this loramux was built without CUDA kernels"
    architectures = build_facts()["CUDA kernels for"]
    if capability is None or any(_serves(one, capability) for one in architectures.split(";")):
        return None
    return (
        f"this loramux was built for {architectures}, the GPU has compute capability "
        f"{capability[0]}.{capability[1]}"
    )


def _serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on a device, by CUDA's rules of compatibility.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
    """
    parts = _ARCHITECTURE.fullmatch(architecture)
    if parts is None:  # CMake's "native" or "all"
        return True
    major, minor, only_that, form = parts.groups()
    built = int(major), int(minor)
    if only_that:
        return capability == built
    return capability >= built and (form != "-real" or capability[0] == built[0])


@functools.cache
def build_facts() -> dict[str, str]:
    """What was compiled in, and with what (written by CMakeLists.txt)."""
    facts: dict[str, str] = json.loads(Path(__file__).with_name("_build.json").read_text())
    return facts


@functools.cache
def _log_fallback(reason: str) -> None:
    logger.warning("using the torch definition, not the compiled kernels: %s", reason)


def shrink(h: torch.Tensor, x: torch.Tensor, site: LoraSite, plan: StepPlan) -> None:
    """``h[row, slice, :rank] = x[row] @ A^T``; h float32 ``[rows, num_slices, max_rank]``."""
    for tile in plan.tiles():
        rows = tile.rows.to(x.device)
        for part in site.slices(tile.slot):
            h[rows, part.index, : len(part.a)] = x[rows].float() @ part.a.float().T


def expand_(y: torch.Tensor, h: torch.Tensor, site: LoraSite, plan: StepPlan) -> None:
    """``y[row, slice] += scale * h[row, slice, :rank] @ B^T``, rounded once."""
    for tile in plan.tiles():
        rows, factors = tile.rows.to(y.device), tile.scales.to(y.device)[:, None]
        for part in site.slices(tile.slot):
            hidden = h[rows, part.index, : part.b.shape[1]]
            _add(y, rows, part.columns, part.scale * factors * (hidden @ part.b.float().T))


def apply_(y: torch.Tensor, x: torch.Tensor, site: LoraSite, plan: StepPlan) -> None:
    """Shrink, then expand."""
    h = x.new_empty(x.shape[0], len(site.widths), site.max_rank, dtype=torch.float32)
    shrink(h, x, site, plan)
    expand_(y, h, site, plan)


def embedding_(y: torch.Tensor, ids: torch.Tensor, site: LoraSite, plan: StepPlan) -> None:
    """``y[row, slice] += scale * A[ids[row]] @ B^T``; an id outside the vocabulary adds nothing."""
    for tile in plan.tiles():
        rows = tile.rows.to(ids.device)
        known = (ids[rows] >= 0) & (ids[rows] < site.in_features)
        rows, factors = rows[known], tile.scales.to(y.device)[known, None]
        for part in site.slices(tile.slot, embedding=True):
            delta = part.a[ids[rows]].float() @ part.b.float().T
            _add(y, rows, part.columns, part.scale * factors * delta)


def _add(y: torch.Tensor, rows: torch.Tensor, columns: slice, delta: torch.Tensor) -> None:
    y[rows, columns] = (y[rows, columns].float() + delta).to(y.dtype)
