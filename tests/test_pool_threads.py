"""Steps, prefetches, unloads and new registrations from threads of their own: no row is ever wrong.

``LORAMUX_TEST_STEPS`` sets how many steps are run; 10,000 take a few minutes.
"""

from __future__ import annotations

import faulthandler
import os
import random
import threading
import time
from contextlib import suppress

import pytest
import torch

from common import random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, lora_apply_
from loramux.config import LoraModuleRef
from loramux.errors import PoolExhausted, UnknownAdapter

STEPS = int(os.environ.get("LORAMUX_TEST_STEPS", 300))
SECONDS_A_STEP, SECONDS_TO_START = 0.1, 30  # a run that takes longer hangs
WIDTH, RANKS = 32, (4, 20, 9, 32, 8)  # of a name's versions
VERSIONS, MAX_BYTES = len(RANKS), 2 * WIDTH * max(RANKS) * 4
NAMES = "abcdef"
STEP_THREADS, NAMES_A_STEP = 2, 2  # all steps together lease as many slots as there are
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


class Served:
    """Which versions of each name a step may see: numbers that ever grow, of files in rotation."""

    def __init__(self, root, spec):
        self.spec, self.announced, self.done = spec, dict.fromkeys(NAMES, -1), {}
        self.paths, self.rows, self.lock = {}, {}, threading.Lock()
        for name in NAMES:
            pairs = [
                random_pair(rank, WIDTH, WIDTH, ord(name) * 10 + i) for i, rank in enumerate(RANKS)
            ]
            self.paths[name] = [
                save_adapter(root / f"{name}{i}", {"q": pair}) for i, pair in enumerate(pairs)
            ]
            self.rows[name] = torch.stack([torch.ones(WIDTH) @ a.T @ b.T for a, b in pairs])
            self.register(name)

    def register(self, name):
        with self.lock:
            self.announced[name] += 1
            self.spec.add_adapter(name, self.paths[name][self.announced[name] % VERSIONS])
            self.done[name] = self.announced[name]

    def unregister(self, name):
        with self.lock:
            self.spec.remove_adapter(name)


class Crew:
    """Threads that run until all steps are done or one of them fails."""

    def __init__(self, pool, served, *refusals):
        self.pool, self.served, self.refusals = pool, served, refusals
        self.stop, self.step_lock = threading.Event(), threading.Lock()
        self.begun, self.errors = 0, []

    def run(self, works):
        threads = [
            threading.Thread(target=self.repeat, args=(work, random.Random(i)), daemon=True)
            for i, work in enumerate(works)
        ]
        deadline = time.monotonic() + SECONDS_TO_START + STEPS * SECONDS_A_STEP
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(all_threads=True)
        self.stop.set()
        if self.errors:
            raise self.errors[0]
        assert self.begun >= STEPS, f"{self.begun} of {STEPS} steps before the watchdog"

    def repeat(self, work, rng):
        try:
            while not self.stop.is_set():
                with suppress(*self.refusals):
                    work(rng)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()

    def step(self, rng):
        names = rng.sample(NAMES, rng.randint(1, NAMES_A_STEP))
        rows = [rng.choice([*names, None]) for _ in range(4)]
        with self.step_lock:
            if self.begun >= STEPS:
                return self.stop.set()
            first = dict(self.served.done)
            lease = self.pool.begin_step(LoraStep(tuple(Segment(name, 1) for name in rows)))
            self.begun += 1
            last = dict(self.served.announced)
            x = torch.ones(len(rows), WIDTH, device=self.pool.device)
            y = torch.zeros(len(rows), WIDTH, device=self.pool.device)
            got = lora_apply_(y, x, self.pool.site("q", 0), lease.plan(1)).cpu()
        time.sleep(rng.random() * 1e-3)  # the lease outlives the next step's begin
        lease.release()
        for name in dict.fromkeys(rows):
            mine = got[[i for i, other in enumerate(rows) if other == name]]
            assert (mine == mine[0]).all(), f"{name} has two versions in one step"
            allowed = [torch.zeros(WIDTH)]
            if name is not None:
                versions = range(first[name], last[name] + 1)
                allowed = [self.served.rows[name][i % VERSIONS] for i in versions]
            assert any(torch.allclose(mine[0], row, atol=1e-5) for row in allowed), name
        return None

    def prefetch(self, rng):
        self.pool.prefetch(rng.sample(NAMES, 2))
        time.sleep(rng.random() * 2e-3)

    def unload(self, rng):
        name = rng.choice(NAMES)
        self.served.unregister(name)
        self.pool.unload(name)
        self.served.register(name)
        time.sleep(rng.random() * 2e-3)

    def replace(self, rng):
        self.served.register(rng.choice(NAMES))
        time.sleep(rng.random() * 2e-3)


LEASED = STEP_THREADS * NAMES_A_STEP
POOLS = [dict(max_slots=LEASED), dict(max_slots=4 * LEASED, arena_bytes=2 * MAX_BYTES)]


@pytest.mark.parametrize("fields", POOLS, ids=["slots", "arena_bytes"])
@pytest.mark.parametrize("device", DEVICES)
def test_C085_C088_C091_no_row_is_wrong_while_threads_load_and_unload(device, fields, tmp_path):
    spec = LoraSpec(
        "lora",
        {"n"},
        1,
        {"q": LoraTarget(WIDTH, (WIDTH,))},
        lambda name: LoraModuleRef(name, 0),
        max_rank=32,
        cpu_capacity=3,
        **fields,
    )
    served = Served(tmp_path, spec)
    pool = LoraPool.build(spec, device=device)
    refusals = [UnknownAdapter]  # unloaded, and not yet registered again
    if "arena_bytes" in fields:
        refusals.append(PoolExhausted)  # the bytes are enough for any step, not for any two
    crew = Crew(pool, served, *refusals)
    crew.run([crew.step] * STEP_THREADS + [crew.prefetch, crew.unload, crew.replace])
    for name in NAMES:
        spec.remove_adapter(name)
        pool.unload(name)
    pool._loader.shutdown(wait=True, cancel_futures=True)
    assert pool.counters["resident"] == pool.counters["on_host"] == []
    pool.close()
