"""A transformers model without its weights: names, shapes, module classes and ties."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def load_skeleton(folder: str) -> Any:
    """The causal language model in ``folder`` on the meta device, from its config alone."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
