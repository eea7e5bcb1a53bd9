from __future__ import annotations

import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora import Embedding, LoraLayer
from safetensors.torch import load, save, save_file

from checkpoints import (
    QKV,
    factors,
    llama_spec,
    refusal,
    safetensors_bytes,
    tiny_llama,
    write,
    write_with_peft,
)
from loramux.adapter_files import read_safetensors
from loramux.checkpoint import (
    drop_base_copies,
    lora_adapter_from_tensors,
    place_modules,
    read_adapter_info,
    read_lora_file,
)
from loramux.errors import AdapterError
from loramux.identity import adapter_digest
from loramux.peft_config import keys_by_module

Q0 = "model.layers.0.self_attn.q_proj"
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
KEYS = st.sampled_from(["a.*b", "(a|b)", "^a", "a$", r"a\.b", ".*"])


def assert_says(error: object, *parts: str) -> None:
    text = str(error)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear", "rank_pattern": {"layers.1.*q_proj": 2, "q_proj": 3}},
        {"rank_pattern": {"q_proj": 2, "model.layers.0.self_attn.q_proj": 2}, "use_rslora": True},
        {"alpha_pattern": {"^model.layers.0.*": 5, r"self_attn\.(q|k)_proj": 7, "v_proj": 9}},
        {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        {"init_lora_weights": "gaussian", "layers_to_transform": [1], "lora_dropout": 0.1},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "mica", "r": 4},
    ],
    ids=str,
)
def test_reads_what_peft_wrote(tmp_path, config):
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in write_with_peft(tmp_path, **config).named_modules()
        if isinstance(layer, LoraLayer)
    }
    adapter = read_lora_file(str(tmp_path))
    assert adapter.modules.keys() == layers.keys()
    for name, layer in layers.items():
        module = adapter.modules[name]
        embedding = isinstance(layer, Embedding)
        a, b = (
            (layer.lora_embedding_A["default"], layer.lora_embedding_B["default"])
            if embedding
            else (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        )
        assert module.embedding == embedding
        assert torch.equal(module.a, a)
        assert torch.equal(module.b, b)
        assert module.scale == layer.scaling["default"]
    assert adapter.rank == max(layer.r["default"] for layer in layers.values())


class TestNames:
    def test_raw_state_dict_names_of_one_adapter_are_taken(self):
        tensors = {k.replace(".weight", ".mine.weight"): v for k, v in factors("a.q").items()}
        tensors["base_model.model.emb.lora_embedding_A.mine"] = torch.ones(4, 9)
        tensors["base_model.model.emb.lora_embedding_B.mine"] = torch.ones(8, 4)
        modules = lora_adapter_from_tensors(tensors, PLAIN).modules
        assert {name: module.embedding for name, module in modules.items()} == {
            "a.q": False,
            "emb": True,
        }


class TestFactors:
    def test_the_values_of_a_lazy_negation_are_taken(self):
        tensors = factors("a.q")
        name = next(name for name in tensors if "lora_A" in name)
        negated = torch._neg_view(tensors[name])
        assert negated.is_neg()
        adapter = lora_adapter_from_tensors({**tensors, name: negated}, PLAIN)
        opposite = lora_adapter_from_tensors({**tensors, name: -tensors[name]}, PLAIN)
        assert adapter_digest(adapter) == adapter_digest(opposite)

    def test_without_sidecar_every_module_needs_its_alpha(self, tmp_path):
        tensors = {**factors("a.q"), **factors("a.k")}
        tensors["base_model.model.a.q.alpha"] = torch.tensor(2.0)
        file = tmp_path / "mine.safetensors"
        save_file(tensors, file)
        assert_says(refusal(read_lora_file, str(file)), "['a.k']", "adapter_config.json", ".alpha")
        save_file({**tensors, "base_model.model.a.k.alpha": torch.tensor([8])}, file)
        modules = read_lora_file(str(file)).modules
        assert [modules[name].scale for name in ("a.q", "a.k")] == [0.5, 2.0]


class TestConfig:
    def test_every_field_that_peft_writes_is_known(self, tmp_path):
        from peft import LoraConfig

        config = LoraConfig(r=4, target_modules=["q"], megatron_core="x").to_dict()
        assert lora_adapter_from_tensors(factors("a.q"), config).modules["a.q"].scale == 2.0

    def test_notes_say_what_the_tensors_do_not_bear_out(self):
        config = {
            "r": 4,
            "alpha_pattern": {"nothing": 3, "": 4, "q": 5},
            "target_modules": ["q", "nosuch", ["not", "a", "name"]],
        }
        adapter = lora_adapter_from_tensors({**factors("a.q"), **factors("a.k")}, config)
        notes = "\n".join(adapter.notes)
        assert_says(notes, "lora_alpha is absent: 8", "'nothing'", "''", "'nosuch'")
        assert len(adapter.notes) == 4
        assert {name: m.alpha for name, m in adapter.modules.items()} == {"a.q": 5, "a.k": 8}

    def test_an_alpha_that_an_old_peft_would_have_had_otherwise_is_noted(self):
        """PEFT 0.10 to 0.13 took the first key of either pattern for the rank and the alpha."""
        config = {**PLAIN, "rank_pattern": {"q": 4}, "alpha_pattern": {"a.q": 2, "k": 3}}
        tensors = {**factors("a.q"), **factors("a.k")}
        adapter = lora_adapter_from_tensors(tensors, config)
        assert adapter.modules["a.q"].alpha == 2
        assert_says("\n".join(adapter.notes), "before 0.14", "the alpha of ['a.q'] may")
        for fields in ({"peft_version": "0.21.2"}, {"rank_pattern": {"a.q": 4}}):
            assert not lora_adapter_from_tensors(tensors, {**config, **fields}).notes

    def test_patterns_must_name_the_modules_that_convert_keys_makes(self):
        def rename(tensors):
            return {name.replace("a.q", "b.query"): tensor for name, tensor in tensors.items()}

        config = {**PLAIN, "alpha_pattern": {"a.q": 64}}
        text = refusal(lora_adapter_from_tensors, factors("a.q"), config, rename)
        assert_says(text, "'a.q'", "convert_keys", "rename")

    @given(
        st.lists(st.text(alphabet="ab.-", min_size=1, max_size=6) | KEYS, max_size=5, unique=True),
        st.lists(st.lists(st.sampled_from(["a", "b", "ab", "a-b"]), min_size=1).map(".".join)),
    )
    def test_names_among_the_keys_match_as_the_patterns_they_are(self, keys, modules):
        want = {}
        for module in modules:
            matching = [key for key in keys if re.match(rf"(.*\.)?({key})$", module)]
            if matching:
                want[module] = matching[0]
        idle = [key for key in keys if key not in want.values()]
        problems = []
        assert keys_by_module(keys, modules, problems) == (want, idle)
        assert not problems

    def test_a_name_for_every_module_is_no_pattern_to_wait_for(self, monkeypatch):
        monkeypatch.setattr("loramux.peft_config._MAX_PATTERN_SECONDS", 0.0)
        names = [f"layers.{i}.experts.{j}.up" for i in range(40) for j in range(64)]
        problems = []
        keys, idle = keys_by_module(names, names, problems)
        assert (keys, idle, problems) == (dict(zip(names, names, strict=True)), [], [])

    def test_a_pattern_cannot_hold_the_reader_up(self, monkeypatch):
        monkeypatch.setattr("loramux.peft_config._MAX_PATTERN_SECONDS", 0.2)
        name = ".".join("a" * 100)
        config = {**PLAIN, "alpha_pattern": {f".*.*.*x{i}": 1 for i in range(500)}}
        assert_says(refusal(lora_adapter_from_tensors, factors(name), config), "take more than 0.2")


def test_linears_called_as_megatrons_are_read():
    adapter = lora_adapter_from_tensors(factors("a.linear_out") | factors("a.linear_in"), PLAIN)
    assert sorted(adapter.modules) == ["a.linear_in", "a.linear_out"]
    megatron = {"decoder.layers.0.adapter.linear_in.weight": torch.ones(2, 2)}
    assert_says(refusal(lora_adapter_from_tensors, megatron, PLAIN), "Megatron layout")


def test_a_header_of_faults_is_told_in_part(tmp_path):
    entries = {f"t{i}": 1 for i in range(5000)}
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes(entries))
    text = refusal(read_lora_file, str(tmp_path))
    assert_says(text, "'t99' has", "more of them; expected at most 100 faults")
    assert "'t100' has" not in str(text)


