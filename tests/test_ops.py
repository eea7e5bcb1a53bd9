"""The operators: their contract with torch, and their values against float64."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from common import COMPILER, TracedGraph
from loramux import LoraSite, PlanMismatch, SpecError, StepPlan
from loramux.ops import (
    lora_apply_,
    lora_embedding_,
    lora_expand_,
    lora_finish_,
    lora_shrink,
    lora_start,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = [1, 0, 2, 1, 3, 0, 2, 2]  # one adapter's rows are apart, base rows between


def stacked_site(width, widths, rank, dtype, device="cpu", slots=3, embedding=False, **options):
    """A site over random stacked tensors whose slots have different true ranks and scales."""
    generator = torch.Generator().manual_seed(width * 31 + rank)

    def make(*shape, fan):
        return (torch.randn(shape, generator=generator) / fan**0.5).to(device, dtype)

    shape = (slots, width, rank) if embedding else (slots, rank, width)
    return LoraSite.stacked(
        [make(*shape, fan=1 if embedding else width) for _ in widths],
        [make(slots, out, rank, fan=rank) for out in widths],
        ranks=[max(rank - i, 1) for i in range(slots)],
        scales=[0.5 + i for i in range(slots)],
        embedding=embedding,
        **options,
    )


def operands(rows, width, site, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(rows * 17 + width)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    y = torch.randn(rows, sum(site.widths), generator=generator).to(device, dtype)
    return x, y


def defined(y, x, site, slots, dtype=torch.float64, embedding=False):
    """The definition, row by row, computed in ``dtype``."""
    out = y.to(dtype)
    for i, slot in enumerate(slots):
        for part in site.slices(slot, embedding=embedding) if slot else ():
            a, b = part.a.to(dtype), part.b.to(dtype)
            hidden = a[x[i]] if embedding else x[i].to(dtype) @ a.T
            out[i, part.columns] += part.scale * (hidden @ b.T)
    return out


def assert_accurate(got, y, x, site, slots, embedding=False):
    """At most twice the error of the same expression in torch at this dtype; base rows untouched.

    The floor under the bound, a rounding of the result, is for where torch happens to be exact.
    """
    want = defined(y, x, site, slots, embedding=embedding)
    torch_error = (defined(y, x, site, slots, y.dtype, embedding).double() - want).norm()
    rounding = torch.finfo(y.dtype).eps * want.norm() / 2
    assert (got.double() - want).norm() <= max(2 * torch_error, rounding)
    base = [i for i, slot in enumerate(slots) if slot == 0]
    assert torch.equal(got[base], y[base])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 8, 24, 64])
@pytest.mark.parametrize(
    ("width", "widths"), [(64, [64]), (40, [48, 8, 8]), (256, [8, 264]), (4096, [1024])]
)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_apply_is_the_definition(width, widths, rank, dtype, device, backend):
    site = stacked_site(width, widths, rank, dtype, device, backend=backend)
    x, y = operands(len(SLOTS), width, site, dtype, device)
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    got = lora_apply_(y.clone(), x, site, plan)
    assert_accurate(got, y, x, site, SLOTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("vocab", "rank"), [(8, 8), (40960, 24), (100, 72), (104, 5)])
@pytest.mark.parametrize("slots", [SLOTS, 40 * SLOTS], ids=len)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_embedding_is_the_definition(slots, vocab, rank, ids_dtype, dtype, device, backend):
    site = stacked_site(vocab, [48], rank, dtype, device, embedding=True, backend=backend)
    ids = torch.arange(len(slots)) * 5 % vocab
    ids[3] = vocab - 1
    y = torch.randn(len(slots), 48).to(device, dtype)
    plan = StepPlan.for_rows(slots, site.num_slots, device)
    got = lora_embedding_(y.clone(), ids.to(device, ids_dtype), site, plan)
    assert_accurate(got, y, ids, site, slots, embedding=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 65, 200])
def test_C028_two_adapters_on_each_side_of_every_threshold(rows, device):
    a, b = torch.randn(2, 16, 64) / 8, torch.randn(2, 48, 16) / 4
    weights = [t.to(device, torch.bfloat16) for t in (a, b)]
    site = LoraSite.stacked(weights[:1], weights[1:], ranks=[8, 16], scales=[2.0, 0.5])
    slots = [1 + i % 2 for i in range(2 * rows)]
    x, y = operands(2 * rows, 64, site, torch.bfloat16, device)
    plan = StepPlan.for_rows(slots, site.num_slots, device)
    assert_accurate(lora_apply_(y.clone(), x, site, plan), y, x, site, slots)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 64, 65, 200])
def test_rows_of_one_adapter_give_the_same_bits_alone_and_in_any_company(rows, device):
    site = stacked_site(96, [64, 32], 16, torch.bfloat16, device)
    x, y = operands(rows, 96, site, torch.bfloat16, device)
    plan = StepPlan.for_rows([2] * rows, site.num_slots, device)
    together = lora_apply_(y.clone(), x, site, plan)
    single = StepPlan.for_rows([2], site.num_slots, device)
    for i in {0, rows // 2, rows - 1}:
        alone = lora_apply_(y[i : i + 1].clone(), x[i : i + 1], site, single)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("device", DEVICES)
def test_shrink_then_expand_is_apply_bit_for_bit(device):
    site = stacked_site(128, [64, 64], 16, torch.bfloat16, device)
    x, y = operands(len(SLOTS), 128, site, torch.bfloat16, device)
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    h = lora_shrink(x, site, plan)
    assert h.shape == (len(SLOTS), 2, 16)
    assert torch.equal(
        lora_expand_(y.clone(), h, site, plan), lora_apply_(y.clone(), x, site, plan)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_strided_rows_and_a_column_slice_of_y(device, backend):
    site = stacked_site(64, [48], 8, torch.float32, device, backend=backend)
    x, y = operands(len(SLOTS), 64, site, torch.float32, device)
    wide_x = torch.full((len(SLOTS), 100), float("nan"), device=device)
    wide_y = torch.full((len(SLOTS), 90), float("nan"), device=device)
    wide_x[:, 3:67], wide_y[:, 5:53] = x, y
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    lora_apply_(wide_y[:, 5:53], wide_x[:, 3:67], site, plan)
    assert_accurate(wide_y[:, 5:53], y, x, site, SLOTS)
    assert wide_y[:, :5].isnan().all()
    assert wide_y[:, 53:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_C031_ranks_5_and_8_in_one_batch(device):
    a = [torch.randn(2, 8, 32, device=device)]
    b = [torch.randn(2, 32, 8, device=device)]
    a[0][0, 5:], b[0][0, :, 5:] = float("nan"), float("nan")  # past slot 1's true rank of 5
    site = LoraSite.stacked(a, b, ranks=[5, 8])
    x, y = operands(4, 32, site, torch.float32, device)
    plan = StepPlan.for_rows([1, 2, 1, 2], site.num_slots, device)
    assert_accurate(lora_apply_(y.clone(), x, site, plan), y, x, site, [1, 2, 1, 2])


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 7, 9, 24, 100])
def test_C032_C034_every_rank_is_served(rank):
    # a slot of an odd rank is no multiple of 16 bytes in float32 unless its width makes it one
    site = stacked_site(48, [64], rank, torch.float32)
    x, y = operands(3, 48, site, torch.float32)
    plan = StepPlan.for_rows([1, 2, 3], site.num_slots)
    assert_accurate(lora_apply_(y.clone(), x, site, plan), y, x, site, [1, 2, 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_C044_no_dtype_is_a_silent_no_op(dtype):
    site = stacked_site(64, [64], 8, dtype)
    x, y = operands(1, 64, site, dtype)
    got = lora_apply_(y.clone(), x, site, StepPlan.for_rows([1], site.num_slots))
    assert (got != y).float().mean() > 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_rows_past_the_plans_are_base_rows(device):
    site = stacked_site(64, [48], 8, torch.float32, device)
    x, y = operands(len(SLOTS) + 5, 64, site, torch.float32, device)
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    got, scratch = y.clone(), torch.zeros(len(x) * 8, device=device)
    torch.ops.loramux.lora_apply_(
        got, scratch, x, site.weights, site.table, plan.buffer, 0, site.widths, 8
    )
    assert_accurate(got, y, x, site, [*SLOTS, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_that_is_not_active_does_nothing(device):
    linear = stacked_site(64, [48], 8, torch.float32, device)
    tokens = stacked_site(50, [48], 8, torch.float32, device, embedding=True)
    x, y = operands(len(SLOTS), 64, linear, torch.float32, device)
    ids = torch.arange(len(SLOTS), device=device)
    plan = StepPlan.for_rows(SLOTS, linear.num_slots, device).buffer
    scratch, active = torch.zeros(len(SLOTS) * 8, device=device), torch.zeros(1, dtype=torch.bool)
    ops, where = torch.ops.loramux, lambda site: (site.weights, site.table, plan, 0, [48])
    for is_active in (False, True):
        active.fill_(is_active)
        applied, embedded = y.clone(), y.clone()
        ops.lora_apply_(applied, scratch, x, *where(linear), 8, active)
        ops.lora_embedding_(embedded, ids, *where(tokens), 50, 8, active)
        assert torch.equal(applied, y) != is_active
        assert torch.equal(embedded, y) != is_active


@pytest.mark.parametrize("rows", [0, 3])
def test_C080_a_batch_without_adapters_touches_nothing(rows):
    site = stacked_site(64, [64], 8, torch.float32)
    x, y = operands(rows, 64, site, torch.float32)
    plan = StepPlan.for_rows([0] * rows, site.num_slots)
    assert plan.base_only
    assert torch.equal(lora_apply_(y.clone(), x, site, plan), y)


@pytest.mark.parametrize("device", DEVICES)
def test_one_row_gets_the_same_bits_whatever_its_stride(device):
    site = stacked_site(4096, [64], 16, torch.bfloat16, device)
    x, y = operands(1, 4096, site, torch.bfloat16, device)
    plan = StepPlan.for_rows([1], site.num_slots, device)
    odd = x.as_strided(x.shape, (1, 1))
    assert torch.equal(lora_apply_(y.clone(), odd, site, plan), lora_apply_(y, x, site, plan))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_input_without_columns_adds_nothing(dtype, device):
    other = stacked_site(64, [48], 8, dtype, device)
    x, y = operands(len(SLOTS), 64, other, dtype, device)
    plan = StepPlan.for_rows(SLOTS, other.num_slots, device)
    lora_apply_(y, x, other, plan)  # leaves what it computed in memory
    a, b = torch.zeros(3, 8, 0), torch.ones(3, 48, 8)
    site = LoraSite.stacked([a.to(device, dtype)], [b.to(device, dtype)])
    before = y.clone()
    assert torch.equal(lora_apply_(y, x[:, :0], site, plan), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 3.39e38])
def test_an_infinite_hidden_value_stays_infinite(value, dtype, device):
    x, y = torch.ones(2, 64, device=device), torch.zeros(2, 48, device=device)
    x[0, 0] = value
    a, b = torch.ones(1, 8, 64, device=device), torch.ones(1, 48, 8, device=device)
    site = LoraSite.stacked([a.to(dtype)], [b.to(dtype)])
    plan = StepPlan.for_rows([1, 1], site.num_slots, device)
    got = lora_apply_(y.to(dtype), x.to(dtype), site, plan)
    assert got[0].isinf().all()
    assert (got[1] == 64 * 8).all()


def apply_in_parts(y, x, site, plan):
    """The operator that a traced graph has."""
    scratch = x.new_zeros(x.shape[0] * len(site.widths) * site.max_rank, dtype=torch.float32)
    torch.ops.loramux.lora_apply_(
        y, scratch, x, site.weights, site.table, plan.buffer, site.entry, site.widths, site.max_rank
    )
    return y


@pytest.mark.parametrize("device", DEVICES)
def test_a_traced_call_has_the_bits_of_an_eager_one(device):
    site = stacked_site(64, [32, 16], 8, torch.bfloat16, device)
    x, y = operands(len(SLOTS), 64, site, torch.bfloat16, device)
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    want = lora_apply_(y.clone(), x, site, plan)
    assert not torch.equal(want, y)
    assert torch.equal(apply_in_parts(y, x, site, plan), want)


def test_a_copied_site_has_weights_of_its_own():
    site = stacked_site(64, [48], 8, torch.float32)
    x, y = operands(len(SLOTS), 64, site, torch.float32)
    plan = StepPlan.for_rows(SLOTS, site.num_slots)
    want = lora_apply_(y.clone(), x, site, plan)
    copied = copy.deepcopy(site)
    for weights in site.weights:
        weights.zero_()
    assert torch.equal(lora_apply_(y.clone(), x, copied, plan), want)
    assert torch.equal(lora_apply_(y.clone(), x, site, plan), y)


def test_a_plan_that_has_grown_serves_no_row_until_it_is_written():
    site = stacked_site(64, [48], 8, torch.float32)
    x, y = operands(len(SLOTS), 64, site, torch.float32)
    plan = StepPlan.for_rows(SLOTS, site.num_slots)
    plan.reserve(100)
    with pytest.raises(PlanMismatch, match="got 8 rows, the plan is for 0"):
        lora_apply_(y, x, site, plan)


@pytest.mark.parametrize("device", DEVICES)
def test_an_eager_call_reads_its_own_plan_where_that_is_now(device):
    site = stacked_site(64, [32, 16], 8, torch.bfloat16, device)
    x, y = operands(len(SLOTS), 64, site, torch.bfloat16, device)
    plans = [
        StepPlan(len(SLOTS), site.num_slots, device, scratch_width)
        for scratch_width in (16, 0, 24, 8)
    ]
    seen = []
    for turn in range(3):
        for i, plan in enumerate(plans):
            if turn == 2:
                plan.reserve(100 + i)
            slots = [SLOTS[(row + i + turn) % len(SLOTS)] for row in range(len(SLOTS))]
            plan.update(slots, [1] * len(slots), [1.0] * len(slots))
            for _ in range(2):
                seen.append(lora_apply_(y.clone(), x, site, plan))
                assert torch.equal(seen[-1], apply_in_parts(y.clone(), x, site, plan))
    assert not torch.equal(seen[0], seen[2])


def test_threads_with_plans_of_their_own_share_a_site():
    site = stacked_site(64, [48], 8, torch.float32)
    x, y = operands(len(SLOTS), 64, site, torch.float32)
    ready = threading.Barrier(4)

    def call_often(turn):
        plan = StepPlan(len(SLOTS), site.num_slots, scratch_width=8)
        plan.update(SLOTS[turn:] + SLOTS[:turn], [1] * len(SLOTS), [1.0] * len(SLOTS))
        want = apply_in_parts(y.clone(), x, site, plan)
        ready.wait()
        return all(torch.equal(lora_apply_(y.clone(), x, site, plan), want) for _ in range(1500))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(call_often, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_an_eager_call_reads_an_engines_weights_where_they_are_now():
    site = stacked_site(64, [48], 8, torch.float32)
    x, y = operands(len(SLOTS), 64, site, torch.float32)
    plan = StepPlan.for_rows(SLOTS, site.num_slots)
    want = lora_apply_(y.clone(), x, site, plan)
    site.weights[1].data = 2 * site.weights[1]
    torch.testing.assert_close(lora_apply_(y.clone(), x, site, plan) - y, 2 * (want - y))
    site.weights[1] = torch.zeros_like(site.weights[1])
    assert torch.equal(lora_apply_(y.clone(), x, site, plan), y)


def test_what_records_a_call_sees_the_sites_tensors():
    site = stacked_site(64, [48], 8, torch.float32)
    x, y = operands(len(SLOTS), 64, site, torch.float32)
    plan = StepPlan.for_rows(SLOTS, site.num_slots)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        lora_apply_(mode.from_tensor(y), mode.from_tensor(x), site, plan)
    graph = make_fx(lambda y, x: lora_apply_(y, x, site, plan))(y.clone(), x).graph
    assert [node.target for node in graph.nodes if "lora" in str(node.target)] == [
        torch.ops.loramux.lora_apply_.default
    ]


# On an H200 the clusters of the decode shrink have three and four of these 40 tiles each.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [4104, 8200])
def test_a_long_step_of_more_decode_tiles_than_clusters(width, device):
    site = stacked_site(width, [8] * 8, 16, torch.bfloat16, device, slots=11)
    slots = [0, *[1 + i % 10 for i in range(320)], *[11] * 200]
    x, y = operands(len(slots), width, site, torch.bfloat16, device)
    plan = StepPlan.for_rows(slots, site.num_slots, device)
    assert sum(len(tile.rows) <= 8 for tile in plan.tiles()) >= 40
    assert_accurate(lora_apply_(y.clone(), x, site, plan), y, x, site, slots)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_calls_run_where_their_tensors_are():
    here, dtype = torch.device("cuda", 1), torch.bfloat16
    site = stacked_site(64, [32, 16], 8, dtype, here)
    tokens = stacked_site(64, [48], 8, dtype, here, embedding=True)
    x, y = operands(len(SLOTS), 64, site, dtype, here)
    plan = StepPlan.for_rows(SLOTS, site.num_slots, here)
    ids = torch.arange(len(SLOTS), device=here)

    def results():
        h = lora_shrink(x, site, plan)
        started = lora_start(x, site, plan)
        return [
            lora_apply_(y.clone(), x, site, plan),
            lora_expand_(y.clone(), h, site, plan),
            lora_finish_(y.clone(), started),
            lora_embedding_(y.clone(), ids, tokens, plan),
        ]

    with torch.cuda.device(here):
        want = results()
    with torch.cuda.device(0):
        got = results()
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_accurate(got[0], y, x, site, SLOTS)


class TestTorchContract:
    def calls(self, device):
        site = stacked_site(64, [32, 16], 8, torch.float32, device)
        tokens = stacked_site(50, [48], 8, torch.float32, device, embedding=True)
        x, y = operands(len(SLOTS), 64, site, torch.float32, device)
        plan = StepPlan.for_rows(SLOTS, site.num_slots, device).buffer
        h = torch.zeros(len(SLOTS), 2, 8, device=device)
        ids = torch.arange(len(SLOTS), device=device)
        ops = torch.ops.loramux
        where = (site.weights, site.table, plan, 0)
        yield ops.lora_shrink, (h, x, *where)
        yield ops.lora_expand_, (y, h, *where, site.widths)
        yield ops.lora_apply_, (y, h.flatten(), x, *where, site.widths, 8)
        yield ops.lora_apply_packed_, (y, h.flatten(), x, plan, site.packed)
        active = torch.ones(1, dtype=torch.bool)
        yield ops.lora_apply_, (y, h.flatten(), x, *where, site.widths, 8, active)
        delta, parts = torch.zeros_like(y), torch.zeros(8 * h.numel(), device=device)
        yield ops.lora_start, (delta, parts, x, *where, site.widths, 8)
        yield ops.lora_finish_, (y, delta, parts, x, *where, site.widths, 8)
        where = (tokens.weights, tokens.table, plan, 0)
        yield ops.lora_embedding_, (y, ids, *where, tokens.widths, 50, 8)

    @pytest.mark.parametrize("device", DEVICES)
    def test_opcheck(self, device):
        for op, arguments in self.calls(device):
            torch.library.opcheck(op, arguments)

    @pytest.mark.parametrize("device", DEVICES)
    def test_compile_sees_one_opaque_node(self, device):
        site = stacked_site(64, [64], 8, torch.float32, device)
        x, _ = operands(len(SLOTS), 64, site, torch.float32, device)
        plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
        graph = TracedGraph()

        def layer(x):
            return lora_apply_(x * 2, x + 1, site, plan) + 1

        want = layer(x)
        assert torch.equal(torch.compile(layer, backend=graph, fullgraph=True)(x), want)
        assert graph.calls(torch.ops.loramux.lora_apply_) == 1
        torch.testing.assert_close(torch.compile(layer, backend=COMPILER, fullgraph=True)(x), want)

    def test_a_compiled_layer_follows_the_plan_in_its_buffer(self):
        site = stacked_site(64, [64], 8, torch.float32)
        x, y = operands(4, 64, site, torch.float32)
        plan = StepPlan(4, site.num_slots)

        def layer(y, x):
            return lora_apply_(y.clone(), x, site, plan)

        compiled = torch.compile(layer, backend=COMPILER, fullgraph=True)
        for slots in ([1, 0, 2, 1], [0, 3, 3, 0], [0, 0, 0, 0]):
            plan.update(slots, [1] * 4, [1.0] * 4)
            assert_accurate(compiled(y, x), y, x, site, slots)


class TestRefusals:
    """Nothing is written, and the text has both numbers."""

    @pytest.fixture
    def call(self):
        site = stacked_site(64, [48], 8, torch.float32)
        x, y = operands(4, 64, site, torch.float32)
        return y, x, site, StepPlan.for_rows([1, 0, 2, 3], site.num_slots)

    def test_C122_a_plan_for_other_rows(self, call):
        y, x, site, plan = call
        before = y.clone()
        with pytest.raises(PlanMismatch, match="got 3 rows, the plan is for 4"):
            lora_apply_(y[:3], x[:3], site, plan)
        with pytest.raises(RuntimeError, match="the plan is for 4 rows, the call has 3"):
            torch.ops.loramux.lora_apply_(
                y[:3], torch.zeros(24), x[:3], site.weights, site.table, plan.buffer, 0, [48], 8
            )  # fmt: skip
        assert torch.equal(y, before)

    def test_a_plan_over_more_slots_than_the_sites(self, call):
        y, x, site, _ = call
        before = y.clone()
        plan = StepPlan.for_rows([1, 0, 2, 1], site.num_slots + 1)
        with pytest.raises(PlanMismatch, match=r"over 5 slots, the site has 4"):
            lora_apply_(y, x, site, plan)
        assert torch.equal(y, before)

    @pytest.mark.parametrize("apply", [lora_apply_, apply_in_parts])
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda y, x: (y[:, :40], x), "y has 40 columns, the site's slices 48"),
            (lambda y, x: (y.double(), x), "y must be float32, float16 or bfloat16"),
            (lambda y, x: (y.bfloat16(), x), "y has another dtype than the weights"),
            (lambda y, x: (y, x.half()), "x has another dtype than the weights"),
            (lambda y, x: (y, x.T.contiguous().T), "x must have unit column stride, has 4"),
            (lambda y, x: (y[:2], x), "y has 2 rows, the input 4"),
            (lambda y, x: (y[:1].expand(4, -1), x), "rows of y overlap: stride 0 for 48 columns"),
            (lambda y, x: (y, x[0]), "x has 1 dimensions"),
        ],
    )
    def test_operands_that_do_not_fit(self, call, change, said, apply):
        y, x, site, plan = call
        before = y.clone()
        y_bad, x_bad = change(y, x)
        if x_bad.dim() == 1:
            plan = StepPlan.for_rows([1] * 64, site.num_slots)
        with pytest.raises(RuntimeError) as error:
            apply(y_bad, x_bad, site, plan)
        assert said in str(error.value)
        assert torch.equal(y, before)

    def test_an_input_of_other_columns_than_the_sites(self, call):
        y, x, site, plan = call
        before = y.clone()
        with pytest.raises(RuntimeError, match="x has 63 columns, the site 64"):
            lora_apply_(y, x[:, :63], site, plan)
        with pytest.raises(RuntimeError, match="site is not of lora_pack_site"):
            torch.ops.loramux.lora_apply_packed_(
                y, torch.zeros(32), x, plan.buffer, torch.zeros(8, dtype=torch.uint8)
            )
        assert torch.equal(y, before)

    def test_weights_off_their_alignment(self, call):
        y, x, site, plan = call
        before = y.clone()
        for i, weight in enumerate(site.weights):
            moved = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
            weights = [*site.weights[:i], moved, *site.weights[i + 1 :]]
            with pytest.raises(RuntimeError, match="weights must start on 16 bytes"):
                lora_apply_(y, x, dataclasses.replace(site, weights=weights), plan)
        assert torch.equal(y, before)

    @pytest.mark.parametrize("active", [torch.ones(2, dtype=torch.bool), torch.ones(1)])
    def test_what_is_no_flag(self, call, active):
        y, x, site, plan = call
        with pytest.raises(RuntimeError, match="active must be one bool on the CPU"):
            torch.ops.loramux.lora_apply_(
                y, torch.zeros(32), x, site.weights, site.table, plan.buffer, 0, [48], 8, active
            )

    def test_a_table_that_does_not_reach_the_entries(self, call):
        _, x, site, plan = call
        with pytest.raises(RuntimeError, match="entries 5 to 5 are not among the table's 1"):
            torch.ops.loramux.lora_shrink(
                torch.zeros(4, 1, 8), x, site.weights, site.table, plan.buffer, 5
            )

    @pytest.mark.parametrize("token", [50, -2, 2**31])
    def test_C052_a_token_outside_the_vocabulary(self, token):
        site = stacked_site(50, [48], 8, torch.float32, embedding=True)
        y = torch.zeros(2, 48)
        plan = StepPlan.for_rows([1, 1], site.num_slots)
        with pytest.raises(RuntimeError, match=f"token id {token} at row 1 is outside .* 50"):
            lora_embedding_(y, torch.tensor([3, token]), site, plan)
        assert not y.any()

    def test_a_vocabulary_that_the_weights_do_not_have(self):
        site = stacked_site(50, [48], 8, torch.float32, embedding=True)
        plan = StepPlan.for_rows([1, 2], site.num_slots)
        site = dataclasses.replace(site, in_features=1 << 60)
        with pytest.raises(RuntimeError, match=r"a vocabulary of .* ids is not in the weights"):
            lora_embedding_(torch.zeros(2, 48), torch.tensor([3, 10**9]), site, plan)

    @pytest.mark.parametrize("widths", [[2**62] * 3 + [2**62 + 48], [2**61 + 48] * 8])
    def test_widths_whose_sum_is_ys_by_overflow(self, call, widths):
        y, x, site, plan = call
        weights = [t for t in site.weights for _ in widths]
        table = site.table.expand(-1, len(widths), -1).contiguous()
        y = y.new_zeros(4, sum(widths) % 2**64)
        with pytest.raises(RuntimeError, match="slice 0 has width"):
            torch.ops.loramux.lora_apply_(
                y, torch.zeros(4096), x, weights, table, plan.buffer, 0, widths, 8
            )

    def test_an_entry_past_every_table(self, call):
        _, x, site, plan = call
        with pytest.raises(RuntimeError, match="are not among the table's 1"):
            torch.ops.loramux.lora_shrink(
                torch.zeros(4, 1, 8), x, site.weights, site.table, plan.buffer, 2**63 - 1
            )

    def test_a_rank_that_no_product_of_sizes_holds(self, call):
        y, x, site, plan = call
        with pytest.raises(RuntimeError, match=r"max_rank is .*; want 1 to 65536"):
            torch.ops.loramux.lora_apply_(
                y, torch.zeros(64), x, site.weights, site.table, plan.buffer, 0, [48], (1 << 61) + 8
            )

    def test_C052_minus_one_is_another_ranks_token(self):
        site = stacked_site(50, [48], 8, torch.float32, embedding=True)
        y = torch.zeros(2, 48)
        plan = StepPlan.for_rows([1, 1], site.num_slots)
        lora_embedding_(y, torch.tensor([-1, 3]), site, plan)
        assert not y[0].any()
        assert y[1].any()

    def test_a_slot_past_the_table(self):
        with pytest.raises(PlanMismatch, match="is 5, and there are 4 slots"):
            StepPlan.for_rows([1, 5], 4)

    def test_stacked_tensors_that_disagree(self):
        a, b = torch.zeros(2, 8, 64), torch.zeros(2, 48, 8)
        for bad_a, bad_b in [([a], [b[:1]]), ([a, a[:, :4]], [b, b]), ([a], []), ([a.mT], [b])]:
            with pytest.raises(SpecError):
                LoraSite.stacked(bad_a, bad_b)
        with pytest.raises(SpecError, match="slot 1 has rank 9; the tensors hold 0 to 8"):
            LoraSite.stacked([a], [b], ranks=[8, 9])
        with pytest.raises(SpecError, match="takes 28 bytes, no multiple of 16"):
            LoraSite.stacked([torch.zeros(2, 1, 7)], [torch.zeros(2, 8, 1)])
