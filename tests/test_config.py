"""What is declared, what a request may ask, and that the documented names and parameters exist."""

import dataclasses
import inspect

import pytest

import loramux
from loramux import config, identity, serving
from loramux.config import (
    AdapterInfo,
    LoraBaseOnly,
    LoraModuleRef,
    LoraReqConfig,
    LoraSpec,
    LoraStep,
    LoraTarget,
    Segment,
)
from loramux.errors import AdapterError, SpecError, UnknownAdapter


def make_spec(**fields):
    targets = {"q_proj": LoraTarget(8, (8,)), "lm_head": LoraTarget(8, (32,), per_segment=True)}
    places = {"q_proj": LoraModuleRef("q_proj", 0), "lm_head": LoraModuleRef("lm_head", 0)}
    return LoraSpec("lora", {"llm"}, 1, targets, places.get, **fields)


SPEC_FIELDS = [
    "resource_key",
    "nodes",
    "num_layers",
    "targets",
    "module_map",
    "max_slots",
    "max_rank",
    "cpu_capacity",
    "adapters",
    "adapter_digests",
    "dtype",
    "backend",
    "convert_keys",
    "ignored_modules",
    "dropped_targets",
    "arena_bytes",
]
TARGET_FIELDS = [
    "in_features",
    "out_slices",
    "parallel",
    "slice_names",
    "slice_units",
    "slice_packs",
    "slice_align",
    "layers",
    "kind",
    "per_segment",
    "token_fold",
]
SIGNATURES = [
    (LoraSpec, SPEC_FIELDS),
    (LoraTarget, TARGET_FIELDS),
    (AdapterInfo, ["rank", "unmapped", "misfits"]),
    (LoraBaseOnly, ["key"]),
    (LoraModuleRef, ["target", "layer", "shard_id"]),
    (LoraReqConfig, ["adapter"]),
    (LoraStep, ["segments"]),
    (LoraReqConfig.validate, ["self", "spec"]),
    (LoraSpec.adapter_info, ["self", "name"]),
    (LoraSpec.add_adapter, ["self", "name", "path", "digest"]),
    (LoraSpec.check_adapter, ["self", "name", "info"]),
    (LoraSpec.remove_adapter, ["self", "name"]),
    (LoraSpec.stop_ignoring, ["self", "modules"]),
    (
        LoraSpec.apply_yaml_overrides,
        [
            "self",
            "max_slots",
            "max_rank",
            "cpu_capacity",
            "adapters",
            "adapter_digests",
            "targets",
            "arena_bytes",
        ],
    ),
    (LoraTarget.input_cols, ["self", "rank", "world_size"]),
    (LoraTarget.local_width, ["self", "slice_idx", "world_size"]),
    (LoraTarget.module_slices, ["self", "shard_id"]),
    (LoraTarget.shard, ["self", "world_size"]),
    (LoraTarget.shard_pair, ["self", "slice_idx", "a", "b", "rank", "world_size"]),
    (LoraTarget.slice_index, ["self", "shard_id"]),
    (LoraTarget.slice_rows, ["self", "slice_idx", "rank", "world_size"]),
    (config.lora_enabled, ["model_config"]),
    (config.node_capture_key, ["key"]),
    (config.resolve_adapter_path, ["path"]),
    (config.served_lora_adapters, ["model_config"]),
    (identity.adapter_digest, ["adapter"]),
    (identity.adapter_prefix_root, ["digest"]),
    (identity.read_adapter_digest, ["spec", "path"]),
    (identity.AdapterPrefixRoots, ["roots"]),
    (identity.AdapterPrefixRoots.read, ["spec", "digests"]),
    (identity.AdapterPrefixRoots.register, ["self", "name", "digest"]),
    (identity.AdapterPrefixRoots.root, ["self", "name"]),
    (identity.AdapterPrefixRoots.unregister, ["self", "name"]),
    (serving.declared_lora_specs, ["model", "model_config"]),
    (serving.drop_lora_specs_without_targets, ["specs"]),
    (serving.lora_specs, ["model", "model_config"]),
    (serving.served_lora_targets, ["lora"]),
    (serving.size_lora_specs, ["lora", "model_config"]),
]


@pytest.mark.parametrize(
    ("thing", "parameters"), SIGNATURES, ids=lambda v: getattr(v, "__qualname__", "")
)
def test_documented_names_have_their_documented_parameters(thing, parameters):
    assert list(inspect.signature(thing).parameters) == parameters


