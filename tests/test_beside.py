"""``lora_start`` and ``lora_finish_``: deltas made beside the GEMM whose output takes them."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from common import COMPILER, TracedGraph
from loramux import PlanMismatch, StepPlan, lora_apply_, lora_finish_, lora_start
from loramux.ops import BESIDE_ROWS, beside_memory
from test_ops import DEVICES, DTYPES, SLOTS, operands, stacked_site

REPLAYS = 300
FIVE_MS = 10_000_000  # cycles at about 2 GHz


def is_beside(y, site):
    """Whether csrc/cuda/beside.cu serves the step; ``lora_finish_`` does all of any other."""
    return (
        y.is_cuda
        and torch.cuda.get_device_capability() >= (9, 0)
        and site.backend == "native"
        and y.dtype != torch.float32
        and len(y) <= BESIDE_ROWS
        and site.max_rank <= 64
        and min(len(y), site.num_slots - 1) * site.max_rank <= 512
        and all(width % 8 == 0 for width in site.widths)
    )


def added(y, x, site, plan):
    """What the halves are to give: beside the GEMM a delta in y's dtype, and then the sum."""
    if not is_beside(y, site):
        return lora_apply_(y.clone(), x, site, plan)
    delta = lora_apply_(torch.zeros_like(y), x, site, plan)
    return torch.where(delta == 0, y, (y.float() + delta.float()).to(y.dtype))


def assert_same_bits(got, want):
    bits = {2: torch.int16, 4: torch.int32}[got.itemsize]
    assert torch.equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [[64], [48, 8, 8], [33], [4096, 1024]], ids=str)
@pytest.mark.parametrize(
    ("rank", "backend"),
    [(8, "native"), (16, "native"), (24, "native"), (64, "native"), (72, "native"), (16, "torch")],
)
def test_every_row_gets_its_delta_and_base_rows_keep_their_bits(
    widths, rank, dtype, device, backend
):
    site = stacked_site(256, widths, rank, dtype, device, backend=backend)
    x, y = operands(len(SLOTS), 256, site, dtype, device)
    y[1] = -0.0  # a base row, whose sign an added zero would change
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    want = added(y, x, site, plan)
    assert (want != y).any()
    got = y.clone()
    assert lora_finish_(got, lora_start(x, site, plan)) is got
    assert_same_bits(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 9, BESIDE_ROWS, BESIDE_ROWS + 1, 300])
