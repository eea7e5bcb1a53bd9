"""loramux's wrapper for vLLM's LoRA layers, imported in a vLLM that ``loramux.vllm`` has checked.

What is replaced in vLLM when the wrapper is made, and nothing else:

- ``BaseLayerWithLoRA.set_mapping``: a layer that loramux serves gets a wrapper of its own, which
  runs over the layer's stacked tensors and learns each slot's rank from ``set_lora``;
- ``BaseLinearLayerWithLoRA._apply_sync``: the deltas of short steps are made beside the base GEMM;
- ``column_parallel_linear._mcp_apply``: so are those of a packed projection, by the same call;
- ``VocabParallelEmbeddingWithLoRA.forward``: the kernel looks A up, by token id;
- ``LoRAModelManager.activate_adapter``: what a slot holds has changed, so the next step is planned
  even if it names the same adapters as the last one.

Fully sharded and MoE layers, and those whose output has another dtype than their adapters, keep
vLLM's kernels, whose metadata is then prepared as well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora import layers, model_manager
from vllm.lora.layers import base, base_linear, column_parallel_linear
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.model_executor.layers.linear import ReplicatedLinear

from . import __version__
from .errors import SpecError
from .ops import beside_memory
from .plan import StepPlan
from .site import LoraSite
from .vllm import logger

_apply = torch.ops.loramux.lora_apply_.default
_start = torch.ops.loramux.lora_start.default
_finish = torch.ops.loramux.lora_finish_.default
_embedding = torch.ops.loramux.lora_embedding_.default

_LINEAR = (
    layers.ColumnParallelLinearWithLoRA,
    layers.MergedColumnParallelLinearWithLoRA,
    layers.MergedColumnParallelLinearVariableSliceWithLoRA,
    layers.QKVParallelLinearWithLoRA,
    layers.MergedQKVParallelLinearWithLoRA,
    layers.ReplicatedLinearWithLoRA,
    layers.RowParallelLinearWithLoRA,
)


class RowPlan:
    """The plan of one of vLLM's two mappings, of tokens or of sampled rows, to adapters.

    Attributes:
        plan: holds the step's rows; rows past them, which pad a step to the size of a captured
            graph, are in no tile.
        active: bool ``[1]`` on the CPU, read by every call on the host: false where no row has an
            adapter, so that a graph captured then has no LoRA kernel in it. True until the first
            mapping: vLLM captures a vision encoder ahead of it.
    """

    def __init__(self, max_rows: int, num_slots: int, device: torch.device | str) -> None:
        self.plan = StepPlan(max_rows, num_slots, device)
        with torch.inference_mode(False):
            self.active = torch.ones(1, dtype=torch.bool)

    def update(self, adapters: Sequence[int], slots: dict[int, int]) -> None:
        """Plan a step: the adapter id of every row, 0 for the base."""
        self.plan.update_rows(adapters, slots)
        self.active.fill_(not self.plan.base_only)


class PunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """Plans the steps of one model and gives each layer that loramux serves its own wrapper."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        _replace()
        self._plan = functools.partial(RowPlan, max_num_batched_tokens, self.max_loras + 1, device)
        self._tokens = self._plan()
        self._sampled: RowPlan | None = None  # where an LM head has adapters
        self._served = 0
        self._left: Counter[str] = Counter()  # layers that keep vLLM's kernels, by type
        self._is_announced = False

    def bind(self, layer: Any) -> PunicaWrapper | LayerWrapper:
        """The wrapper for ``layer``: its own, or this one where vLLM's kernels stay."""
        try:
            site = _site_of(layer)
        except SpecError as error:
            logger.warning("%s keeps vLLM's LoRA kernels: %s", type(layer).__name__, error)
            site = None
        if site is None:
            self._left[type(layer).__name__] += 1
            return self
        self._served += 1
        if type(layer) is not layers.LogitsProcessorWithLoRA:
            return LayerWrapper(layer, site, self._tokens)
        self._sampled = self._sampled or self._plan()
        return LayerWrapper(layer, site, self._sampled)

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Plan the step. vLLM calls it only when the mapping has changed."""
        self._announce()
        slots = {0: 0}
        slots.update((name, i + 1) for i, name in enumerate(lora_index_to_id) if name is not None)
        self._tokens.update(mapping.index_mapping, slots)
        if self._sampled:
            self._sampled.update(mapping.prompt_mapping, slots)
        if self._left:
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            left = ", ".join(f"{count} {name}" for name, count in sorted(self._left.items()))
            logger.info(
                "loramux %s is active: it serves %d LoRA layers; with vLLM's own kernels: %s",
                __version__,
                self._served,
                left or "none",
            )


class LayerWrapper:
    """What one layer calls as its punica wrapper.

    The methods are traced by Dynamo: what changes from step to step is in tensors of fixed address.
    """

    def __init__(self, layer: Any, site: LoraSite, rows: RowPlan) -> None:
        self.site = site
        self.rows = rows
        self._empty_slots = site.table.to("cpu", copy=True)  # rank 0
        set_lora, reset_lora = layer.set_lora, layer.reset_lora

        def learn_ranks(index: int, lora_a: Any, lora_b: Any) -> None:
            set_lora(index, lora_a, lora_b)
            self.set_ranks(index, _ranks(lora_a, len(site.widths)))

        def forget_ranks(index: int) -> None:
            reset_lora(index)
            self.set_ranks(index, [0] * len(site.widths))

        layer.set_lora, layer.reset_lora = learn_ranks, forget_ranks

    def set_ranks(self, index: int, ranks: Sequence[int]) -> None:
        """Slot ``index`` of the stacked tensors holds ``ranks`` from here on in the stream.

        The slot's entries are written whole: as the weights, they are lost in a deep sleep.
        """
        entries = self._empty_slots[index + 1].clone()
        entries[:, 2] = torch.tensor(ranks, device="cpu")
        table = self.site.table
        if table.is_cuda:
            entries = entries.pin_memory()
        table[index + 1].copy_(entries, non_blocking=True)

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, scale: float, *_: Any, **__: Any
    ) -> None:
        """``y += delta`` in place, for ``x [rows, in]`` and ``y [rows, sum of slices]``.

        vLLM folds ``alpha / r`` into B and passes a scale of 1.0, and with ``add_inputs=False`` a y
        of zeros. Its A and B are the site's.
        """
        assert scale == 1.0
        values = x.shape[0] * self.site.scratch_width
        _apply(y, x.new_empty(values, dtype=torch.float32), x, *self._where())

    def start(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Begin the deltas of ``x [rows, in]``; what it returns is for ``finish``."""
        delta, scratch = beside_memory(x, self.site)
        _start(delta, scratch, x, *self._where())
        return delta, scratch, x

    def finish(self, y: torch.Tensor, started: tuple[torch.Tensor, ...]) -> None:
        """Add to ``y [rows, sum of slices]`` what ``start`` began before y was enqueued."""
        _finish(y, *started, *self._where())

    def _where(self) -> tuple[Any, ...]:
        site = self.site
        return (
            site.weights, site.table, self.rows.plan.buffer,
            site.entry, site.widths, site.max_rank, self.rows.active,
        )  # fmt: skip

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As ``add_lora_linear`` for sampled rows; y may have columns of padding at its end."""
        y = y.view(-1, y.shape[-1])[:, : self.site.widths[0]]
        self.add_lora_linear(y, x.view(-1, x.shape[-1]), *args, **kwargs)

    def add_token_embedding(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        """``y[i] += A[slot(i)][ids[i]] @ B[slot(i)]^T`` in place, y ``[rows, hidden]``."""
        site = self.site
        _embedding(
            y, ids, site.weights, site.table, self.rows.plan.buffer,
            site.entry, site.widths, site.in_features, site.max_rank, self.rows.active,
        )  # fmt: skip


def _site_of(layer: Any) -> LoraSite | None:
    """The site over a layer's stacked tensors, every slot still of rank 0; None: not served."""
    kind = type(layer)
    if kind is layers.VocabParallelEmbeddingWithLoRA:
        a, b, dtype = [layer.lora_a_stacked], [layer.lora_b_stacked], layer.base_layer.weight.dtype
    elif kind is layers.LogitsProcessorWithLoRA:
        a, b, dtype = [layer.lora_a_stacked], [layer.lora_b_stacked], layer.dtype
    elif kind in _LINEAR:
        a, b, dtype = layer.lora_a_stacked, layer.lora_b_stacked, layer.base_layer.params_dtype
    else:
        return None
    is_router = kind is layers.ReplicatedLinearWithLoRA and (
        type(layer.base_layer) is not ReplicatedLinear  # may return float32
    )
    if is_router or any(tensor.dtype != dtype for tensor in (*a, *b)):
        return None
    with torch.inference_mode(False):
        return LoraSite.stacked(
            [tensor.squeeze(1) if tensor.dim() == 4 else tensor for tensor in a],
            [tensor.squeeze(1) for tensor in b],
            ranks=[0] * len(a[0]),
            embedding=kind is layers.VocabParallelEmbeddingWithLoRA,
        )


