"""Public fault reports about vocabularies, shards and copies, replayed through a pool.

Each test carries the number of its report in the project's collection of cases.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from common import random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, lora_apply_, lora_embedding_
from loramux.checkpoint import read_adapter_info
from loramux.config import LoraModuleRef
from loramux.errors import AdapterError

HIDDEN = 16


def pool_of(targets, path, layers=1, **placement) -> LoraPool:
    """One adapter; a module's name is its target's, after its layer's where there are several."""

    def place(name):
        layer, _, target = name.rpartition(".")
        return LoraModuleRef(target, int(layer or 0)) if target in targets else None

    spec = LoraSpec("lora", {"n"}, layers, targets, place, adapters={"a": path}, max_rank=16)
    return LoraPool.build(spec, **placement)


@pytest.mark.parametrize("vocab", [7, 40960, 131072])
def test_C049_C050_any_vocabulary_is_served_and_has_no_room_for_added_tokens(tmp_path, vocab):
    targets = {
        "embed": LoraTarget(vocab, (HIDDEN,), kind="embedding"),
        "head": LoraTarget(HIDDEN, (vocab,), per_segment=True),
    }
    embed_a, embed_b = random_pair(3, vocab, HIDDEN)
    head_a, head_b = random_pair(3, HIDDEN, vocab)
    path = save_adapter(tmp_path / "a", {"head": (head_a, head_b)})
    save_embedding(path, embed_a, embed_b)
    pool = pool_of(targets, path)
    ids = torch.tensor([0, vocab - 1, vocab // 2])
    x = torch.randn(1, HIDDEN)
    with pool.begin_step(LoraStep((Segment("a", len(ids)),))) as lease:
        embedded = lora_embedding_(
            torch.zeros(3, HIDDEN), ids, pool.site("embed", 0), lease.plan(1)
        )
        logits = lora_apply_(torch.zeros(1, vocab), x, pool.site("head", 0), lease.plan(0))
    torch.testing.assert_close(embedded, embed_a.T[ids] @ embed_b.T)
    torch.testing.assert_close(logits, x @ head_a.T @ head_b.T, rtol=1e-5, atol=1e-5)

    grown = save_adapter(tmp_path / "grown", {"head": random_pair(3, HIDDEN, vocab + 1)})
    both = rf"\[{vocab + 1}, 3\]; expected .*\[{vocab}, r\]"
    with pytest.raises(AdapterError, match=both):
        pool.spec.check_adapter("grown", read_adapter_info(grown, pool.spec))


def save_embedding(path: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add an embedding's factors, A ``[r, vocab]``, to an adapter's file."""
    file = f"{path}/adapter_model.safetensors"
    names = [f"base_model.model.embed.lora_embedding_{factor}" for factor in "AB"]
    save_file(load_file(file) | dict(zip(names, (a, b), strict=True)), file)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("parallel", ["column", "row"])
def test_C032_ranks_1_to_9_of_every_shard_add_up_to_the_dense_delta(tmp_path, world, parallel):
    targets = {"q": LoraTarget(HIDDEN, (24,), parallel=parallel)}
    x = torch.randn(5, HIDDEN)
    for rank in range(1, 10):
        a, b = random_pair(rank, HIDDEN, 24)
        path = save_adapter(tmp_path / str(rank), {"q": (a, b)})
        parts = []
        for tp in range(world):
            pool = pool_of(targets, path, rank=tp, world_size=world)
            local = targets["q"].shard(world)
            start = tp * local.in_features if parallel == "row" else 0
            columns = x[:, start : start + local.in_features].contiguous()
            y = torch.zeros(5, *local.out_slices)
            with pool.begin_step(LoraStep((Segment("a", 5),))) as lease:
                parts.append(lora_apply_(y, columns, pool.site("q", 0), lease.plan(1)))
            pool.close()
        whole = torch.cat(parts, 1) if parallel == "column" else sum(parts)
        torch.testing.assert_close(whole, x @ a.T @ b.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [0, 1])
def test_C052_padded_rows_of_a_vocabulary_shard_get_nothing(tmp_path, tp):
    """Ten tokens over two ranks, whose heads are padded from 5 rows to 8."""
    targets = {
        "embed": LoraTarget(10, (HIDDEN,), kind="embedding", parallel="row"),
        "head": LoraTarget(HIDDEN, (10,), per_segment=True, slice_align=(8,)),
    }
    embed_a, embed_b = random_pair(3, 10, HIDDEN)
    head_a, head_b = random_pair(3, HIDDEN, 10)
    path = save_adapter(tmp_path / "a", {"head": (head_a, head_b)})
    save_embedding(path, embed_a, embed_b)
    pool = pool_of(targets, path, rank=tp, world_size=2)
    mine = slice(5 * tp, 5 * tp + 5)
    x = torch.randn(1, HIDDEN)
    ids = torch.tensor([0, 4, -1])  # of this rank's own, -1 the other's
    with pool.begin_step(LoraStep((Segment("a", 3),))) as lease:
        embedded = lora_embedding_(
            torch.zeros(3, HIDDEN), ids, pool.site("embed", 0), lease.plan(1)
        )
        logits = lora_apply_(torch.zeros(1, 8), x, pool.site("head", 0), lease.plan(0))
        with pytest.raises(RuntimeError, match="token id 5 at row 0 is outside"):
            lora_embedding_(embedded, ids + 5, pool.site("embed", 0), lease.plan(1))
    torch.testing.assert_close(embedded[:2], embed_a.T[mine][ids[:2]] @ embed_b.T)
    torch.testing.assert_close(logits[:, :5], x @ head_a.T @ head_b[mine].T)
    assert not embedded[2].any()
    assert not logits[:, 5:].any()


class CopiesInto(TorchDispatchMode):
    """Counts the copies whose destination is one of some storages."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].untyped_storage().data_ptr() in self.storages
        return func(*args, **(kwargs or {}))


def test_C121_installing_takes_two_copies_whatever_the_layers(tmp_path):
    """One of the image and one of its row of the slot table, fewer than the layers there are."""
    layers = 12
    targets = {name: LoraTarget(HIDDEN, (HIDDEN,)) for name in "qv"}
    pairs = {
        f"{layer}.{name}": random_pair(4, HIDDEN, HIDDEN, layer)
        for layer in range(layers)
        for name in "qv"
    }
    pool = pool_of(targets, save_adapter(tmp_path / "a", pairs), layers)
    with (
        CopiesInto(pool._arena.weights, pool._arena.table) as copies,
        pool.begin_step(LoraStep((Segment("a", 1),))),
    ):
        pass
    assert copies.count == 2
    for layer in (0, layers - 1):
        held = next(pool.site("v", layer).slices(1))
        assert torch.equal(held.a[:4], pairs[f"{layer}.v"][0])
