"""Binding to module trees: what the spec has, what a bound step adds, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpoints import HIDDEN, INNER, LAYERS, VOCAB, tiny_llama, write_with_peft
from common import random_pair, save_adapter
from loramux import (
    AdapterError,
    LoraModuleRef,
    LoraPool,
    LoraStep,
    PlanMismatch,
    Segment,
    SpecError,
    module_lora_spec,
    modules,
)

SIZES = dict(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
)
LENGTH = 5


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=4)
        return GPT2LMHeadModel(config).eval()
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)).eval()
    return tiny_llama().eval()


def peft_adapter(folder: Path, model: nn.Module, **config: object) -> nn.Module:
    return write_with_peft(folder, copy.deepcopy(model), **config).eval()


def step(*adapters: str | None, length: int = LENGTH) -> LoraStep:
    return LoraStep(tuple(Segment(adapter, length) for adapter in adapters))


def last_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, logits_to_keep=1).logits[:, 0]


class Block(nn.Module):
    """A fused projection and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.qkv_proj(x)))


class Stack(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


PACKING = {"qkv_proj": {"q_proj": 24, "kv_proj": 16}}


def bound(model: nn.Module, path: str, *, beside_gemm: bool = False, **options: object):
    """A pool serving ``path`` as ``"a"``, and the binding of the model to it."""
    spec = module_lora_spec(model, adapters={"a": path}, **options)
    pool = LoraPool.build(spec)
    return pool, spec.module_map.bind(model, pool, beside_gemm=beside_gemm)


# What the spec has.


def test_a_spec_has_the_stacks_linears_between_the_embedding_and_the_head():
    spec = module_lora_spec(tiny_llama(torch.bfloat16), max_rank=8)
    assert list(spec.targets) == [
        "model.embed_tokens",
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    ]
    head, tokens = spec.targets["lm_head"], spec.targets["model.embed_tokens"]
    assert (head.layers, head.row_grouping) == ((LAYERS - 1,), 0)
    assert (tokens.layers, tokens.kind, tokens.in_features) == ((0,), "embedding", VOCAB)
    up = spec.targets["mlp.up_proj"]
    assert (up.layers, up.in_features, up.out_slices) == (None, HIDDEN, (INNER,))
    assert (spec.num_layers, spec.max_rank, spec.dtype) == (LAYERS, 8, torch.bfloat16)
    token_head = module_lora_spec(tiny_llama(), lm_head_per_segment=False).targets["lm_head"]
    assert token_head.row_grouping == 1


def test_names_map_by_their_whole_path():
    spec = module_lora_spec(tiny_llama())
    path = "model.layers.1.self_attn.q_proj"
    assert spec.module_map(path) == LoraModuleRef("self_attn.q_proj", 1)
    assert path in spec.module_map.module_names
    for other in (f"language_model.{path}", "layers.1.self_attn.q_proj", path.replace("1", "99")):
        assert spec.module_map(other) is None


def test_the_embedding_comes_first_and_the_head_last_wherever_they_are_declared():
    model = nn.Module()
    model.lm_head = nn.Linear(16, 8)
    model.layers = Stack().layers
    model.tokens = nn.Embedding(8, 16)
    assert list(module_lora_spec(model).targets) == ["tokens", "qkv_proj", "down", "lm_head"]


@pytest.mark.parametrize("names", [["q_proj", "lm_head"], ["self_attn.q_proj", "lm_head"]])
def test_only_the_named_targets_are_served_and_the_rest_refused_by_name(tmp_path, names):
    model = tiny("llama")
    peft_adapter(tmp_path, model, target_modules=["q_proj", "v_proj"])
    spec = module_lora_spec(model, targets=names, adapters={"a": str(tmp_path)})
    assert list(spec.targets) == ["self_attn.q_proj", "lm_head"]
    with pytest.raises(AdapterError, match=r"'self_attn.v_proj', which this deployment drops"):
        spec.check_adapter("a", spec.adapter_info("a"))
    with pytest.raises(SpecError, match="'nosuch', which is none of the targets"):
        module_lora_spec(model, targets=["nosuch"])


def test_a_target_may_exist_on_some_layers_only():
    model = Stack(3)
    model.layers[1].down = nn.Identity()
    assert module_lora_spec(model).targets["down"].layers == (0, 2)


def test_other_stacks_are_left_out():
    model = Stack(3)
    model.tower = Stack(2)
    model.layers[0].experts = nn.ModuleList([nn.Linear(4, 4)] * 9)
    spec = module_lora_spec(model)
    assert (list(spec.targets), spec.num_layers) == (["qkv_proj", "down"], 3)
    assert spec.module_map("layers.0.experts.0") is None
    tower = module_lora_spec(model, stack="tower.layers")
    assert tower.num_layers == 2
    assert tower.module_map("tower.layers.1.down") == LoraModuleRef("down", 1)
    model.tower = Stack(3)
    with pytest.raises(SpecError, match=r"\['layers', 'tower.layers'\] have 3 layers each"):
        module_lora_spec(model)
    for stack, found in (("tower", "is a Stack"), ("nosuch", "is no module")):
        with pytest.raises(SpecError, match=found):
            module_lora_spec(model, stack=stack)


def test_modules_that_a_hook_cannot_serve_are_left_out():
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 8

    model = nn.ModuleDict(
        dict(tokens=Scaled(8, 4), attention=nn.MultiheadAttention(4, 1), up=nn.Linear(4, 6))
    )
    spec = module_lora_spec(model)
    assert (list(spec.targets), spec.num_layers) == (["up"], 1)


def test_a_target_of_two_shapes_is_refused_with_both():
    model = Stack()
    model.layers[1].down = nn.Linear(40, 17)
    both = r"linear 40 -> 16 at 'layers.0.down' but linear 40 -> 17 at 'layers.1.down'"
    with pytest.raises(SpecError, match=both):
        module_lora_spec(model)
    assert list(module_lora_spec(model, targets=["qkv_proj"]).targets) == ["qkv_proj"]


def test_two_modules_of_one_name_are_refused():
    model = Stack()
    model.down = nn.Linear(40, 16)
    with pytest.raises(SpecError, match=r"one layer: \['layers.0.down', 'layers.1.down', 'down'\]"):
        module_lora_spec(model, targets=["down"])


# What a bound step adds.


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_C053_a_mixed_batch_is_peft_one_adapter_at_a_time(tmp_path, family):
    """Qwen2 and GPT-2 tie their LM head to the embedding; one adapter is on both."""
    model = tiny(family)
    names = {
        "gpt2": [["c_attn"], ["c_attn", "c_proj", "c_fc"], ["wte", "lm_head"]],
    }.get(family, [["q_proj"], "all-linear", ["v_proj", "embed_tokens", "lm_head"]])
    paths, peft_models = {}, {}
    for rank, targets in zip((4, 13, 16), names, strict=True):
        name, path = f"rank{rank}", tmp_path / str(rank)
        peft_models[name] = peft_adapter(path, model, r=rank, target_modules=targets)
        paths[name] = str(path)
    state, forward = copy.deepcopy(model.state_dict()), type(model).forward
    ids = torch.randint(VOCAB, (6, LENGTH))
    rows = ["rank13", None, "rank4", "rank16", "rank13", None]
    base = last_logits(model, ids)

    spec = module_lora_spec(model, adapters=paths)
    pool = LoraPool.build(spec)
    with spec.module_map.bind(model, pool):
        with pool.begin_step(step(*rows)):
            got = last_logits(model, ids)
        assert torch.equal(last_logits(model, ids), base), "no step: nothing is added"
        assert list(model.state_dict()) == list(state)
        assert type(model).forward is forward

    for i, name in enumerate(rows):
        if name is None:
            assert torch.equal(got[i], base[i])
        else:
            want = last_logits(peft_models[name], ids[i : i + 1])[0]
            assert (want - base[i]).abs().max() > 1e-2
            torch.testing.assert_close(got[i], want)
    with pool.begin_step(step(*rows)):
        assert torch.equal(last_logits(model, ids), base), "unbound: nothing is added"


def test_C014_an_adapter_of_layer_1_alone_changes_the_model(tmp_path):
    model = tiny("llama")
    peft_model = peft_adapter(tmp_path, model, layers_to_transform=[1])
    ids = torch.randint(VOCAB, (1, LENGTH))
    want = last_logits(peft_model, ids)
    assert (want - last_logits(model, ids)).abs().max() > 1e-2
    pool, _ = bound(model, str(tmp_path))
    with pool.begin_step(step("a")):
        torch.testing.assert_close(last_logits(model, ids), want)


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints_of_a_fused_linear_or_of_its_slices_land_alike(tmp_path, fused):
    torch.manual_seed(0)
    model = Stack()
    a, b = random_pair(4, 16, 40)
    prefix = "layers.1."
    pairs = (
        {f"{prefix}qkv_proj": (a, b)}
        if fused
        else {f"{prefix}q_proj": (a, b[:24]), f"{prefix}kv_proj": (a.clone(), b[24:])}
    )
    merged = copy.deepcopy(model)
    merged.layers[1].qkv_proj.weight += b @ a
    x = torch.randn(3, 16)
    pool, _ = bound(model, save_adapter(tmp_path / "a", pairs), packing=PACKING)
    with pool.begin_step(step("a", length=3)):
        torch.testing.assert_close(model(x), merged(x))


def test_a_packing_that_does_not_fit_is_refused():
    with pytest.raises(SpecError, match=r"39 columns together, but 'layers.0.qkv_proj' has 40"):
        module_lora_spec(Stack(), packing={"qkv_proj": {"q_proj": 24, "kv_proj": 15}})
    with pytest.raises(SpecError, match="packing names 'gate_up', which is none of the targets"):
        module_lora_spec(Stack(), packing={"gate_up": {"gate": 1, "up": 1}})


def test_only_the_targets_a_deployment_keeps_are_bound(tmp_path):
    model = tiny("llama")
    peft_adapter(tmp_path, model, target_modules=["q_proj"])
    spec = module_lora_spec(model, adapters={"a": str(tmp_path)})
    spec.apply_yaml_overrides(targets=["self_attn.q_proj"])
    pool = LoraPool.build(spec)
    with spec.module_map.bind(model, pool):
        hooked = {name for name, child in model.named_modules() if child._forward_hooks}
    assert hooked == {f"model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)}


@pytest.mark.parametrize("beside_gemm", [False, True])
def test_a_bound_model_compiles_to_one_graph_whenever_it_is_bound(tmp_path, beside_gemm):
    model = tiny("llama")
    peft_adapter(tmp_path, model, target_modules=["q_proj", "embed_tokens", "lm_head"])
    ids = torch.randint(VOCAB, (2, LENGTH))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    base = last_logits(compiled, ids)
    pool, binding = bound(model, str(tmp_path), beside_gemm=beside_gemm)
    for rows in (("a", None), (None, "a"), (None, None)):
        with pool.begin_step(step(*rows)):
            got = last_logits(compiled, ids)
            torch.testing.assert_close(got, last_logits(model, ids))
        for i, name in enumerate(rows):
            assert torch.allclose(got[i], base[i], atol=1e-4) == (name is None)
    binding.close()
    with pool.begin_step(step("a", None)):
        torch.testing.assert_close(last_logits(compiled, ids), base)


def test_deltas_begin_ahead_of_the_linears_own_forward(tmp_path):
    order: list[str] = []

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append("forward")
            if x.isnan().any():
                raise ArithmeticError
            y = super().forward(x)
            if x.isinf().any():
                return y, None
            return y.double() if x.max() > 1e9 else y

    def noting(name):
        call = getattr(modules, name)

        def noted(*args):
            order.append(name)
            return call(*args)

        return mock.patch.object(modules, name, noted)

    model, x = nn.ModuleDict(dict(down=Linear(40, 16))), torch.randn(3, 40)
    base = model["down"](x)
    path = save_adapter(tmp_path / "a", {"down": random_pair(4, 40, 16)})
    pool, binding = bound(model, path)
    with pool.begin_step(step("a", length=3)):
        want = model["down"](x)
    binding.close()
    pool, _ = bound(model, path, beside_gemm=True)
    with noting("lora_start"), noting("lora_finish_"):
        with pool.begin_step(step("a", length=3)):
            order.clear()
            assert torch.equal(model["down"](x), want)
            assert order == ["lora_start", "forward", "lora_finish_"]
            faults = {float("nan"): ArithmeticError, float("inf"): SpecError, 9e9: RuntimeError}
            for fault, error in faults.items():
                order.clear()
                with pytest.raises(error):
                    model["down"](x + fault)
                assert order[:3] == ["lora_start", "forward", "lora_finish_"]
                assert order[3:] == (["lora_finish_"] if error is RuntimeError else [])
        with pool.begin_step(step(None, length=3)):
            order.clear()
            assert torch.equal(model["down"](x), base)
            assert order == ["forward"], "the call that failed left something"


@pytest.mark.parametrize("beside_gemm", [False, True])
def test_a_module_may_be_called_by_keyword(tmp_path, beside_gemm):
    model, x = nn.ModuleDict(dict(down=nn.Linear(40, 16))), torch.randn(3, 40)
    path = save_adapter(tmp_path / "a", {"down": random_pair(4, 40, 16)})
    pool, _ = bound(model, path, beside_gemm=beside_gemm)
    with pool.begin_step(step("a", length=3)):
        assert torch.equal(model["down"](input=x), model["down"](x))


@pytest.mark.parametrize("beside_gemm", [False, True])
def test_inputs_may_lie_in_memory_as_they_like(tmp_path, beside_gemm):
    model, x = nn.ModuleDict(dict(down=nn.Linear(40, 16))), torch.randn(40, 3).T
    path = save_adapter(tmp_path / "a", {"down": random_pair(4, 40, 16)})
    pool, _ = bound(model, path, beside_gemm=beside_gemm)
    with pool.begin_step(step("a", length=3)):
        torch.testing.assert_close(model["down"](x), model["down"](x.contiguous()))


def test_token_ids_may_be_a_column(tmp_path):
    model, ids = tiny_llama(torch.float32), torch.randint(VOCAB, (LENGTH, 2))
    peft_adapter(tmp_path, model, target_modules=["embed_tokens"])
    pool, _ = bound(model, str(tmp_path))
    embedding = model.get_input_embeddings()
    with pool.begin_step(step("a")):
        assert torch.equal(embedding(ids[:, 0]), embedding(ids[:, 0].contiguous()))


@pytest.mark.parametrize("compiled", [None, dict(fullgraph=False), dict(fullgraph=True)])
def test_modules_of_a_layerwise_step_wait_for_their_layer(tmp_path, compiled):
    """Compiled ones run eagerly in such a step, or refuse where that is not allowed."""
    model, x = Stack(3), torch.randn(3, 16)
    pairs = {f"layers.{i}.down": random_pair(4, 40, 16, i) for i in range(3)}
    pool, _ = bound(model, save_adapter(tmp_path / "a", pairs))
    call = model if compiled is None else torch.compile(model, backend="eager", **compiled)
    stream = mock.Mock()
    with (
        pool.begin_step(step("a", length=3)) as lease,
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        want = call(x)
        lease._arriving, pool.arriving = [(0, "start"), (1, "rest"), (9, "past the end")], True
        if compiled == dict(fullgraph=True):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="begin this one without layer"):
                call(x)
            return
        at = []
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: at.append(stream.wait_event.call_count))
        assert torch.equal(call(x), want)
    assert [call.args for call in stream.wait_event.mock_calls] == [("start",), ("rest",)]
    assert at == [1, 2, 2]


# What is refused.


@pytest.fixture
def stack(tmp_path):
    """A bound stack, and a pool that serves an adapter of its ``down`` as ``"a"``."""
    model = Stack()
    path = save_adapter(tmp_path / "a", {"layers.0.down": random_pair(4, 40, 16)})
    pool, binding = bound(model, path)
    return model, pool, binding


def test_binding_twice_is_refused_until_the_first_is_closed(stack):
    model, pool, binding = stack
    with pytest.raises(SpecError, match=r"'layers.0.qkv_proj' is bound to a pool already"):
        pool.spec.module_map.bind(model, pool)
    binding.close()
    binding.close()
    pool.spec.module_map.bind(model, pool)


def test_another_tree_is_refused_and_left_unbound(stack):
    _, pool, _ = stack
    cases = {
        "has no module 'layers.1.qkv_proj', expected linear 16 -> 40": Stack(1),
        "'layers.1.down' is linear 40 -> 17, expected linear 40 -> 16": Stack(),
        "'layers.1.down' is Identity, expected linear 40 -> 16": Stack(),
    }
    _, wide, identity = cases.values()
    wide.layers[1].down = nn.Linear(40, 17)
    identity.layers[1].down = nn.Identity()
    for text, model in cases.items():
        with pytest.raises(SpecError, match=text):
            pool.spec.module_map.bind(model, pool)
        assert not any(child._forward_hooks for child in model.modules())


def test_the_map_of_another_spec_is_refused(stack):
    _, pool, _ = stack
    other = module_lora_spec(Stack(1)).module_map
    with pytest.raises(SpecError, match=r"bind with pool.spec.module_map"):
        other.bind(Stack(), pool)


def test_rows_that_are_not_the_steps_are_refused(stack):
    model, pool, _ = stack
    with (
        pool.begin_step(step("a", length=3)),
        pytest.raises(PlanMismatch, match="got 4 rows, the plan is for 3"),
    ):
        model(torch.randn(2, 2, 16))


def test_a_step_with_gradients_is_refused_and_one_of_the_base_is_not(stack):
    model, pool, _ = stack
    x = torch.randn(3, 16)
    with torch.enable_grad():
        with pool.begin_step(step("a", length=3)), pytest.raises(SpecError, match="inference_mode"):
            model(x)
        with pool.begin_step(step(None, length=3)):
            assert model(x).requires_grad


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: (y, None), "returned a tuple, expected one tensor"),
        (lambda y: y.transpose(0, 1), r"returned shape \(3, 2, 40\) with strides \(40, 120, 1\)"),
    ],
)
def test_an_output_that_has_no_rows_is_refused(change, text):
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return change(super().forward(x))

    model = nn.ModuleDict(dict(odd=Odd(16, 40)))
    spec = module_lora_spec(model)
    pool = LoraPool.build(spec)
    pool.active = True
    with spec.module_map.bind(model, pool), pytest.raises(SpecError, match=text):
        model["odd"](torch.randn(2, 3, 16))


def test_an_embedding_that_renorms_its_vectors_is_no_target():
    model = nn.ModuleDict(
        dict(emb=nn.Embedding(8, 4, max_norm=1.0), plain=nn.Embedding(8, 4), l=nn.Linear(4, 4))
    )
    assert "emb" not in module_lora_spec(model).targets
