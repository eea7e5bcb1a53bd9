"""Sharding: for every world size, the ranks' deltas put together are the unsharded delta."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loramux import LoraTarget
from loramux.errors import SpecError

WORLDS = (1, 2, 4, 8)


@st.composite
def targets(draw: st.DrawFn) -> LoraTarget:
    units = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24]), min_size=1, max_size=3)))
    head = draw(st.sampled_from([1, 3, 8]))
    align = draw(st.one_of(st.none(), st.just(tuple(8 for _ in units))))
    return LoraTarget(
        in_features=draw(st.sampled_from([8, 16, 24])),
        out_slices=tuple(n * head for n in units),
        parallel=draw(st.sampled_from(["column", "row", "none"])),
        slice_names=tuple("qkv"[: len(units)]),
        slice_units=units,
        slice_align=align,
    )


@given(targets(), st.sampled_from(WORLDS), st.integers(1, 4), st.randoms())
def test_the_ranks_deltas_make_the_unsharded_delta(target, world, rank, random):
    torch.manual_seed(random.randrange(2**31))
    x = torch.randn(3, target.in_features, dtype=torch.float64)
    local = target.shard(world)
    for i, width in enumerate(target.out_slices):
        a = torch.randn(rank, target.in_features, dtype=torch.float64)
        b = torch.randn(width, rank, dtype=torch.float64)
        whole = x @ a.T @ b.T
        rebuilt = torch.zeros_like(whole)
        for tp in range(world):
            start, size = target.input_cols(tp, world)
            row, rows = target.slice_rows(i, tp, world)
            local_a, local_b = target.shard_pair(i, a, b, tp, world)
            assert local_a.shape == (rank, local.in_features)
            assert local_b.shape == (local.out_slices[i], rank)
            part = x[:, start : start + size] @ local_a.T @ local_b.T
            assert (part[:, rows:] == 0).all(), "alignment rows add nothing"
            if target.parallel == "row":
                rebuilt += part[:, :rows]
            else:
                rebuilt[:, row : row + rows] = part[:, :rows]
        torch.testing.assert_close(rebuilt, whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (24, 8), (24, 2)])
@pytest.mark.parametrize("world", WORLDS)
def test_C055_C056_C058_C065_kv_heads_below_the_ranks_are_replicated(heads, kv_heads, world):
    dim = 64
    target = LoraTarget(
        heads * dim,
        (heads * dim, kv_heads * dim, kv_heads * dim),
        slice_names=("q", "k", "v"),
        slice_units=(heads, kv_heads, kv_heads),
    )
    parts = min(kv_heads, world)
    for tp in range(world):
        assert target.slice_rows(0, tp, world) == (tp * heads // world * dim, heads // world * dim)
        owned = tp * parts // world
        for kv in (1, 2):
            size = kv_heads // parts * dim
            assert target.slice_rows(kv, tp, world) == (owned * size, size)


def test_C059_fused_rows_are_split_by_slice_before_rank():
    target = LoraTarget(
        4, (4, 2, 2), slice_names=("q", "k", "v"), slice_packs=(("qkv", tuple("qkv")),)
    )
    assert target.module_slices("qkv") == (0, 1, 2)
    assert [target.slice_rows(i, 1, 2) for i in range(3)] == [(2, 2), (1, 1), (1, 1)]


def test_row_grouping_names_the_rows_a_linear_sees():
    assert LoraTarget(4, (4,)).row_grouping == 1
    assert LoraTarget(4, (4,), token_fold=4).row_grouping == 4
    assert LoraTarget(4, (4,), per_segment=True).row_grouping == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(in_features=0, out_slices=(4,)), "in_features=0"),
        (dict(in_features=4, out_slices=()), "out_slices=()"),
        (dict(in_features=4, out_slices=(4, 4)), "2 slices need slice_names"),
        (dict(in_features=4, out_slices=(4,), slice_names=("a", "b")), "2 values for 1 slices"),
        (dict(in_features=4, out_slices=(5,), slice_units=(2,)), "5 rows, not 2 equal units"),
        (dict(in_features=4, out_slices=(4,), slice_align=(0,)), "must be positive"),
        (dict(in_features=4, out_slices=(4,), parallel="both"), "'both'"),
        (dict(in_features=4, out_slices=(4,), kind="conv"), "'conv'"),
        (dict(in_features=4, out_slices=(4,), token_fold=0), "token_fold=0"),
        (dict(in_features=4, out_slices=(4,), token_fold=2, per_segment=True), "per_segment=True"),
        (
            dict(in_features=4, out_slices=(4,), slice_names=("q",), slice_packs=(("p", ("k",)),)),
            "slice_packs['p'] names ['k']",
        ),
    ],
)
def test_a_contradictory_declaration_is_refused(fields, said):
    with pytest.raises(SpecError) as error:
        LoraTarget(**fields)
    assert said in str(error.value)


def test_a_split_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(SpecError, match="7 input columns do not split over 2 ranks"):
        LoraTarget(7, (4,), parallel="row").input_cols(0, 2)
    with pytest.raises(SpecError, match="slice 0 has 6 units, which neither split over 4"):
        LoraTarget(8, (12,), slice_units=(6,)).slice_rows(0, 0, 4)
    with pytest.raises(SpecError, match="rank 2 of 2"):
        LoraTarget(8, (12,)).slice_rows(0, 2, 2)


def test_a_shard_id_that_names_no_slice_is_refused():
    fused = LoraTarget(4, (4, 4), slice_names=("gate", "up"))
    assert fused.slice_index("up") == 1
    for shard_id in (None, "down"):
        with pytest.raises(SpecError, match="is none of the target's slices"):
            fused.slice_index(shard_id)
