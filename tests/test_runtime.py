"""Loading, unloading and replacing adapters while requests run, and what their caches hang from."""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from checkpoints import VOCAB, tiny_llama, write_with_peft
from loramux import (
    LoraPool,
    LoraReqConfig,
    LoraRuntime,
    LoraStep,
    Segment,
    adapter_prefix_root,
    lora_apply_,
    lora_specs,
    module_lora_spec,
    prefix_block_keys,
    read_adapter_digest,
)
from loramux.errors import AdapterError, PoolExhausted, SpecError, UnknownAdapter
from loramux.generate import Row, greedy
from multimodal import VISION_FC, VISION_Q, WIDTH, Q, TwoSpecs, write

KEYS = ("lora", "vision_lora")
SITES = {"lora": ("q_proj", 1), "vision_lora": ("q_proj", 0)}  # Q and VISION_Q


@pytest.fixture
def deploy():
    """A runtime over two specs; ``block`` is the deployment's, ``own`` the vision tower's."""
    made = []

    def make(own=None, **block):
        model = TwoSpecs()
        config = {"resources": {"lora": block, "vision_lora": own}}
        made.append(LoraRuntime.build(lora_specs(model, config)))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()


@pytest.fixture
def path(tmp_path):
    def make(name, seed=0, modules=(Q, VISION_Q)):
        return write(tmp_path / name, *modules, seed=seed)

    return make


def admit(runtime, name):
    return runtime.admit(LoraReqConfig(name))


def delta(runtime, hold, key="lora"):
    """What one request's adapter adds to a row of ones, through one spec's pool."""
    pool = runtime.pools[key]
    with pool.begin_step(LoraStep((hold.segment(key, 1),))) as lease:
        y, x = torch.zeros(1, WIDTH), torch.ones(1, WIDTH)
        return lora_apply_(y, x, pool.site(*SITES[key]), lease.plan(1))[0]


def served(runtime, name, key="lora"):
    with admit(runtime, name) as hold:
        return delta(runtime, hold, key)


def state(runtime):
    """All that a refused change must leave as it is."""
    pools = [{**pool.counters, "load_seconds": 0} for pool in runtime.pools.values()]
    names = [dict(pool.spec.adapters) for pool in runtime.pools.values()]
    return (
        runtime.list(),
        [runtime.roots.root(adapter.name) for adapter in runtime.list()],
        pools,
        names,
    )


