"""Public fault reports about indices, sizes and shards, replayed through the operators and a pool.

Each test carries the number of its report in the project's collection of cases.
"""

from __future__ import annotations

import pytest
import torch

from common import random_pair, save_adapter
from loramux import (
    LoraPool,
    LoraSite,
    LoraSpec,
    LoraStep,
    LoraTarget,
    PlanMismatch,
    Segment,
    StepPlan,
    lora_apply_,
)
from loramux.checkpoint import read_lora_file
from loramux.config import LoraModuleRef
from loramux.errors import AdapterError
from loramux.identity import adapter_digest
from test_ops import DEVICES, assert_accurate, operands, stacked_site


def apply_and_check(site, slots, rows, dtype, device):
    """One call of segments ``rows`` of ``slots``, against the definition."""
    slot_of_row = [slot for slot, count in zip(slots, rows, strict=True) for _ in range(count)]
    x, y = operands(len(slot_of_row), site.in_features, site, dtype, device)
    plan = StepPlan(len(slot_of_row), site.num_slots, device)
    plan.update(slots, rows, [1.0] * len(slots))
    assert_accurate(lora_apply_(y.clone(), x, site, plan), y, x, site, slot_of_row)


def one_row_of_many(rows, width, out, slots, device):
    """A call of ``rows`` rows whose last alone has an adapter, in the last of ``slots`` slots.

    What no row needs is zeros that were never written: on the CPU it takes no memory.
    """
    dtype, rank = torch.bfloat16, 8
    a = torch.zeros(slots, rank, width, dtype=dtype, device=device)
    b = torch.zeros(slots, out, rank, dtype=dtype, device=device)
    x = torch.zeros(rows, width, dtype=dtype, device=device)
    y = torch.zeros(rows, out, dtype=dtype, device=device)
    a[-1] = torch.randn(rank, width) / width**0.5
    b[-1] = torch.randn(out, rank)
    x[-1] = torch.randn(width)
    plan = StepPlan(rows, slots + 1, device)
    plan.update([0, slots], [rows - 1, 1], [1.0, 1.0])
    lora_apply_(y, x, LoraSite.stacked([a], [b]), plan)
    want = x[-1].double() @ a[-1].double().T @ b[-1].double().T
    assert (y[-1].double() - want).norm() <= 5e-3 * want.norm()
    base = y[:-1]
    assert not base[:9].any()
    assert not base[-9:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_C067_the_last_of_87384_rows_of_12288_columns(device):
    one_row_of_many(87384, 16, 12288, 1, device)


@pytest.mark.parametrize("device", DEVICES)
def test_C068_rows_of_x_and_slots_past_two_to_the_31_elements(device):
    one_row_of_many(87384, 24832, 16, 1, device)  # 2.17e9 elements of x
    one_row_of_many(2, 131072, 16, 2100, device)  # 2.2e9 elements of A


@pytest.mark.parametrize("device", DEVICES)
def test_C070_a_slot_past_the_last_or_below_the_first_reads_no_neighbour(device):
    site = stacked_site(64, [32], 8, torch.float32, device)
    x, y = operands(1, 64, site, torch.float32, device)
    plan = StepPlan(1, site.num_slots, device)
    for slot in (site.num_slots, 2**31 - 1, 2**31):
        with pytest.raises(PlanMismatch, match=str(slot)):
            plan.update([slot], [1], [1.0])
    for slot in (-1, -2, -(2**31)):
        plan.update([slot], [1], [1.0])
        assert torch.equal(lora_apply_(y.clone(), x, site, plan), y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_C073_three_rows_of_64_to_32_in_two_segments(dtype, device):
    apply_and_check(stacked_site(64, [32], 8, dtype, device), [1, 2], [1, 2], dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [[1, 200], [200, 1], [1, 66, 1]])
def test_C074_a_short_segment_beside_a_long_one(rows, device):
    site = stacked_site(72, [264], 16, torch.bfloat16, device)
    apply_and_check(site, [1, 2, 3][: len(rows)], rows, torch.bfloat16, device)


@pytest.mark.parametrize("device", DEVICES)
def test_C076_sites_of_other_widths_and_ranks_take_turns(device):
    sites = [
        stacked_site(64, [out], rank, torch.bfloat16, device)
        for out, rank in ((4096, 16), (32000, 16), (4096, 64))
    ]
    for site in sites * 2:
        apply_and_check(site, [1, 0, 2], [2, 1, 3], torch.bfloat16, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 7, 33, 12289, 29568])
def test_C077_C079_widths_that_are_no_multiple_of_a_tile(width, device):
    for dtype in (torch.float32, torch.bfloat16):
        apply_and_check(
            stacked_site(width, [33, 7], 8, dtype, device), [1, 2], [3, 9], dtype, device
        )
        apply_and_check(stacked_site(33, [width], 8, dtype, device), [1, 2], [3, 9], dtype, device)


def ranks_of(targets, path, world_size, names, digests=None):
    """A pool for every tensor-parallel rank; a module's name is its target's, or a slice's."""
    specs = [
        LoraSpec(
            "lora",
            {"n"},
            1,
            targets,
            names.get,
            adapters={"a": path},
            adapter_digests=digests or {},
            max_rank=16,
        )
        for _ in range(world_size)
    ]
    return [
        LoraPool.build(spec, rank=rank, world_size=world_size) for rank, spec in enumerate(specs)
    ]


def test_C061_a_row_parallel_shard_keeps_the_tensors_rank(tmp_path):
    a, b = random_pair(8, 64, 24)
    path = save_adapter(tmp_path / "a", {"o": (a, b)}, r=4, rank_pattern={"o": 8}, lora_alpha=8)
    targets = {"o": LoraTarget(64, (24,), parallel="row")}
    x = torch.randn(3, 64)
    y = torch.zeros(3, 24)
    for rank, pool in enumerate(ranks_of(targets, path, 4, {"o": LoraModuleRef("o", 0)})):
        with pool.begin_step(LoraStep((Segment("a", 3),))) as lease:
            lora_apply_(
                y, x[:, 16 * rank : 16 * rank + 16].contiguous(), pool.site("o", 0), lease.plan(1)
            )
    torch.testing.assert_close(y, x @ a.T @ b.T, rtol=1e-5, atol=1e-5)


def test_C062_a_merged_target_takes_two_dimensional_factors(tmp_path):
    pairs = {name: random_pair(4, 16, 32, seed) for seed, name in enumerate(("gate", "up"))}
    path = save_adapter(tmp_path / "a", pairs)
    targets = {"gate_up": LoraTarget(16, (32, 32), slice_names=("gate", "up"))}
    names = {name: LoraModuleRef("gate_up", 0, name) for name in pairs}
    x = torch.randn(3, 16)
    parts = []
    for pool in ranks_of(targets, path, 2, names):
        with pool.begin_step(LoraStep((Segment("a", 3),))) as lease:
            y = lora_apply_(torch.zeros(3, 32), x, pool.site("gate_up", 0), lease.plan(1))
        parts.append(y.view(3, 2, 16))
    got = torch.cat(parts, 2)
    for i, (a, b) in enumerate(pairs.values()):
        torch.testing.assert_close(got[:, i], x @ a.T @ b.T, rtol=1e-5, atol=1e-5)


def test_C064_ranks_that_would_load_different_weights_are_refused(tmp_path):
    ours = save_adapter(tmp_path / "ours", {"o": random_pair(4, 16, 16, seed=1)})
    theirs = save_adapter(tmp_path / "theirs", {"o": random_pair(4, 16, 16, seed=2)})
    digest = adapter_digest(read_lora_file(ours))
    targets = {"o": LoraTarget(16, (16,), parallel="row")}
    names = {"o": LoraModuleRef("o", 0)}
    step = LoraStep((Segment("a", 1),))
    ranks_of(targets, ours, 2, names, {"a": digest})[0].begin_step(step).release()
    with pytest.raises(AdapterError, match=digest.hex()):
        ranks_of(targets, theirs, 2, names, {"a": digest})[1].begin_step(step)
