"""A deployment's config and the specs it builds, sentence by sentence."""

from __future__ import annotations

import pytest

from loramux import (
    declared_lora_specs,
    drop_lora_specs_without_targets,
    lora_specs,
    served_lora_targets,
    size_lora_specs,
    validate_deployment,
)
from loramux.errors import AdapterError, SpecError
from loramux.resource import NodeResourceSpec
from multimodal import HEAD, UP, VISION_FC, VISION_Q, Q, TwoSpecs, write


@pytest.fixture
def model():
    return TwoSpecs()


def config(lora=None, **other):
    return {"resources": {"lora": lora or {}, **other}}


def check(spec, name):
    spec.check_adapter(name, spec.adapter_info(name))


class TestDeclared:
    def test_the_spec_keyed_lora_is_first(self, model):
        assert [s.resource_key for s in declared_lora_specs(model, config())] == [
            "lora",
            "vision_lora",
        ]

    @pytest.mark.parametrize("resources", [{}, {"lora": None}, None, ["lora"]])
    def test_without_a_lora_block_there_are_none(self, model, resources):
        assert declared_lora_specs(model, {"resources": resources}) == []

    def test_the_block_sizes_specs_of_another_key_and_leaves_lora_to_its_own(self, model):
        lora, vision = declared_lora_specs(model, config({"max_slots": 9}))
        assert (lora.max_slots, vision.max_slots) == (4, 9)

    def test_a_spec_whose_resolver_binds_nothing_is_refused(self, model, monkeypatch):
        spec = model.lora_specs()[0]
        spec.module_map = lambda name: None
        monkeypatch.setattr(model, "lora_specs", lambda: [spec])
        with pytest.raises(SpecError, match=r"'vision_lora' has a function .* a ModuleLoraMap"):
            declared_lora_specs(model, config())

    def test_every_problem_of_the_config_is_in_one_error(self, model):
        with pytest.raises(SpecError) as error:
            declared_lora_specs(model, config({"max_slots": 0}, vision_lora={"max_rank": "8"}))
        assert "resources.lora.max_slots" in str(error.value)
        assert "resources.vision_lora.max_rank" in str(error.value)


class TestSized:
    def test_the_lora_block_applies_to_specs_of_another_key_only(self, model):
        vision, lora = model.lora_specs()
        size_lora_specs([lora, vision], config({"max_rank": 64, "cpu_capacity": 2}))
        assert (vision.max_rank, vision.cpu_capacity) == (64, 2)
        assert (lora.max_rank, lora.cpu_capacity) == (16, 16)

    def test_a_block_under_another_specs_key_overrides_it_there(self, model, tmp_path):
        ours, theirs = write(tmp_path / "a", Q), write(tmp_path / "b", VISION_Q)
        block = {
            "max_slots": 8,
            "max_rank": 32,
            "adapters": {"a": ours},
            "adapter_digests": {"a": "ab" * 32},
            "targets": ["up_proj", "q_proj"],
        }
        own = {"max_slots": 2, "adapters": {"b": theirs}, "targets": ["fc"]}
        lora, vision = lora_specs(model, config(block, vision_lora=own))
        assert (lora.max_slots, lora.max_rank, lora.adapters) == (8, 32, {"a": ours})
        assert (vision.max_slots, vision.max_rank, vision.adapters) == (2, 32, {"b": theirs})
        assert vision.adapter_digests == {}
        assert (set(lora.targets), set(vision.targets)) == ({"q_proj", "up_proj"}, {"fc"})


class TestDropped:
    def test_a_spec_that_the_targets_list_leaves_none_is_not_built(self, model):
        assert [s.resource_key for s in lora_specs(model, config({"targets": ["up_proj"]}))] == [
            "lora"
        ]
        assert len(lora_specs(model, config({"targets": ["up_proj", "q_proj"]}))) == 2

    def test_an_adapter_that_touches_its_modules_is_refused_from_then_on(self, model, tmp_path):
        block = {"adapters": {"a": write(tmp_path, UP, VISION_FC)}}
        both = lora_specs(model, config(block))
        for spec in both:
            check(spec, "a")
        (lora,) = lora_specs(model, config({**block, "targets": ["up_proj"]}))
        with pytest.raises(AdapterError, match=f"module {VISION_FC!r} is on none of the targets"):
            check(lora, "a")

    def test_an_adapter_on_a_dropped_target_is_refused_by_its_name(self, model, tmp_path):
        block = {"adapters": {"a": write(tmp_path, Q, HEAD)}, "targets": ["q_proj"]}
        lora = lora_specs(model, config(block))[0]
        with pytest.raises(AdapterError, match="the target 'lm_head', which this deployment drops"):
            check(lora, "a")

    def test_other_resources_pass_untouched(self, model):
        other, vision = NodeResourceSpec("kv", {"llm"}), model.lora_specs()[0]
        vision.apply_yaml_overrides(targets=[])
        assert drop_lora_specs_without_targets([other, vision]) == [other]


class TestSpecs:
    def test_the_config_is_applied_to_every_spec(self, model):
        specs = lora_specs(model, config({"max_slots": 3}))
        assert [(s.resource_key, s.max_slots) for s in specs] == [("lora", 3), ("vision_lora", 3)]

    def test_there_are_none_without_a_model_or_a_config_that_turns_lora_on(self, model):
        assert lora_specs(None, config()) == []
        assert lora_specs(model, None) == []
        assert lora_specs(model, {"resources": {"kv": {}}}) == []

    def test_one_model_and_block_share_their_specs_and_what_is_loaded_at_run_time(self, model):
        first = lora_specs(model, config({"max_slots": 3, "max_rank": 8}))
        again = lora_specs(model, {"port": 1, **config({"max_rank": 8, "max_slots": 3})})
        first[0].add_adapter("new", "/adapters/new")
        assert "new" in again[0].adapters
        assert "new" not in lora_specs(model, config({"max_slots": 4, "max_rank": 8}))[0].adapters
        assert "new" not in lora_specs(TwoSpecs(), config({"max_slots": 3}))[0].adapters