def test_documented_defaults():
    spec = make_spec()
    assert (spec.max_slots, spec.max_rank, spec.cpu_capacity, spec.backend) == (4, 16, 16, "auto")
    assert spec.num_slots == 5
    assert (spec.adapters, spec.adapter_digests, spec.dropped_targets) == ({}, {}, frozenset())
    unset = ("dtype", "convert_keys", "ignored_modules", "arena_bytes")
    assert all(getattr(spec, name) is None for name in unset)
    target = {f.name: f.default for f in dataclasses.fields(LoraTarget)}
    assert target["parallel"] == "column"
    assert (target["kind"], target["per_segment"], target["token_fold"]) == ("linear", False, 1)


@pytest.mark.parametrize("name", loramux.__all__)
def test_public_names_import_from_the_package(name):
    assert getattr(loramux, name) is not None


def test_resource_class_is_the_pool():
    assert make_spec().resource_class is loramux.LoraPool


class TestAdmission:
    def test_base_and_served_names_pass(self):
        spec = make_spec(adapters={"sql": "/secret/sql"})
        LoraReqConfig().validate(spec)
        LoraReqConfig("sql").validate(spec)
        LoraReqConfig("anything").validate()

    def test_an_unknown_name_says_what_is_served_and_never_a_path(self):
        spec = make_spec(adapters={"support-en": "/secret/a", "sql": "/secret/b"})
        with pytest.raises(ValueError, match="Did you mean 'support-en'") as error:
            LoraReqConfig("suport-en").validate(spec)
        assert "'sql', 'support-en'" in str(error.value)
        assert "/secret" not in str(error.value)

    @pytest.mark.parametrize("value", [3, ["sql"], True])
    def test_a_name_of_another_type_is_refused(self, value):
        with pytest.raises(UnknownAdapter, match="must be a name or null"):
            LoraReqConfig(value).validate(make_spec())


class TestCheckAdapter:
    def test_a_fitting_adapter_passes(self):
        make_spec().check_adapter("a", AdapterInfo(16, ()))

    def test_every_problem_is_listed_at_once(self):
        spec = make_spec(max_rank=8)
        info = AdapterInfo(64, ("model.nosuch",), ("module q_proj: [8, 5120] for [8, 1536]",))
        with pytest.raises(AdapterError) as error:
            spec.check_adapter("a", info)
        text = str(error.value)
        assert "rank is 64; expected at most the pool's max_rank, 8: raise max_rank" in text
        assert "'model.nosuch' is on none of the targets ['lm_head', 'q_proj']" in text
        assert "5120" in text
        assert len(error.value.problems) == 3

    def test_no_lora_layer_is_refused(self):
        with pytest.raises(AdapterError, match="no LoRA layer"):
            make_spec().check_adapter("a", AdapterInfo(0, ()))

    def test_a_dropped_target_is_named(self):
        spec = make_spec()
        spec.apply_yaml_overrides(targets=["q_proj"])
        with pytest.raises(AdapterError, match="'lm_head', which this deployment drops"):
            spec.check_adapter("a", AdapterInfo(8, ("lm_head",)))


class TestOverrides:
    def test_all_are_applied(self):
        spec = make_spec(adapters={"old": "o"}, adapter_digests={"old": b"x" * 32})
        spec.apply_yaml_overrides(
            max_slots=2,
            max_rank=64,
            cpu_capacity=9,
            adapters={"new": "n"},
            adapter_digests={"new": "ab" * 32},
            targets=["q_proj", "of_another_spec"],
            arena_bytes=4096,
        )
        assert (spec.max_slots, spec.max_rank, spec.cpu_capacity) == (2, 64, 9)
        assert spec.arena_bytes == 4096
        assert spec.adapters == {"new": "n"}
        assert spec.adapter_digests == {"new": bytes.fromhex("ab" * 32)}
        assert set(spec.targets) == {"q_proj"}
        assert spec.dropped_targets == {"lm_head"}

    @pytest.mark.parametrize(
        "bad",
        [
            dict(max_slots=0),
            dict(max_rank=True),
            dict(cpu_capacity="8"),
            dict(arena_bytes="8G"),
            dict(adapters=["a"]),
            dict(adapter_digests={"a": "ab"}),
            dict(adapter_digests={"stranger": "ab" * 32}),
            dict(targets="q_proj"),
        ],
        ids=str,
    )
    def test_a_refused_override_leaves_the_spec_as_declared(self, bad):
        spec = make_spec(adapters={"a": "p"})
        with pytest.raises(SpecError):
            spec.apply_yaml_overrides(**{"max_slots": 2, "max_rank": 32, **bad})
        assert (spec.max_slots, spec.max_rank, spec.cpu_capacity) == (4, 16, 16)
        assert spec.adapters == {"a": "p"}
        assert set(spec.targets) == {"q_proj", "lm_head"}


