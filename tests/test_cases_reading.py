"""Public fault reports about reading, naming, scaling and keying adapters, replayed.

Each test carries the number of its report in the project's collection of cases.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from checkpoints import (
    QKV,
    factors,
    llama_spec,
    safetensors_bytes,
    tiny_llama,
    write,
    write_with_peft,
)
from loramux.checkpoint import (
    drop_base_copies,
    lora_adapter_from_tensors,
    place_modules,
    read_adapter_info,
    read_lora_file,
)
from loramux.config import LoraModuleRef
from loramux.errors import AdapterError
from loramux.identity import (
    AdapterPrefixRoots,
    adapter_digest,
    adapter_prefix_root,
    read_adapter_digest,
)
from loramux.merge import merge_adapter

Q0, Q1 = (f"model.layers.{i}.self_attn.q_proj" for i in range(2))
PLAIN = {"peft_type": "LORA", "lora_alpha": 8}


def refused(*parts: str):
    """A context that expects an ``AdapterError`` whose text has every part."""
    pattern = "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(AdapterError, match=f"(?s){pattern}")


def from_tensors(tensors, convert_keys=None, **config):
    return lora_adapter_from_tensors(tensors, {**PLAIN, **config}, convert_keys)


# ---- Naming and silent no-op ----


def test_C001_no_name_matches_the_model(tmp_path):
    spec = llama_spec("language_model.model.")
    path = write(tmp_path, {**factors(Q0, 4, 64, 64), **factors(Q1, 4, 64, 64)})
    parts = ("0 of 2 modules matched", f"'{Q0}'", "'language_model.model.embed_tokens'")
    with refused(*parts, "convert_keys"):
        place_modules(read_lora_file(path), spec)
    with refused(*parts):
        spec.check_adapter("a", read_adapter_info(path, spec))


def test_C002_a_valid_suffix_on_a_layer_that_is_not_there():
    spec = llama_spec()
    spec.module_map = lambda name: LoraModuleRef("qkv", int(name.split(".")[2]), "q_proj")
    tensors = {**factors(Q0, 4, 64, 64), **factors(Q0.replace("0", "99"), 4, 64, 64)}
    with refused(r"model\.layers\.99\.self_attn\.q_proj"):
        place_modules(from_tensors(tensors), spec)


def test_C004_a_listed_target_without_tensors_is_accepted_and_noted():
    adapter = from_tensors(factors(Q0), target_modules=["q_proj", "nosuch"])
    assert adapter.modules.keys() == {Q0}
    assert any("'nosuch'" in note for note in adapter.notes)


def test_C005_an_adapter_of_the_inner_model_needs_a_prefix_map():
    tensors = factors(Q0.removeprefix("model."), 4, 64, 64)
    with refused("0 of 1", "'layers.0.self_attn.q_proj'"):
        place_modules(from_tensors(tensors), llama_spec())
    prefixed = from_tensors(
        tensors, lambda t: {n.replace("layers", "model.layers"): v for n, v in t.items()}
    )
    assert place_modules(prefixed, llama_spec()).keys() == {("qkv", 0, 0)}


def test_C007_every_tensor_is_consumed_or_refused():
    down = factors("model.layers.0.mlp.down_proj", 4, 128, 64)
    placed = place_modules(from_tensors({**factors(Q0, 4, 64, 64), **down}), llama_spec())
    assert placed.keys() == {("qkv", 0, 0), ("down", 0, 0)}
    with refused("'stray'"):
        from_tensors({**down, "stray": torch.ones(1)})


def test_C008_gate_and_up_each_land_on_their_slice():
    values = {"gate_proj": (0.25, 0.5), "up_proj": (0.75, 1.0)}
    tensors = {}
    for name, (a, b) in values.items():
        keys = factors(f"model.layers.0.mlp.{name}")
        shapes = [(4, 64), (128, 4)]
        tensors |= {k: torch.full(s, v) for k, s, v in zip(keys, shapes, (a, b), strict=True)}
    placed = place_modules(from_tensors(tensors), llama_spec())
    found = [
        (placed["gate_up", 0, i].a.unique().item(), placed["gate_up", 0, i].b.unique().item())
        for i in (0, 1)
    ]
    assert found == list(values.values())


def test_C010_a_kohya_file_is_named_as_such():
    down, up = torch.ones(4, 8), torch.ones(6, 4)
    names = (
        "lora_unet_a_q.lora_down.weight",
        "lora_unet_a_q.lora_up.weight",
        "lora_unet_a_q.alpha",
    )
    with refused("kohya layout", *names):
        from_tensors(dict(zip(names, (down, up, torch.tensor(4.0)), strict=True)))


def test_C011_a_root_level_module_list_is_read():
    config = {"layers_to_transform": [0], "layers_pattern": "layers", "target_modules": ["q_proj"]}
    assert from_tensors(factors("layers.0.q_proj"), **config).modules.keys() == {"layers.0.q_proj"}


def test_C013_expert_tensors_that_peft_writes_are_refused_by_name(tmp_path):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(4, 8, 8))
            self.down = torch.nn.Parameter(torch.randn(4, 8, 8))

    names = ["experts.up", "experts.down"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=names)
    model = torch.nn.ModuleDict({"experts": Experts()})
    get_peft_model(model, config).save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 4
    with refused("expert parameters", *map(str, tensors)):
        lora_adapter_from_tensors(tensors, PLAIN)
    with refused("'target_parameters'", "expert"):
        read_lora_file(str(tmp_path))


def test_C014_an_adapter_of_layer_1_only_is_applied_there(tmp_path):
    write_with_peft(tmp_path, layers_to_transform=[1], target_modules=["q_proj"])
    assert place_modules(read_lora_file(str(tmp_path)), llama_spec()).keys() == {("qkv", 1, 0)}


# ---- Alpha and scale ----


def test_C016_C017_rslora_scales_alike_through_every_entry(tmp_path):
    config = {"r": 16, "lora_alpha": 16, "use_rslora": True}
    write_with_peft(tmp_path, target_modules=["q_proj"], **config)
    file = tmp_path / "adapter_model.safetensors"
    adapters = [
        read_lora_file(str(tmp_path)),
        read_lora_file(str(file)),
        lora_adapter_from_tensors(load_file(file), config),
        lora_adapter_from_tensors(load_file(file), config, dict),
    ]
    assert [adapter.modules[Q0].scale for adapter in adapters] == [4.0] * 4
    assert len({adapter_digest(adapter) for adapter in adapters}) == 1


def test_C019_an_absent_lora_alpha_is_pefts_default():
    adapter = lora_adapter_from_tensors(factors("q"), {"r": 4})
    assert adapter.modules["q"].alpha == LoraConfig().lora_alpha == 8
    assert "lora_alpha is absent: 8" in adapter.notes


@pytest.mark.parametrize("r", [0, -5, True, "8", 1e9, 8.5, None, 10**9])
def test_C020_a_rank_that_is_none_is_refused(r):
    with refused(r"'?r'? is|expected 1000000000, as the config says"):
        from_tensors(factors("q"), r=r)


@pytest.mark.parametrize("config", [None, {**PLAIN, "lora_alpha": 64}])
def test_C022_an_alpha_tensor_is_honoured(config):
    tensors = {**factors("q", 64), "base_model.model.q.alpha": torch.tensor(8.0)}
    assert lora_adapter_from_tensors(tensors, config).modules["q"].scale == 0.125


def test_C023_an_orphan_alpha_is_refused():
    def forgets_alpha(tensors):
        return {k if "alpha" in k else k.replace(".q.", ".query."): v for k, v in tensors.items()}

    tensors = {**factors("m.q"), "base_model.model.m.q.alpha": torch.tensor(8.0)}
    with refused(r"'m\.q' has \['alpha'\]; expected lora_A and lora_B"):
        lora_adapter_from_tensors(tensors, None, forgets_alpha)


def test_C025_a_scale_can_be_stated_for_a_producer_of_another_formula():
    def scale_is_20(tensors):
        return {**tensors, "q.alpha": torch.tensor(20.0 * 4)}

    assert from_tensors(factors("q"), scale_is_20).modules["q"].scale == 20.0


# ---- Rank patterns, shapes, dtypes ----


def test_C029_rank_and_alpha_patterns_scale_each_module(tmp_path):
    patterns = {"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"v_proj": 64}}
    write_with_peft(tmp_path, r=8, lora_alpha=16, target_modules=list(QKV), **patterns)
    modules = read_lora_file(str(tmp_path)).modules
    scales = [modules[Q1.replace("q_proj", name)].scale for name in QKV]
    assert scales == [1.0, 2.0, 8.0]


def test_C035_a_rank_of_zero_is_refused_by_name():
    keys = list(factors("m.q"))
    with refused(r"'m\.q'", r"\[0, 8\]", "at least 1"):
        from_tensors(dict(zip(keys, (torch.ones(0, 8), torch.ones(6, 0)), strict=True)))


def test_C037_an_input_width_off_by_one_is_refused():
    with refused(r"\[4, 63\]", r"\[r, 64\]"):
        place_modules(from_tensors(factors(Q0, 4, 63, 64)), llama_spec())


def test_C040_bfloat16_bits_survive_and_later_edits_of_the_file_do_not_reach_them(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in factors("q", 4, 64, 64).items()}
    path = write(tmp_path, tensors)
    adapter = read_lora_file(path)
    before = adapter_digest(adapter)
    file = tmp_path / "adapter_model.safetensors"
    with open(file, "r+b") as f:
        f.write(b"\0" * os.path.getsize(file))
    read = {name: getattr(adapter.modules["q"], name[-8].lower()) for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(read[name].view(torch.int16), tensor.view(torch.int16))
    assert adapter_digest(adapter) == before


def test_C041_a_bfloat16_pickle_is_refused_and_its_safetensors_read(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in factors("q").items()}
    torch.save(tensors, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    with refused(r"adapter_model\.bin", "re-save the adapter"):
        read_lora_file(str(tmp_path))
    assert read_lora_file(write(tmp_path, tensors)).modules["q"].a.dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
def test_C043_float16_files_keep_their_bits_whatever_peft_casts_to(tmp_path, autocast):
    write_with_peft(tmp_path, tiny_llama(torch.float16))
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    loaded = PeftModel.from_pretrained(
        tiny_llama(torch.float16), str(tmp_path), autocast_adapter_dtype=autocast
    )
    weight = loaded.get_submodule(f"base_model.model.{Q0}").lora_A["default"].weight
    a = read_lora_file(str(tmp_path)).modules[Q0].a
    assert (a.dtype, weight.dtype) == (torch.float16, torch.float32 if autocast else torch.float16)
    assert torch.equal(a.to(weight.dtype), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_C044_the_delta_is_not_zero_in_any_dtype(dtype):
    adapter = from_tensors({name: tensor.to(dtype) for name, tensor in factors("q").items()})
    state = {"q.weight": torch.zeros(6, 8, dtype=dtype)}
    merge_adapter(state, adapter)
    assert state["q.weight"].count_nonzero() == 48


# ---- Embeddings and what else a file may hold ----


def test_C046_copies_of_base_embeddings_are_taken_only_where_equal(tmp_path):
    targets = ["embed_tokens", "lm_head"]
    write_with_peft(tmp_path, target_modules=targets, base_copies=True)
    base = tiny_llama().state_dict()
    assert read_lora_file(str(tmp_path), drop_base_copies(base)).modules.keys() == {
        "model.embed_tokens",
        "lm_head",
    }
    base["lm_head.weight"] = base["lm_head.weight"].clone()
    base["lm_head.weight"][5, 5] += 1
    with refused(r"lm_head\.base_layer\.weight", "base weights"):
        read_lora_file(str(tmp_path), drop_base_copies(base))


def test_C047_full_weights_are_refused_by_feature(tmp_path):
    write_with_peft(tmp_path, modules_to_save=["lm_head"])
    with refused("'modules_to_save'", r"base_model\.model\.lm_head\.weight", "full weights"):
        read_lora_file(str(tmp_path))


def test_C053_embedding_and_head_of_tied_weights_stay_apart(tmp_path):
    model = tiny_llama(tied=True)
    write_with_peft(tmp_path, model, target_modules=["embed_tokens", "lm_head"])
    adapter = read_lora_file(str(tmp_path))
    assert place_modules(adapter, llama_spec()).keys() == {("embed", 0, 0), ("head", 1, 0)}
    with refused("one tensor", "clone"):
        merge_adapter(tiny_llama(tied=True).state_dict(), adapter)


def test_C097_tensors_at_hand_are_not_written_to():
    tensors = factors("q")
    before = {name: (tensor.clone(), tensor._version) for name, tensor in tensors.items()}

    def convert(given):
        given["x.lora_A.weight"] = given.pop("base_model.model.q.lora_A.weight")
        given["x.lora_B.weight"] = given.pop("base_model.model.q.lora_B.weight")
        return given

    adapter = from_tensors(tensors, convert)
    merge_adapter({"x.weight": torch.zeros(6, 8)}, adapter)
    assert tensors.keys() == before.keys()
    for name, (value, version) in before.items():
        assert torch.equal(tensors[name], value)
        assert tensors[name]._version == version


# ---- Cache identity ----


def test_C098_one_name_with_other_weights_digests_apart(tmp_path):
    spec = llama_spec()
    digests = [
        read_adapter_digest(spec, write(tmp_path / "a", factors(Q0, seed=seed))) for seed in (0, 1)
    ]
    assert digests[0] != digests[1]


def test_C100_the_digest_is_of_the_weights_that_were_read(tmp_path):
    adapter = read_lora_file(write(tmp_path, factors(Q0)))
    swapped = read_lora_file(write(tmp_path, factors(Q0, seed=1)))
    first = read_lora_file(write(tmp_path / "first", factors(Q0)))
    assert adapter_digest(adapter) == adapter_digest(first) != adapter_digest(swapped)


def test_C101_C106_the_root_of_a_key_has_no_default():
    with pytest.raises(TypeError):
        adapter_prefix_root()
    assert adapter_prefix_root(None) == b""


def test_C103_C104_base_and_adapters_are_keyed_apart():
    roots = AdapterPrefixRoots()
    roots.register("a", b"1" * 32)
    roots.register("b", b"2" * 32)
    assert len({adapter_prefix_root(None), roots.root("a"), roots.root("b"), None}) == 4


# ---- Malformed and hostile files ----


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt", ".safetensors"])
def test_C107_a_pickle_is_refused_by_suffix_and_by_bytes(tmp_path, suffix):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    file = tmp_path / f"adapter_model{suffix}"
    file.write_bytes(pickle.dumps(Bomb()))
    with refused("re-save the adapter"):
        read_lora_file(str(file))
    save_file(factors("q"), tmp_path / f"adapter{suffix}")
    if suffix != ".safetensors":
        with refused("re-save the adapter"):
            read_lora_file(str(tmp_path / f"adapter{suffix}"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../x", "/etc", "/dev/zero", "a\0b", "x" * 300, ""])
def test_C109_a_path_to_no_adapter_is_refused(path):
    with refused("no such file"):
        read_lora_file(path)


def test_C110_no_field_of_the_config_is_imported(monkeypatch):
    def forbidden(*_):
        raise AssertionError("imported")

    monkeypatch.setattr(importlib, "import_module", forbidden)
    mapping = {"base_model_class": "system", "parent_library": "os"}
    assert from_tensors(factors("q"), auto_mapping=mapping).rank == 4


def test_C112_C116_every_tensor_with_a_nan_or_inf_is_named():
    tensors = {**factors("m.q"), **factors("m.k"), **factors("m.v")}
    tensors["base_model.model.m.q.lora_B.weight"][5, 3] = math.nan
    tensors["base_model.model.m.k.lora_A.weight"][0, 0] = -math.inf
    with refused(r"m\.q\.lora_B\.weight' has a NaN", r"m\.k\.lora_A\.weight' has a NaN"):
        from_tensors(tensors)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_C113_a_gigabyte_is_not_read(tmp_path, name):
    path = write(tmp_path, factors("q"))
    with open(tmp_path / name, "wb") as file:
        file.write(safetensors_bytes(b"{")[8:] if name.endswith("json") else b"\0\0\0\x40\0\0\0\0{")
        file.truncate((1 << 30) + 64)
    with refused("4194304" if name.endswith("json") else "1073741824 bytes.*at most 16777216"):
        read_lora_file(path)


def test_C113_a_config_without_peft_type_is_loras():
    assert lora_adapter_from_tensors(factors("q"), {"r": 4, "lora_alpha": 8}).rank == 4


def test_C115_a_plain_peft_file_goes_through_every_entry(tmp_path):
    write_with_peft(tmp_path, target_modules="all-linear", exclude_modules=["lm_head"])
    spec = llama_spec()
    for path in (str(tmp_path), str(tmp_path / "adapter_model.safetensors")):
        adapter = read_lora_file(path)
        assert len(place_modules(adapter, spec)) == 7 * 2
        assert read_adapter_info(path, spec) == (4, (), ())
        assert read_adapter_digest(spec, path) == adapter_digest(adapter)


# ---- Limits ----


def test_C118_an_adapter_of_another_size_is_refused_with_both_sizes(tmp_path):
    path = write(tmp_path, factors(Q0, 4, 160, 160))
    with refused(r"\[4, 160\]", r"\[r, 64\]", r"\[160, 4\]", r"\[64, r\]"):
        place_modules(read_lora_file(path), llama_spec())
    assert len(read_adapter_info(path, llama_spec()).misfits) == 1


def test_C119_the_rank_limit_counts_every_pattern(tmp_path):
    write_with_peft(tmp_path, r=8, rank_pattern={"layers.1.self_attn.v_proj": 64})
    spec = llama_spec(max_rank=16)
    info = read_adapter_info(str(tmp_path), spec)
    assert info.rank == 64
    with refused("64", "16", "max_rank"):
        spec.check_adapter("a", info)
