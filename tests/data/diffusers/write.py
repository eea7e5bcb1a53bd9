"""Writes the files beside it with Diffusers 0.42.1, PEFT 0.21.2 and transformers 5.24.0.

The files are of a pipeline with a transformer and a text encoder, of one with a UNet (whose factors
are named ``lora.down`` and ``lora.up``), and of a transformer alone. ``scales.json`` has the scales
that Diffusers gives the modules of the transformer or UNet once it has read the file back.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from transformers import CLIPTextConfig, CLIPTextModel

HERE = Path(__file__).parent
PATTERNS = {"rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_k": 3}}


def transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=0,
        attention_head_dim=8,
        num_attention_heads=1,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )


def text_encoder() -> CLIPTextModel:
    sizes = dict(hidden_size=8, intermediate_size=8, vocab_size=9, projection_dim=8)
    return CLIPTextModel(CLIPTextConfig(num_hidden_layers=1, num_attention_heads=1, **sizes))


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(4,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("UpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=4,
        norm_num_groups=2,
        attention_head_dim=2,
    )


def adapt(model: torch.nn.Module, **config: object) -> torch.nn.Module:
    lora = LoraConfig(r=4, init_lora_weights=False, **config)
    inject_adapter_in_model(lora, model)
    model.peft_config = {"default": lora}
    return model


def scales(model: torch.nn.Module, file: str, prefix: str | None) -> dict[str, float]:
    model.load_lora_adapter(str(HERE), weight_name=file, prefix=prefix)
    layers = {n: m for n, m in model.named_modules() if getattr(m, "scaling", None)}
    return {name: next(iter(layer.scaling.values())) for name, layer in layers.items()}


def main() -> None:
    torch.manual_seed(0)
    models = {
        "transformer": adapt(
            transformer(),
            target_modules=["to_q", "to_k"],
            use_rslora=True,
            lora_alpha=12,
            **PATTERNS,
        ),
        "text_encoder": adapt(text_encoder(), target_modules=["q_proj"], lora_alpha=8),
        "unet": adapt(unet(), target_modules=["to_k"], lora_alpha=12),
    }
    states = {name: get_peft_model_state_dict(model) for name, model in models.items()}
    FluxPipeline.save_lora_weights(
        HERE,
        transformer_lora_layers=states["transformer"],
        text_encoder_lora_layers=states["text_encoder"],
        weight_name="pipeline.safetensors",
        **_collate_lora_metadata({k: models[k] for k in ("transformer", "text_encoder")}),
    )
    StableDiffusionPipeline.save_lora_weights(
        HERE,
        unet_lora_layers=convert_state_dict_to_diffusers(states["unet"]),
        weight_name="unet.safetensors",
        **_collate_lora_metadata({"unet": models["unet"]}),
    )
    models["transformer"].save_lora_adapter(HERE, weight_name="model.safetensors")
    found = {
        "pipeline.safetensors": scales(transformer(), "pipeline.safetensors", "transformer"),
        "unet.safetensors": scales(unet(), "unet.safetensors", "unet"),
        "model.safetensors": scales(transformer(), "model.safetensors", None),
    }
    (HERE / "scales.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
