"""Slots, leases and plans: what is resident, what is evicted, and what a failure leaves behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from unittest import mock

import pytest
import torch

from common import LOAD_FAULTS, random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, StepPlan, arena, lora_apply_
from loramux.config import LoraBaseOnly, LoraModuleRef
from loramux.errors import (
    AdapterError,
    LoraError,
    PlanMismatch,
    PoolExhausted,
    SpecError,
    UnknownAdapter,
)
from loramux.identity import read_adapter_digest

WIDTH = 32
MODULE_BYTES = 2 * 8 * WIDTH * 4  # A and B of a module at rank 4, rounded up to 8, in float32
TARGETS = {"q": LoraTarget(WIDTH, (WIDTH,)), "v": LoraTarget(WIDTH, (WIDTH,))}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def serve(tmp_path, device):
    """A pool over one layer of q and v; adapters are given as name -> modules, all of rank 4."""
    pools = []

    def make(adapters, **fields):
        spec = LoraSpec(
            "lora",
            {"n"},
            1,
            module_map=lambda name: LoraModuleRef(name, 0) if name in TARGETS else None,
            adapters={name: write(tmp_path, name, modules) for name, modules in adapters.items()},
            **{"targets": TARGETS, "max_slots": 2, "max_rank": 8, **fields},
        )
        pools.append(LoraPool.build(spec, device=device))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def write(folder, name, modules="qv", seed=None):
    seed = sum(map(ord, name)) if seed is None else seed
    pairs = {module: random_pair(4, WIDTH, WIDTH, seed + ord(module)) for module in modules}
    return save_adapter(folder / name, pairs)


def run(pool, *adapters, target="q"):
    """One row per name, each an identity input: returns the deltas [rows, WIDTH]."""
    step = LoraStep(tuple(Segment(name, 1) for name in adapters))
    with pool.begin_step(step) as lease:
        return deltas(pool, lease, len(adapters), target)


def deltas(pool, lease, rows, target="q"):
    x = torch.ones(rows, WIDTH, device=pool.device)
    y = torch.zeros(rows, WIDTH, device=pool.device)
    return lora_apply_(y, x, pool.site(target, 0), lease.plan(1)).cpu()


def expected(name, module="q", seed=None):
    seed = sum(map(ord, name)) if seed is None else seed
    a, b = random_pair(4, WIDTH, WIDTH, seed + ord(module))
    return torch.ones(WIDTH) @ a.T @ b.T


def assert_serves(pool, *adapters, target="q"):
    got = run(pool, *adapters, target=target)
    want = torch.stack([expected(a, target) if a else torch.zeros(WIDTH) for a in adapters])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_every_row_gets_its_own_adapter(serve):
    pool = serve({"a": "qv", "b": "qv"})
    for target in "qv":
        assert_serves(pool, "a", None, "b", "a", None, target=target)


def test_C071_C086_as_many_adapters_as_slots_beside_base_rows(serve):
    pool = serve({"a": "q", "b": "q", "c": "q"})
    assert_serves(pool, "a", None, "b")
    before = pool.counters
    with pytest.raises(PoolExhausted, match="names 3 adapters, the pool has 2 slots"):
        run(pool, "a", "b", "c")
    assert pool.counters == before


def test_C082_a_reused_slot_keeps_nothing_of_its_previous_adapter(serve):
    pool = serve({"a": "qv", "b": "q"}, max_slots=1)
    assert run(pool, "a", target="v").any()
    assert not run(pool, "b", target="v").any()
    assert_serves(pool, "b")


def test_C083_C095_adapters_rotate_through_fewer_slots(serve):
    names = "abcd"
    pool = serve(dict.fromkeys(names, "q"), max_slots=1, cpu_capacity=2)
    for name in names * 3:
        assert_serves(pool, name)
    assert pool.counters["evictions"] == 11
    assert pool.counters["on_host"] == ["c", "d"]


def test_the_least_recently_used_slot_is_evicted(serve):
    pool = serve(dict.fromkeys("abc", "q"))
    for names in ("a", "b", "a", "c"):
        run(pool, *names)
    assert sorted(pool.counters["resident"]) == ["a", "c"]
    assert (pool.counters["hits"], pool.counters["misses"]) == (1, 3)


def test_a_leased_slot_is_not_evicted(serve):
    pool = serve(dict.fromkeys("abc", "q"))
    held = pool.begin_step(LoraStep((Segment("a", 1), Segment("b", 1))))
    with pytest.raises(PoolExhausted, match="1 adapters need slots, 0 of 2 are not leased"):
        run(pool, "c")
    held.release()
    held.release()
    assert_serves(pool, "c")


def test_C092_a_plan_outlives_neither_its_lease_nor_the_next_step(serve):
    pool = serve(dict.fromkeys("ab", "q"))
    first = pool.begin_step(LoraStep((Segment("a", 1),)))
    second = pool.begin_step(LoraStep((Segment("b", 1),)))
    with pytest.raises(PlanMismatch, match="this step is over"):
        first.plan(1)
    second.release()
    with pytest.raises(PlanMismatch, match="this step is over"):
        second.plan(1)
    first.release()


def test_row_groupings_of_one_step(serve, tmp_path):
    spec = LoraSpec(
        "lora",
        {"n"},
        1,
        {"q": LoraTarget(WIDTH, (WIDTH,)), "v": LoraTarget(WIDTH, (WIDTH,), token_fold=4),
         "h": LoraTarget(WIDTH, (WIDTH,), per_segment=True)},
        lambda name: LoraModuleRef(name, 0),
        adapters={"a": write(tmp_path, "a", "qvh")},
    )  # fmt: skip
    pool = LoraPool.build(spec)
    with pool.begin_step(LoraStep((Segment(None, 4), Segment("a", 8), Segment("a", 0)))) as lease:
        assert [lease.plan(grouping).rows for grouping in (1, 4, 0)] == [12, 3, 2]
        assert lease.plan(0).tiles()[0].rows.tolist() == [1]
        assert lease.plan(4).tiles()[0].rows.tolist() == [1, 2]
    with pytest.raises(PlanMismatch, match="6 tokens has no whole rows of 4 tokens"):
        pool.begin_step(LoraStep((Segment("a", 6),)))


def test_a_segments_own_factor(serve):
    pool = serve({"a": "q"})
    step = LoraStep((Segment("a", 1), Segment("a", 1, 0.5), Segment("a", 1, 0.0)))
    with pool.begin_step(step) as lease:
        whole, half, none = deltas(pool, lease, 3)
    torch.testing.assert_close(half, whole * 0.5)
    assert not none.any()


def test_C026_a_segments_factor_multiplies_the_rslora_scale(serve, tmp_path):
    pool = serve({}, max_rank=16)
    a, b = random_pair(16, WIDTH, WIDTH)
    path = save_adapter(tmp_path / "rs", {"q": (a, b)}, lora_alpha=16, use_rslora=True)
    pool.spec.add_adapter("rs", path)
    with pool.begin_step(LoraStep((Segment("rs", 1, 0.5),))) as lease:
        got = deltas(pool, lease, 1)[0]
    torch.testing.assert_close(got, 2.0 * (torch.ones(WIDTH) @ a.T @ b.T), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_C038_every_file_dtype_is_converted_to_the_pools(serve, tmp_path, dtype):
    pool = serve({}, dtype=torch.bfloat16)
    a, b = random_pair(4, WIDTH, WIDTH, dtype=dtype)
    pool.spec.add_adapter("a", save_adapter(tmp_path / "any", {"q": (a, b)}))
    with pool.begin_step(LoraStep((Segment("a", 1),))):
        held = next(pool.site("q", 0).slices(1))
    torch.testing.assert_close(held.a[:4].cpu(), a.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(held.b[:, :4].cpu(), b.bfloat16(), rtol=0, atol=0)


def test_C038_a_value_that_overflows_on_narrowing_is_refused(serve, tmp_path):
    pool = serve({}, dtype=torch.float16)
    a, b = random_pair(4, WIDTH, WIDTH)
    b[3, 2] = 70000.0
    pool.spec.add_adapter("a", save_adapter(tmp_path / "large", {"q": (a, b)}))
    with pytest.raises(AdapterError, match=r"B of module 'q' has a value too large .*float16"):
        run(pool, "a")


def test_C124_C128_base_only_steps_need_no_slot_and_have_their_own_capture_key(serve):
    pool = serve({"a": "q"})
    base, mixed = LoraStep((Segment(None, 2),)), LoraStep((Segment(None, 2), Segment("a", 1)))
    assert pool.capture_key(base, 8) == LoraBaseOnly(8)
    assert pool.capture_key(LoraStep(), 8) == LoraBaseOnly(8)
    assert pool.capture_key(mixed, 8) == 8
    nobody = LoraStep((Segment(None, 2), Segment("a", 0)))
    assert pool.capture_key(nobody, 8) == LoraBaseOnly(8)
    with pool.begin_step(nobody) as lease:
        assert lease.base_only
    steps = [base, mixed, LoraStep(), LoraStep((Segment("a", 5),) * 3)]
    assert {pool.capture_key(step, 8) for step in steps} == {8, LoraBaseOnly(8)}
    with pool.begin_step(base) as lease:
        assert lease.base_only
        assert not pool.active
    with pool.begin_step(mixed):
        assert pool.active
    assert not pool.active


def test_fixed_rows_refuse_a_larger_step(serve, tmp_path):
    pool = serve({"a": "q"})
    fixed = LoraPool.build(pool.spec, device=pool.device, max_rows=4)
    address = fixed.plan(1).buffer.data_ptr()
    with fixed.begin_step(LoraStep((Segment("a", 4),))):
        pass
    with pytest.raises(PlanMismatch, match=r"the step has 5 rows, .* max_rows is 4"):
        fixed.begin_step(LoraStep((Segment("a", 5),)))
    assert fixed.plan(1).buffer.data_ptr() == address
    assert fixed.counters["hits"] + fixed.counters["misses"] == 1


def test_unknown_adapters_change_nothing(serve):
    pool = serve({"a": "q"})
    before = pool.counters
    with pytest.raises(UnknownAdapter, match="no adapter 'b' is served"):
        run(pool, "a", "b")
    with pytest.raises(UnknownAdapter):
        pool.prefetch(["b"])
    assert pool.counters == before


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            {"q": random_pair(16, WIDTH, WIDTH)},
            "rank is 16; expected at most the pool's max_rank, 8: raise max_rank",
        ),
        ({"q": random_pair(4, WIDTH - 1, WIDTH)}, "31"),
        ({"k": random_pair(4, WIDTH, WIDTH)}, "'k'"),
    ],
    ids=["rank", "C037-C118-size", "C001-name"],
)
def test_C131_a_failed_load_between_two_good_steps_leaves_no_trace(serve, tmp_path, pairs, said):
    pool = serve({"a": "q"})
    assert_serves(pool, "a")
    pool.spec.add_adapter("bad", save_adapter(tmp_path / "bad", pairs))
    before, arena, table = pool.counters, pool._arena.weights.clone(), pool._arena.table.clone()
    with pytest.raises(AdapterError) as error:
        run(pool, "a", "bad")
    assert said in str(error.value)
    assert pool.counters == before
    assert torch.equal(pool._arena.weights, arena)
    assert torch.equal(pool._arena.table, table)
    assert_serves(pool, "a")


@pytest.mark.parametrize("fault", LOAD_FAULTS)
def test_C131_a_load_cut_short_between_two_good_steps_leaves_no_trace(serve, tmp_path, fault):
    pool = serve({"a": "q"})
    assert_serves(pool, "a")
    path = write(tmp_path, "bad", "q")
    pool.spec.add_adapter("bad", path)

    def state():
        slots = [(slot.holds, slot.leases, slot.used_at) for slot in pool._slots]
        return (
            {**pool.counters, "on_host": 0, "load_seconds": 0},
            slots,
            pool._arena.weights.tolist(),
        )

    before = state()
    with LOAD_FAULTS[fault](tmp_path / "bad"), pytest.raises((LoraError, torch.OutOfMemoryError)):
        run(pool, "a", "bad")
    assert state() == before
    assert_serves(pool, "a")
    write(tmp_path, "bad", "q")
    assert_serves(pool, "a", "bad")


@pytest.mark.parametrize("broken", ["copy_", "sub_"])  # of an image's bytes; of a moved row
def test_C131_an_installation_that_breaks_off_serves_nobody_with_what_it_wrote(
    serve, monkeypatch, broken
):
    adapters = {"a": "q", "b": "qv", "c": "q", "d": "qv"}
    pool = serve(adapters, max_slots=9, arena_bytes=4 * MODULE_BYTES)
    for names in ("a", "b", "c", "b"):
        run(pool, *names)
    pool._store.get(pool.spec.registration("d"))
    monkeypatch.setattr(torch.Tensor, broken, mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        run(pool, "d", "b")
    monkeypatch.undo()
    for names in ("b", "db", "ac"):
        assert_serves(pool, *names)
    placed = pool._arena._placement.spans
    assert set(placed) == {slot.index for slot in pool._slots if slot.holds}
    assert not any(slot.leases for slot in pool._slots)


def test_a_release_that_fails_can_be_done_again(serve):
    pool = serve({"a": "q"})
    lease = pool.begin_step(LoraStep((Segment("a", 1),)))
    with mock.patch.object(pool._arena, "stream", mock.Mock()):
        with (
            mock.patch.object(pool._arena, "mark", side_effect=RuntimeError),
            pytest.raises(RuntimeError),
        ):
            lease.release()
        assert [slot.leases for slot in pool._slots] == [1, 0]
        with mock.patch.object(pool._arena, "mark", return_value=None):
            lease.release()
            lease.release()
    assert [slot.leases for slot in pool._slots] == [0, 0]


@pytest.mark.parametrize("arena_bytes", [None, 1 << 20])
def test_a_rank_above_the_pools_own_is_refused_whatever_the_spec_has_become(
    serve, tmp_path, arena_bytes
):
    pool = serve({"a": "q"}, arena_bytes=arena_bytes)
    pool.spec.apply_yaml_overrides(max_rank=64)
    big = save_adapter(tmp_path / "big", {"q": random_pair(64, WIDTH, WIDTH)})
    pool.spec.add_adapter("big", big)
    with pytest.raises(AdapterError, match="its rank is 64; expected at most 8"):
        run(pool, "big")
    assert_serves(pool, "a")


def test_a_rank_outside_the_world_is_refused(serve):
    with pytest.raises(SpecError, match="rank 2 is none of the 2"):
        LoraPool.build(serve({"a": "q"}).spec, rank=2, world_size=2)


def test_a_closed_pool_holds_nothing_and_says_so(serve):
    pool = serve({"a": "q"})
    lease = pool.begin_step(LoraStep((Segment("a", 1),)))
    site, plan = pool.site("q", 0), pool.plan(1)
    x = torch.ones(1, WIDTH, device=pool.device)
    own = StepPlan.for_rows([1], site.num_slots, pool.device)
    lora_apply_(torch.zeros_like(x), x, site, own)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="weights has no tensor"):
        lora_apply_(torch.zeros_like(x), x, site, own)
    assert pool.counters["on_host"] == pool.counters["resident"] == []
    assert (site.weights, plan.buffer.numel(), plan.scratch.numel()) == ([], 0, 0)
    for name in ("a", None):
        with pytest.raises(PoolExhausted, match="the pool is closed"):
            pool.begin_step(LoraStep((Segment(name, 1),)))
    lease.release()


@pytest.fixture
def held_up(serve, monkeypatch):
    """A pool, and events: an installation is under way; it may go on."""
    pool = serve({"a": "q", "b": "q"})
    installing, go_on = threading.Event(), threading.Event()
    install = pool._arena.install

    def slowly(plan):
        installing.set()
        assert go_on.wait(20)
        install(plan)

    monkeypatch.setattr(pool._arena, "install", slowly)
    return pool, installing, go_on


def test_a_pool_closes_once_the_installation_under_way_is_done(held_up):
    pool, installing, go_on = held_up
    with ThreadPoolExecutor(2) as threads:
        step = threads.submit(pool.begin_step, LoraStep((Segment("a", 1),)))
        assert installing.wait(20)
        closing = threads.submit(pool.close)
        assert not wait([closing], 0.1).done
        go_on.set()
        closing.result(20)
        with suppress(LoraError):  # the step may find the pool closed
            step.result(20)


def test_a_pool_that_is_closing_takes_nothing_more(held_up):
    pool, installing, go_on = held_up
    pool.prefetch(["a"])
    assert installing.wait(20)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(pool.close)
        try:
            assert not wait([closing], 0.1).done
            with pytest.raises(PoolExhausted, match="the pool is closed"):
                pool.prefetch(["b"])
            with pytest.raises(PoolExhausted, match="the pool is closed"):
                pool.read(pool.spec.registration("b").path)
        finally:
            go_on.set()
        closing.result(20)


@pytest.mark.parametrize("at", ["reserve", "_wait"])
def test_a_step_that_begins_as_the_pool_closes_is_refused(serve, monkeypatch, at):
    pool = serve({"a": "q"})
    owner = pool.plan(1) if at == "reserve" else pool
    monkeypatch.setattr(owner, at, lambda *_: pool.close())
    with pytest.raises(PoolExhausted, match="the pool is closed"):
        pool.begin_step(LoraStep((Segment("a", 2),)))
    assert (pool.current, pool.active) == (None, False)


def test_a_pool_that_closes_while_an_adapter_is_read_keeps_no_image(serve):
    pool = serve({"a": "q"})
    registration = pool.spec.registration("a")
    image = pool.read(registration.path)
    pool.close()
    pool.adopt(registration, image)
    assert pool.counters["on_host"] == []


def test_a_slot_that_a_failed_installation_forgot_is_freed_with_its_lease(serve, monkeypatch):
    """Its adapter has another slot by then."""
    names = dict.fromkeys("abcd", "q") | {"large": "qv"}
    pool = serve(names, max_slots=6, arena_bytes=4 * MODULE_BYTES)
    pool.begin_step(LoraStep((Segment("a", 1),))).release()
    held = pool.begin_step(LoraStep((Segment("b", 1),)))
    pool.begin_step(LoraStep((Segment("c", 1), Segment("d", 1)))).release()
    with monkeypatch.context() as patched:
        patched.setattr(arena.Arena, "_copy", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            pool.begin_step(LoraStep((Segment("large", 1),)))
    assert "b" not in [registration.name for registration in pool._slot_of], "it was moved"
    pool.begin_step(LoraStep((Segment("b", 1),))).release()
    held.release()
    assert pool.counters["resident"].count("b") == 1
    with pool.begin_step(LoraStep((Segment("b", 1),))) as lease:
        torch.testing.assert_close(deltas(pool, lease, 1)[0], expected("b"), rtol=1e-5, atol=1e-5)


def test_a_dtype_that_images_cannot_have_is_refused(serve):
    with pytest.raises(SpecError, match=r"a pool of torch\.float64; expected one of"):
        LoraPool.build(serve({"a": "q"}).spec, dtype=torch.float64)


def test_a_name_that_is_no_string_is_unknown(serve):
    pool = serve({"a": "q"})
    with pytest.raises(UnknownAdapter, match="no adapter '5' is served"):
        pool.begin_step(LoraStep((Segment(5, 1),)))
    with pytest.raises(UnknownAdapter, match="no adapter '5' is served"):
        pool.prefetch([5])


def test_weights_lie_on_the_pools_device_whatever_the_default_one_is(serve):
    first = serve({"a": "q", "b": "q"})
    with torch.device("meta"):
        pool = LoraPool.build(first.spec, device=first.device)
        lease = pool.begin_step(LoraStep((Segment("a", 1), Segment("b", 1))))
    with lease:
        torch.testing.assert_close(deltas(pool, lease, 2)[1], expected("b"), rtol=1e-5, atol=1e-5)


def test_C131_a_refused_step_leaves_the_one_before_it_valid(serve):
    pool = serve({"a": "q"})
    with pool.begin_step(LoraStep((Segment("a", 2),))) as lease:
        with pytest.raises(UnknownAdapter):
            pool.begin_step(LoraStep((Segment("b", 100),)))
        with pytest.raises(PlanMismatch):
            pool.begin_step(LoraStep((Segment("a", -1),)))
        torch.testing.assert_close(deltas(pool, lease, 2)[1], expected("a"), rtol=1e-5, atol=1e-5)


def test_a_step_refused_for_want_of_slots_reads_no_file(serve):
    pool = serve(dict.fromkeys("abc", "q"))
    with pool.begin_step(LoraStep((Segment("a", 1), Segment("b", 1)))):
        before = pool.counters
        with pytest.raises(PoolExhausted):
            run(pool, "c")
        assert pool.counters == before


def test_C100_a_file_swapped_after_its_digest_was_taken_is_refused(serve, tmp_path):
    pool = serve({"a": "q"})
    path = pool.spec.adapters["a"]
    pool.spec.add_adapter("a", path, digest=read_adapter_digest(pool.spec, path))
    write(tmp_path, "a", "q", seed=999)
    found = read_adapter_digest(pool.spec, path).hex()
    with pytest.raises(AdapterError, match=f"its weights digest to {found}, the deployment exp"):
        run(pool, "a")
    write(tmp_path, "a", "q")
    assert_serves(pool, "a")


def test_C098_a_name_registered_again_serves_its_new_weights(serve, tmp_path):
    pool = serve({"a": "q"})
    assert_serves(pool, "a")
    old = pool.begin_step(LoraStep((Segment("a", 1),)))
    write(tmp_path, "a", "q", seed=999)
    pool.spec.add_adapter("a", pool.spec.adapters["a"])
    torch.testing.assert_close(deltas(pool, old, 1)[0], expected("a"), rtol=1e-5, atol=1e-5)
    old.release()
    torch.testing.assert_close(run(pool, "a")[0], expected("a", seed=999), rtol=1e-5, atol=1e-5)


def test_C094_unloading_under_a_lease_waits_for_it(serve):
    pool = serve({"a": "q", "b": "q", "c": "q"})
    lease = pool.begin_step(LoraStep((Segment("a", 1), Segment("b", 1))))
    pool.spec.remove_adapter("a")
    pool.unload("a")
    torch.testing.assert_close(deltas(pool, lease, 2)[0], expected("a"), rtol=1e-5, atol=1e-5)
    assert pool.counters["on_host"] == ["b"]
    lease.release()
    assert pool.counters["resident"] == ["b"]
    with pytest.raises(UnknownAdapter):
        run(pool, "a")
    assert_serves(pool, "c")


def test_prefetch_makes_a_later_step_a_hit(serve):
    pool = serve({"a": "q"})
    pool.prefetch(["a"])
    pool._loader.shutdown(wait=True)
    assert pool.counters["resident"] == ["a"]
    misses = pool.counters["misses"]
    assert_serves(pool, "a")
    assert pool.counters["misses"] == misses


def test_C089_concurrent_loads_of_one_adapter_share_one_read(serve, monkeypatch):
    pool = serve({"a": "q"})
    reads, read = [], pool._store.read

    def counted(*arguments, **options):
        reads.append(arguments)
        return read(*arguments, **options)

    monkeypatch.setattr(pool._store, "read", counted)
    registration = pool.spec.registration("a")
    images, barrier = [], threading.Barrier(16)

    def load():
        barrier.wait()
        images.append(pool._store.get(registration))

    threads = [threading.Thread(target=load) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert len(images) == 16
    assert all(image is images[0] for image in images)


def test_C085_an_adapter_unloaded_while_it_loads_is_not_kept(serve, monkeypatch):
    pool = serve({"a": "q"})
    read = pool._store.read

    def read_and_unload(*arguments, **options):
        image = read(*arguments, **options)
        pool.spec.remove_adapter("a")
        pool.unload("a")
        return image

    monkeypatch.setattr(pool._store, "read", read_and_unload)
    assert_serves(pool, "a")  # the step had begun before
    assert pool.counters["on_host"] == pool.counters["resident"] == []


def test_C085_an_adapter_unloaded_under_two_leases_is_loaded_again_between(serve):
    pool = serve({"a": "q"}, max_slots=3)
    path, leases = pool.spec.adapters["a"], []
    for _ in range(2):
        leases.append(pool.begin_step(LoraStep((Segment("a", 1),))))
        pool.spec.remove_adapter("a")
        pool.unload("a")
        pool.unload("a")
        pool.spec.add_adapter("a", path)
    assert_serves(pool, "a")
    assert pool.counters["resident"] == ["a"] * 3
    for lease in leases:
        lease.release()
    assert pool.counters["resident"] == ["a"]
    assert_serves(pool, "a")
    assert pool.counters["copies"] == 3


def test_C091_an_adapter_evicted_between_look_up_and_lease_is_loaded_again(serve, monkeypatch):
    pool = serve(dict.fromkeys("abcd", "q"))
    assert_serves(pool, "a")
    get, others = pool._store.get, iter(["c", "d"])

    def get_and_evict(registration):
        image = get(registration)
        for other in others:
            run(pool, other)
        return image

    monkeypatch.setattr(pool._store, "get", get_and_evict)
    assert_serves(pool, "a", "b")
    assert sorted(pool.counters["resident"]) == ["a", "b"]


def test_a_prefetch_takes_no_slot_from_a_step(serve):
    pool = serve(dict.fromkeys("abc", "q"))
    held = pool.begin_step(LoraStep((Segment("a", 1), Segment("b", 1))))
    pool.prefetch(["c"])
    pool._loader.submit(int).result()
    torch.testing.assert_close(deltas(pool, held, 2)[0], expected("a"), rtol=1e-5, atol=1e-5)
    assert pool.counters["on_host"] == ["a", "b", "c"]
    assert pool.counters["resident"] == ["a", "b"]
    held.release()


def test_C127_a_captured_call_follows_its_slots_and_plan(serve):
    pool = serve(dict.fromkeys("abc", "q"), max_slots=1)
    fixed = LoraPool.build(pool.spec, device=pool.device, max_rows=3)
    site, plan = fixed.site("q", 0), fixed.plan(1)
    addresses = [t.data_ptr() for t in (site.weights[0], site.table, plan.buffer, plan.scratch)]
    x = torch.ones(3, WIDTH, device=fixed.device)
    for names in (("a", None, "a"), (None, "b"), ("c", "c", "c"), ("a",)):
        with fixed.begin_step(LoraStep(tuple(Segment(name, 1) for name in names))):
            y = lora_apply_(torch.zeros_like(x[: len(names)]), x[: len(names)], site, plan)
        want = [expected(name) if name else torch.zeros(WIDTH) for name in names]
        torch.testing.assert_close(y.cpu(), torch.stack(want), rtol=1e-5, atol=1e-5)
    assert addresses == [
        t.data_ptr() for t in (site.weights[0], site.table, plan.buffer, plan.scratch)
    ]
    fixed.close()


def test_C130_many_steps_keep_one_plan_per_grouping(serve):
    pool = serve(dict.fromkeys("abc", "q"))
    plans, fixed = dict(pool._plans), LoraPool.build(pool.spec, device=pool.device, max_rows=3)
    for i in range(500):
        run(pool, "abc"[i % 3], None)
        run(fixed, *"ab"[: 1 + i % 2])
    assert pool._plans == plans
    assert pool.plan(1).max_rows == 2
    fixed.close()


def test_a_step_that_cannot_be_planned_leaves_no_lease(serve):
    pool = serve({"a": "q"}, max_slots=1)
    with pytest.raises(TypeError):
        pool.begin_step(LoraStep((Segment("a", 1, None),)))
    assert not pool.active
    pool.spec.add_adapter("b", pool.spec.adapters["a"])
    run(pool, "b")


def test_a_step_half_planned_ends_the_one_before_it(serve, monkeypatch):
    pool = serve({"a": "q"}, targets={**TARGETS, "v": LoraTarget(WIDTH, (WIDTH,), token_fold=2)})
    with pool.begin_step(LoraStep((Segment("a", 2),))) as lease:
        monkeypatch.setattr(pool._plan_memory, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.begin_step(LoraStep((Segment("a", 4),)))
        with pytest.raises(PlanMismatch, match="this step is over"):
            lease.plan(1)


def test_rank_takes_its_own_bytes_and_absent_modules_none(serve):
    pool = serve({"a": "qv", "b": "q"})
    image = pool._store.get(pool.spec.registration("a"))
    assert image.data.numel() == 2 * MODULE_BYTES
    assert pool._store.get(pool.spec.registration("b")).data.numel() == MODULE_BYTES
    assert [entry[2] for entry in image.entries] == [8, 8]


def test_sixty_adapters_of_rank_8_fit_where_8_slots_of_rank_64_would(serve):
    names = [f"a{i}" for i in range(60)]
    slots = serve({}, max_rank=64, max_slots=8)
    size = slots._arena.weights.nbytes
    pool = serve(dict.fromkeys(names, "qv"), max_rank=64, max_slots=60, arena_bytes=size)
    assert pool._arena.weights.nbytes == size
    for target in "qv":
        assert_serves(pool, *names, target=target)
    assert pool.counters["evictions"] == 0


def test_more_bytes_than_the_arena_has_are_refused_with_both_numbers(serve):
    size = 3 * MODULE_BYTES
    pool = serve({"a": "q", "b": "qv", "c": "qv"}, max_slots=9, arena_bytes=size + 1)
    assert_serves(pool, "a", "b")
    before, spans = pool.counters, dict(pool._arena._placement.spans)

    def refused(*names, wanted, found):
        text = f"{wanted} bytes .* to be installed, {found} of the arena's {size} can be had"
        with pytest.raises(PoolExhausted, match=text):
            run(pool, *names)
        assert {**pool.counters, "load_seconds": 0} == {
            **before, "load_seconds": 0, "on_host": ["a", "b", "c"]
        }  # fmt: skip
        assert pool._arena._placement.spans == spans

    refused("b", "c", wanted=2 * MODULE_BYTES, found=MODULE_BYTES)
    with pool.begin_step(LoraStep((Segment("b", 1),))):
        before = {**before, "hits": 1}
        refused("c", wanted=2 * MODULE_BYTES, found=MODULE_BYTES)
    assert_serves(pool, "c", "a")


def test_what_fits_by_its_bytes_is_placed_beside_what_steps_lease(serve):
    """Of four adapters side by side the second is leased; the first and third make room for two."""
    adapters = {**dict.fromkeys("abcd", "q"), "e": "qv"}
    pool = serve(adapters, max_slots=9, arena_bytes=4 * MODULE_BYTES)
    for name in "abcd":
        run(pool, name)
    run(pool, "d")
    lease = pool.begin_step(LoraStep((Segment("b", 1),)))
    held = StepPlan.for_rows([lease._slots[0].index], pool.spec.num_slots, pool.device)
    pool.prefetch(["e"])
    pool._loader.submit(int).result()
    assert "e" in pool.counters["on_host"]
    assert sorted(pool.counters["resident"]) == [*"abcd"], "a prefetch moves nothing leased"
    assert_serves(pool, "e", target="v")
    assert sorted(pool.counters["resident"]) == [*"bde"]
    assert (pool.counters["moves"], pool.counters["moved_bytes"]) == (1, MODULE_BYTES)
    x, y = torch.ones(1, WIDTH, device=pool.device), torch.zeros(1, WIDTH, device=pool.device)
    got = lora_apply_(y, x, pool.site("q", 0), held)[0].cpu()
    torch.testing.assert_close(got, expected("b"), rtol=1e-5, atol=1e-5)
    lease.release()
    assert_serves(pool, "b", "d", "e")


def test_an_image_moves_to_bytes_that_overlap_its_own(serve, monkeypatch):
    """In pieces of the distance where that is the longer, else through the staging memory."""
    for staging in (512, 1 << 20):
        monkeypatch.setattr(arena, "_STAGING_BYTES", staging)
        adapters = {"a": "q", "b": "qv", "c": "q", "d": "qv"}
        pool = serve(adapters, max_slots=9, arena_bytes=4 * MODULE_BYTES)
        for name in "abc":
            run(pool, name)
        run(pool, "b")
        assert_serves(pool, "d")
        assert sorted(pool.counters["resident"]) == [*"bd"]
        assert pool.counters["moved_bytes"] == 2 * MODULE_BYTES
        for target in "qv":
            assert_serves(pool, "b", "d", target=target)
