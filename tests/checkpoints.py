"""Adapters that PEFT itself wrote, files made by hand, and specs to read them for."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.config import LoraModuleRef, LoraSpec
from loramux.errors import AdapterError
from loramux.target import LoraTarget

# A refusal says what was found, what was expected and what to do.
REFUSAL = re.compile(r"(?s)(?P<found>.+); expected (?P<expected>.+): (?P<remedy>.+)")

HIDDEN, INNER, VOCAB, LAYERS = 64, 128, 96, 2
QKV = ("q_proj", "k_proj", "v_proj")


def tiny_llama(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def write_with_peft(
    folder: Path, model: torch.nn.Module | None = None, *, base_copies: bool = False, **config: Any
) -> PeftModel:
    """Adapt ``model`` (a tiny Llama) with random factors and save the adapter in ``folder``."""
    fields = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], **config}
    peft_model = get_peft_model(tiny_llama() if model is None else model, LoraConfig(**fields))
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    peft_model.save_pretrained(str(folder), save_embedding_layers=base_copies)
    return peft_model


def factors(
    module: str, rank: int = 4, width_in: int = 8, width_out: int = 6, seed: int = 0
) -> dict[str, torch.Tensor]:
    """PEFT's two tensors of one linear."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(
            rank, width_in, generator=generator
        ),
        f"base_model.model.{module}.lora_B.weight": torch.randn(
            width_out, rank, generator=generator
        ),
    }


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: object = None, **fields: object
) -> str:
    """Save tensors and a sidecar: ``config`` as it is, or a plain PEFT config with ``fields``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "lora_alpha": 8, **fields}
    text = json.dumps(plain if config is None else config)
    (folder / "adapter_config.json").write_text(text)
    return str(folder)


def safetensors_bytes(header: bytes | Mapping[str, object], data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class NameMap:
    """A ``module_map`` over a table."""

    def __init__(self, refs: Mapping[str, LoraModuleRef]) -> None:
        self.refs = dict(refs)
        self.module_names = tuple(refs)

    def __call__(self, name: str) -> LoraModuleRef | None:
        return self.refs.get(name)


def llama_spec(prefix: str = "model.", **options: Any) -> LoraSpec:
    """The tiny Llama's fused projections, embedding and LM head."""
    targets = {
        "embed": LoraTarget(VOCAB, (HIDDEN,), kind="embedding", layers=(0,)),
        "qkv": LoraTarget(HIDDEN, (64, 32, 32), slice_names=QKV, slice_packs=(("qkv_proj", QKV),)),
        "o": LoraTarget(HIDDEN, (HIDDEN,), parallel="row"),
        "gate_up": LoraTarget(HIDDEN, (INNER, INNER), slice_names=("gate_proj", "up_proj")),
        "down": LoraTarget(INNER, (HIDDEN,), parallel="row"),
        "head": LoraTarget(HIDDEN, (VOCAB,), layers=(LAYERS - 1,), per_segment=True),
    }
    refs = {
        f"{prefix}embed_tokens": LoraModuleRef("embed", 0),
        "lm_head": LoraModuleRef("head", LAYERS - 1),
    }
    for layer in range(LAYERS):
        path = f"{prefix}layers.{layer}."
        for name in (*QKV, "qkv_proj"):
            refs[f"{path}self_attn.{name}"] = LoraModuleRef("qkv", layer, name)
        refs[f"{path}self_attn.o_proj"] = LoraModuleRef("o", layer)
        for name in ("gate_proj", "up_proj"):
            refs[f"{path}mlp.{name}"] = LoraModuleRef("gate_up", layer, name)
        refs[f"{path}mlp.down_proj"] = LoraModuleRef("down", layer)
    return LoraSpec("lora", {"llm"}, LAYERS, targets, NameMap(refs), **options)


def refusal(call: Callable[..., Any], *args: Any) -> AdapterError:
    """The error that a call must end in."""
    with pytest.raises(AdapterError) as error:
        call(*args)
    return error.value


def assert_refused(error: AdapterError, path: str, found: str, expected: str, remedy: str) -> None:
    """The error names the path, and one of its problems has these parts, in this order."""
    assert repr(path)[1:-1] in str(error)
    parts = [REFUSAL.fullmatch(problem) for problem in error.problems]
    assert None not in parts, error
    assert any(
        found in part["found"] and expected in part["expected"] and remedy in part["remedy"]
        for part in parts
    ), error