class TestFiles:
    def test_a_header_length_that_looks_like_a_pickle_is_none(self, tmp_path):
        content = save(factors("a.q"))
        header = content[8 : 8 + int.from_bytes(content[:8], "little")].ljust(0x280)
        file = tmp_path / "adapter_model.safetensors"
        write(tmp_path, factors("a.q"))
        file.write_bytes(
            safetensors_bytes(header, content[8 + len(header.rstrip()) :].lstrip(b" "))
        )
        assert file.read_bytes()[:2] == b"\x80\x02"
        assert read_lora_file(str(tmp_path)).rank == 4

    def test_files_with_one_header_differ_in_all_else(self, tmp_path):
        first, second, cut = (str(tmp_path / name) for name in ("first", "second", "cut"))
        tensors = factors("a.q")
        write(tmp_path / "first", tensors)
        write(tmp_path / "second", {name: tensor + 1 for name, tensor in tensors.items()})
        content = (tmp_path / "second" / "adapter_model.safetensors").read_bytes()
        write(tmp_path / "cut", tensors)
        (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(content[:-4])
        a, b = (read_lora_file(path).modules["a.q"].a for path in (first, second))
        assert torch.equal(b, a + 1)
        assert_says(refusal(read_lora_file, cut), "the file's end", cut)
        read_safetensors(content_path := f"{first}/adapter_model.safetensors")[1]["note"] = "mine"
        assert "note" not in read_safetensors(content_path)[1]

    def test_tensors_off_their_alignment_are_read(self, tmp_path):
        tensors = {
            "base_model.model.q.alpha": torch.tensor(2.0, dtype=torch.bfloat16),
            **factors("q", rank=1, width_in=1, width_out=1),
        }
        entries, data = {}, b""
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            dtype = "F32" if size == 4 else "BF16"
            offsets = [len(data), len(data) + size]
            entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            data += tensor.view(-1).view(torch.uint8).numpy().tobytes()
        file = tmp_path / "x.safetensors"
        file.write_bytes(safetensors_bytes(entries, data))
        module = read_lora_file(str(file)).modules["q"]
        assert torch.equal(module.a, tensors["base_model.model.q.lora_A.weight"])
        assert (module.alpha, module.b.data_ptr() % 4) == (2.0, 0)

    @given(st.data())
    def test_a_damaged_file_is_read_as_the_library_reads_it_or_refused(
        self, tmp_path_factory, data
    ):
        tensors = {**factors("q"), "base_model.model.q.alpha": torch.tensor(2.0)}
        content = bytearray(save(tensors))
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(content) - 1))
            content[position] = data.draw(st.integers(0, 255))
        content = content[: data.draw(st.sampled_from([len(content), len(content) // 2]))]
        file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
        file.write_bytes(content)
        try:
            module = read_lora_file(str(file)).modules.popitem()[1]
        except AdapterError:
            return
        library = load(bytes(content))
        read = (module.a, module.b)
        assert all(any(torch.equal(x, y) for y in library.values()) for x in read)

    def test_a_file_is_read_whole_in_chunks_and_short_reads(self, tmp_path, monkeypatch):
        monkeypatch.setattr("loramux.adapter_files._CHUNK_BYTES", 100)
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda f, b, offset: preadv(f, [b[0][:7]], offset))
        tensors = factors("a.q", rank=4, width_in=37)
        module = read_lora_file(write(tmp_path, tensors)).modules["a.q"]
        assert torch.equal(module.a, tensors["base_model.model.a.q.lora_A.weight"])
        assert torch.equal(module.b, tensors["base_model.model.a.q.lora_B.weight"])

    def test_the_hub_caches_links_are_followed(self, tmp_path):
        write(tmp_path / "blobs", factors("a.q"))
        snapshot = tmp_path / "snapshots" / "0a1b" / "sub"
        snapshot.mkdir(parents=True)
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            (snapshot / name).symlink_to(f"../../../blobs/{name}")
        assert read_lora_file(str(snapshot)).rank == 4


class TestPlacement:
    def test_info_needs_no_weights_and_counts_every_module(self, tmp_path, monkeypatch):
        tensors = {
            **factors(Q0, 4, 64, 64),
            **factors("model.layers.1.mlp.down_proj", 8, 128, 65),
            **factors("model.layers.9.mlp.down_proj", 4, 128, 64),
            **factors("vision.q", 9, 5, 5),
            **factors("model.embed_tokens", 4, 96, 64),
        }
        path = write(tmp_path, tensors)
        monkeypatch.setattr("loramux.adapter_files._fill", None)
        info = read_adapter_info(path, llama_spec(ignored_modules=lambda n: n.startswith("vision")))
        assert info.rank == 9
        assert info.unmapped == ("model.layers.9.mlp.down_proj",)
        assert len(info.misfits) == 2
        assert_says(info.misfits[0], "embed_tokens", "linear", "embedding")
        assert_says(info.misfits[1], "down_proj", "[8, 128]", "[65, 8]", "[r, 128]", "[64, r]")

    def test_info_is_that_of_the_adapter_read(self, tmp_path):
        write_with_peft(tmp_path, target_modules=["q_proj", "embed_tokens"], r=2)
        spec = llama_spec()
        info = read_adapter_info(str(tmp_path), spec)
        assert info == read_lora_file(str(tmp_path)).info(spec) == (2, (), ())

    def test_separate_and_packed_modules_land_on_their_slices(self):
        tensors = {
            **factors("model.layers.0.self_attn.k_proj", 2, 64, 32),
            **factors("model.layers.1.self_attn.qkv_proj", 4, 64, 128),
        }
        adapter = lora_adapter_from_tensors(tensors, {"lora_alpha": 8})
        placed = place_modules(adapter, llama_spec())
        assert placed.keys() == {("qkv", 0, 1), ("qkv", 1, 0), ("qkv", 1, 1), ("qkv", 1, 2)}
        assert placed["qkv", 0, 1].scale == 4.0
        packed = [placed["qkv", 1, i] for i in range(3)]
        whole = adapter.modules["model.layers.1.self_attn.qkv_proj"]
        assert torch.equal(torch.cat([part.b for part in packed]), whole.b)
        assert [len(part.b) for part in packed] == [64, 32, 32]
        assert all(part.a is whole.a and part.scale == 2.0 for part in packed)

    def test_an_adapter_of_ignored_modules_only_places_nothing(self):
        adapter = lora_adapter_from_tensors(factors("vision.q"), PLAIN)
        assert place_modules(adapter, llama_spec(ignored_modules=lambda _: True)) == {}


def test_base_copies_are_dropped_where_they_equal_the_base(tmp_path):
    write_with_peft(tmp_path, target_modules=["embed_tokens", *QKV], base_copies=True)
    base = tiny_llama().state_dict()
    assert "model.embed_tokens" in read_lora_file(str(tmp_path), drop_base_copies(base)).modules
    spec = llama_spec(convert_keys=drop_base_copies(base))
    assert read_adapter_info(str(tmp_path), spec).unmapped == ()
    weight = base["model.embed_tokens.weight"]
    unequal = [{}] + [{"model.embed_tokens.weight": w} for w in (weight + 1, weight.half())]
    for convert_keys in (None, *map(drop_base_copies, unequal)):
        text = refusal(read_lora_file, str(tmp_path), convert_keys)
        assert_says(text, "embed_tokens.base_layer.weight", "copy of base weights")
    assert_says(
        refusal(read_adapter_info, str(tmp_path), llama_spec(convert_keys=convert_keys)), str(text)
    )
