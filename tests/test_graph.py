"""One CUDA graph of a pool's ops, replayed with ever other adapters, slots, rows and base rows."""

from __future__ import annotations

import random

import pytest
import torch

from common import random_pair, save_adapter
from loramux import LoraPool, LoraSpec, LoraStep, LoraTarget, Segment, lora_apply_
from loramux.config import LoraModuleRef

pytestmark = pytest.mark.cuda

WIDTH, ROWS, REPLAYS = 512, 96, 1000
WIDTHS = {"qkv": (512, 128, 128), "down": (640,)}
RANKS = dict(zip("abcdefgh", [4, 8, 16, 64, 8, 24, 40, 64], strict=True))
POOLS = [dict(max_slots=4), dict(max_slots=8, arena_bytes=950_000)]  # all take 1,275,904
FIVE_MS = 10_000_000  # cycles at about 2 GHz


@pytest.fixture(params=POOLS, ids=["slots", "arena_bytes"])
def pool(request, tmp_path):
    paths = {}
    for name, rank in RANKS.items():
        pairs = {f"qkv.{i}": random_pair(rank, WIDTH, out, ord(name) + i)
                 for i, out in enumerate(WIDTHS["qkv"]) if (ord(name) + i) % 3}  # fmt: skip
        pairs["down"] = random_pair(rank, WIDTH, WIDTHS["down"][0], ord(name))
        paths[name] = save_adapter(tmp_path / name, pairs)

    def place(module):
        target, _, part = module.partition(".")
        return LoraModuleRef(target, 0, part or None)

    targets = {
        "qkv": LoraTarget(WIDTH, WIDTHS["qkv"], slice_names=("0", "1", "2")),
        "down": LoraTarget(WIDTH, WIDTHS["down"]),
    }
    spec = LoraSpec("lora", {"n"}, 1, targets, place, max_rank=64, adapters=paths,
                    dtype=torch.bfloat16, **request.param)  # fmt: skip
    pool = LoraPool.build(spec, device="cuda", max_rows=ROWS)
    yield pool
    pool.close()


def random_step(rng):
    """Segments of ``ROWS`` rows: decode rows, a prefill, base rows and what is left as padding."""
    names = [*rng.sample([*RANKS], rng.randint(0, 3)), None]
    left = ROWS - rng.choice([0, 0, 7, 60])
    segments = []
    while left:
        length = min(left, rng.choice([1, 1, 1, 2, 9, 40]))
        segments.append(Segment(rng.choice(names), length, rng.choice([1.0, 0.5])))
        left -= length
    return LoraStep((*segments, Segment(None, ROWS - sum(s.length for s in segments))))


class Call:
    """Both sites on one x, into outputs of fixed addresses."""

    def __init__(self, pool):
        generator = torch.Generator().manual_seed(0)
        self.pool = pool
        self.x, self.qkv, self.down = (
            torch.randn(ROWS, width, generator=generator).to("cuda", torch.bfloat16)
            for width in (WIDTH, sum(WIDTHS["qkv"]), sum(WIDTHS["down"]))
        )
        self.out = [torch.empty_like(self.qkv), torch.empty_like(self.down)]

    def reset(self, out):
        for y, base in zip(out, (self.qkv, self.down), strict=True):
            y.copy_(base)

    def apply(self, x, out):
        for y, target in zip(out, WIDTHS, strict=True):
            lora_apply_(y, x, self.pool.site(target, 0), self.pool.plan(1))

    def __call__(self, x, out):
        self.reset(out)
        self.apply(x, out)

    def eager(self, x):
        out = [torch.empty_like(y) for y in self.out]
        self(x, out)
        return out

    def captured(self, stream=None):
        with self.pool.begin_step(LoraStep((Segment("a", ROWS),))):
            self.eager(self.x)  # loads the kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self(self.x, self.out)
        return graph


def test_C124_C125_C127_C130_one_capture_serves_every_step(pool):
    call, rng = Call(pool), random.Random(0)
    graph = call.captured()
    differ, changed = torch.zeros(2, REPLAYS, dtype=torch.bool, device="cuda")
    held = []
    for i in range(REPLAYS):
        call.x.normal_()
        with pool.begin_step(random_step(rng)):
            graph.replay()
            want = call.eager(call.x)
        differ[i] = torch.stack(
            [(got != y).any() for got, y in zip(call.out, want, strict=True)]
        ).any()
        changed[i] = (want[1] != call.down).any()
        held = [*held[-7:], torch.full((rng.randint(1, 1 << 20),), float("nan"), device="cuda")]
    assert not differ.any(), f"replays {differ.nonzero().flatten().tolist()} differ from eager"
    assert changed.float().mean() > 0.5
    counters = pool.counters
    assert counters["evictions"] > REPLAYS / 5
    assert (counters["moves"] > 0) == (pool.spec.arena_bytes is not None)


def test_C133_a_kernel_that_writes_x_late_is_waited_for_on_any_stream(pool):
    call, rng, stream = Call(pool), random.Random(1), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = call.captured(stream)
        for _ in range(10):
            x = torch.randn_like(call.x)
            with pool.begin_step(random_step(rng)):
                want = call.eager(x)
                for run in (graph.replay, lambda: call.apply(call.x, call.out)):
                    call.reset(call.out)
                    call.x.fill_(float("nan"))
                    stream.synchronize()
                    torch.cuda._sleep(FIVE_MS)
                    torch.mul(x, 1, out=call.x)
                    run()
                    done = stream.record_event()
                    assert not done.query(), "the kernel ahead was over too soon to prove anything"
                    for got, y in zip(call.out, want, strict=True):
                        assert torch.equal(got, y)
