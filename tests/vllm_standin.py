"""The part of vLLM 0.24 that a LoRA backend meets: its tensors, its calls and their order.

``install`` puts modules of vLLM's names into ``sys.modules``. The base layers' weights are random;
what the real engine does with adapters (zero padding to max_lora_rank, slices of a packed layer
that an adapter may lack, slots reused, a mapping sent only when it changes, stray keywords)
is done here the same way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn import functional


@dataclass
class LoRAConfig:
    max_loras: int = 3
    max_lora_rank: int = 16
    specialize_active_lora: bool = False

    def compute_hash(self):
        return "stock"


@dataclass
class LoRAMapping:
    index_mapping: tuple
    prompt_mapping: tuple
    is_prefill: bool = True


class Platform:
    cuda = True

    def is_cuda(self):
        return self.cuda

    def get_device_capability(self):
        return 9, 0

    def get_punica_wrapper(self):
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"


class PunicaWrapperGPU:
    """Counts what reaches vLLM's own kernels."""

    def __init__(self, max_num_batched_tokens, max_batches, device, **kwargs):
        self.lora_config = kwargs["lora_config"]
        self.max_loras = self.lora_config.max_loras
        self.metadata_updates = 0
        self.kernel_calls = []

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs):
        self.metadata_updates += 1

    def add_lora_linear(self, *args, **kwargs):
        self.kernel_calls.append("linear")

    def add_shrink(self, *args, **kwargs):
        self.kernel_calls.append("shrink")

    def add_expand(self, *args, **kwargs):
        self.kernel_calls.append("expand")

    def add_lora_embedding(self, *args, **kwargs):
        self.kernel_calls.append("embedding")


class QuantMethod:
    def apply(self, layer, x, bias):
        return layer.apply_to(x, bias)


class Linear(nn.Module):
    """A base layer, this rank's part of it."""

    def __init__(self, width, out, dtype=torch.float32):
        super().__init__()
        self.params_dtype = dtype
        self.weight = nn.Parameter(torch.randn(out, width, dtype=dtype) / width**0.5, False)

    def apply_to(self, x, bias):
        return functional.linear(x, self.weight)

    @property
    def quant_method(self):
        return QuantMethod()

    def forward(self, x):
        return self.apply_to(x, None), None


class ReplicatedLinear(Linear):
    pass


class GateLinear(ReplicatedLinear):
    pass


class BaseLayerWithLoRA(nn.Module):
    def set_mapping(self, punica_wrapper):
        self.punica_wrapper = punica_wrapper


class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    def __init__(self, base_layer, output_slices, tp_rank=0, tp_size=1):
        super().__init__()
        self.base_layer = base_layer
        self.output_slices = tuple(output_slices)
        self.n_slices = len(self.output_slices)
        self.tp_rank, self.tp_size = tp_rank, tp_size

    def create_lora_weights(self, config, dtype):
        slots, rank = config.max_loras, config.max_lora_rank
        width = self.base_layer.weight.shape[1]
        self.lora_a_stacked = tuple(
            torch.zeros(slots, 1, rank, width, dtype=dtype) for _ in self.output_slices
        )
        self.lora_b_stacked = tuple(
            torch.zeros(slots, 1, out, rank, dtype=dtype) for out in self.output_slices
        )

    def reset_lora(self, index):
        for tensor in (*self.lora_a_stacked, *self.lora_b_stacked):
            tensor[index] = 0

    def slice_lora_a(self, a):
        return a

    def slice_lora_b(self, b, out):
        return b

    def set_lora(self, index, lora_a, lora_b):
        self.reset_lora(index)
        if isinstance(lora_a, torch.Tensor):
            lora_a, lora_b = [lora_a], [lora_b]
        for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
            if a is not None:
                a, b = self.slice_lora_a(a), self.slice_lora_b(b, self.output_slices[i])
                self.lora_a_stacked[i][index, 0, : a.shape[0], : a.shape[1]].copy_(a)
                self.lora_b_stacked[i][index, 0, : b.shape[0], : b.shape[1]].copy_(b)

    def apply(self, x, bias=None):
        return self._apply_sync(x, bias)

    def _get_quant_method(self):
        return self.base_layer.quant_method

    def _apply_sync(self, x, bias=None):
        output = self._get_quant_method().apply(self.base_layer, x, bias)
        return self._apply_lora_to_output(x, output)

    def _apply_lora_to_output(self, x, output):
        self.punica_wrapper.add_lora_linear(
            output, x, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
        )
        return output

    def forward(self, x):
        return self.apply(x)