def test_of_any_number_of_rows(rows, device):
    site = stacked_site(64, [48], 8, torch.bfloat16, device)
    slots = [i // 50 % 4 for i in range(rows)]
    x, y = operands(rows, 64, site, torch.bfloat16, device)
    plan = StepPlan.for_rows(slots, site.num_slots, device)
    want = added(y, x, site, plan)
    assert_same_bits(lora_finish_(y.clone(), lora_start(x, site, plan)), want)


@pytest.mark.parametrize("device", DEVICES)
def test_y_may_be_a_column_slice_and_x_strided(device):
    dtype = torch.bfloat16
    site = stacked_site(64, [48], 8, dtype, device)
    x, y = operands(len(SLOTS), 64, site, dtype, device)
    wide_x, wide_y = torch.full((2, len(SLOTS), 104), float("nan"), dtype=dtype, device=device)
    wide_x[:, 8:72], wide_y[:, 5:53] = x, y
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    want = added(y, x, site, plan)
    lora_finish_(wide_y[:, 5:53], lora_start(wide_x[:, 8:72], site, plan))
    assert torch.equal(wide_y[:, 5:53], want)
    assert wide_y[:, :5].isnan().all()
    assert wide_y[:, 53:].isnan().all()


def test_rows_that_are_not_the_plans_are_refused():
    site = stacked_site(64, [48], 8, torch.float32)
    x, y = operands(len(SLOTS), 64, site, torch.float32)
    plan = StepPlan.for_rows(SLOTS, site.num_slots)
    with pytest.raises(PlanMismatch):
        lora_start(x[1:], site, plan)
    started, before = lora_start(x, site, plan), y.clone()
    with pytest.raises(PlanMismatch):
        lora_finish_(y[1:], started)
    assert torch.equal(y, before)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda delta, scratch: (delta[:, :40], scratch), "delta contiguous"),
        (lambda delta, scratch: (delta[:, :40].contiguous(), scratch), "delta has 40 columns"),
        (lambda delta, scratch: (delta.float(), scratch), "delta has another dtype"),
        (lambda delta, scratch: (delta, scratch[: 8 * len(SLOTS) * 8 - 1]), "lora_start needs"),
    ],
)
def test_memory_that_does_not_fit_is_refused_by_both_halves(change, said):
    site = stacked_site(64, [48], 8, torch.bfloat16, "cuda")
    x, y = operands(len(SLOTS), 64, site, torch.bfloat16, "cuda")
    plan, before = StepPlan.for_rows(SLOTS, site.num_slots, "cuda"), y.clone()
    memory = change(*beside_memory(x, site))
    where = (x, site.weights, site.table, plan.buffer, 0, site.widths, 8)
    for call in (
        torch.ops.loramux.lora_start,
        functools.partial(torch.ops.loramux.lora_finish_, y),
    ):
        with pytest.raises(RuntimeError, match=said):
            call(*memory, *where)
    assert torch.equal(y, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile_sees_two_opaque_nodes(dtype, device):
    site = stacked_site(64, [64], 8, dtype, device)
    x, _ = operands(len(SLOTS), 64, site, dtype, device)
    plan = StepPlan.for_rows(SLOTS, site.num_slots, device)
    graph = TracedGraph()

    def layer(x):
        x = x + 1
        started = lora_start(x, site, plan)
        return lora_finish_(x * 2, started) + 1

    want = layer(x)
    assert torch.equal(torch.compile(layer, backend=graph, fullgraph=True)(x), want)
    ops = torch.ops.loramux
    assert [graph.calls(op) for op in (ops.lora_start, ops.lora_finish_)] == [1, 1]
    torch.testing.assert_close(torch.compile(layer, backend=COMPILER, fullgraph=True)(x), want)


@pytest.mark.cuda
def test_one_capture_serves_every_step():
    widths, rows, rng = [[512, 128], [512]], BESIDE_ROWS, random.Random(0)
    sites = [stacked_site(512, w, 16, torch.bfloat16, "cuda", slots=8) for w in widths]
    weights = [torch.randn(sum(w), 512).to("cuda", torch.bfloat16) / 23 for w in widths]
    first = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    plan = StepPlan(rows, 9, "cuda")

    def step():
        """Each site's input and output; the second reads what the first has just made."""
        x, calls = first, []
        for site, weight in zip(sites, weights, strict=True):
            started = lora_start(x, site, plan)
            y = lora_finish_(x @ weight.T, started)
            del started  # its memory may be the next site's
            calls.append((x, y))
            x = y[:, :512]
        return calls

    def replan():
        slots = [rng.choice([0, 0, *rng.sample(range(1, 9), 3)]) for _ in range(rows)]
        plan.update(slots, [1] * rows, [1.0] * rows)

    replan()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    assert all(is_beside(y, site) for (_, y), site in zip(replayed, sites, strict=True))
    for _ in range(REPLAYS):
        first.normal_()
        replan()
        graph.replay()
        for (x, got), (_, eager), site, weight in zip(
            replayed, step(), sites, weights, strict=True
        ):
            assert torch.equal(got, eager)
            assert torch.equal(got, added(x @ weight.T, x, site, plan))


@pytest.mark.cuda
def test_what_writes_x_late_is_waited_for_on_any_stream():
    site = stacked_site(512, [512], 16, torch.bfloat16, "cuda")
    x, y = operands(len(SLOTS), 512, site, torch.bfloat16, "cuda")
    plan = StepPlan.for_rows(SLOTS, site.num_slots, "cuda")
    want, late = added(y, x, site, plan), torch.zeros_like(x)
    lora_finish_(y.clone(), lora_start(late, site, plan))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(FIVE_MS)
        late.copy_(x)
        started, got = lora_start(late, site, plan), y.clone()
        torch.cuda._sleep(FIVE_MS)
        lora_finish_(got, started)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
