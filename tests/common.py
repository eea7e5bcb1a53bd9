"""Adapters written by hand, and the definition they are compared with."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

# Inductor's compiler command does not quote torch's own path.
COMPILER = "inductor" if " " not in torch.__file__ else "aot_eager"


class TracedGraph:
    """A backend of ``torch.compile`` that runs the one graph it is given as it was traced."""

    module: torch.fx.GraphModule

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        assert not hasattr(self, "module"), "traced twice"
        self.module = module
        return module

    def calls(self, op: Any) -> int:
        """Of an operator's packet, how often the graph calls it."""
        nodes = self.module.graph.nodes
        return sum(node.op == "call_function" and node.target == op.default for node in nodes)


def save_adapter(
    folder: Path, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], **config: Any
) -> str:
    """Write a PEFT directory: module name to (A [r, in], B [out, r]). Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    rank = max((len(a) for a, _ in pairs.values()), default=1)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return str(folder)


def random_pair(
    rank: int, width_in: int, width_out: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 7919 + rank * 131 + width_in + width_out)
    a = torch.randn(rank, width_in, generator=generator) / width_in**0.5
    b = torch.randn(width_out, rank, generator=generator) / rank**0.5
    return a.to(dtype), b.to(dtype)


def _truncate(file: Path) -> mock.MagicMock:
    file.write_bytes(file.read_bytes()[:-1])
    return mock.MagicMock()


def _refuse_image(
    *shape: Any, pin_memory: bool | None = None, empty: Any = torch.empty, **options: Any
) -> torch.Tensor:
    if pin_memory is not None:
        raise torch.OutOfMemoryError("no memory for the image")
    return empty(*shape, **options)


# What keeps an adapter's folder from being loaded, as long as a ``with`` over it lasts.
LOAD_FAULTS = {
    "cut file": lambda path: _truncate(path / "adapter_model.safetensors"),
    "disk error": lambda path: mock.patch(
        "loramux.adapter_files._fill", side_effect=OSError(errno.EIO, "Input/output error")
    ),
    "out of host memory": lambda path: mock.patch("torch.empty", _refuse_image),
    "out of memory for the table row": lambda path: mock.patch(
        "loramux.store.LoraImage.table_row", side_effect=torch.OutOfMemoryError("no memory")
    ),
}