def _mcp_apply(x, bias, layer):
    output = layer._get_quant_method().apply(layer.base_layer, x, bias)
    buffers = x.new_zeros(layer.n_slices, x.shape[0], layer.lora_a_stacked[0].shape[2])
    layer.punica_wrapper.add_shrink(buffers, x, layer.lora_a_stacked, 1.0)
    layer.punica_wrapper.add_expand(
        output, buffers, layer.lora_b_stacked, layer.output_slices, offset_start=0, add_input=True
    )
    return output


# A module of its own, because a plugin replaces the function in it.
column_parallel_linear = ModuleType("vllm.lora.layers.column_parallel_linear")
column_parallel_linear._mcp_apply = _mcp_apply


class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def slice_lora_b(self, b, out):
        return b[self.tp_rank * out : (self.tp_rank + 1) * out]


class QKVParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    pass


class MergedColumnParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    def apply(self, x, bias=None):
        return column_parallel_linear._mcp_apply(x, bias, self)


class MergedQKVParallelLinearWithLoRA(MergedColumnParallelLinearWithLoRA):
    pass


class MergedColumnParallelLinearVariableSliceWithLoRA(MergedColumnParallelLinearWithLoRA):
    def set_lora(self, index, lora_a, lora_b):
        if isinstance(lora_a, torch.Tensor):
            lora_a, lora_b = [lora_a] * self.n_slices, lora_b.split(self.output_slices)
        super().set_lora(index, lora_a, lora_b)


class MergedColumnParallelLinearWithShardedLoRA(MergedColumnParallelLinearWithLoRA):
    pass