def _ranks(lora_a: Any, num_slices: int) -> list[int]:
    """The rank of each slice of what ``set_lora`` is given: one A ``[r, in]``, or one per slice."""
    if isinstance(lora_a, torch.Tensor):
        return [lora_a.shape[0]] * num_slices
    ranks = [0 if a is None else a.shape[0] for a in lora_a]
    # Groups that cover several slices each: past its own rank a slice has zeros.
    return ranks if len(ranks) == num_slices else [max(ranks)] * num_slices


_stock_apply_sync = base_linear.BaseLinearLayerWithLoRA._apply_sync
_stock_mcp_apply = column_parallel_linear._mcp_apply
_stock_embedding_forward = layers.VocabParallelEmbeddingWithLoRA.forward
_stock_activate_adapter = model_manager.LoRAModelManager.activate_adapter


def _set_mapping(layer: Any, punica_wrapper: Any) -> None:
    is_ours = isinstance(punica_wrapper, PunicaWrapper)
    layer.punica_wrapper = punica_wrapper.bind(layer) if is_ours else punica_wrapper


def _apply_sync(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    wrapper = layer.punica_wrapper
    if not isinstance(wrapper, LayerWrapper):
        return _stock_apply_sync(layer, x, bias)
    started = wrapper.start(x.reshape(-1, x.shape[-1]))
    y = layer._get_quant_method().apply(layer.base_layer, x, bias)
    wrapper.finish(y.view(-1, y.shape[-1]), started)
    return y


def _mcp_apply(x: torch.Tensor, bias: torch.Tensor | None, layer: Any) -> Any:
    if isinstance(layer.punica_wrapper, LayerWrapper):
        return layer._apply_sync(x, bias)
    return _stock_mcp_apply(x, bias, layer)


def _embedding_forward(layer: Any, x: torch.Tensor) -> Any:
    wrapper = layer.punica_wrapper
    if not isinstance(wrapper, LayerWrapper):
        return _stock_embedding_forward(layer, x)
    y = layer.base_layer.forward(x)
    wrapper.add_token_embedding(y.view(-1, y.shape[-1]), x.view(-1))
    return y


def _activate_adapter(manager: Any, lora_id: int) -> Any:
    is_activated = _stock_activate_adapter(manager, lora_id)
    if is_activated:
        manager._last_mapping = None
    return is_activated


def _replace() -> None:
    base.BaseLayerWithLoRA.set_mapping = _set_mapping
    base_linear.BaseLinearLayerWithLoRA._apply_sync = _apply_sync
    column_parallel_linear._mcp_apply = _mcp_apply
    layers.VocabParallelEmbeddingWithLoRA.forward = _embedding_forward
    model_manager.LoRAModelManager.activate_adapter = _activate_adapter
