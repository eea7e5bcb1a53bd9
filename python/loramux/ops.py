"""The LoRA shrink and expand as torch operators, each one opaque node under ``torch.compile``.

The operators and their schemas live in csrc/ops.cpp. The functions here take a ``LoraSite`` and a
``StepPlan``, check what only the host can see, and call the operator or the torch definition.

An engine may call the operators themselves. Rows past the plan's are then base rows, and
``active``, one bool on the CPU, turns a call off: it is read at every call, so that one traced
graph serves steps without adapters too, and a CUDA graph captured with it false has no LoRA kernel.

On a CUDA device the kernels start reading weights, table and plan while the kernel ahead of them on
the stream still runs (x, y and h they wait for). Copies are always waited for; a kernel that writes
weights, a table or a plan must not be the one enqueued just before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack

from . import backend
from .errors import PlanMismatch
from .plan import StepPlan
from .site import LoraSite

_shrink = torch.ops.loramux.lora_shrink.default
_expand = torch.ops.loramux.lora_expand_.default
_apply = torch.ops.loramux.lora_apply_.default
# What the overload calls, less a Python frame: half a microsecond.
_apply_packed = torch.ops.loramux.lora_apply_packed_.default._op
_start = torch.ops.loramux.lora_start.default
_finish = torch.ops.loramux.lora_finish_.default
_embedding = torch.ops.loramux.lora_embedding_.default

# Of csrc/lora.h: rows of a step at most whose deltas are made beside the base GEMM, and the arrays
# of h that this takes.
BESIDE_ROWS, _BESIDE_PARTS = 32, 8

# They only write into their arguments, so that there is nothing to infer.
for _name in (
    "lora_shrink", "lora_expand_", "lora_apply_", "lora_apply_packed_", "lora_start",
    "lora_finish_", "lora_embedding_",
):  # fmt: skip
    torch.library.register_fake(f"loramux::{_name}", lambda *args: None)


def lora_shrink(
    x: torch.Tensor, site: LoraSite, plan: StepPlan, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``h[i, s, :r] = x[i] @ A[slot(i), s]^T`` for every row that has an adapter.

    Rows without one, and ranks past an adapter's own, keep what ``out`` held.

    Args:
        x: ``[rows, in]``, the weights' dtype, unit column stride.
        out: float32 ``[rows, num_slices, max_rank]``, contiguous; allocated where ``None``.

    Returns:
        h, which is ``out`` where it was given.

    Raises:
        PlanMismatch: the plan is for another number of rows, or over more slots than the site's.
        RuntimeError: a shape, dtype, stride or device that does not fit, with both values.
    """
    _check_plan(plan, x.shape[0], site)
    if out is None:
        out = x.new_empty(x.shape[0], len(site.widths), site.max_rank, dtype=torch.float32)
    if site.backend == "native":
        _shrink(out, x, site.weights, site.table, plan.buffer, site.entry)
    else:
        backend.shrink(out, x, site, plan)
    return out


def lora_expand_(y: torch.Tensor, h: torch.Tensor, site: LoraSite, plan: StepPlan) -> torch.Tensor:
    """``y[i, s] += scale * h[i, s, :r] @ B[slot(i), s]^T``, in place, rounded once.

    Args:
        y: ``[rows, sum(widths)]``, unit column stride; may be a column slice of a wider tensor.
        h: float32 ``[rows, num_slices, max_rank]`` from ``lora_shrink`` with the same plan.

    Returns:
        y.

    Raises:
        PlanMismatch, RuntimeError: as ``lora_shrink``.
    """
    _check_plan(plan, y.shape[0], site)
    if site.backend == "native":
        _expand(y, h, site.weights, site.table, plan.buffer, site.entry, site.widths)
    else:
        backend.expand_(y, h, site, plan)
    return y


def lora_apply_(y: torch.Tensor, x: torch.Tensor, site: LoraSite, plan: StepPlan) -> torch.Tensor:
    """Add every row its own adapter's delta: ``lora_shrink`` and ``lora_expand_`` as one call.

    ``y[i] += scale * (x[i] @ A[slot(i)]^T) @ B[slot(i)]^T``; base rows keep their bits.
    The workspace between the two is the plan's, so that two calls with one plan must not run at
    the same time on different streams: beside other work use ``lora_shrink`` with an ``out``.

    Args:
        y: ``[rows, sum(widths)]``, unit column stride; may be a column slice of a wider tensor.
        x: ``[rows, in]``, unit column stride, the dtype of y and of the weights.

    Returns:
        y.

    Raises:
        PlanMismatch, RuntimeError: as ``lora_shrink``.
    """
    rows = x.shape[0]
    is_eager = _check_plan(plan, rows, site)
    if site.backend != "native":
        backend.apply_(y, x, site, plan)
        return y
    scratch = plan.scratch
    if plan.scratch_width < site.scratch_width:
        scratch = x.new_empty(rows * site.scratch_width, dtype=torch.float32)
    if is_eager and not _len_torch_dispatch_stack():  # else a tracer would keep addresses
        if len(site.weights) > 1:
            site.follow_memory()
        _apply_packed(y, scratch, x, plan.buffer, site.packed)
    else:
        _apply(
            y, scratch, x, site.weights, site.table, plan.buffer,
            site.entry, site.widths, site.max_rank,
        )  # fmt: skip
    return y