class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    def apply(self, x, bias=None):
        return self._apply_lora_to_output(x, self.base_layer(x)[0])


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def slice_lora_a(self, a):
        part = self.base_layer.weight.shape[1]
        return a[:, self.tp_rank * part : (self.tp_rank + 1) * part]


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def create_lora_weights(self, config, dtype):
        vocab, hidden = self.base_layer.weight.shape
        self.lora_a_stacked = torch.zeros(
            config.max_loras, vocab, config.max_lora_rank, dtype=dtype
        )
        self.lora_b_stacked = torch.zeros(
            config.max_loras, 1, hidden, config.max_lora_rank, dtype=dtype
        )

    def reset_lora(self, index):
        self.lora_a_stacked[index] = 0
        self.lora_b_stacked[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self.reset_lora(index)
        self.lora_a_stacked[index, : lora_a.shape[1], : lora_a.shape[0]].copy_(lora_a.T)
        self.lora_b_stacked[index, 0, : lora_b.shape[0], : lora_b.shape[1]].copy_(lora_b)

    def forward(self, x):
        y = self.base_layer.forward(x)
        self.punica_wrapper.add_lora_embedding(y, x, self.lora_b_stacked, add_input=True)
        return y


class LogitsProcessorWithLoRA(BaseLayerWithLoRA):
    """The vocabulary's logits, with columns of padding after it."""

    def __init__(self, base_layer, vocab):
        super().__init__()
        self.base_layer = base_layer
        self.vocab = vocab
        self.dtype = base_layer.params_dtype

    def create_lora_weights(self, config, dtype):
        rank, hidden = config.max_lora_rank, self.base_layer.weight.shape[1]
        self.lora_a_stacked = torch.zeros(config.max_loras, 1, rank, hidden, dtype=dtype)
        self.lora_b_stacked = torch.zeros(config.max_loras, 1, self.vocab, rank, dtype=dtype)

    def reset_lora(self, index):
        self.lora_a_stacked[index] = 0
        self.lora_b_stacked[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self.reset_lora(index)
        self.lora_a_stacked[index, 0, : lora_a.shape[0]].copy_(lora_a)
        self.lora_b_stacked[index, 0, :, : lora_b.shape[1]].copy_(lora_b)

    def forward(self, hidden):
        logits = self.base_layer.apply_to(hidden, None)
        self.punica_wrapper.add_lora_logits(
            logits, hidden, self.lora_a_stacked, self.lora_b_stacked, 1.0
        )
        return logits


class FusedMoEWithLoRA(BaseLayerWithLoRA):
    pass


class LoRAModelManager:
    """``modules`` by name, of which an adapter has some: ``{name: (lora_a, lora_b)}``."""

    def __init__(self, modules, config, max_tokens):
        platform = sys.modules["vllm.platforms"].current_platform
        module, _, name = platform.get_punica_wrapper().rpartition(".")
        __import__(module)
        self.punica_wrapper = getattr(sys.modules[module], name)(
            max_tokens, max_batches=max_tokens, device="cpu", lora_config=config
        )
        self.modules = modules
        for layer in modules.values():
            layer.set_mapping(self.punica_wrapper)
        self.lora_index_to_id = [None] * config.max_loras
        self.registered = {}
        self.active = []
        self._last_mapping = None

    def activate_adapter(self, lora_id):
        if lora_id in self.active:
            self.active.append(self.active.pop(self.active.index(lora_id)))  # the newest
            return False
        index = self.lora_index_to_id.index(None)
        self.active.append(lora_id)
        self.lora_index_to_id[index] = lora_id
        for name, layer in self.modules.items():
            if name in self.registered[lora_id]:
                layer.set_lora(index, *self.registered[lora_id][name])
            elif not isinstance(layer, FusedMoEWithLoRA):
                layer.reset_lora(index)
        return True

    def deactivate_adapter(self, lora_id):
        self.active.remove(lora_id)
        self.lora_index_to_id[self.lora_index_to_id.index(lora_id)] = None

    def set_active_adapters(self, mapping):
        for lora_id in sorted(set(mapping.index_mapping) - {0}):
            if lora_id not in self.active and None not in self.lora_index_to_id:
                self.deactivate_adapter(self.active[0])
            self.activate_adapter(lora_id)
        if mapping != self._last_mapping:
            slots = len(self.lora_index_to_id)
            self.punica_wrapper.update_metadata(mapping, self.lora_index_to_id, slots + 1, 0)
            self._last_mapping = mapping


_LAYERS = [
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    LogitsProcessorWithLoRA,
    FusedMoEWithLoRA,
]


def install(monkeypatch):
    """Make ``import vllm`` find the stand-in, and undo afterwards what a plugin replaces in it."""
    contents = {
        "vllm": {"__version__": "0.24.0"},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.config": {},
        "vllm.config.lora": {"LoRAConfig": LoRAConfig},
        "vllm.lora": {},
        "vllm.lora.layers": {kind.__name__: kind for kind in _LAYERS},
        "vllm.lora.layers.base": {"BaseLayerWithLoRA": BaseLayerWithLoRA},
        "vllm.lora.layers.base_linear": {"BaseLinearLayerWithLoRA": BaseLinearLayerWithLoRA},
        "vllm.lora.model_manager": {"LoRAModelManager": LoRAModelManager},
        "vllm.lora.punica_wrapper": {},
        "vllm.lora.punica_wrapper.punica_gpu": {"PunicaWrapperGPU": PunicaWrapperGPU},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {"ReplicatedLinear": ReplicatedLinear},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    contents[column_parallel_linear.__name__] = {}
    monkeypatch.setitem(sys.modules, column_parallel_linear.__name__, column_parallel_linear)
    monkeypatch.setattr(
        sys.modules["vllm.lora.layers"],
        "column_parallel_linear",
        column_parallel_linear,
        raising=False,
    )
    monkeypatch.setitem(sys.modules, "loramux.punica", None)
    del sys.modules["loramux.punica"]  # imported anew, and forgotten afterwards
    for owner, attribute in (
        (BaseLayerWithLoRA, "set_mapping"),
        (BaseLinearLayerWithLoRA, "_apply_sync"),
        (VocabParallelEmbeddingWithLoRA, "forward"),
        (LoRAModelManager, "activate_adapter"),
        (LoRAConfig, "compute_hash"),
        (column_parallel_linear, "_mcp_apply"),
    ):
        monkeypatch.setattr(owner, attribute, vars(owner)[attribute])
    return SimpleNamespace(**{name.rpartition(".")[2]: sys.modules[name] for name in contents})