class TestChanges:
    def test_a_load_serves_on_every_spec_with_its_root(self, deploy, path):
        runtime = deploy()
        runtime.load("a", path("a"))
        digest = read_adapter_digest(runtime.pools["lora"].spec, path("a"))
        assert runtime.roots.root("a") == adapter_prefix_root(digest)
        assert [s.name for s in runtime.list()] == ["a"]
        for key in KEYS:
            assert served(runtime, "a", key).abs().sum() > 0
            assert runtime.pools[key].counters["on_host"] == ["a"]

    def test_a_request_may_name_it_once_every_pool_holds_it(self, deploy, path, monkeypatch):
        runtime = deploy()
        vision = runtime.pools["vision_lora"]
        seen = []

        def read(file):
            with pytest.raises(UnknownAdapter):
                admit(runtime, "a")
            seen.append(runtime.roots.root("a"))
            return type(vision).read(vision, file)

        monkeypatch.setattr(vision, "read", read)
        runtime.load("a", path("a"))
        assert seen == [None]
        admit(runtime, "a").release()

    @pytest.mark.parametrize("change", ["load", "replace"])
    @pytest.mark.parametrize("modules", [(VISION_Q, "elsewhere"), ("visual.nowhere",)])
    def test_a_file_that_one_spec_refuses_changes_nothing(self, deploy, path, change, modules):
        runtime = deploy(adapters={"a": path("a")})
        served(runtime, "a")
        before, name = state(runtime), "a" if change == "replace" else "b"
        for bad in (path("bad", modules=modules), "/no/such/adapter"):
            with pytest.raises(AdapterError):
                getattr(runtime, change)(name, bad)
        assert state(runtime) == before

    def test_a_name_served_with_other_weights_is_replaced_explicitly(self, deploy, path):
        runtime = deploy(adapters={"a": path("a")})
        with pytest.raises(AdapterError, match="'a' is served with other weights: replace it"):
            runtime.load("a", path("other", seed=1))
        with pytest.raises(UnknownAdapter, match=r"no adapter 'b' is served.* Served: 'a'"):
            runtime.replace("b", path("other", seed=1))
        with pytest.raises(AdapterError, match="give it a name"):
            runtime.load("", path("a"))

    def test_C089_concurrent_loads_of_one_adapter_all_succeed_and_keep_one_image(
        self, deploy, path
    ):
        runtime, file, results = deploy(), path("a"), []
        threads = [
            threading.Thread(target=lambda: results.append(runtime.load("a", file)))
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 16
        assert len(set(results)) == 1
        assert runtime.pools["lora"].counters["on_host"] == ["a"]

    def test_C083_C095_cycles_through_one_slot_leave_nothing(self, deploy, path):
        runtime = deploy(max_slots=1)
        files = [path(str(i), seed=i) for i in range(4)]
        for cycle in range(3):
            for i, file in enumerate(files):
                runtime.load(f"{cycle}-{i}", file)
            for i in range(4):
                assert served(runtime, f"{cycle}-{i}").abs().sum() > 0
            for i in range(4):
                runtime.unload(f"{cycle}-{i}")
        for pool in runtime.pools.values():
            assert pool.counters["resident"] == pool.counters["on_host"] == []
        assert runtime.list() == []

    def test_an_unloaded_name_has_no_root_and_is_unknown(self, deploy, path):
        runtime = deploy(adapters={"a": path("a")})
        runtime.unload("a")
        assert runtime.roots.root("a") is None
        for call in (lambda: admit(runtime, "a"), lambda: runtime.unload("a")):
            with pytest.raises(UnknownAdapter):
                call()

    def test_configured_adapters_are_served_or_fail_the_deployment(self, deploy, path):
        vision_only = path("v", modules=(VISION_FC,))
        runtime = deploy(own={"adapters": {"v": vision_only}}, adapters={"a": path("a")})
        assert [s.name for s in runtime.list()] == ["a", "v"]
        with admit(runtime, "v") as hold:
            assert hold.segment("lora", 3).adapter is None
            assert hold.segment("vision_lora", 3).adapter.name == "v"
        with pytest.raises(AdapterError, match="not_there"):
            deploy(adapters={"a": path("bad", modules=("not_there",))})

    def test_progress_is_told_of_every_configured_adapter(self, path):
        told = []
        spec = TwoSpecs().lora_specs()[0]
        spec.apply_yaml_overrides(adapters={"a": path("a"), "b": path("b", 1)})
        LoraRuntime.build([spec], progress=lambda *counts: told.append(counts)).close()
        assert told == [(1, 2), (2, 2)]

    def test_an_adapter_of_a_configured_digest_is_read_when_it_is_asked_for(self, deploy, path):
        spec = lora_specs(TwoSpecs(), {"resources": {"lora": {}}})[0]
        digest = read_adapter_digest(spec, path("a"))
        runtime = deploy(adapters={"a": path("a")}, adapter_digests={"a": digest.hex()})
        assert runtime.pools["lora"].counters["on_host"] == []
        assert runtime.roots.root("a") == adapter_prefix_root(digest)
        assert served(runtime, "a").abs().sum() > 0
        with pytest.raises(AdapterError, match="max_rank"):
            deploy(adapters={"a": path("a")}, adapter_digests={"a": digest.hex()}, max_rank=2)

    def test_a_name_of_one_spec_alone_is_loaded_on_the_others(self, deploy, path):
        runtime = deploy(own={"adapters": {"v": path("a")}})
        before = runtime.roots.root("v")
        assert not served(runtime, "v").any()
        runtime.load("v", path("a"))
        assert served(runtime, "v").any()
        assert runtime.roots.root("v") != before
        with pytest.raises(AdapterError, match="'v' is served with other weights: replace it"):
            runtime.load("v", path("other", seed=1))

    def test_a_runtime_that_is_not_to_be_leaves_no_digest_with_its_specs(self, path):
        spec = TwoSpecs().lora_specs()[0]
        bad = path("bad", modules=("visual.nowhere",))
        spec.apply_yaml_overrides(adapters={"a": path("a"), "bad": bad})
        with pytest.raises(AdapterError):
            LoraRuntime.build([spec])
        assert spec.adapter_digests == {}
        path("a", seed=1)
        path("bad")
        runtime = LoraRuntime.build([spec])
        assert len(spec.adapter_digests) == 2
        runtime.close()

    def test_a_closed_runtime_takes_no_adapter(self, deploy, path):
        runtime = deploy()
        runtime.close()
        with pytest.raises(PoolExhausted, match="the pool is closed"):
            runtime.load("a", path("a"))
        with pytest.raises(PoolExhausted, match="the pool is closed"):
            runtime.pools["lora"].prefetch([])

    def test_two_pools_of_one_key_are_refused(self, deploy):
        pool = deploy().pools["lora"]
        with pytest.raises(SpecError, match="two pools have the resource key 'lora'"):
            LoraRuntime.build([pool.spec, pool.spec])


class TestRequests:
    def test_C104_a_root_tells_which_specs_serve_the_adapter(self, deploy, path):
        file = path("a")
        runtime = deploy(
            own={"adapters": {"both": file, "vision": file}}, adapters={"both": file, "text": file}
        )
        names = ("both", "vision", "text")
        roots = [admit(runtime, name).root for name in names]
        assert roots == [runtime.roots.root(name) for name in names]
        assert len(set(roots)) == 3

    def test_a_root_is_of_the_weights_that_are_held_whoever_registered_them(self, path):
        specs = lora_specs(TwoSpecs(), {"resources": {"lora": {"adapters": {"a": path("a")}}}})
        mine, other = LoraRuntime.build(specs), LoraRuntime.build(specs)
        old = admit(mine, "a").root
        other.replace("a", path("new", seed=1))
        assert admit(mine, "a").root == admit(other, "a").root != old
        other.unload("a")
        with pytest.raises(UnknownAdapter, match="no adapter 'a' is served"):
            admit(mine, "a")
        specs[0].add_adapter("a", path("a"))
        with pytest.raises(UnknownAdapter, match="without a digest: load it"):
            admit(mine, "a")
        for runtime in (mine, other):
            runtime.close()

    def test_a_segment_of_no_pool_is_refused(self, deploy, path):
        runtime = deploy(adapters={"a": path("a")})
        for name in ("a", None):
            with pytest.raises(SpecError, match=r"no pool has the key 'lroa': use one of \['lora'"):
                admit(runtime, name).segment("lroa", 3)

    def test_C098_a_replaced_name_has_a_new_root_and_old_requests_finish_on_the_old_weights(
        self, deploy, path
    ):
        runtime = deploy(adapters={"a": path("old")}, max_slots=1)
        old = admit(runtime, "a")
        before = {key: delta(runtime, old, key) for key in KEYS}
        runtime.replace("a", path("new", seed=1))
        new = admit(runtime, "a")
        assert new.root == runtime.roots.root("a") != old.root
        for key in KEYS:  # one slot: each evicts the other
            assert not torch.equal(delta(runtime, new, key), before[key])
            assert torch.equal(delta(runtime, old, key), before[key])
        old.release()
        new.release()
        for pool in runtime.pools.values():
            assert pool.counters["on_host"] == ["a"]

    def test_a_name_and_a_hold_on_it_share_a_slot_in_one_step(self, deploy, path):
        runtime = deploy(adapters={"a": path("a")}, max_slots=1)
        pool = runtime.pools["lora"]
        with admit(runtime, "a") as hold:
            step = LoraStep((hold.segment("lora", 1), Segment("a", 1)))
            with pool.begin_step(step):
                assert pool.counters["resident"] == ["a"]

    def test_what_is_replaced_while_no_request_is_on_it_is_freed_at_once(self, deploy, path):
        runtime = deploy(adapters={"a": path("old")})
        served(runtime, "a")
        runtime.replace("a", path("new", seed=1))
        pool = runtime.pools["lora"]
        assert (pool.counters["resident"], pool.counters["on_host"]) == ([], ["a"])

    def test_C098_it_is_so_when_the_file_is_overwritten(self, deploy, path):
        runtime = deploy(adapters={"a": path("a")})
        old = admit(runtime, "a")
        before = delta(runtime, old)
        runtime.replace("a", path("a", seed=1))
        assert torch.equal(delta(runtime, old), before)

    def test_C094_an_unload_leaves_running_requests_and_frees_all_after_the_last(
        self, deploy, path
    ):
        runtime = deploy(adapters={"a": path("a")})
        first, second = admit(runtime, "a"), admit(runtime, "a")
        before = delta(runtime, first)
        runtime.unload("a")
        first.release()
        first.release()
        assert torch.equal(delta(runtime, second), before)
        second.release()
        for pool in runtime.pools.values():
            assert pool.counters["resident"] == pool.counters["on_host"] == []

    def test_C092_a_released_request_of_an_unloaded_adapter_is_a_typed_error(self, deploy, path):
        runtime = deploy(adapters={"a": path("a")})
        hold = admit(runtime, "a")
        hold_segment = hold.segment("lora", 1)
        runtime.unload("a")
        hold.release()
        with pytest.raises(UnknownAdapter, match="neither served nor held"):
            runtime.pools["lora"].begin_step(LoraStep((hold_segment,)))

    def test_a_runtime_that_is_not_built_leaves_no_image(self, deploy, path, tmp_path):
        runtime = deploy()
        spec = runtime.pools["lora"].spec
        spec.add_adapter("a", path("a"))
        spec.add_adapter("z", str(tmp_path / "none"))
        pool = LoraPool.build(spec)
        with pytest.raises(AdapterError, match="none"):
            LoraRuntime([pool])
        assert pool.counters["on_host"] == []
        pool.close()

    def test_C100_weights_changed_on_disk_are_refused_and_never_served_under_the_old_root(
        self, deploy, path
    ):
        runtime = deploy(cpu_capacity=1, max_slots=1, adapters={"a": path("a"), "b": path("b")})
        path("a", seed=1)
        served(runtime, "b")
        with pytest.raises(AdapterError, match="the deployment expects"):
            served(runtime, "a")

    def test_the_base_model_is_admitted_with_the_base_root(self, deploy):
        with admit(deploy(), None) as hold:
            assert hold.root == adapter_prefix_root(None)
            assert hold.segment("lora", 5, 2.0) == (None, 5, 2.0)

    def test_a_name_that_is_not_served_is_an_answer_for_the_client(self, deploy, path):
        runtime = deploy(adapters={"sql": path("secret"), "support": path("b")})
        with pytest.raises(ValueError, match="Did you mean 'support'") as error:
            admit(runtime, "suport")
        assert "secret" not in str(error.value)
        with pytest.raises(ValueError, match="a name or null"):
            admit(runtime, 7)
        with pytest.raises(ValueError, match="is served") as error:
            admit(runtime, "x" * 1_000_000)
        assert len(str(error.value)) < 200

    def test_the_nearest_of_many_names_is_found(self, deploy, path):
        file = path("a")
        runtime = deploy(adapters={f"tenant-{i:03}": file for i in range(100)})
        with pytest.raises(ValueError, match=r"Did you mean 'tenant-057'.* and 92 more"):
            admit(runtime, "tenant-057-")

    def test_the_served_adapters_are_listed_as_openai_lists_models(self, deploy, path):
        runtime = deploy(adapters={"b": path("b"), "a": path("secret")})
        cards = runtime.model_cards("llama")
        assert [(c["id"], c["object"], c["parent"]) for c in cards] == [
            ("a", "model", "llama"),
            ("b", "model", "llama"),
        ]
        assert all(abs(c["created"] - time.time()) < 60 for c in cards)
        assert "secret" not in json.dumps(cards)


class TestBlockKeys:
    ROOTS = (adapter_prefix_root(None), *(adapter_prefix_root(bytes([i]) * 32) for i in (1, 2)))

    def test_C103_C104_base_and_adapters_share_no_block(self):
        keys = [prefix_block_keys(root, range(12), 4) for root in self.ROOTS]
        assert [len(k) for k in keys] == [3, 3, 3]
        assert len({key for chain in keys for key in chain}) == 9

    @pytest.mark.parametrize(("tokens", "size"), [([1, 2], 0), ([1, 2], -4), ([2**63], 1)])
    def test_what_makes_no_block_is_refused(self, tokens, size):
        with pytest.raises(ValueError, match=r"a block has 1 token or more|does not fit int64"):
            prefix_block_keys(b"", tokens, size)

    def test_a_root_is_not_mistaken_for_tokens(self):
        root = self.ROOTS[1]
        spelled = [int.from_bytes(root[i : i + 8], "little", signed=True) for i in (0, 8, 16, 24)]
        assert prefix_block_keys(root, [7], 1) != prefix_block_keys(b"", [*spelled, 7], 5)

    def test_a_key_is_of_all_tokens_before_and_part_blocks_have_none(self):
        keys = prefix_block_keys(b"", [1, 2, 3, 4, 5], 2)
        assert keys == prefix_block_keys(b"", [1, 2, 3, 4], 2)
        changed = prefix_block_keys(b"", [9, 2, 3, 4], 2)
        assert all(a != b for a, b in zip(keys, changed, strict=True))
        assert prefix_block_keys(b"", [1], 2) == []

    def test_C101_C106_no_root_is_no_key_and_the_base_is_said(self):
        with pytest.raises(UnknownAdapter, match="no prefix root"):
            prefix_block_keys(None, [1, 2], 2)
        with pytest.raises(TypeError):
            prefix_block_keys(tokens=[1, 2], block_size=2)
        with pytest.raises(ValueError, match="32 bytes, got 5"):
            prefix_block_keys(b"short", [1, 2], 2)


def run_while_adapters_change(tmp_path, seconds, cpu_capacity=3):
    """4 threads submit to one generation loop while a fifth loads, unloads and replaces.

    Returns how many requests were answered, how many changes were made, and the emptied runtime.
    """
    model, prompt_length, new_tokens = tiny_llama().eval(), 5, 3
    weights = []
    tmp_path.mkdir(exist_ok=True)
    for i in range(6):
        adapted = tiny_llama()  # which seeds torch
        torch.manual_seed(i)
        write_with_peft(tmp_path / f"w{i}", adapted, lora_alpha=48, r=4)
        weights.append(str(tmp_path / f"w{i}"))
    spec = module_lora_spec(model, max_slots=2, max_rank=8, cpu_capacity=cpu_capacity)
    runtime = LoraRuntime.build([spec], dtype=torch.float32)
    pool = runtime.pools["lora"]
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCAB, (16, prompt_length), generator=generator).tolist()
    names = ("x", "y", "z")
    inbox: queue.Queue = queue.Queue()
    stop, all_submitted = threading.Event(), threading.Event()
    failures: list[BaseException | str] = []
    expected: dict[bytes, list[list[int]]] = {}
    asked: list[int] = []
    answered, changes = [], []

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                failures.append(error)
                stop.set()

        return threading.Thread(target=run)

    def texts(rows):
        return greedy(model, pool, rows, new_tokens).tokens.tolist()

    def generate():
        """Batches of what waits, two adapters at most: as many as the pool has slots."""
        waiting: list = []
        while not all_submitted.is_set():
            try:
                waiting.append(inbox.get(timeout=0.01))
            except queue.Empty:
                if not waiting:
                    continue
            batch, adapters = [], set()
            for request in list(waiting):
                adapter = request[0].segment("lora", 0).adapter
                if len({*adapters, adapter} - {None}) <= 2:
                    adapters.add(adapter)
                    batch.append(request)
                    waiting.remove(request)
            rows = [Row(hold.segment("lora", 0).adapter, prompts[p]) for hold, p, _ in batch]
            for (_, _, reply), text in zip(batch, texts(rows), strict=True):
                reply.put(text)

    def submit(seed):
        rng = random.Random(seed)
        while not stop.is_set():
            try:
                hold = admit(runtime, rng.choice((None, *names)))
            except UnknownAdapter:
                continue
            with hold:
                prompt, reply = rng.choice(asked), queue.Queue()
                inbox.put((hold, prompt, reply))
                text = reply.get(timeout=30)
                if text != expected[hold.root][prompt]:
                    failures.append(f"{hold.adapter}: {text}")
                answered.append(text)

    def change():
        rng = random.Random(0)
        broken = tmp_path / "broken"
        shutil.copytree(weights[0], broken)
        (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
        while not stop.is_set():
            name, path = rng.choice(names), rng.choice(weights)
            known = name in [adapter.name for adapter in runtime.list()]
            if rng.random() < 0.2:
                with pytest.raises(AdapterError):
                    (runtime.replace if known else runtime.load)(name, str(broken))
            elif not known:
                runtime.load(name, path)
            elif rng.random() < 0.5:
                runtime.replace(name, path)
            else:
                runtime.unload(name)
            changes.append(name)
            time.sleep(0.002)

    with spec.module_map.bind(model, pool):
        for path in (None, *weights):
            adapter = None if path is None else "alone"
            if adapter is not None:
                runtime.load(adapter, path)
            with admit(runtime, adapter) as hold:
                expected[hold.root] = texts([Row(adapter, prompt) for prompt in prompts])
            if adapter is not None:
                runtime.unload(adapter)
        for i in range(len(prompts)):  # the prompts that tell all weights apart are asked
            if len({tuple(alone[i]) for alone in expected.values()}) == 1 + len(weights):
                asked.append(i)
        assert len(asked) > 2
        loop = guarded(generate)
        others = [guarded(change), *(guarded(lambda seed=i: submit(seed)) for i in range(4))]
        for thread in (loop, *others):
            thread.start()
        stop.wait(seconds)
        stop.set()
        for thread in others:
            thread.join()
        all_submitted.set()
        loop.join()
    assert not failures
    for adapter in runtime.list():
        runtime.unload(adapter.name)
    return len(answered), len(changes), runtime


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_C085_C088_no_request_is_lost_or_wrong_while_adapters_come_and_go(tmp_path):
    """For a few seconds, or LORAMUX_TEST_SECONDS; 120 shows that memory stays flat."""
    run_while_adapters_change(tmp_path / "warm", seconds=1)[2].close()
    before = resident_mib()
    seconds = float(os.environ.get("LORAMUX_TEST_SECONDS", 3))
    answered, changes, runtime = run_while_adapters_change(tmp_path / "run", seconds)
    assert resident_mib() - before < 48
    assert answered > 40
    assert changes > 40
    pool = runtime.pools["lora"]
    assert pool.counters["resident"] == pool.counters["on_host"] == []
    assert not pool.spec._held
    assert not pool.spec._registrations
    runtime.close()
