"""What an old, a middle and the installed PEFT wrote gives the logits that PEFT gets from it.

The old versions' files are in ``tests/data/peft``, each in a folder of its version's name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loramux import LoraPool, LoraStep, Segment, module_lora_spec
from loramux.checkpoint import drop_base_copies, read_lora_file
from peft_cases import CASES, DTYPES, IDS, LOGITS, base_model, last_logits, write_cases

DATA = Path(__file__).parent / "data" / "peft"


@pytest.fixture(scope="module", params=["0.10.0", "0.15.2", "installed"])
def written(request, tmp_path_factory) -> Path:
    if request.param != "installed":
        return DATA / request.param
    folder = tmp_path_factory.mktemp("peft")
    write_cases(folder)
    return folder


def served_logits(model: torch.nn.Module, path: str) -> list[torch.Tensor]:
    """The logits of ``IDS`` under the adapter at ``path``, and without."""
    spec = module_lora_spec(
        model,
        max_rank=8,
        adapters={"a": path},
        convert_keys=drop_base_copies(model.state_dict()),
    )
    pool = LoraPool.build(spec)
    logits = []
    with spec.module_map.bind(model, pool), torch.no_grad():
        for name in ("a", None):
            segments = (Segment(name, IDS.shape[1]),) * len(IDS)
            with pool.begin_step(LoraStep(segments)):
                logits.append(model(IDS, use_cache=False, logits_to_keep=1).logits[:, 0].clone())
    return logits


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_pefts(written, case):
    model = base_model(case)
    base = last_logits(model)
    expected = load_file(written / LOGITS)[case]
    assert (expected - base).abs().max() > 0.01
    served, served_base = served_logits(model, str(written / case))
    torch.testing.assert_close(served, expected)
    torch.testing.assert_close(served_base, base)


def test_mixed_dtypes_are_read_as_they_were_written(written):
    modules = read_lora_file(str(written / "mixed_dtypes")).modules
    assert {name.split(".")[-1]: module.a.dtype for name, module in modules.items()} == DTYPES
    assert all(module.a.dtype == module.b.dtype for module in modules.values())


def test_the_scales_of_patterns_are_pefts(written):
    modules = read_lora_file(str(written / "patterns")).modules
    found = {name.removeprefix("model.layers."): m.scale for name, m in modules.items()}
    assert found == {
        **{f"{layer}.self_attn.q_proj": 3 / 2 for layer in (0, 1)},
        **{f"{layer}.self_attn.v_proj": 9 / 4 for layer in (0, 1)},
        "0.mlp.down_proj": 12 / 4,
        "1.mlp.down_proj": 5 / 4,
    }