class StartedDelta(NamedTuple):
    """What ``lora_start`` leaves for ``lora_finish_``: keep it until then.

    A kernel on the stream beside may still write to its tensors. So where y is not to be had any
    more, finish into another.
    """

    x: torch.Tensor
    site: LoraSite
    plan: StepPlan
    delta: torch.Tensor
    scratch: torch.Tensor


def lora_start(x: torch.Tensor, site: LoraSite, plan: StepPlan) -> StartedDelta:
    """Begin ``lora_apply_`` before its y exists: call it ahead of the GEMM that makes y.

    On sm_90 and later, in half precision, the deltas of a short step are made on a stream of their
    own, beside what is enqueued on the current stream until ``lora_finish_``. Both can be captured
    in a CUDA graph. All else is left to ``lora_finish_``. Short is a step of at most
    ``BESIDE_ROWS`` rows, over a site of rank 64 at most, where a row's adapter each, or all that
    have slots, have 512 ranks at most.

    Args:
        x: ``[rows, in]``, unit column stride, the dtype of y and of the weights; not written to
            until ``lora_finish_``.

    Raises:
        PlanMismatch, RuntimeError: as ``lora_shrink``.
    """
    _check_plan(plan, x.shape[0], site)
    delta, scratch = beside_memory(x, site)
    if site.backend == "native":
        _start(
            delta, scratch, x, site.weights, site.table, plan.buffer,
            site.entry, site.widths, site.max_rank,
        )  # fmt: skip
    return StartedDelta(x, site, plan, delta, scratch)


def beside_memory(x: torch.Tensor, site: LoraSite) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta and the scratch that the operators of the two halves take for ``x [rows, in]``."""
    delta = x.new_empty(BESIDE_ROWS, sum(site.widths))
    arrays = x.shape[0] + _BESIDE_PARTS * BESIDE_ROWS
    return delta, x.new_empty(arrays * site.scratch_width, dtype=torch.float32)


def lora_finish_(y: torch.Tensor, started: StartedDelta) -> torch.Tensor:
    """Add the deltas that ``lora_start`` began, on the stream that it was called on.

    As ``lora_apply_``, base rows keep their bits; but a delta that was made beside the GEMM was
    rounded to y's dtype before it is added: two roundings, as in vLLM's kernels.

    Args:
        y: ``[rows, sum(widths)]``, unit column stride.

    Returns:
        y.

    Raises:
        PlanMismatch, RuntimeError: as ``lora_shrink``.
    """
    x, site, plan, delta, scratch = started
    _check_plan(plan, y.shape[0], site)
    if site.backend == "native":
        _finish(
            y, delta, scratch, x, site.weights, site.table, plan.buffer,
            site.entry, site.widths, site.max_rank,
        )  # fmt: skip
    else:
        backend.apply_(y, x, site, plan)
    return y


def lora_embedding_(
    y: torch.Tensor, ids: torch.Tensor, site: LoraSite, plan: StepPlan
) -> torch.Tensor:
    """Add every row its own adapter's embedding delta, in place, rounded once.

    ``y[i] += scale * A[slot(i)][ids[i]] @ B[slot(i)]^T``, as PEFT's ``lora_embedding_A / _B``.

    Args:
        y: ``[rows, sum(widths)]``, unit column stride.
        ids: ``[rows]``, int32 or int64. An id of -1 has no vector here (another rank's part of the
            vocabulary) and adds nothing; on a CUDA device neither does any other id outside
            ``[0, vocab)``, which the host cannot see.

    Returns:
        y.

    Raises:
        PlanMismatch, RuntimeError: as ``lora_shrink``; on the CPU also an id below -1 or past the
            vocabulary, and nothing is written.
    """
    _check_plan(plan, ids.shape[0], site)
    if site.backend == "native":
        _embedding(
            y, ids, site.weights, site.table, plan.buffer,
            site.entry, site.widths, site.in_features, site.max_rank,
        )  # fmt: skip
    else:
        backend.embedding_(y, ids, site, plan)
    return y


def _check_plan(plan: StepPlan, rows: int, site: LoraSite) -> bool:
    """Whether the call is eager, and its plan was checked.

    A graph being traced is used with later plans: there the operator checks what it can.
    """
    if torch.compiler.is_compiling():
        return False
    if rows != plan.rows:
        raise PlanMismatch(
            f"got {rows} rows, the plan is for {plan.rows}: plan the step that these rows "
            "are of, padding rows as a base segment"
        )
    if plan.num_slots > site.num_slots:
        raise PlanMismatch(
            f"the plan is over {plan.num_slots} slots, the site has {site.num_slots}: plan for the "
            "site's num_slots"
        )
    return True
