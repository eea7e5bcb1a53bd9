"""The plugin in vLLM's own layers and manager, where vLLM is importable; no engine is started.

Without a CUDA device the kernels are the CPU's, and what vLLM needs Triton for is left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import vllm

from loramux import vllm as plugin

if not vllm.__version__.startswith(plugin.VERSION):
    pytest.skip(f"vLLM is {vllm.__version__}", allow_module_level=True)

if not torch.cuda.is_available():
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.lora import model_manager
from vllm.lora.layers import LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.punica_wrapper import punica_gpu
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 64, 96, 128, 8, 2
SLOTS, MAX_RANK, MAX_TOKENS = 2, 16, 64
WIDTHS = {  # of every module that an adapter may name: inputs and outputs
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, HIDDEN * KV_HEADS // HEADS),
    "v_proj": (HIDDEN, HIDDEN * KV_HEADS // HEADS),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
    "embed_tokens": (VOCAB, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}


class Model(torch.nn.Module):
    """Every kind of layer that a Llama has, without attention."""

    supports_lora = True
    is_3d_moe_weight = False
    is_non_gated_moe = False
    lora_skip_prefixes = ()
    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}  # noqa: RUF012
    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN)
        self.qkv_proj = QKVParallelLinear(
            HIDDEN, HIDDEN // HEADS, HEADS, KV_HEADS, bias=False, return_bias=False
        )
        self.o_proj = RowParallelLinear(HIDDEN, HIDDEN, bias=False, return_bias=False)
        self.gate_up_proj = MergedColumnParallelLinear(
            HIDDEN, [INNER, INNER], bias=False, return_bias=False
        )
        self.down_proj = RowParallelLinear(INNER, HIDDEN, bias=False, return_bias=False)
        self.lm_head = ParallelLMHead(VOCAB, HIDDEN)
        self.logits_processor = LogitsProcessor(VOCAB)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        x = x + self.o_proj(self.qkv_proj(x)[:, :HIDDEN])
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return x + self.down_proj(torch.tanh(gate) * up)

    def compute_logits(self, hidden):
        return self.logits_processor(self.lm_head, hidden)


def defined(model, ids, rows, adapters):
    """``compute_logits(forward(ids))`` by the definition; ``adapters[id][module]`` is A and B."""

    def linear(base, x, *names):
        y = x @ base.weight.double().T
        for i, row in enumerate(rows):
            parts = []
            for name in names:
                if name in adapters.get(row, {}):
                    a, b = adapters[row][name]
                    parts.append(b @ (a @ x[i]))
                else:
                    parts.append(y.new_zeros(WIDTHS[name][1]))
            y[i] += torch.cat(parts)
        return y

    x = model.embed_tokens.base_layer.weight.double()[ids]
    for i, row in enumerate(rows):
        if "embed_tokens" in adapters.get(row, {}):
            a, b = adapters[row]["embed_tokens"]
            x[i] += b @ a[:, ids[i]]
    qkv = linear(model.qkv_proj.base_layer, x, "q_proj", "k_proj", "v_proj")
    x = x + linear(model.o_proj.base_layer, qkv[:, :HIDDEN], "o_proj")
    gate, up = linear(model.gate_up_proj.base_layer, x, "gate_proj", "up_proj").chunk(2, dim=-1)
    x = x + linear(model.down_proj.base_layer, torch.tanh(gate) * up, "down_proj")
    return linear(model.lm_head, x, "lm_head")


@pytest.fixture(scope="module")
def parallel():
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29711", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield config


@pytest.fixture
def manager(parallel, monkeypatch):
    if DEVICE == "cpu":
        if not hasattr(punica_gpu, "LoRAKernelMeta"):
            monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", kernel_meta(), raising=False)
        monkeypatch.setattr(model_manager, "PIN_MEMORY", False)
        monkeypatch.setattr(plugin, "_why_no_kernels", lambda: None)
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
        monkeypatch.setattr(type(current_platform), "can_update_inplace", lambda self: True)
    plugin.register()
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    for module in model.modules():
        module.cpu_linear = torch.nn.functional.linear  # as a loaded model has on the CPU
    config = LoRAConfig(max_loras=SLOTS, max_lora_rank=MAX_RANK, max_cpu_loras=8)
    config.lora_dtype = torch.float32
    with torch.inference_mode():
        yield model_manager.LRUCacheLoRAModelManager(
            model, 8, MAX_TOKENS, VOCAB, config, torch.device(DEVICE), parallel
        )


def kernel_meta():
    """The metadata of vLLM's own kernels: it needs no Triton, but is imported beside what does."""
    package = importlib.util.find_spec("vllm").submodule_search_locations[0]
    path = Path(package) / "lora/ops/triton_ops/lora_kernel_metadata.py"
    spec = importlib.util.spec_from_file_location("lora_kernel_metadata", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.LoRAKernelMeta


def add_adapter(manager, name, rank, modules):
    """Register an adapter of ``modules``; returns A and B of each, alpha folded into B."""
    generator = torch.Generator().manual_seed(name)
    weights, loras = {}, {}
    for module in modules:
        width, out = WIDTHS[module]
        a = torch.randn(rank, width, generator=generator) / width**0.5
        b = torch.randn(out, rank, generator=generator) / rank**0.5
        loras[module] = LoRALayerWeights(module, rank, 2 * rank, a, b.clone())
        weights[module] = (a.double().to(DEVICE), 2 * b.double().to(DEVICE))
    manager.add_adapter(LoRAModel(name, rank, loras))
    return weights


def run(manager, rows, padding=0):
    """The logits of a step of ``rows``, padded, and the ids of its tokens."""
    for name in sorted(set(rows) - {0}):
        manager.activate_adapter(name)
    manager.set_adapter_mapping(LoRAMapping(tuple(rows), tuple(rows), is_prefill=True))
    ids = torch.arange(len(rows) + padding, device=DEVICE) * 5 % VOCAB
    hidden = manager.model(ids)[: len(rows)]
    return manager.model.compute_logits(hidden), ids[: len(rows)]


def test_a_model_of_every_kind_of_layer_is_the_definition(manager):
    adapters = {
        1: add_adapter(manager, 1, 8, WIDTHS),
        2: add_adapter(manager, 2, 3, ["q_proj", "v_proj", "up_proj"]),
        3: add_adapter(manager, 3, 16, WIDTHS),
    }
    for rows, padding in (
        ([1, 0, 2, 2, 1], 0),
        ([0, 0], 6),
        ([3, 2, 0, 3], 4),  # evicts 1
        ([1, 3, 1], 5),
        ([2] * 40 + [0] * 3 + [1] * 9, 0),
    ):
        got, ids = run(manager, rows, padding)
        want = defined(manager.model, ids, rows, adapters)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_a_slots_rank_is_its_adapters(manager):
    add_adapter(manager, 1, 8, ["q_proj", "v_proj", "o_proj"])
    run(manager, [1])

    def ranks(layer):
        return layer.punica_wrapper.site.table[1, :, 2].tolist()

    model = manager.model
    assert ranks(model.qkv_proj) == [8, 0, 8]
    assert ranks(model.o_proj) == [8]
    assert ranks(model.gate_up_proj) == [0, 0]


def test_no_layer_of_a_llama_is_left_to_vllm(manager):
    wrapper = manager.punica_wrapper_mapping["language_model"]
    assert wrapper._served == len(manager.modules) == 6
    assert not wrapper._left


def test_the_key_of_compiled_graphs_names_the_wrapper(manager):
    config = LoRAConfig(max_loras=2)
    assert config.compute_hash() != config.compute_hash.__wrapped__(config)
