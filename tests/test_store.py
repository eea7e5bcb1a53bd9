"""One pass from a file to an image: the same bytes and digest however they are come by."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from checkpoints import HIDDEN, INNER, VOCAB, factors, llama_spec, safetensors_bytes, write
from loramux import adapter_files
from loramux.checkpoint import place_modules, read_lora_file
from loramux.errors import AdapterError
from loramux.identity import adapter_digest, read_adapter_digest
from loramux.site import table_row
from loramux.store import LoraImage, LoraStore, SlotLayout, pack_image

Q0, V1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
EMBED = "base_model.model.model.embed_tokens.lora_embedding_"


def llama_tensors():
    """Separate, packed, row-parallel, embedding and LM head modules, of mixed ranks and dtypes."""
    tensors = {
        **factors(Q0, 4, HIDDEN, 64, seed=1),
        **factors(V1, 1, HIDDEN, 32, seed=2),
        **factors("model.layers.1.mlp.down_proj", 8, INNER, HIDDEN, seed=3),
        **factors("model.layers.0.mlp.up_proj", 5, HIDDEN, INNER, seed=4),
        **factors("lm_head", 16, HIDDEN, VOCAB, seed=5),
    }
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    tensors |= factors("model.layers.0.self_attn.o_proj", 3, HIDDEN, HIDDEN, seed=6)
    tensors[f"{EMBED}A"], tensors[f"{EMBED}B"] = torch.randn(4, VOCAB), torch.randn(HIDDEN, 4)
    return tensors


def expected_bytes(adapter, layout):
    """The image as its definition has it, from torch alone."""
    placed = place_modules(adapter, layout.spec)
    blocks = []
    for site in layout.sites:
        for factor in (0, 1):
            for i in range(site.local.num_slices):
                if (part := placed.get((site.target, site.layer, i))) is None:
                    continue
                pair = site.declared.shard_pair(i, part.a, part.b, layout.rank, layout.world_size)
                block = pair[factor]
                if site.local.kind == "embedding" and factor == 0:
                    block = block.T
                columns = factor == 1 or site.local.kind == "embedding"
                missing = -block.shape[columns] % 8
                block = F.pad(block, (0, missing) if columns else (0, 0, 0, missing))
                flat = block.to(layout.dtype).contiguous().flatten().view(torch.uint8)
                blocks.append(F.pad(flat, (0, -len(flat) % 128)))
    return torch.cat(blocks)


@pytest.mark.parametrize("run_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_image_is_its_definition_however_its_bytes_are_come_by(
    tmp_path, monkeypatch, dtype, world_size, run_bytes
):
    monkeypatch.setattr("loramux.store._RUN_BYTES", run_bytes)
    path = write(tmp_path, llama_tensors())
    eager = read_lora_file(path)
    digest = adapter_digest(eager)
    for rank in range(world_size):
        layout = SlotLayout(llama_spec(), dtype, rank, world_size)
        want = expected_bytes(eager, layout)
        read_first = SlotLayout(llama_spec(convert_keys=dict), dtype, rank, world_size)
        for image, found in (
            (LoraStore(layout).read(path), digest),
            (LoraStore(layout).read(path, digest=False), b""),
            (LoraStore(read_first).read(path), digest),
            (LoraStore(read_first).read(path, digest=False), b""),
            (pack_image(eager, layout), digest),
        ):
            assert torch.equal(image.data, want)
            assert image.digest == found


def test_tensors_in_memory_may_have_any_strides(tmp_path):
    adapter = read_lora_file(write(tmp_path, llama_tensors()))
    layout = SlotLayout(llama_spec(), torch.float32, 1, 2)
    want = pack_image(adapter, layout)
    for name, module in adapter.modules.items():
        object.__setattr__(module, "a", module.a.T.contiguous().T)
        object.__setattr__(module, "b", torch.stack([module.b, module.b], 2)[:, :, 0])
        assert not module.b.is_contiguous(), name
    for digest in (True, False):
        got = pack_image(adapter, layout, digest=digest)
        assert torch.equal(got.data, want.data)
        assert got.digest == (want.digest if digest else b"")


def test_without_a_digest_a_rank_reads_its_own_bytes_alone(tmp_path, monkeypatch):
    tensors = {
        **factors("model.layers.0.mlp.gate_proj", 4, HIDDEN, INNER),
        **factors("model.layers.0.mlp.down_proj", 4, INNER, HIDDEN),
    }
    path = write(tmp_path, tensors)
    read, fill = [], adapter_files._fill

    def count(memory, *where):
        read.append(len(memory))
        fill(memory, *where)

    monkeypatch.setattr(adapter_files, "_fill", count)
    mine = LoraStore(SlotLayout(llama_spec(), torch.float32, 1, 4))
    replicated, sharded = 4 * 4 * (HIDDEN + HIDDEN), 4 * 4 * (INNER + INNER)
    mine.read(path, digest=False)
    assert sum(read) == replicated + sharded // 4
    read.clear()
    mine.read(path)
    assert read == [replicated + sharded], "what lies together is read at once"


def test_a_registration_without_a_digest_takes_none(tmp_path):
    path = write(tmp_path, llama_tensors())
    spec = llama_spec()
    store = LoraStore(SlotLayout(spec, torch.float32))
    assert store.get(spec.add_adapter("a", path)).digest == b""
    digest = read_adapter_digest(spec, path)
    assert store.get(spec.add_adapter("a", path, digest)).digest == digest
    with pytest.raises(AdapterError, match="the deployment expects 0101"):
        store.get(spec.add_adapter("a", path, b"\1" * 32))


def test_an_image_that_nobody_serves_makes_room_first(tmp_path):
    path = write(tmp_path, llama_tensors())
    spec = llama_spec(cpu_capacity=2)
    store = LoraStore(SlotLayout(spec, torch.float32))
    store.get(spec.add_adapter("a", path))
    replaced = spec.add_adapter("b", path)
    image = store.get(replaced)
    other = spec.add_adapter("b", path, read_adapter_digest(spec, path))
    assert not spec.serves(replaced)
    store.put(other, image)
    assert store.names == ["a", "b"]


def test_an_adapters_error_goes_from_process_to_process(tmp_path):
    with pytest.raises(AdapterError) as error:
        read_lora_file(str(tmp_path))
    for again in (pickle.loads(pickle.dumps(error.value)), copy.copy(error.value)):
        assert (type(again), str(again)) == (AdapterError, str(error.value))
        assert (again.path, again.problems) == (error.value.path, error.value.problems)


def test_a_bad_value_in_another_ranks_part_is_refused_with_the_digest(tmp_path):
    tensors = llama_tensors()
    for module in (Q0, "lm_head"):
        tensors[f"base_model.model.{module}.lora_B.weight"][-1, 0] = math.nan
    path = write(tmp_path, tensors)
    for rank in range(2):
        store = LoraStore(SlotLayout(llama_spec(), torch.float32, rank, 2))
        with pytest.raises(AdapterError) as error:
            store.read(path)
        assert len(error.value.problems) == 2
        for module in (Q0, "lm_head"):
            assert f"B of module {module!r} has a NaN or Inf" in str(error.value)
    mine = LoraStore(SlotLayout(llama_spec(), torch.float32, 1, 2))
    with pytest.raises(AdapterError, match=r"at element \d+ of this rank's part"):
        mine.read(path, digest=False)
    LoraStore(SlotLayout(llama_spec(), torch.float32, 0, 2)).read(path, digest=False)


def test_modules_of_another_spec_are_checked_and_digested(tmp_path):
    tensors = {**factors(Q0, 4, HIDDEN, 64), **factors("vision.q")}
    path = write(tmp_path, tensors)
    layout = SlotLayout(llama_spec(ignored_modules=lambda n: n == "vision.q"), torch.float32)
    assert LoraStore(layout).read(path).digest == adapter_digest(read_lora_file(path))
    tensors["base_model.model.vision.q.lora_A.weight"][0, 0] = math.inf
    with pytest.raises(AdapterError, match=r"A of module 'vision.q' has a NaN or Inf"):
        LoraStore(layout).read(write(tmp_path, tensors))


def test_a_file_whose_tensors_are_not_aligned_is_read(tmp_path):
    """As no writer of safetensors does, but the format allows."""
    plain = factors(Q0, 4, HIDDEN, 64)
    alpha = f"base_model.model.{Q0}.alpha"
    header = {alpha: {"dtype": "F16", "shape": [], "data_offsets": [0, 2]}}
    data = torch.tensor(2.0, dtype=torch.float16).numpy().tobytes()
    for name, tensor in plain.items():
        start, data = len(data), data + tensor.numpy().tobytes()
        entry = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [start, len(data)]}
        header[name] = entry
    (tmp_path / "odd.safetensors").write_bytes(safetensors_bytes(json.dumps(header).encode(), data))
    save_file(plain | {alpha: torch.tensor(2.0)}, tmp_path / "even.safetensors")
    layout = SlotLayout(llama_spec(), torch.float32)
    odd, even = (
        LoraStore(layout).read(str(tmp_path / f"{name}.safetensors")) for name in ("odd", "even")
    )
    assert torch.equal(odd.data, even.data)
    assert odd.digest == even.digest
    assert odd.entries == even.entries
    assert odd.entries[1][3] == 2.0 / 4  # the embedding's entry comes first, then q's


def test_a_loads_threads_work_at_once_and_within_each_other(monkeypatch):
    monkeypatch.setattr(adapter_files, "_num_threads", lambda: 2)
    both = threading.Barrier(2, timeout=20)

    def nested(i):
        both.wait()  # every thread that there is works on an item
        return adapter_files.in_parallel(lambda j: (i, j), range(3))

    with ThreadPoolExecutor(1) as only:
        monkeypatch.setattr(adapter_files, "_threads", lambda: only)
        results = adapter_files.in_parallel(nested, range(2))
    assert results == [[(i, j) for j in range(3)] for i in range(2)]


@pytest.mark.parametrize("bad", range(2))
def test_an_error_in_one_thread_is_raised_when_all_are_done(monkeypatch, bad):
    monkeypatch.setattr(adapter_files, "_num_threads", lambda: 2)
    both, done = threading.Barrier(2, timeout=20), []

    def work(i):
        both.wait()
        if i == bad:
            raise OSError(f"item {i}")
        time.sleep(0.05)
        done.append(i)

    with pytest.raises(OSError, match=f"item {bad}"):
        adapter_files.in_parallel(work, range(2))
    assert done == [1 - bad]


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(adapter_files, "_num_threads", lambda: 2)

    def meet():
        both = threading.Barrier(2, timeout=20)
        adapter_files.in_parallel(lambda _: both.wait(), range(2))

    meet()
    child = os.fork()
    if child == 0:
        try:
            meet()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("base", [0, 7, 2**31 - 3, 2**31, 2**32 - 6])
def test_a_table_row_counts_from_where_the_image_lies(base):
    entries = [(0, 3, 8, 0.5), (5, 2, 16, -1.0), (4, 4, 0, 0.0)]
    image = LoraImage(torch.empty(0), entries, b"")
    placed = [(base + a, base + b, rank, scale) for a, b, rank, scale in entries]
    assert torch.equal(image.table_row(base), table_row(placed))
    assert torch.equal(image.table_row(0), table_row(entries)), "the row before is as it was"


def test_a_load_that_breaks_off_late_is_not_waited_for(tmp_path):
    spec = llama_spec(adapters={"a": write(tmp_path, llama_tensors())})
    store, registration = LoraStore(SlotLayout(spec, torch.float32)), spec.registration("a")
    with (
        mock.patch.object(store, "put", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        store.get(registration)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(store.get, registration).result(20).data.numel() > 0