class TestServedTargets:
    def targets(self, model, **adapters):
        return served_lora_targets(lora_specs(model, config({"adapters": adapters})))

    def test_those_that_a_configured_adapter_touches_are_kept(self, model, tmp_path):
        a, b = write(tmp_path / "a", UP), write(tmp_path / "b", HEAD, VISION_FC)
        assert self.targets(model, a=a, b=b) == ["up_proj", "lm_head", "fc"]

    def test_a_name_that_two_specs_declare_is_kept_for_both(self, model, tmp_path):
        kept = self.targets(model, a=write(tmp_path, UP, VISION_Q))
        assert kept == ["q_proj", "up_proj"]
        lora, vision = lora_specs(model, config({"targets": kept}))
        assert (set(lora.targets), set(vision.targets)) == ({"q_proj", "up_proj"}, {"q_proj"})

    def test_the_first_spec_keeps_all_if_no_adapter_touches_it(self, model, tmp_path):
        assert self.targets(model, a=write(tmp_path, VISION_FC)) is None
        assert self.targets(model, a=write(tmp_path, VISION_Q)) == ["q_proj", "up_proj", "lm_head"]

    def test_a_later_spec_left_with_none_is_not_built(self, model, tmp_path):
        adapters = {"a": write(tmp_path, UP)}
        kept = self.targets(model, **adapters)
        built = lora_specs(model, config({"adapters": adapters, "targets": kept}))
        assert [set(spec.targets) for spec in built] == [{"up_proj"}]

    def test_nothing_narrows_where_all_are_touched(self, model, tmp_path):
        assert self.targets(model, a=write(tmp_path, Q, UP, HEAD, VISION_FC)) is None

    def test_an_adapter_that_cannot_be_read_fails_the_deployment(self, model, tmp_path):
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"\x80\x02}q\x00.")
        with pytest.raises(AdapterError, match="broken"):
            self.targets(model, a=str(broken))


class TestValidate:
    @pytest.mark.parametrize(
        "good",
        [{}, {"resources": None}, {"resources": {"kv": 3}}, config(), config({"max_rank": 1})],
    )
    def test_nothing_is_wrong_with_a_good_config(self, model, good):
        assert validate_deployment(good) == validate_deployment(good, model) == []

    @pytest.mark.parametrize(
        ("resources", "path"),
        [
            (["lora"], "resources "),
            ({"lora": None}, "resources.lora "),
            ({"lora": 3}, "resources.lora "),
        ],
    )
    def test_a_block_that_is_no_mapping_is_reported(self, resources, path):
        (problem,) = validate_deployment({"resources": resources})
        assert problem.startswith(path + "must be a mapping")

    def test_every_problem_has_its_path(self, model, tmp_path):
        adapter = write(tmp_path, Q)
        block = {
            "max_slot": 2,
            "max_rank": True,
            "cpu_capacity": None,
            "adapters": {"a": adapter, "gone": "/no/such", "list": [], 3: adapter, "b": adapter},
            "adapter_digests": {"a": "abc", "stranger": "ab" * 32, "b": "ab" * 32},
            "targets": ["q_proj", "up_prj"],
        }
        own = {"targets": "fc", "adapter_digests": {"a": "ab" * 32, "nobody": "ab" * 32}}
        problems = validate_deployment(config(block, vision_lora=own, kv=7), model)
        assert [problem.split(" ")[0] for problem in problems] == [
            "resources.lora.max_slot",
            "resources.lora.max_rank",
            "resources.lora.cpu_capacity",
            "resources.lora.adapters.list",
            "resources.lora.adapters.3",
            "resources.lora.adapter_digests.a",
            "resources.lora.adapter_digests.stranger",
            "resources.lora.adapters.gone",
            "resources.lora.targets[1]",
            "resources.vision_lora.adapter_digests.nobody",
            "resources.vision_lora.targets",
        ]
        assert "did you mean max_slots" in problems[0]
        assert "did you mean 'up_proj'" in problems[8]

    def test_a_list_that_keeps_no_target_is_reported(self):
        (problem,) = validate_deployment(config({"targets": []}))
        assert problem.startswith("resources.lora.targets keeps nothing")


@pytest.mark.parametrize("name", [123, True, None])
def test_names_that_are_no_strings_are_a_problem_of_the_config(model, name):
    with pytest.raises(SpecError, match=rf"resources\.lora\.adapters\.{name} must be a name"):
        lora_specs(model, config({"adapters": {name: "/a", "sql": "/b"}}))


def test_an_empty_config_has_no_problem(model):
    assert validate_deployment(None, model) == []


def test_a_digest_may_be_of_an_adapter_that_the_spec_declares(model, tmp_path, monkeypatch):
    specs = model.lora_specs()
    for spec in specs:
        spec.add_adapter("sql", write(tmp_path / "a", Q))
    monkeypatch.setattr(model, "lora_specs", lambda: specs)
    assert validate_deployment(config({"adapter_digests": {"sql": "aa" * 32}}), model) == []


def test_a_misspelt_setting_is_refused_by_size_lora_specs_too(model):
    with pytest.raises(SpecError, match="max_slot is no setting: did you mean max_slots"):
        size_lora_specs(model.lora_specs(), config({"max_slot": 3}))
