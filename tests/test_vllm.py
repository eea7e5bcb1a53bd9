"""loramux as vLLM's LoRA backend, against a stand-in for vLLM's tensors and calls."""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_standin as standin
from common import COMPILER, TracedGraph
from loramux import PlanMismatch, backend
from loramux import vllm as plugin

WIDTH, HIDDEN, VOCAB, PADDED_VOCAB = 64, 48, 40, 56
CONFIG = standin.LoRAConfig(max_loras=3, max_lora_rank=16)
MAX_TOKENS = 256
WHY_NO_KERNELS = plugin._why_no_kernels
STOCK = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"


@pytest.fixture
def engine(monkeypatch):
    """The stand-in's modules, as a process finds them before plugins load."""
    cached = (plugin.register, plugin._missing, plugin._keep_own_kernels)
    modules = standin.install(monkeypatch)
    monkeypatch.setattr(plugin, "_why_no_kernels", lambda: None)
    monkeypatch.delenv("LORAMUX_VLLM", raising=False)
    for function in cached:
        function.cache_clear()
    yield modules
    for function in cached:
        function.cache_clear()


@pytest.fixture
def active(engine):
    plugin.register()
    return engine


def column(dtype=torch.float32, **tp):
    return standin.ColumnParallelLinearWithLoRA(standin.Linear(WIDTH, 40, dtype), [40], **tp)


def qkv(dtype=torch.float32, **tp):
    base = standin.Linear(WIDTH, 64, dtype)
    return standin.MergedQKVParallelLinearWithLoRA(base, [32, 16, 16], **tp)


def row(dtype=torch.float32, **tp):
    return standin.RowParallelLinearWithLoRA(standin.Linear(WIDTH, HIDDEN, dtype), [HIDDEN], **tp)


def replicated(dtype=torch.float32, base=standin.ReplicatedLinear):
    return standin.ReplicatedLinearWithLoRA(base(WIDTH, 24, dtype), [24])


def variable(dtype=torch.float32):
    base = standin.Linear(WIDTH, 56, dtype)
    return standin.MergedColumnParallelLinearVariableSliceWithLoRA(base, [24, 16, 8, 8])


def logits(dtype=torch.float32):
    base = standin.Linear(WIDTH, PADDED_VOCAB, dtype)
    return standin.LogitsProcessorWithLoRA(base, VOCAB)


def embedding(dtype=torch.float32):
    base = torch.nn.Embedding(VOCAB, HIDDEN, dtype=dtype).requires_grad_(False)
    return standin.VocabParallelEmbeddingWithLoRA(base)


LAYERS = [column, qkv, row, replicated, variable]


def load(layers, dtype=torch.float32, config=CONFIG, **extra):
    """A manager over ``{name: layer}``; ``extra`` layers have no adapter weights."""
    for layer in layers.values():
        layer.create_lora_weights(config, dtype)
    return standin.LoRAModelManager({**layers, **extra}, config, MAX_TOKENS)


