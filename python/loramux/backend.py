"""Which code adds a batch's LoRA deltas: the compiled kernels, or the plain definition below.

The definition is what every kernel is compared with: ``h = x @ A^T``, then ``y += s * h @ B^T``, in
float32 with one rounding when the delta is added to y.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Literal

import torch

from .errors import BackendUnavailable
from .plan import StepPlan
from .site import LoraSite

torch.ops.load_library(str(Path(__file__).with_name("_ops.so")))

logger = logging.getLogger("loramux")

NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    op = "loramux::lora_apply_"
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(op, key):
        return f"this build of loramux has no kernel for the device {device.type!r}"
    return None


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
