"""Adapters that the installed PEFT writes for a tiny Llama, and the logits it gets from them.

``python tests/peft_cases.py DIR`` writes them in ``DIR/<PEFT's version>``, as ``make peft-data``
does with each version that ``tests/data/peft`` is of. Needs PEFT, transformers and torch alone.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ENDS = ["embed_tokens", "lm_head", "q_proj"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "rslora": {"target_modules": ["k_proj", "o_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 3, "v_proj": 9, "layers.1.mlp.down_proj": 5},
    },
    "embedding_and_head": {"target_modules": ENDS},
    "tied": {"target_modules": ENDS},
    "layers_to_transform": {
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "mixed_dtypes": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    "all_linear": {"target_modules": "all-linear"},
}
DTYPES = {"q_proj": torch.float16, "k_proj": torch.bfloat16, "v_proj": torch.float32}
IDS = torch.arange(24).reshape(4, 6) * 7 % 32  # four prompts
LOGITS = "logits.safetensors"


def numbers(name: str, shape: torch.Size, size: float) -> torch.Tensor:
    """Values in ``[-size, size)`` that are the same in every version of everything."""
    index = torch.arange(shape.numel()) * 2654435761 + zlib.crc32(name.encode())
    return ((index % 2**32).double() / 2**31 - 1).mul(size).float().reshape(shape)


def base_model(case: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        tie_word_embeddings=case == "tied",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(numbers(name, parameter.shape, 0.4))
    return model


def last_logits(model: torch.nn.Module) -> torch.Tensor:
    """``[prompts, vocab]`` after each prompt's last token."""
    with torch.no_grad():
        return model(IDS, use_cache=False).logits[:, -1].clone()


def write_cases(folder: Path) -> None:
    """An adapter a case, and under ``LOGITS`` what PEFT computes once it has read it back."""
    logits = {}
    for case, config in CASES.items():
        model = get_peft_model(base_model(case), LoraConfig(r=4, lora_alpha=12, **config))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = numbers(name, parameter.shape, 0.4)
                if case == "mixed_dtypes":
                    (dtype,) = (dtype for target, dtype in DTYPES.items() if target in name)
                    parameter.data = parameter.data.to(dtype)
        model.save_pretrained(str(folder / case))
        (folder / case / "README.md").unlink()
        loaded = PeftModel.from_pretrained(base_model(case), str(folder / case))
        logits[case] = last_logits(loaded.eval())
    save_file(logits, str(folder / LOGITS))


if __name__ == "__main__":
    write_cases(Path(sys.argv[1]) / peft.__version__)
