from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from checkpoints import factors, tiny_llama, write_with_peft
from loramux.checkpoint import lora_adapter_from_tensors, read_lora_file
from loramux.errors import AdapterError
from loramux.merge import merge_adapter

CONFIG = {"peft_type": "LORA", "lora_alpha": 8}


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (tiny_llama, {"target_modules": "all-linear", "use_rslora": True}),
        (tiny_llama, {"target_modules": ["embed_tokens", "lm_head"]}),
        (tiny_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_merges_as_peft_does(tmp_path, make, config):
    model = make()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    conv1d = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    merged = write_with_peft(tmp_path, model, **config).merge_and_unload().state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    merge_adapter(state, read_lora_file(str(tmp_path)), fan_in_fan_out=conv1d)
    touched = [name for name in state if not torch.equal(state[name], before[name])]
    assert touched
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sum_is_rounded_once_to_the_weights_dtype(dtype):
    adapter = lora_adapter_from_tensors(factors("q"), {**CONFIG, "lora_alpha": 7})
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    state = {"q.weight": weight}
    merge_adapter(state, adapter)
    module = adapter.modules["q"]
    exact = weight.double() + module.scale * module.b.double() @ module.a.double()
    assert state["q.weight"].dtype == dtype
    ulps = torch.finfo(dtype).eps * exact.abs() * (0.51 if dtype != torch.float32 else 4)
    assert ((state["q.weight"].double() - exact).abs() <= ulps + 1e-6).all()
    assert state["q.weight"] is not weight


def test_what_does_not_fit_is_listed_before_anything_changes():
    tensors = {**factors("q"), **factors("absent"), **factors("wide"), **factors("packed")}
    tensors |= factors("tied")
    adapter = lora_adapter_from_tensors(tensors, CONFIG)
    shared = torch.zeros(6, 8)
    state = {
        "q.weight": torch.zeros(6, 8),
        "wide.weight": torch.zeros(8, 6),
        "packed.weight": torch.zeros(6, 8, dtype=torch.uint8),
        "tied.weight": shared,
        "other.weight": shared,
    }
    before = dict(state)
    with pytest.raises(AdapterError) as error:
        merge_adapter(state, adapter)
    problems = " ".join(error.value.problems)
    assert len(error.value.problems) == 4
    for part in ("'absent.weight'", "[6, 8], the weight is [8, 6]", "torch.uint8", "clone them"):
        assert part in problems
    assert all(state[name] is before[name] for name in before)
