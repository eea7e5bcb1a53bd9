"""What ``convert`` writes is the adapter it read, for loramux and for PEFT."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import save_file

from checkpoints import factors, tiny_llama, write, write_with_peft
from loramux.checkpoint import LoraAdapter, LoraModule, read_lora_file
from loramux.cli import main
from loramux.convert import write_peft
from loramux.converters import kohya
from loramux.errors import AdapterError
from loramux.identity import adapter_digest


@pytest.mark.parametrize(
    "config",
    [
        dict(use_rslora=True),
        dict(rank_pattern={"layers.1.self_attn.q_proj": 8}, alpha_pattern={"v_proj": 5}),
        dict(target_modules=["embed_tokens", "lm_head", "q_proj"]),
    ],
)
def test_peft_loads_what_is_written_to_the_same_logits(tmp_path, config):
    trained = write_with_peft(tmp_path / "in", **config).eval()
    write_peft(read_lora_file(str(tmp_path / "in")), str(tmp_path / "out"))
    loaded = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "out")).eval()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, trained(ids).logits)


@given(
    ranks=st.dictionaries(
        st.sampled_from(["q", "a.q", "a_q", "b.a.q", "b.a_q", "b.a.q.q", "layers.1.q"]),
        st.sampled_from([1, 2]),
        min_size=1,
    )
)
def test_names_that_end_alike_keep_their_own_rank_and_alpha(tmp_path_factory, ranks):
    modules = {
        name: LoraModule(torch.rand(3, rank).T, torch.rand(2, rank), alpha=float(3 - rank))
        for name, rank in ranks.items()
    }
    folder = tmp_path_factory.mktemp("any") / "out"
    write_peft(LoraAdapter(modules), str(folder))
    assert adapter_digest(read_lora_file(str(folder))) == adapter_digest(LoraAdapter(modules))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_command_converts_a_kohya_file(tmp_path, capsys, dtype):
    a, b = (tensor.to(dtype) for tensor in factors("q").values())
    tensors = {"lora_unet_q.lora_down.weight": a, "lora_unet_q.lora_up.weight": b}
    source, out = tmp_path / "kohya.safetensors", tmp_path / "out"
    save_file(tensors | {"lora_unet_q.alpha": torch.tensor(2.0)}, source)
    (tmp_path / "names.json").write_text(json.dumps({"lora_unet_q": "down.q"}))
    argv = ["convert", str(source), str(out), "--layout=kohya", f"--names={tmp_path}/names.json"]
    assert main(argv) == 0
    assert capsys.readouterr().out == f"{out}: 1 modules, rank 4\n"
    written = read_lora_file(str(out))
    assert adapter_digest(written) == adapter_digest(
        read_lora_file(str(source), kohya({"lora_unet_q": "down.q"}))
    )
    assert (written.modules["down.q"].a.dtype, written.modules["down.q"].scale) == (dtype, 0.5)

    assert main(argv) == 2
    assert "expected the path of a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "names"),
    [("diffusers", ("lora_A.weight", "lora_B.weight")), ("mlx", ("lora_a", "lora_b"))],
)
def test_the_command_takes_a_stated_scale(tmp_path, layout, names):
    pair = (t.T.contiguous() if layout == "mlx" else t for t in factors("q").values())
    prefix = "unet.q" if layout == "diffusers" else "q"
    source, out = tmp_path / "x.safetensors", tmp_path / "out"
    save_file({f"{prefix}.{n}": t for n, t in zip(names, pair, strict=True)}, source)
    assert main(["convert", str(source), str(out), f"--layout={layout}", "--scale=20"]) == 0
    assert read_lora_file(str(out)).modules["q"].scale == 20.0


def test_nothing_is_written_where_the_file_is_refused(tmp_path, capsys):
    path = write(tmp_path / "in", {"unet.q.hada_w1_a": torch.ones(2)})
    out = tmp_path / "out"
    assert main(["convert", path, str(out), "--layout=diffusers"]) == 2
    assert "LoHa" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["a+b.q_proj", "a[0].q_proj", "x(y.q_proj"])
def test_a_name_that_ends_like_anothers_key_can_be_a_pattern_or_is_refused(tmp_path, name):
    modules = {
        module: LoraModule(torch.ones(1, 3), torch.ones(2, 1), alpha=alpha)
        for module, alpha in {"q_proj": 3.0, name: 1.0, "c.v": 1.0, "d.v": 1.0}.items()
    }
    with pytest.raises(AdapterError, match="a name that ends like theirs"):
        write_peft(LoraAdapter(modules), str(tmp_path / "out"))


def test_scales_of_two_kinds_are_refused(tmp_path):
    modules = {
        name: LoraModule(torch.ones(4, 3), torch.ones(2, 4), 4.0, rslora=name == "a")
        for name in "ab"
    }
    with pytest.raises(AdapterError, match="rank-stabilised in part"):
        write_peft(LoraAdapter(modules), str(tmp_path / "out"))


def test_a_name_that_no_pattern_can_have_is_refused(tmp_path):
    modules = {
        name: LoraModule(torch.ones(rank, 3), torch.ones(2, rank), alpha=1.0)
        for name, rank in {"a": 1, "b": 1, "q(": 2}.items()
    }
    with pytest.raises(AdapterError, match=r"'q\('"):
        write_peft(LoraAdapter(modules), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--layout=kohya"], "--names goes with --layout kohya"),
        (["--layout=mlx", "--names=x"], "--names goes with --layout kohya"),
        (["--layout=mlx", "--scale=nan"], "nan is not finite"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(capsys, argv, text):
    with pytest.raises(SystemExit):
        main(["convert", "x", "y", *argv])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "names", ["[]", '{"a": 1}', "{", '{"a": "b", "a": "c"}', "[" * 200_000, None]
)
def test_a_file_of_names_that_is_none_is_refused(tmp_path, capsys, names):
    path = tmp_path / "names.json"
    if names is not None:
        path.write_text(names)
    assert main(["convert", "x", "y", "--layout=kohya", f"--names={path}"]) == 2
    assert f"--names {path}" in capsys.readouterr().err