def pair(rank, width, out, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    a = torch.randn(rank, width, generator=generator) / width**0.5
    b = torch.randn(out, rank, generator=generator) / rank**0.5
    return a.to(dtype), b.to(dtype)


def adapter(layer, rank, seed, dtype=torch.float32):
    """What the manager hands to ``set_lora``: one A and B, or a list of them for a packed layer."""
    if isinstance(layer, standin.VocabParallelEmbeddingWithLoRA):
        return pair(rank, VOCAB, HIDDEN, seed, dtype)
    if isinstance(layer, standin.LogitsProcessorWithLoRA):
        return pair(rank, WIDTH, VOCAB, seed, dtype)
    is_row = isinstance(layer, standin.RowParallelLinearWithLoRA)
    wide, tall = (layer.tp_size, 1) if is_row else (1, layer.tp_size)
    pairs = [
        pair(rank, WIDTH * wide, out * tall, seed + i, dtype)
        for i, out in enumerate(layer.output_slices)
    ]
    if isinstance(layer, standin.MergedColumnParallelLinearVariableSliceWithLoRA):
        return pairs[0][0], torch.cat([b for _, b in pairs])
    return tuple(map(list, zip(*pairs, strict=True))) if len(pairs) > 1 else pairs[0]


def step(manager, ids, prompts=None):
    manager.set_active_adapters(standin.LoRAMapping(tuple(ids), tuple(prompts or ids)))


def expected(layer, x, ids, adapters):
    """The definition in float64, from ``adapters[id]`` as ``set_lora`` takes them."""
    is_embedding = isinstance(layer, standin.VocabParallelEmbeddingWithLoRA)
    base = layer.base_layer
    y = (base(x) if is_embedding else x @ base.weight.T).double()
    for i, name in enumerate(ids):
        lora_a, lora_b = adapters.get(name, ([], []))
        if isinstance(lora_a, torch.Tensor):
            lora_a, lora_b = [lora_a], [lora_b]
        offset = 0
        for j, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
            out = b.shape[0] if b is not None else layer.output_slices[j]
            if a is not None:
                hidden = a[:, x[i]].double() if is_embedding else a.double() @ x[i].double()
                y[i, offset : offset + out] += b.double() @ hidden
            offset += out
    return y


def assert_close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


class TestPlugin:
    def test_its_wrapper_is_chosen_and_registering_again_changes_nothing(self, engine):
        platform = engine.platforms.current_platform
        assert platform.get_punica_wrapper() == STOCK
        plugin.register()
        plugin.register()
        assert platform.get_punica_wrapper() == plugin.WRAPPER
        assert platform.get_punica_wrapper.args[0]() == STOCK

    def test_it_is_turned_off_by_its_variable(self, engine, monkeypatch):
        monkeypatch.setenv("LORAMUX_VLLM", "0")
        plugin.register()
        assert engine.platforms.current_platform.get_punica_wrapper() == STOCK
        assert standin.LoRAConfig().compute_hash() == "stock"

    def test_platforms_without_cuda_are_left_alone(self, engine, monkeypatch):
        monkeypatch.setattr(standin.Platform, "cuda", False)
        plugin.register()
        assert engine.platforms.current_platform.get_punica_wrapper() == STOCK

    def warnings_of(self, caplog):
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    @pytest.mark.parametrize("version", ["0.23.1", "0.25.0", "0.240.0", "1.0.0"])
    def test_an_unknown_version_gets_one_warning(self, engine, monkeypatch, caplog, version):
        monkeypatch.setattr(engine.vllm, "__version__", version)
        plugin.register()
        plugin.register()
        assert engine.platforms.current_platform.get_punica_wrapper() == STOCK
        (warning,) = self.warnings_of(caplog)
        assert f"it knows vLLM 0.24.*, this is {version}" in warning
        assert "vLLM's own LoRA kernels are used" in warning

    def test_a_missing_part_of_the_contract_gets_one_warning(self, active, monkeypatch, caplog):
        monkeypatch.delattr(active.column_parallel_linear, "_mcp_apply")
        for _ in range(2):
            assert active.platforms.current_platform.get_punica_wrapper() == STOCK
        (warning,) = self.warnings_of(caplog)
        assert "vllm.lora.layers.column_parallel_linear._mcp_apply is not as expected" in warning

    def test_a_gpu_without_kernels_gets_one_warning(self, active, monkeypatch, caplog):
        monkeypatch.setattr(plugin, "_why_no_kernels", WHY_NO_KERNELS)
        asked = []
        monkeypatch.setattr(backend, "why_no_cuda", lambda *of: asked.append(of) or "no kernels")
        for _ in range(2):
            assert active.platforms.current_platform.get_punica_wrapper() == STOCK
        (warning,) = self.warnings_of(caplog)
        assert "no kernels (see python -m loramux.collect_env)" in warning
        assert asked == [((9, 0),)]

    def test_graphs_compiled_with_and_without_it_have_different_keys(self, engine, monkeypatch):
        stock = standin.LoRAConfig().compute_hash()
        plugin.register()
        served = standin.LoRAConfig().compute_hash()
        plugin._missing.cache_clear()
        monkeypatch.setattr(plugin, "_why_no_kernels", lambda: "it cannot")
        kept = standin.LoRAConfig().compute_hash()
        assert len({stock, served, kept}) == 3

    def test_one_line_says_that_it_is_active(self, active, caplog):
        caplog.set_level(logging.INFO)
        manager = load({"a": column(), "b": qkv()}, experts=standin.FusedMoEWithLoRA())
        for ids in ([0], [0, 0]):
            step(manager, ids)
        (line,) = [r.getMessage() for r in caplog.records if "is active" in r.getMessage()]
        assert "serves 2 LoRA layers; with vLLM's own kernels: 1 FusedMoEWithLoRA" in line

    def test_its_entry_point_is_installed(self):
        names = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
        if "loramux" not in names:
            pytest.skip("loramux is not installed, only on the path")
        assert names["loramux"] == "loramux.vllm:register"


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "loramux":
            self.names.append(func._schema.name.removeprefix("loramux::"))
        return func(*args, **(kwargs or {}))


class TestLayers:
    IDS = (7, 0, 9, 7, 9, 9, 0, 5)

    def engine_of(self, make, ranks=((5, 16), (7, 8), (9, 3)), dtype=torch.float32):
        layer = make(dtype)
        manager = load({"layer": layer}, dtype)
        adapters = {name: adapter(layer, rank, name, dtype) for name, rank in ranks}
        manager.registered = {name: {"layer": weights} for name, weights in adapters.items()}
        return layer, manager, adapters

    @pytest.mark.parametrize("make", LAYERS)
    def test_rows_get_their_own_adapters(self, active, make):
        layer, manager, adapters = self.engine_of(make)
        step(manager, self.IDS)
        x = torch.randn(len(self.IDS), WIDTH)
        with CountOps() as ops:
            got = layer(x)
        want = expected(layer, x, self.IDS, self.per_slice(layer, adapters))
        assert_close(got, want)
        is_replicated = isinstance(layer, standin.ReplicatedLinearWithLoRA)
        assert ops.names == (["lora_apply_"] if is_replicated else ["lora_start", "lora_finish_"])
        assert torch.equal(got[1], layer.base_layer.apply_to(x, None)[1])
        assert manager.punica_wrapper.metadata_updates == 0
        assert not manager.punica_wrapper.kernel_calls

    def per_slice(self, layer, adapters):
        if not isinstance(layer, standin.MergedColumnParallelLinearVariableSliceWithLoRA):
            return adapters
        return {
            name: ([a] * layer.n_slices, b.split(layer.output_slices))
            for name, (a, b) in adapters.items()
        }

    def test_embedding(self, active):
        layer, manager, adapters = self.engine_of(embedding)
        step(manager, self.IDS)
        ids = torch.tensor([0, 1, VOCAB - 1, 3, 3, 17, 8, 20])
        with CountOps() as ops:
            got = layer(ids)
        assert_close(got, expected(layer, ids, self.IDS, adapters))
        assert ops.names == ["lora_embedding_"]

    def test_logits_follow_the_sampled_rows_and_leave_padding_columns(self, active):
        layer, manager, adapters = self.engine_of(logits)
        prompts = [9, 0, 5]
        step(manager, [9] * 4 + [0] * 3 + [5], prompts)
        hidden = torch.randn(3, WIDTH)
        got = layer(hidden)
        base = layer.base_layer.apply_to(hidden, None)
        assert_close(got, expected(layer, hidden, prompts, adapters))
        assert torch.equal(got[:, VOCAB:], base[:, VOCAB:])
        assert not torch.equal(got[2], base[2])

    @pytest.mark.parametrize("tp_rank", [0, 1])
    @pytest.mark.parametrize("make", [column, qkv])
    def test_column_parallel_takes_its_rows_of_b(self, active, make, tp_rank):
        layer = make(tp_rank=tp_rank, tp_size=2)
        manager = load({"layer": layer})
        a, b = adapter(layer, 8, 3)
        manager.registered = {3: {"layer": (a, b)}}
        step(manager, [3, 0, 3])
        x = torch.randn(3, WIDTH)
        mine = [
            t[tp_rank * out : (tp_rank + 1) * out]
            for t, out in zip(b if isinstance(b, list) else [b], layer.output_slices, strict=True)
        ]
        a = a if isinstance(a, list) else [a]
        assert_close(layer(x), expected(layer, x, [3, 0, 3], {3: (a, mine)}))

    def test_row_parallel_parts_sum_to_the_whole(self, active):
        total = torch.zeros(3, HIDDEN, dtype=torch.float64)
        x = torch.randn(3, 2 * WIDTH)
        for tp_rank in range(2):
            layer = row(tp_rank=tp_rank, tp_size=2)
            manager = load({"layer": layer})
            a, b = adapter(layer, 8, 3)
            manager.registered = {3: {"layer": (a, b)}}
            step(manager, [3, 0, 3])
            part = x[:, tp_rank * WIDTH : (tp_rank + 1) * WIDTH].contiguous()
            total += (layer(part) - layer.base_layer.apply_to(part, None)).double()
        want = (x.double() @ a.double().T) @ b.double().T
        want[1] = 0
        assert_close(total, want)

    def test_stray_keyword_arguments_and_a_y_of_zeros(self, active):
        layer, manager, adapters = self.engine_of(row)
        step(manager, self.IDS)
        x = torch.randn(len(self.IDS), WIDTH)
        delta = torch.zeros(len(self.IDS), HIDDEN)
        layer.punica_wrapper.add_lora_linear(
            delta, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices,
            add_inputs=False, add_input=True, buffer=None,
        )  # fmt: skip
        want = expected(layer, x, self.IDS, adapters) - layer.base_layer.apply_to(x, None).double()
        assert_close(delta, want)

    def test_bfloat16(self, active):
        layer, manager, adapters = self.engine_of(qkv, dtype=torch.bfloat16)
        step(manager, self.IDS)
        x = torch.randn(len(self.IDS), WIDTH).bfloat16()
        want = expected(layer, x, self.IDS, adapters)
        torch.testing.assert_close(layer(x).double(), want, rtol=2e-2, atol=2e-2)

    def sharded(dtype=torch.float32):
        base = standin.Linear(WIDTH, 32, dtype)
        return standin.MergedColumnParallelLinearWithShardedLoRA(base, [16, 16])

    def router(dtype=torch.float32):
        return replicated(dtype, base=standin.GateLinear)

    @pytest.mark.parametrize(
        ("make", "calls"), [(sharded, ["shrink", "expand"]), (router, ["linear"])]
    )
    def test_layers_that_keep_vllms_kernels_get_its_metadata(self, active, make, calls):
        layer = make()
        manager = load({"layer": layer, "served": column()})
        step(manager, [0, 0])
        layer(torch.randn(2, WIDTH))
        assert manager.punica_wrapper.kernel_calls == calls
        assert manager.punica_wrapper.metadata_updates == 1

    def test_a_layer_of_another_dtype_than_its_adapters_keeps_vllms_kernels(self, active):
        layer = column(torch.bfloat16)
        manager = load({"layer": layer}, dtype=torch.float32)
        step(manager, [0])
        layer(torch.randn(1, WIDTH).bfloat16())
        assert manager.punica_wrapper.kernel_calls == ["linear"]

    def test_slots_that_no_table_can_name_keep_vllms_kernels(self, active, caplog):
        layer = standin.ColumnParallelLinearWithLoRA(standin.Linear(WIDTH, 3), [3])
        load({"layer": layer}, config=standin.LoRAConfig(max_lora_rank=1))
        assert "keeps vLLM's LoRA kernels" in caplog.text
        assert "takes 12 bytes, no multiple of 16" in caplog.text


class TestSteps:
    @pytest.fixture
    def served(self, active):
        layer = qkv()
        manager = load({"layer": layer})
        adapters = {name: adapter(layer, 8 + name, name) for name in range(1, 7)}
        manager.registered = {name: {"layer": weights} for name, weights in adapters.items()}
        return layer, manager, adapters

    def check(self, served, ids, padding=0):
        layer, manager, adapters = served
        step(manager, ids)
        x = torch.randn(len(ids) + padding, WIDTH)
        got, base = layer(x), layer.base_layer.apply_to(x, None)
        assert_close(got, expected(layer, x, ids + [0] * padding, adapters))
        base_rows = [i for i, name in enumerate(ids + [0] * padding) if name == 0]
        assert torch.equal(got[base_rows], base[base_rows])

    def test_rows_that_pad_a_step_keep_nothing_of_an_earlier_one(self, served):
        self.check(served, [1, 2, 3, 1, 2, 3, 1, 2])
        self.check(served, [2, 1, 0], padding=5)
        self.check(served, [3], padding=7)

    def test_a_step_of_base_rows_after_one_with_adapters(self, served):
        self.check(served, [1, 2, 3])
        self.check(served, [0, 0, 0], padding=5)
        # Where one graph serves all steps the kernels run, and the plan alone must keep them out.
        served[0].punica_wrapper.rows.active.fill_(True)
        x = torch.randn(8, WIDTH)
        assert torch.equal(served[0](x), served[0].base_layer.apply_to(x, None))

    def test_a_graph_captured_ahead_of_every_step_has_the_kernels(self, served):
        layer = served[0]
        x = torch.randn(2, WIDTH)
        assert torch.equal(layer(x), layer.base_layer.apply_to(x, None))
        layer.punica_wrapper.rows.plan.buffer[2] = 9
        with pytest.raises(RuntimeError, match="the plan is for 9 rows, the call has 2"):
            layer(x)

    def test_adapters_loaded_after_a_sleep_that_lost_the_weights(self, served):
        layer, manager, _ = served
        self.check(served, [1, 2, 0])
        layer.punica_wrapper.site.table.zero_()
        for name in (1, 2):
            manager.deactivate_adapter(name)
        self.check(served, [2, 0, 3])

    def test_no_kernel_runs_in_a_step_without_adapters(self, served):
        layer, manager, _ = served
        self.check(served, [1, 2])
        step(manager, [0, 0])
        table = layer.punica_wrapper.site.table.clone()
        layer.punica_wrapper.site.table.fill_(-1)  # nothing that a kernel could use
        layer.punica_wrapper.rows.plan.buffer[2] = 9  # a plan that a kernel would refuse
        x = torch.randn(2, WIDTH)
        assert torch.equal(layer(x), layer.base_layer.apply_to(x, None))
        layer.punica_wrapper.site.table.copy_(table)
        layer.punica_wrapper.rows.active.fill_(True)
        with pytest.raises(RuntimeError, match="the plan is for 9 rows, the call has 2"):
            layer(x)

    def test_adapters_come_and_go(self, served):
        generator = np.random.default_rng(0)
        for _ in range(40):
            chosen = generator.choice(range(1, 7), 3, replace=False)
            ids = generator.choice([0, *chosen], generator.integers(1, 12)).tolist()
            self.check(served, ids, padding=int(generator.integers(0, 4)))

    def test_the_same_mapping_over_slots_that_have_changed(self, served):
        _, manager, _ = served
        self.check(served, [1, 2])
        for name in (1, 2):
            manager.deactivate_adapter(name)
        for name in (2, 1):  # between steps, as an API call does
            manager.activate_adapter(name)
        self.check(served, [1, 2])

    def test_ids_come_as_numpy_integers(self, served):
        layer, manager, adapters = served
        ids = np.array([4, 0, 5, 4], dtype=np.int32)
        step(manager, tuple(ids))
        x = torch.randn(4, WIDTH)
        assert_close(layer(x), expected(layer, x, ids.tolist(), adapters))

    def test_prefill_and_mixed_steps(self, served):
        self.check(served, [1] * 100 + [0] * 20 + [2] * 33 + [1] * 40 + [3], padding=20)

    def test_more_tokens_than_the_engine_declared(self, served):
        with pytest.raises(PlanMismatch, match="the step has 257 rows, the plan holds 256"):
            step(served[1], [1] * 257)

    @pytest.mark.parametrize("is_recorded", [True, False], ids=["graph", "compiled"])
    def test_a_compiled_layer_follows_steps_of_every_length(self, served, is_recorded):
        layer, manager, adapters = served
        graph = TracedGraph()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: layer(x * 2) + 1,
            backend=graph if is_recorded else COMPILER,
            fullgraph=True,
        )
        for ids in ([3, 0, 1, 1, 2], [0, 0, 0, 0], [1, 2, 3], [4] * 70):
            step(manager, ids)
            x = torch.randn(len(ids), WIDTH)
            torch._dynamo.mark_dynamic(x, 0)
            assert_close(compiled(x), expected(layer, x * 2, ids, adapters) + 1)
        ops = torch.ops.loramux
        if is_recorded:
            assert [graph.calls(op) for op in (ops.lora_start, ops.lora_finish_)] == [1, 1]


