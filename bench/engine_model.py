"""A Llama with random weights, PEFT adapters for it, and what they answer in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Shape:
    """A Llama, Llama-3.1-8B's but for what is given."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32000

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def linears(self) -> dict[str, tuple[int, int, str]]:
        """Inputs, outputs and block of every linear of a layer."""
        kv = self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, self.hidden, "self_attn"),
            "k_proj": (self.hidden, kv, "self_attn"),
            "v_proj": (self.hidden, kv, "self_attn"),
            "o_proj": (self.hidden, self.hidden, "self_attn"),
            "gate_proj": (self.hidden, self.inner, "mlp"),
            "up_proj": (self.hidden, self.inner, "mlp"),
            "down_proj": (self.inner, self.hidden, "mlp"),
        }


def write_model(folder: Path, shape: Shape, with_weights: bool) -> Path:
    """A Hugging Face folder; without weights it serves ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.inner, vocab_size=shape.vocab, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", attention_bias=False,
        mlp_bias=False, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        torch_dtype="bfloat16",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    if with_weights and not (folder / "model.safetensors").exists():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)

        def normal(rows: int, columns: int, std: float) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator, device=device)
            return (values * std).bfloat16().cpu()

        ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
        tensors = {
            "model.embed_tokens.weight": normal(shape.vocab, shape.hidden, 1.0),
            "lm_head.weight": normal(shape.vocab, shape.hidden, 2.0 / shape.hidden**0.5),
            "model.norm.weight": ones,
        }
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            for name, (width, out, block) in shape.linears().items():
                tensors[f"{prefix}{block}.{name}.weight"] = normal(out, width, width**-0.5)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = ones.clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_adapters(
    folder: Path,
    shape: Shape,
    ranks: Sequence[int],
    *,
    distinct: int | None = None,
    modules: Callable[[int], Sequence[str]] | None = None,
) -> list[Path]:
    """One PEFT folder per rank, alpha twice the rank.

    Only the first ``distinct`` have files of their own, the others are links to them. Adapter ``i``
    is on ``modules(i)``; on every linear where that is not given.
    """
    paths = []
    for index, rank in enumerate(ranks):
        names = list(modules(index)) if modules else list(shape.linears())
        path = folder / f"adapter_{index + 1}"
        path.mkdir(parents=True, exist_ok=True)
        paths.append(path)
        config = dict(
            peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=0.0,
            bias="none", target_modules=names, base_model_name_or_path="none", inference_mode=True,
        )  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(config))
        file = path / "adapter_model.safetensors"
        file.unlink(missing_ok=True)
        if distinct is not None and index >= distinct:
            file.symlink_to(paths[index % distinct] / file.name)
            continue
        generator = torch.Generator().manual_seed(1000 + index)
        tensors = {}
        for layer in range(shape.layers):
            for name in names:
                width, out, block = shape.linears()[name]
                prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
                a = torch.randn(rank, width, generator=generator) * width**-0.5
                b = torch.randn(out, rank, generator=generator) * 0.3 * rank**-0.5
                tensors[prefix + ".lora_A.weight"] = a.bfloat16()
                tensors[prefix + ".lora_B.weight"] = b.bfloat16()
        save_file(tensors, file)
    return paths


class Reference:
    """The same model and adapters in float32, one request at a time."""

    def __init__(self, folder: Path, adapters: Sequence[Path]) -> None:
        from transformers import LlamaForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = self.model.to(self.device).eval()
        self.adapters = adapters

    @contextmanager
    def _adapter(self, name: int) -> Iterator[None]:
        """Adapter ``name``, counted from 1, on every linear that it has; 0 is the base model."""
        handles = []
        if name:
            path = self.adapters[name - 1]
            tensors = load_file(path / "adapter_model.safetensors")
            config = json.loads((path / "adapter_config.json").read_text())
            scale = config["lora_alpha"] / config["r"]
            for key in tensors:
                if not key.endswith("lora_A.weight"):
                    continue
                a = tensors[key].to(self.device, torch.float32)
                b = scale * tensors[key.replace("lora_A", "lora_B")].to(self.device, torch.float32)
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")

                def add(_: Any, inputs: Any, y: torch.Tensor, a: Any = a, b: Any = b) -> Any:
                    return y + (inputs[0] @ a.T) @ b.T

                handles.append(self.model.get_submodule(module).register_forward_hook(add))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def logprobs(self, adapter: int, tokens: Sequence[int]) -> torch.Tensor:
        """Of every token after the first: ``[tokens - 1, vocab]``, on the reference's device."""
        with self._adapter(adapter):
            ids = torch.tensor([list(tokens)], device=self.device)
            return self.model(ids).logits[0, :-1].log_softmax(-1)
