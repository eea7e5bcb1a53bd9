"""Foreign layouts, read where the caller names them, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoints import factors, llama_spec, write
from loramux.checkpoint import (
    drop_base_copies,
    lora_adapter_from_tensors,
    read_adapter_info,
    read_lora_file,
)
from loramux.converters import diffusers, kohya, mlx, rename
from loramux.errors import AdapterError
from loramux.identity import adapter_digest

Q = "down_blocks.0.attn_1.to_q"
DATA = Path(__file__).parent / "data" / "diffusers"
DIFFUSERS_SCALES = json.loads((DATA / "scales.json").read_text())
KOHYA_Q = "lora_unet_down_blocks_0_attn_1_to_q"


def pair(prefix, names=("lora_A.weight", "lora_B.weight"), rank=4, **widths):
    """A ``[r, in]`` and B ``[out, r]`` under a layout's names."""
    values = factors("m", rank, **widths).values()
    return {f"{prefix}.{name}": value for name, value in zip(names, values, strict=True)}


def kohya_pair(prefix=KOHYA_Q, **sizes):
    return pair(prefix, ("lora_down.weight", "lora_up.weight"), **sizes)


def mlx_pair(prefix="model.q", **sizes):
    return {n: t.T for n, t in pair(prefix, ("lora_a", "lora_b"), **sizes).items()}


def read(tensors, convert_keys, config=None):
    return lora_adapter_from_tensors(tensors, config, convert_keys).modules


def refusal(tensors, convert_keys, config=None) -> str:
    with pytest.raises(AdapterError) as error:
        read(tensors, convert_keys, config)
    return str(error.value)


def assert_is_pair(module, a, b):
    assert torch.equal(module.a, a)
    assert torch.equal(module.b, b)