class TestRanks:
    def ranks(self, layer, slot):
        return layer.punica_wrapper.site.table[slot + 1, :, 2].tolist()

    def test_a_slots_rank_is_learned_and_nothing_past_it_is_read(self, active):
        layer = qkv()
        manager = load({"layer": layer})
        weights = adapter(layer, 3, 1)
        manager.registered = {1: {"layer": weights}}
        step(manager, [1, 0])
        assert self.ranks(layer, 0) == [3, 3, 3]
        for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            a[0, 0, 3:], b[0, 0, :, 3:] = float("nan"), float("nan")
        x = torch.randn(2, WIDTH)
        assert_close(layer(x), expected(layer, x, [1, 0], {1: weights}))

    def test_slices_and_modules_that_an_adapter_lacks_cost_nothing(self, active):
        layer, other = qkv(), column()
        manager = load({"layer": layer, "other": other})
        a, b = adapter(layer, 8, 1)
        a[1], b[1] = None, None
        manager.registered = {1: {"layer": (a, b)}}
        step(manager, [1])
        assert self.ranks(layer, 0) == [8, 0, 8]
        assert self.ranks(other, 0) == [0]
        for tensor in (layer.lora_a_stacked[1], other.lora_a_stacked[0]):
            tensor.fill_(float("nan"))
        x = torch.randn(1, WIDTH)
        assert_close(layer(x), expected(layer, x, [1], {1: (a, b)}))
        assert torch.equal(other(x), other.base_layer.apply_to(x, None))

    def test_a_slot_is_replaced_by_an_adapter_of_a_lower_rank(self, active):
        layer = row()
        manager = load({"layer": layer})
        adapters = {name: adapter(layer, rank, name) for name, rank in ((1, 16), (2, 4))}
        manager.registered = {name: {"layer": weights} for name, weights in adapters.items()}
        x = torch.randn(2, WIDTH)
        for name in (1, 2):
            step(manager, [name, 0])
            assert self.ranks(layer, 0) == [16 if name == 1 else 4]
            assert_close(layer(x), expected(layer, x, [name, 0], adapters))
            manager.deactivate_adapter(name)

    def test_an_adapter_without_the_module_takes_a_slot_that_had_it(self, active):
        layer = row()
        manager = load({"layer": layer})
        manager.registered = {1: {"layer": adapter(layer, 8, 1)}, 2: {}}
        step(manager, [1])
        manager.deactivate_adapter(1)
        step(manager, [2])
        assert self.ranks(layer, 0) == [0]
        x = torch.randn(1, WIDTH)
        assert torch.equal(layer(x), layer.base_layer.apply_to(x, None))

    def test_groups_that_cover_several_slices_take_the_largest_rank(self, active):
        layer = variable()
        layer.create_lora_weights(CONFIG, torch.float32)
        manager = standin.LoRAModelManager({"layer": layer}, CONFIG, MAX_TOKENS)
        assert manager.punica_wrapper is not layer.punica_wrapper
        ranks = importlib.import_module("loramux.punica")._ranks
        assert ranks([torch.zeros(4, 1), torch.zeros(8, 1)], 4) == [8] * 4
