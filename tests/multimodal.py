"""A model with two LoRA specs, a language model's and a vision tower's, whose names overlap."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from common import random_pair, save_adapter
from loramux import LoraSpec, module_lora_spec

WIDTH, VOCAB = 16, 24
Q = "language.layers.1.q_proj"
UP = "language.layers.0.up_proj"
HEAD = "lm_head"
VISION_Q = "visual.layers.0.q_proj"
VISION_FC = "visual.layers.1.fc"


class Layers(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names}) for _ in range(2)
        )


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language = Layers("q_proj", "up_proj")
        self.visual = Layers("q_proj", "fc")
        self.lm_head = nn.Linear(WIDTH, VOCAB)


class TwoSpecs:
    """The model. It declares the vision tower's spec first."""

    def __init__(self) -> None:
        self.tree = Tree()

    def lora_specs(self) -> list[LoraSpec]:
        vision = module_lora_spec(
            self.tree,
            resource_key="vision_lora",
            nodes={"vision"},
            stack="visual.layers",
            targets=("q_proj", "fc"),
            ignored_modules=lambda name: not name.startswith("visual."),
        )
        language = module_lora_spec(
            self.tree,
            nodes={"llm"},
            stack="language.layers",
            ignored_modules=lambda name: name.startswith("visual."),
        )
        return [vision, language]


def write(folder: Path, *modules: str, seed: int = 0, rank: int = 4) -> str:
    """An adapter on modules of the tree."""
    widths = {HEAD: VOCAB}
    pairs = {m: random_pair(rank, WIDTH, widths.get(m, WIDTH), seed + len(m)) for m in modules}
    return save_adapter(folder, pairs)
