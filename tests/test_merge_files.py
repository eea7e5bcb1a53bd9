"""``loramux merge``: a model's folder in, a merged one out, one file of weights at a time."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from checkpoints import tiny_llama, write_with_peft
from loramux import merge
from loramux.adapter_files import read_safetensors
from loramux.cli import main

SHARDED = dict(max_shard_size="64KB")
ADAPTER = "adapter_model.safetensors"


def tiny_gpt2() -> GPT2LMHeadModel:
    """Tied, and its linears are ``Conv1D``, one of them square."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))


def command(tmp_path) -> list[str]:
    return ["merge", *(f"--{name}={tmp_path / name}" for name in ("model", "adapter", "out"))]


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (tiny_llama, {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}),
        (tiny_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_the_merged_folder_is_pefts_merged_model(tmp_path, make, config):
    model = make()
    model.save_pretrained(tmp_path / "model", **SHARDED)
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert sum(name.endswith(".safetensors") for name in before) > 1
    expected = write_with_peft(tmp_path / "adapter", model, **config).merge_and_unload()
    assert main(command(tmp_path)) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert merged.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)
    assert {file.name for file in (tmp_path / "out").iterdir()} == before.keys()
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == before


def test_one_file_of_weights_is_held_at_a_time(tmp_path, monkeypatch):
    held: list[weakref.ref] = []

    def read(path, *, weights=True):
        assert not any(memory() for memory in held)
        content = read_safetensors(path, weights=weights)
        if weights:
            held.extend(map(weakref.ref, content[0].values()))
        return content

    tiny_llama().save_pretrained(tmp_path / "model", **SHARDED)
    write_with_peft(tmp_path / "adapter")
    monkeypatch.setattr(merge, "read_safetensors", read)
    assert main(command(tmp_path)) == 0
    assert held


@pytest.mark.parametrize(
    ("tied", "target", "parts"),
    [
        (True, "embed_tokens", ("lm_head.weight", "are one tensor")),
        (True, "lm_head", ("model.embed_tokens.weight", "are one tensor")),
        (False, "q_proj", ("model.layers.1.self_attn.q_proj", "the weight is [32, 64]")),
    ],
)
def test_what_cannot_be_merged_is_refused_before_anything_is_written(
    tmp_path, capsys, tied, target, parts
):
    model = tiny_llama(tied=tied)
    write_with_peft(tmp_path / "adapter", model, target_modules=[target])
    model = tiny_llama(tied=tied)
    if target == "q_proj":
        attention = model.model.layers[1].self_attn
        attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj
    model.save_pretrained(tmp_path / "model")
    assert main(command(tmp_path)) == 2
    text = capsys.readouterr().err
    assert all(part in text for part in parts)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_not_written_to(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "model")
    write_with_peft(tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    assert main(command(tmp_path)) == 2
    assert "expected the path of a new folder" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("sizes", [SHARDED, {}])
def test_weights_that_transformers_does_not_load_stay_behind(tmp_path, sizes):
    tiny_llama().save_pretrained(tmp_path / "model", **sizes)
    before = {file.name for file in (tmp_path / "model").iterdir()}
    write_with_peft(tmp_path / "adapter")
    save_file(tiny_llama().state_dict(), tmp_path / "model" / "consolidated.safetensors")
    assert main(command(tmp_path)) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == before


def test_a_model_saved_without_its_head_is_merged_as_pefts(tmp_path):
    model = tiny_gpt2().transformer
    model.save_pretrained(tmp_path / "model")
    peft = write_with_peft(
        tmp_path / "adapter", model, target_modules=["attn.c_proj"], fan_in_fan_out=True
    )
    expected = peft.merge_and_unload().state_dict()
    assert main(command(tmp_path)) == 0
    merged = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_single_file_is_merged_where_an_index_lies_beside_it(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model", **SHARDED)
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    write_with_peft(tmp_path / "adapter")
    assert main(command(tmp_path)) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(merged.model.norm.weight, model.model.norm.weight)


def test_an_adapter_in_the_models_folder_is_not_half_copied(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    write_with_peft(tmp_path / "model")
    assert main([*command(tmp_path), f"--adapter={tmp_path / 'model'}"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_copies_of_the_base_are_left_out(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    peft = write_with_peft(tmp_path / "adapter", target_modules=["embed_tokens"])
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert any("base_layer" in name for name in load_file(tmp_path / "adapter" / ADAPTER))
    assert main(command(tmp_path)) == 0


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ("{", "Expecting property name"),
        ("{}", "'weight_map'"),
        ("[]", "list indices"),
        ('{"weight_map": {"a": 1}}', "expected a weight_map"),
        ('{"weight_map": {"a": "sub/x.safetensors"}}', "not in the folder itself: ['sub/x"),
        ("[" * 200_000, "nested too deep"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, capsys, index, part):
    tiny_llama().save_pretrained(tmp_path / "model", **SHARDED)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    write_with_peft(tmp_path / "adapter")
    assert main(command(tmp_path)) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", ["{}", "{", '{"model_type": "t5"}', '{"model_type": "none"}'])
@pytest.mark.parametrize("called", ["merge", "inspect", "generate"])
def test_a_folder_without_such_a_model_is_refused(tmp_path, capsys, config, called):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    adapter, model = tmp_path / "adapter", f"--model={tmp_path / 'model'}"
    write_with_peft(adapter)
    arguments = {
        "merge": command(tmp_path),
        "inspect": ["inspect", str(adapter), model],
        "generate": ["generate", model, f"--adapter=a={adapter}", "--prompt=a:x"],
    }[called]
    assert main(arguments) == 2
    assert (
        "expected a folder that transformers' AutoModelForCausalLM loads" in capsys.readouterr().err
    )
