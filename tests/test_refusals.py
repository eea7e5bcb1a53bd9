"""Every refusal of what an adapter says: where, what was found, what was expected, what to do.

Through files on disk; ``assert_refused`` checks the parts. Files that cannot be read at all are in
``test_refused_files.py``.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save, save_file

from checkpoints import (
    assert_refused,
    factors,
    llama_spec,
    refusal,
    safetensors_bytes,
    tiny_llama,
    write,
    write_with_peft,
)
from loramux.checkpoint import drop_base_copies, place_modules, read_adapter_info, read_lora_file
from loramux.converters import diffusers, kohya, mlx
from loramux.store import SlotLayout, pack_image

Q = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q}.lora_{factor}.weight" for factor in "AB")


def q_proj(**sizes) -> dict[str, torch.Tensor]:
    return factors(Q, **{"rank": 4, "width_in": 64, "width_out": 64, **sizes})


# ---- Tensors: what a file's names and shapes say it is ----

ANEW = "download or export the file anew"
PLAIN = ("lora_A and lora_B alone", "plain LoRA")
KOHYA = ("PEFT's names", "convert_keys=converters.kohya(name_map)")
DIFFUSERS = ("PEFT's names", "convert_keys=converters.diffusers()")
NAME = ("printable parts joined by dots", "rename")


@pytest.mark.parametrize(
    ("name", "found", "expected", "remedy"),
    [
        ("lora_unet_mid_block_0.lora_down.weight", "kohya layout", *KOHYA),
        ("lora_te1_text_model.alpha", "kohya layout", *KOHYA),
        ("diffusion_model.blocks.0.q.lora_A.weight", "kohya layout", *KOHYA),
        ("transformer.blocks.0.q.lora_A.weight", "Diffusers layout", *DIFFUSERS),
        ("unet.down.0.q.lora_B.weight", "Diffusers layout", *DIFFUSERS),
        (f"{Q}.lora_a", "MLX layout", "PEFT's names", "converters.mlx(scale=...)"),
        (f"{Q}.hada_w1_a", "LoHa", *PLAIN),
        (f"{Q}.lokr_w1", "LoKr", *PLAIN),
        (f"{Q}.dora_scale", "DoRA", *PLAIN),
        (f"base_model.model.{Q}.lora_magnitude_vector", "DoRA", *PLAIN),
        (f"base_model.model.{Q}.lora_magnitude_vector.weight", "DoRA", *PLAIN),
        ("x.lora_mid.weight", "Tucker", *PLAIN),
        ("decoder.layers.0.adapter.linear_in.weight", "Megatron", "PEFT's names", "export"),
        ("base_model.model.a.experts.lora_A.weight", "expert parameters", *PLAIN),
        ("base_model.model.a.experts.base_layer.lora_B.weight", "expert parameters", *PLAIN),
        ("base_model.model.a.q.lora_B.bias", "LoRA bias", *PLAIN),
        ("base_model.model.a.q.bias", "full weights (modules_to_save)", *PLAIN),
        ("base_model.model.lm_head.weight", "full weights (modules_to_save)", *PLAIN),
        ("base_model.model.a.q.lora_C.weight", "full weights (modules_to_save)", *PLAIN),
        ("base_model.model.embed.base_layer.weight", "copy of base", "none", "drop_base_copies"),
        ("base_model.model.e.token_adapter.trainable_tokens_delta", "trained token", *PLAIN),
        ("base_model.model.a.q.lora_A", "no LoRA tensor", "lora_A.weight", "remove them"),
        ("base_model.model.a..q.lora_A.weight", "no module name", *NAME),
        ("base_model.model.../etc.lora_A.weight", "no module name", *NAME),
        ("/etc/passwd", "no module name", *NAME),
        ("base_model.model.a\0.q.lora_A.weight", "no module name", *NAME),
        ("base_model.model." + "q" * 300 + ".lora_A.weight", "no module name", *NAME),
    ],
)
def test_a_tensor_that_is_not_pefts_is_refused_as_what_it_is(
    tmp_path, name, found, expected, remedy
):
    path = write(tmp_path, {**q_proj(), name: torch.ones(4, 8)})
    error = refusal(read_lora_file, path)
    assert_refused(error, path, repr(name[:256]), expected, remedy)
    assert_refused(error, path, found, expected, remedy)


@pytest.mark.parametrize(
    ("tensors", "found", "expected", "remedy"),
    [
        ({A: None}, f"'{Q}' has ['lora_B']", "lora_A and lora_B", "export the adapter whole"),
        ({B: None}, f"'{Q}' has ['lora_A']", "lora_A and lora_B", "export the adapter whole"),
        ({B: (64, 5)}, f"'{Q}' has A [4, 64] and B [64, 5]", "one r", "export the adapter anew"),
        ({A: (0, 64), B: (64, 0)}, f"tensor {A!r} has data_offsets", "at least 1", "anew"),
        ({A: (4, 64, 3, 3)}, f"{A!r} has shape [4, 64, 3, 3]", "a matrix", "linears alone"),
        ({B: (64, 4, 1, 1)}, f"{B!r} has shape [64, 4, 1, 1]", "a matrix", "linears alone"),
        ({A: torch.ones(4, 64).double()}, f"{A!r} is torch.float64", "float16", "save it as"),
        ({A: torch.full((4, 64), math.nan)}, f"{A!r} has a NaN or Inf", "finite", "anew"),
        ({B: torch.full((64, 4), -math.inf)}, f"{B!r} has a NaN or Inf", "finite", "anew"),
        ({f"{Q}.lora_A.x.weight": (4, 64)}, f"{A!r} and '{Q}.lora_A.x.weight'", "one", "remove"),
        ({"k.lora_A.x.weight": (4, 8)}, "adapters ['', 'x']", "one adapter", "save each alone"),
        ({f"{Q}.alpha": (2,)}, f"'{Q}.alpha' has shape [2]", "one finite number", "correct it"),
        ({f"{Q}.alpha": torch.tensor(math.inf)}, f"'{Q}.alpha'", "one finite", "correct it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_factors_that_are_no_pair_of_finite_matrices_are_refused(
    tmp_path, tensors, found, expected, remedy
):
    held = {
        name: torch.ones(value) if isinstance(value, tuple) else value
        for name, value in {**q_proj(), **tensors}.items()
        if value is not None
    }
    path = write(tmp_path, held)
    assert_refused(refusal(read_lora_file, path), path, found, expected, remedy)


def test_a_file_without_a_scale_is_refused(tmp_path):
    save_file(q_proj(), tmp_path / "mine.safetensors")
    path = str(tmp_path / "mine.safetensors")
    error = refusal(read_lora_file, path)
    assert_refused(error, path, f"modules ['{Q}']", "a config or alphas", "adapter_config.json")


def test_a_file_without_lora_is_refused(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes({}))
    error = refusal(read_lora_file, str(tmp_path))
    assert_refused(error, str(tmp_path), "none of its 0 tensors", "A and B", "path of an adapter")


# ---- The config ----

NOT_SERVED = ("none or its default", "export the adapter as a plain LoRA")
TRAINED = "write what the adapter was trained with"
RANK = ("a whole number of at least 1", TRAINED)
FINITE = ("a finite number", TRAINED)
INITS = ("one of (True, False, 'gaussian', 'eva', 'orthogonal', 'mica')", "weight_conversion")
NAMED = ("a module's name", "name it")
SHORT = ("a name, or a pattern of at most", "name the modules instead")


@pytest.mark.parametrize(
    ("field", "value", "found", "expected", "remedy"),
    [
        *(("r", value, "'r' is ", *RANK) for value in (0, -5, True, "8", 8.5, None, [4])),
        ("r", 8, f"'{Q}' has rank 4", "8, as the config says", "of one adapter together"),
        ("rank_pattern", {"q_proj": 8}, f"'{Q}' has rank 4", "8, as the config", "together"),
        ("rank_pattern", {"q": 0}, "'rank_pattern' has 0 for the key 'q'", *RANK),
        ("rank_pattern", [1], "'rank_pattern' is [1]", "a mapping", TRAINED),
        ("alpha_pattern", {"q": "8"}, "'alpha_pattern' has '8' for the key 'q'", *FINITE),
        ("alpha_pattern", {"(": 8}, "'alpha_pattern' has the key '('", *NAMED),
        ("alpha_pattern", {"(a+)+": 8}, "the key '(a+)+'", *SHORT),
        ("alpha_pattern", {"(a|a)(a|a)(a|a)(a|a)": 8}, "the key '(a|a)", *SHORT),
        *(("lora_alpha", value, "'lora_alpha' is", *FINITE) for value in (None, "16", True, 1e39)),
        ("use_rslora", "yes", "'use_rslora' is 'yes'", "true or false", TRAINED),
        ("peft_type", "LOHA", "'peft_type' is 'LOHA'", "'LORA'", "plain LoRA"),
        ("peft_type", None, "'peft_type' is None", "'LORA'", "plain LoRA"),
        ("bias", "all", "'bias' is 'all'", "'none'", "train without"),
        ("bias", "lora_only", "'bias' is 'lora_only'", "'none'", "train without"),
        *(
            ("init_lora_weights", init, f"'init_lora_weights' is '{init}'", *INITS)
            for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
        ),
        ("use_dora", True, "'use_dora' is True: DoRA", *NOT_SERVED),
        ("lora_bias", True, "'lora_bias' is True: LoRA bias", *NOT_SERVED),
        ("modules_to_save", ["lm_head"], "'modules_to_save' is ['lm_head']: full", *NOT_SERVED),
        ("trainable_token_indices", [1, 2], "'trainable_token_indices' is [1, 2]", *NOT_SERVED),
        ("target_parameters", ["experts.w"], "'target_parameters' is", *NOT_SERVED),
        ("layer_replication", [[0, 2]], "'layer_replication' is [[0, 2]]", *NOT_SERVED),
        ("megatron_config", {"x": 1}, "'megatron_config' is {'x': 1}", *NOT_SERVED),
        ("use_qalora", True, "'use_qalora' is True: QA-LoRA", *NOT_SERVED),
        ("use_bdlora", {"nblocks": 2}, "'use_bdlora' is", *NOT_SERVED),
        ("kasa_config", {"beta": 1}, "'kasa_config' is", *NOT_SERVED),
        ("arrow_config", {"top_k": 1}, "'arrow_config' is", *NOT_SERVED),
        ("monteclora_config", {"n": 1}, "'monteclora_config' is", *NOT_SERVED),
        ("ensure_weight_tying", True, "'ensure_weight_tying' is True", *NOT_SERVED),
        ("invented_later", 0.5, "'invented_later' is 0.5: a feature loramux does", *NOT_SERVED),
        (
            "alora_invocation_tokens",
            [5],
            "'alora_invocation_tokens' is [5]: activated LoRA",
            "none",
            "remove the field if rows before the invocation are sent as the base's",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_config_that_is_not_served_is_refused_by_field(
    tmp_path, field, value, found, expected, remedy
):
    path = write(tmp_path, q_proj(), **{field: value})
    error = refusal(read_lora_file, path)
    assert_refused(error, path, found, expected, remedy)
    assert str(refusal(read_adapter_info, path, llama_spec())) == str(error)


MAPPING = ("PEFT's LoraConfig as a mapping", "save the adapter with PEFT")
OBJECT = ("PEFT's LoraConfig as an object", ANEW)
JSON = ("JSON as PEFT writes", ANEW)


@pytest.mark.parametrize(
    ("text", "found", "expected", "remedy"),
    [
        ("{}", "the config is {}", *MAPPING),
        ("[]", "is []", *OBJECT),
        ("null", "is None", *OBJECT),
        ("", "has malformed JSON", *JSON),
        ("\xff", "bytes that are no UTF-8 (at ", *JSON),
        ('{"r": 4, "r": 4}', "has the key 'r' twice", *JSON),
        ('{"r": ' + "[" * 10_000 + "]" * 10_000 + "}", "has JSON nested too deep", *JSON),
        ('{"r": ' + "9" * 10_000 + "}", "a whole number of thousands of digits", *JSON),
        ('{"r": 4, "lora_alpha": null}', "'lora_alpha' is None", *FINITE),
        ('{"r": 4, "lora_alpha": 1e999}', "'lora_alpha' is inf", *FINITE),
        ('{"r": 4, "lora_alpha": NaN}', "'lora_alpha' is nan", *FINITE),
        ('{"peft_type": null, "r": 4}', "'peft_type' is None", "'LORA'", "plain LoRA"),
        ('{"r": 4}' + " " * (4 << 20), "larger than it may be", "4194304 bytes", "PEFT's own"),
    ],
    ids=lambda text: text[:24],
)
def test_C113_a_malformed_config_is_refused(tmp_path, text, found, expected, remedy):
    path = write(tmp_path, q_proj())
    (tmp_path / "adapter_config.json").write_bytes(text.encode("latin-1"))
    assert_refused(refusal(read_lora_file, path), path, found, expected, remedy)


def test_the_pattern_of_another_layouts_names_is_refused(tmp_path):
    tensors = {"unet.q.lora_A.weight": torch.ones(4, 8), "unet.q.lora_B.weight": torch.ones(6, 4)}
    path = write(tmp_path, tensors, alpha_pattern={"unet.q": 4})
    error = refusal(read_lora_file, path, diffusers())
    assert_refused(error, path, "the pattern 'unet.q' matches no module", "one", "rename it")


# ---- Other layouts, named by the caller ----


def kohya_file(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "lora_unet_q.lora_down.weight": torch.ones(4, 8),
        "lora_unet_q.lora_up.weight": torch.ones(6, 4),
        **{f"lora_unet_q.{part}": tensor for part, tensor in more.items()},
    }


@pytest.mark.parametrize(
    ("tensors", "convert_keys", "found", "expected", "remedy"),
    [
        (kohya_file(), kohya({}), "'lora_unet_q.lora_up.weight'", *KOHYA),
        (kohya_file(hada_w1_a=torch.ones(2)), kohya({"lora_unet_q": "q"}), "hada_w1_a", *PLAIN),
        (kohya_file(lokr_w1=torch.ones(2)), kohya({"lora_unet_q": "q"}), "lokr_w1", *PLAIN),
        (kohya_file(dora_scale=torch.ones(2)), kohya({"lora_unet_q": "q"}), "dora_scale", *PLAIN),
        (
            kohya_file(lora_down=torch.ones(2)) | {"lora_unet_p.alpha": torch.tensor(1.0)},
            kohya({"lora_unet_q": "q", "lora_unet_p": "p"}),
            "'p' has ['alpha']",
            "lora_A and lora_B",
            "whole",
        ),
        (
            {f"lora_unet_{n}.lora_up.weight": torch.ones(6, 4) for n in "pq"},
            kohya({"lora_unet_q": "q", "lora_unet_p": "q"}),
            "['lora_unet_p.lora_up.weight', 'lora_unet_q.lora_up.weight'] would all be",
            "one",
            "correct the map of names",
        ),
        (
            {"unet.q.to_q_lora.down.weight": torch.ones(4, 8)},
            diffusers(),
            "Diffusers layout",
            *DIFFUSERS,
        ),
        (
            {"q.lora_a": torch.ones(8, 4, 2), "q.lora_b": torch.ones(4, 6)},
            mlx(scale=1.0),
            "'base_model.model.q.lora_A.weight' has shape [8, 4, 2]",
            "a matrix",
            "linears alone",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_converter_leaves_is_refused(
    tmp_path, tensors, convert_keys, found, expected, remedy
):
    save_file(tensors, tmp_path / "foreign.safetensors")
    path = str(tmp_path / "foreign.safetensors")
    assert_refused(refusal(read_lora_file, path, convert_keys), path, found, expected, remedy)


# ---- The model ----


@pytest.mark.parametrize(
    ("tensors", "found", "expected", "remedy"),
    [
        (q_proj(width_in=63), f"'{Q}' has A [4, 63] and B [64, 4]", "[r, 64] and [64, r]", "model"),
        (q_proj(width_out=65), f"'{Q}' has A [4, 64] and B [65, 4]", "[64, r]", "model it was"),
        (factors("model.layers.9.self_attn.q_proj"), "layers.9.self_attn.q_proj'", "one of", "con"),
        (factors("x.q_proj"), "0 of 1 modules matched", "the model's names", "convert_keys"),
        (factors("model.embed_tokens", 4, 96, 64), "LoRA of a linear", "embedding", "model"),
        (
            q_proj() | factors(Q.replace("q_proj", "qkv_proj"), 4, 64, 128),
            "both slice 0 of target 'qkv', layer 0",
            "one",
            "export the adapter anew",
        ),
        (q_proj(rank=65), "its rank is 65", "at most the pool's max_rank, 64", "raise max_rank"),
        (
            factors("model.layers.0.self_attn.query_key_value", 4, 64, 128),
            "'model.layers.0.self_attn.query_key_value' is on none of the targets",
            "one of them",
            "convert_keys",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_adapter_of_another_model_is_refused(tmp_path, tensors, found, expected, remedy):
    path = write(tmp_path, tensors)
    spec = llama_spec(max_rank=64)
    error = refusal(place_modules, read_lora_file(path), spec)
    assert_refused(error, path, found, expected, remedy)
    assert refusal(spec.check_adapter, path, read_adapter_info(path, spec)).problems == (
        error.problems
    )


def test_a_target_that_the_deployment_drops_is_refused(tmp_path):
    path = write(tmp_path, factors("lm_head", 4, 64, 96))
    spec = llama_spec()
    spec.apply_yaml_overrides(targets=["qkv"])
    error = refusal(place_modules, read_lora_file(path), spec)
    assert_refused(error, path, "'lm_head' is on the target 'head'", "none there", "targets list")


def test_copies_of_base_weights_that_differ_from_the_base_are_refused(tmp_path):
    write_with_peft(tmp_path, target_modules=["embed_tokens", "lm_head"], base_copies=True)
    base = {name: tensor + 1 for name, tensor in tiny_llama().state_dict().items()}
    for convert_keys in (None, drop_base_copies(base)):
        error = refusal(read_lora_file, str(tmp_path), convert_keys)
        for module in ("model.embed_tokens", "lm_head"):
            name = f"'base_model.model.{module}.base_layer.weight'"
            assert_refused(error, str(tmp_path), name, "known to equal", "drop_base_copies")


def test_a_value_that_overflows_on_narrowing_is_refused(tmp_path):
    tensors = q_proj()
    tensors[B][3, 2] = 70000.0
    path = write(tmp_path, tensors)
    layout = SlotLayout(llama_spec(), torch.float16)
    error = refusal(pack_image, read_lora_file(path), layout)
    assert_refused(error, path, f"B of module '{Q}' has a value too large", "finite", "float32")


def test_all_offenders_are_in_one_error(tmp_path):
    tensors = {**factors("a.q"), **factors("a.k", rank=3), "x.hada_w1_a": torch.ones(1)}
    del tensors["base_model.model.a.q.lora_B.weight"]
    path = write(tmp_path, tensors, r=4, use_dora=True, bias="all")
    error = refusal(read_lora_file, path)
    for found in ("'use_dora'", "'bias'", "x.hada_w1_a", "'a.q' has ['lora_A']", "'a.k' has rank"):
        assert_refused(error, path, found, "", "")
    assert len(error.problems) == 5


# ---- Diffusers' config in the metadata ----


@pytest.mark.parametrize(
    ("config", "more", "found", "expected", "remedy"),
    [
        ("{", {}, "'lora_adapter_metadata' has malformed JSON", "LoraConfig as JSON", "export"),
        ("[]", {}, "'lora_adapter_metadata' has no object", "LoraConfig as JSON", "export"),
        ({"unet.r": 8}, {}, "'q' has rank 4", "8, as the config says", "component 'unet'"),
        ({"unet.r": 4, "unet.use_dora": True}, {}, "'use_dora' is True", NOT_SERVED[0], "plain"),
        ({"text_encoder.r": 4}, {}, "['unet.q'] have no scale", "one for each", "anew"),
        ({"unet.r": 4}, {"unet.q.alpha": torch.ones(())}, "['unet.q.alpha']", "one", "either"),
        ({"unet.r": 4, "r": 4}, {}, "['unet.q.alpha'] are in", "one of each", "remove either"),
    ],
    ids=str,
)
def test_a_config_in_the_metadata_that_is_not_served_is_refused(
    tmp_path, config, more, found, expected, remedy
):
    tensors = {"unet.q.lora_A.weight": torch.ones(4, 8), "unet.q.lora_B.weight": torch.ones(6, 4)}
    text = config if isinstance(config, str) else json.dumps(config)
    path = str(tmp_path / "pytorch_lora_weights.safetensors")
    save_file(tensors | more, path, {"lora_adapter_metadata": text})
    assert_refused(refusal(read_lora_file, path, diffusers()), path, found, expected, remedy)


def test_a_config_in_the_metadata_and_one_beside_the_file_are_refused(tmp_path):
    path = write(tmp_path, q_proj())
    content = save(q_proj(), {"lora_adapter_metadata": '{"r": 4}'})
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    error = refusal(read_lora_file, path)
    assert_refused(error, path, "adapter_config.json both have the config", "one", "remove either")