class TestRegistration:
    def test_the_same_path_registered_again_is_another_registration(self):
        spec = make_spec(adapters={"a": "p"})
        first = spec.registration("a")
        assert spec.registration("a") == first
        spec.add_adapter("a", "p")
        assert spec.registration("a") != first

    def test_a_held_registration_is_served_until_its_last_release(self):
        spec = make_spec(adapters={"a": "p"})
        held = spec.hold("a")
        assert held is spec.hold("a") is spec.registration("a")
        spec.remove_adapter("a")
        now = spec.add_adapter("a", "p")
        assert spec.registrations(["a", held]) == [now, held]
        spec.release(held)
        assert spec.serves(held)
        spec.release(held)
        assert not spec.serves(held)
        with pytest.raises(UnknownAdapter, match="neither served nor held"):
            spec.registrations(["a", held])
        with pytest.raises(UnknownAdapter, match="no adapter 'b' is served"):
            spec.registrations(["a", "b"])
        assert spec.registrations([now]) == [now]

    def test_a_spec_keeps_no_hold_of_the_mappings_it_was_given(self):
        adapters = {"a": "p"}
        specs = [make_spec(adapters=adapters) for _ in range(2)]
        specs[0].remove_adapter("a")
        assert (adapters, specs[0].adapters, specs[1].adapters) == ({"a": "p"}, {}, {"a": "p"})

    def test_removed_names_are_unknown(self):
        spec = make_spec(adapters={"a": "p"})
        spec.remove_adapter("a")
        for ask in (spec.registration, spec.remove_adapter, spec.adapter_info):
            with pytest.raises(UnknownAdapter):
                ask("a")

    def test_stop_ignoring_refuses_again(self):
        spec = make_spec(ignored_modules=lambda name: name.startswith(("vision", "audio")))
        spec.stop_ignoring(lambda name: name.startswith("audio"))
        assert spec.ignored_modules("vision.q")
        assert not spec.ignored_modules("audio.q")


@pytest.mark.parametrize(
    ("resources", "enabled", "names"),
    [
        ({"lora": {"adapters": {"a": "p", "b": "q"}}}, True, ("a", "b")),
        ({"lora": {}}, True, ()),
        ({"lora": None}, False, ()),
        ({}, False, ()),
        (["lora"], False, ()),
        (None, False, ()),
    ],
)
def test_yaml_block_turns_lora_on(resources, enabled, names):
    assert config.lora_enabled({"resources": resources}) is enabled
    assert config.served_lora_adapters({"resources": resources}) == names


def test_capture_keys_unwrap_to_the_nodes_own():
    assert config.node_capture_key(LoraBaseOnly((8, "x"))) == (8, "x")
    assert config.node_capture_key((8, "x")) == (8, "x")
    assert LoraBaseOnly(8) == LoraBaseOnly(8) != LoraBaseOnly(9)


def test_adapter_paths(tmp_path):
    assert config.resolve_adapter_path(str(tmp_path)) == str(tmp_path / "adapter_model.safetensors")
    assert config.resolve_adapter_path("x.safetensors") == "x.safetensors"


def test_a_segment_has_a_scale_of_one():
    assert Segment("a", 3) == ("a", 3, 1.0)


@pytest.mark.parametrize(
    ("digests", "said"),
    [({"sqll": b"\0" * 32}, "has none of that name"), ({"sql": "00" * 32}, "expected 32 bytes")],
)
def test_digests_are_of_adapters_and_32_bytes(digests, said):
    with pytest.raises(SpecError, match=said):
        make_spec(adapters={"sql": "/a"}, adapter_digests=digests)


def test_spec_sizes_and_layers_are_checked():
    with pytest.raises(SpecError, match="max_slots must be a positive integer, got 0"):
        make_spec(max_slots=0)
    with pytest.raises(SpecError, match="arena_bytes must be a positive integer, got -1"):
        make_spec(arena_bytes=-1)
    with pytest.raises(SpecError, match="backend is 'triton'"):
        make_spec(backend="triton")
    with pytest.raises(SpecError, match=r"target 'q' has layers \[2\] of 2"):
        LoraSpec("lora", {"n"}, 2, {"q": LoraTarget(4, (4,), layers=(0, 2))}, lambda name: None)
