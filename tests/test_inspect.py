"""``inspect`` says of a path what a deployment would decide."""

from __future__ import annotations

import json

import pytest
import torch

from checkpoints import factors, llama_spec, tiny_llama, write, write_with_peft
from loramux.checkpoint import read_lora_file
from loramux.cli import main
from loramux.errors import AdapterError
from loramux.identity import adapter_digest
from loramux.inspect import inspect_adapter

Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj" for i in range(2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A bfloat16 model's folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def said(capsys, *argv) -> tuple[int, str]:
    status = main(["inspect", *argv])
    return status, capsys.readouterr().out


def test_a_served_adapter_is_described_module_by_module(tmp_path, capsys, model):
    write_with_peft(
        tmp_path,
        rank_pattern={"v_proj": 24},
        alpha_pattern={"nosuch": 4},
        target_modules=["q_proj", "v_proj", "nosuch"],
    )
    status, text = said(capsys, str(tmp_path), "--model", model, "--json")
    report = json.loads(text)
    assert (status, report["refusals"]) == (0, [])
    found = {(m["target"], m["layer"], m["rank"], m["scale"]) for m in report["modules"]}
    assert found == {
        (f"self_attn.{name}", layer, rank, 12 / rank)
        for name, rank in (("q_proj", 4), ("v_proj", 24))
        for layer in (0, 1)
    }
    assert report["digest"] == adapter_digest(read_lora_file(str(tmp_path))).hex()
    assert report["parameters"] == 2 * (4 * (64 + 64) + 24 * (64 + 32))
    assert report["slot_bytes"] == 2 * 2 * (8 * (64 + 64) + 24 * (64 + 32))  # rank 4 takes 8
    assert report["notes"] == [
        "the pattern 'nosuch' matches no module",
        "target module 'nosuch' has no tensor",
    ]


def test_the_text_has_a_line_for_all_layers_that_are_alike(tmp_path, capsys, model):
    write_with_peft(tmp_path)
    for argv in ([], ["--model", model]):
        status, text = said(capsys, str(tmp_path), *argv)
        lines = text.splitlines()
        assert (status, lines[0]) == (0, f"{tmp_path}: served")
        assert [line.split() for line in lines[-2:]] == [
            f"self_attn.{name} linear 64 -> {width} 4 3 float32 0-1".split()
            for name, width in (("q_proj", 64), ("v_proj", 32))
        ]


def test_every_problem_of_a_file_is_listed(tmp_path, capsys):
    write_with_peft(tmp_path, use_dora=True, bias="all")
    with pytest.raises(AdapterError) as error:
        read_lora_file(str(tmp_path))
    status, text = said(capsys, str(tmp_path))
    assert status == 2
    assert text.splitlines()[0].endswith(": refused")
    assert len(error.value.problems) >= 3
    assert all(f"  - {problem}" in text for problem in error.value.problems)


def test_modules_that_have_no_place_or_do_not_fit_are_listed(tmp_path):
    tensors = factors(Q0, 4, 64, 64) | factors(Q1, 4, 32, 64) | factors("vision.q", 4, 64, 64)
    report = inspect_adapter(write(tmp_path, tensors), llama_spec(max_rank=2))
    assert report.unmapped == ("vision.q",)
    assert [Q1 in misfit for misfit in report.misfits] == [True]
    assert len(report.refusals) == 3  # and the rank
    assert [(module.name, module.target, module.layer) for module in report.modules] == [
        (Q0, "qkv", 0),
        (Q1, "qkv", 1),
        ("vision.q", "vision.q", None),
    ]
    assert report.slot_bytes is None


def test_a_value_that_overflows_the_deployments_dtype_is_a_refusal(tmp_path):
    tensors = {name: tensor * 1e9 for name, tensor in factors(Q0, 4, 64, 64).items()}
    path = write(tmp_path, tensors)
    refusals = inspect_adapter(path, llama_spec(dtype=torch.float16)).refusals
    assert [refusal[:14] for refusal in refusals] == ["A of module 'm", "B of module 'm"]
    assert all("too large for the pool's dtype" in refusal for refusal in refusals)
    assert inspect_adapter(path, llama_spec(dtype=torch.bfloat16)).refusals == ()


def test_copies_of_base_weights_are_compared_with_the_models(tmp_path, capsys, model):
    for name, delta in (("same", 0), ("other", 1)):
        base = tiny_llama(torch.bfloat16)
        base.model.embed_tokens.weight.data += delta
        write_with_peft(tmp_path / name, base, target_modules=["embed_tokens"], base_copies=True)
    assert said(capsys, str(tmp_path / "same"), "--model", model)[0] == 0
    status, text = said(capsys, str(tmp_path / "other"), "--model", model)
    assert status == 2
    assert "a copy of base weights" in text


def test_a_folder_that_is_no_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "x", "--model", str(tmp_path)])
    assert "has no config.json" in capsys.readouterr().err