@pytest.mark.parametrize(
    ("tensors", "convert_keys", "name"),
    [
        (kohya_pair(), kohya({KOHYA_Q: Q}), Q),
        (pair(f"diffusion_model.{Q}"), kohya({f"diffusion_model.{Q}": Q}), Q),
        (pair(f"transformer.{Q}"), diffusers(), Q),
        (pair(f"unet.{Q}"), diffusers(), Q),
        (pair(f"unet.{Q}", ("lora.down.weight", "lora.up.weight")), diffusers(), Q),
        (
            pair("unet.q", ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight")),
            diffusers(),
            "q",
        ),
        (pair("text_encoder.q"), diffusers(), "text_encoder.q"),
        (pair("text_encoder.q"), diffusers(["text_encoder"]), "q"),
        (mlx_pair(), mlx(scale=1.0), "model.q"),
    ],
)
def test_each_layout_gives_the_factors_under_the_base_models_names(tensors, convert_keys, name):
    modules = read(tensors, convert_keys)
    assert modules.keys() == {name}
    assert_is_pair(modules[name], *factors("m").values())
    assert modules[name].scale == 1.0


@pytest.mark.parametrize("file", DIFFUSERS_SCALES)
def test_what_diffusers_wrote_has_the_scales_that_diffusers_reads(file):
    path = str(DATA / file)
    adapter = read_lora_file(path, diffusers())
    found = {
        name: module.scale
        for name, module in adapter.modules.items()
        if not name.startswith("text_encoder.")
    }
    assert found == pytest.approx(DIFFUSERS_SCALES[file], rel=1e-12)
    assert set(found.values()) != {1.0}
    assert {m.in_features for m in adapter.modules.values()} <= {4, 8}
    spec = llama_spec(convert_keys=diffusers())
    assert set(read_adapter_info(path, spec).unmapped) == set(adapter.modules)


def test_the_components_of_a_diffusers_file_have_a_config_each():
    modules = read_lora_file(str(DATA / "pipeline.safetensors"), diffusers()).modules
    text_encoder = modules["text_encoder.encoder.layers.0.self_attn.q_proj"]
    assert (text_encoder.rank, text_encoder.scale) == (4, 2.0)
    only = read_lora_file(str(DATA / "pipeline.safetensors"), diffusers(scale=3.0)).modules
    assert {module.scale for module in only.values()} == {3.0}


def test_a_single_models_diffusers_file_needs_no_converter():
    adapters = [read_lora_file(str(DATA / "model.safetensors"), c) for c in (None, diffusers())]
    assert len({adapter_digest(adapter) for adapter in adapters}) == 1


@pytest.mark.parametrize("alpha", [10**30, -1e-30, 0])
def test_any_finite_alpha_in_the_metadata_is_taken(tmp_path, alpha):
    path = str(tmp_path / "x.safetensors")
    config = {"unet.r": 4, "unet.lora_alpha": alpha, "unet.use_rslora": True}
    save_file(pair("unet.q"), path, {"lora_adapter_metadata": json.dumps(config)})
    assert read_lora_file(path, diffusers()).modules["q"].scale == pytest.approx(alpha / 2)
    del config["unet.use_rslora"]
    save_file(pair("unet.q"), path, {"lora_adapter_metadata": json.dumps(config)})
    assert read_lora_file(path, diffusers()).modules["q"].scale == pytest.approx(alpha / 4)


def test_the_notes_of_a_config_in_the_metadata_are_kept(tmp_path):
    config = {"unet.r": 4, "unet.alpha_pattern": {"nosuch": 3}}
    path = str(tmp_path / "x.safetensors")
    save_file(pair("unet.q"), path, {"lora_adapter_metadata": json.dumps(config)})
    assert read_lora_file(path, diffusers()).notes == (
        "lora_alpha is absent: 8",
        "the pattern 'nosuch' matches no module",
    )


def test_a_header_without_weights_is_converted_alike():
    for tensors, convert_keys in (
        (kohya_pair(), kohya({KOHYA_Q: Q})),
        (mlx_pair(), mlx(scale=1.0)),
    ):
        header = convert_keys({name: tensor.to("meta") for name, tensor in tensors.items()})
        whole = convert_keys(tensors)
        assert {n: t.shape for n, t in header.items()} == {n: t.shape for n, t in whole.items()}


def test_square_mlx_factors_are_transposed():
    """Rank 8 of 8 columns: no shape shows it."""
    tensors = mlx_pair(rank=8, width_in=8, width_out=8)
    assert_is_pair(read(tensors, mlx(scale=1.0))["model.q"], *factors("m", 8, 8, 8).values())


@pytest.mark.parametrize("is_reversed", [False, True])
def test_mixed_ranks_without_alpha_scale_by_one_whatever_the_key_order(is_reversed):
    tensors = pair("unet.a", rank=4) | pair("unet.b", rank=8) | pair("unet.c", rank=4)
    order = sorted(tensors, reverse=is_reversed)
    modules = read({name: tensors[name] for name in order}, diffusers())
    assert {name: m.scale for name, m in modules.items()} == {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("tensors", "name", "convert_keys"),
    [
        (kohya_pair(rank=64), KOHYA_Q, kohya({KOHYA_Q: "q"})),
        (pair("unet.q", rank=64), "unet.q", diffusers()),
    ],
)
def test_C022_the_files_alpha_gives_the_scale(tensors, name, convert_keys):
    tensors |= {f"{name}.alpha": torch.tensor(8.0)}
    assert read(tensors, convert_keys)["q"].scale == 0.125


def test_C023_an_orphan_alpha_is_refused():
    orphan = {f"{KOHYA_Q}.alpha": torch.tensor(8.0)}
    name_map = {KOHYA_Q: Q, "lora_unet_other": "other"}
    text = refusal(orphan | kohya_pair("lora_unet_other"), kohya(name_map))
    assert f"module {Q!r} has ['alpha']; expected lora_A and lora_B" in text


def test_C025_a_stated_scale_replaces_the_files_alphas():
    alpha = torch.tensor(123.0)
    for tensors, convert_keys in (
        (kohya_pair() | {f"{KOHYA_Q}.alpha": alpha}, kohya({KOHYA_Q: "q"}, scale=20.0)),
        (pair("unet.q") | {"unet.q.alpha": alpha}, diffusers(scale=20.0)),
        (mlx_pair("q"), mlx(scale=20.0)),
    ):
        assert read(tensors, convert_keys)["q"].scale == 20.0


def test_C010_what_the_map_does_not_name_is_refused_as_kohya_layout():
    tensors = kohya_pair() | kohya_pair("lora_te_q") | {"lora_te_q.alpha": torch.tensor(1.0)}
    text = refusal(tensors, kohya({KOHYA_Q: Q}))
    assert "kohya layout" in text
    assert all(name in text for name in tensors if "lora_te_q" in name)
    assert "lora_unet" not in text


@pytest.mark.parametrize("part", ["hada_w1_a", "lokr_w1", "dora_scale", "lora_mid.weight"])
def test_other_methods_stay_refused_by_name(part):
    tensors = kohya_pair() | {f"{KOHYA_Q}.{part}": torch.ones(4, 4)}
    assert f"{KOHYA_Q}.{part}" in refusal(tensors, kohya({KOHYA_Q: Q}))


def test_convolutions_stay_refused_by_shape():
    tensors = {name: tensor[..., None, None] for name, tensor in kohya_pair().items()}
    assert "[4, 8, 1, 1]; expected a matrix" in refusal(tensors, kohya({KOHYA_Q: Q}))


@pytest.mark.parametrize("layout", [lambda **scale: kohya({"q": "q"}, **scale), diffusers, mlx])
def test_a_peft_file_keeps_its_scale_unless_one_is_stated(layout):
    config = {"peft_type": "LORA", "lora_alpha": 8}
    assert read(factors("q"), layout(), config)["q"].scale == 2.0
    assert read(factors("q"), layout(scale=3.0), config)["q"].scale == 3.0


def test_two_modules_of_one_name_are_refused_with_the_file_and_both(tmp_path):
    tensors = kohya_pair("lora_unet_a") | kohya_pair("lora_unet_b")
    save_file(tensors, tmp_path / "pixel.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    with pytest.raises(AdapterError) as error:
        read_lora_file(
            str(tmp_path / "pixel.safetensors"), kohya({"lora_unet_a": "q", "lora_unet_b": "q"})
        )
    text = str(error.value)
    for part in ("pixel.safetensors", "lora_unet_a.lora_up", "lora_unet_b.lora_up", "use_dora"):
        assert part in text


def test_an_mlx_folder_is_read_with_the_scale_of_its_config(tmp_path):
    """mlx-lm's ``adapter_config.json`` is no PEFT config, and its scale is the factor itself."""
    save_file({n: t.contiguous() for n, t in mlx_pair().items()}, tmp_path / "adapters.safetensors")
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    path = str(tmp_path / "adapters.safetensors")
    assert read_lora_file(path, mlx(scale=20.0)).modules["model.q"].scale == 20.0
    for convert_keys, part in ((None, "MLX layout"), (mlx(), "have no scale")):
        with pytest.raises(AdapterError, match=part):
            read_lora_file(path, convert_keys)


def test_a_peft_config_stays_one_whatever_mlx_fields_it_has():
    config = {"peft_type": "LORA", "lora_alpha": 8, "fine_tune_type": "lora"}
    assert "'fine_tune_type' is 'lora'" in refusal(factors("q"), None, config)


def test_rename_moves_every_tensor_of_a_module(tmp_path):
    """C001 and C005: a wrapper's prefix, put right by the caller."""
    base = {"lm.embed.weight": torch.ones(6, 8)}
    tensors = factors("embed") | factors("q", rank=64)
    tensors |= {"base_model.model.q.alpha": torch.tensor(8.0)}
    tensors |= {"base_model.model.embed.base_layer.weight": base["lm.embed.weight"]}
    path = write(tmp_path, tensors)

    def convert(tensors):
        return drop_base_copies(base)(rename(lambda name: f"lm.{name}")(tensors))

    modules = read_lora_file(path, convert).modules
    assert {name: m.scale for name, m in modules.items()} == {"lm.embed": 2.0, "lm.q": 0.125}
    assert len(read_adapter_info(path, llama_spec(convert_keys=convert)).unmapped) == 2


def test_a_pattern_of_no_module_is_a_note_unless_modules_were_renamed():
    config = {"peft_type": "LORA", "lora_alpha": 8, "alpha_pattern": {"nosuch": 4}}
    adapter = lora_adapter_from_tensors(factors("q"), config, drop_base_copies({}))
    assert adapter.notes == ("the pattern 'nosuch' matches no module",)
    assert "rename it in the config" in refusal(factors("q"), rename(str.upper), config)


@pytest.mark.parametrize("convert_keys", [kohya({KOHYA_Q: Q}), diffusers(), mlx(), rename(str)])
@given(
    module=st.sampled_from([KOHYA_Q, "unet.q", "q", "\n", ""]),
    part=st.sampled_from(
        ["lora_A.weight", "lora_down.weight", "lora_up.weight", "lora_a", "alpha"]
    ),
    shape=st.lists(st.integers(0, 3), max_size=3),
)
def test_hostile_names_and_shapes_end_in_typed_errors(convert_keys, module, part, shape):
    tensors = {f"{module}.{part}": torch.zeros(shape)}
    before = dict(tensors)
    with pytest.raises(AdapterError):
        read(tensors, convert_keys)
    assert tensors == before


@pytest.mark.parametrize(
    "convert", [kohya({"m": "m"}, scale=10.0), diffusers(scale=10.0), mlx(scale=10.0)]
)
def test_a_stated_scale_is_every_modules_whatever_name_its_adapter_has(convert):
    ones = torch.ones
    tensors = {
        "base_model.model.m.lora_A.default.weight": ones(2, 4),
        "base_model.model.m.lora_B.default.weight": ones(4, 2),
        "base_model.model.e.lora_embedding_A.default": ones(2, 4),
        "base_model.model.e.lora_embedding_B.default": ones(4, 2),
    }
    config = {"r": 2, "lora_alpha": 4}
    adapter = lora_adapter_from_tensors(tensors, config, convert)
    assert {name: module.scale for name, module in adapter.modules.items()} == {"m": 10, "e": 10}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_diffusers_factors_may_name_their_adapter(prefix):
    tensors = {f"{prefix}m.lora_{ab}.default.weight": torch.ones(2, 2) for ab in "AB"}
    assert list(lora_adapter_from_tensors(tensors, None, diffusers()).modules) == ["m"]


def test_a_name_of_megabytes_is_left_to_the_reader():
    name = "a" + ".lora_" * (1 << 20) + "\n"
    assert list(rename(lambda module: module)({name: torch.ones(1)})) == [name]


def test_more_components_than_a_pipeline_has_are_refused(tmp_path):
    path = tmp_path / "adapter_model.safetensors"
    config = {f"c{i}.r": 4 for i in range(17)}
    save_file(pair("unet.q"), path, {"lora_adapter_metadata": json.dumps(config)})
    with pytest.raises(AdapterError, match="is for 17 components; expected at most 16"):
        read_lora_file(str(path), diffusers())
