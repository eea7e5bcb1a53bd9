"""A mixed batch through a bound model is each segment alone, in float64, with merged weights."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from common import random_pair, save_adapter
from loramux import LoraPool, LoraStep, Segment, module_lora_spec, read_lora_file

VOCAB = 19


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.tanh(q * k) + v
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Rows do not mix, so that a segment's result alone is its result in any batch."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x[last])


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 3))
    width, inner = draw(st.sampled_from([(8, 24), (17, 40), (32, 33)]))
    modules = ["lm_head"]
    modules += [f"layers.{i}.{n}" for i in range(layers) for n in ("q", "k", "v", "up", "down")]
    adapters = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
        ranks = {name: draw(st.integers(1, 64)) for name in chosen}
        alphas = {name: draw(st.sampled_from([0.5, 8, 32])) for name in chosen}
        adapters.append((ranks, alphas, draw(st.booleans())))
    segments = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(adapters)), st.integers(1, 70), st.sampled_from([1.0, 0.5])
            ),
            min_size=1,
            max_size=8,
        )
    )
    return layers, width, inner, adapters, segments


def write_adapter(folder, model, ranks, alphas, rslora, seed):
    pairs = {}
    for name, rank in ranks.items():
        fused = name.rpartition(".")[2] in ("q", "k", "v")
        linear = model.get_submodule(name[:-1] + "qkv" if fused else name)
        out = linear.out_features // 3 if fused else linear.out_features
        pairs[name] = random_pair(rank, linear.in_features, out, seed)
    exact = {f"^{name}$": value for name, value in ranks.items()}
    return save_adapter(
        folder,
        pairs,
        r=1,
        rank_pattern=exact,
        alpha_pattern={f"^{name}$": value for name, value in alphas.items()},
        use_rslora=rslora,
        target_modules=sorted(ranks),
    )


def merged(model, adapter, factor, dtype):
    """A copy of the model in ``dtype`` with the adapter's deltas in its weights."""
    model = copy.deepcopy(model).to(dtype)
    for name, lora in adapter.modules.items() if adapter else ():
        delta = factor * lora.scale * (lora.b.to(dtype) @ lora.a.to(dtype))
        head, _, last = name.rpartition(".")
        with torch.no_grad():
            if last in ("q", "k", "v"):
                part = model.get_submodule(f"{head}.qkv").weight.chunk(3)["qkv".index(last)]
                part += delta
            else:
                model.get_submodule(name).weight += delta
    return model


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(0, 2**31))
def test_the_bound_model_is_the_definition(case, seed):
    layers, width, inner, drawn, segments = case
    torch.manual_seed(seed)
    model = Model(layers, width, inner)
    with TemporaryDirectory() as folder, torch.inference_mode():
        paths = {
            f"a{i}": write_adapter(Path(folder) / str(i), model, *parts, seed=i)
            for i, parts in enumerate(drawn, 1)
        }
        spec = module_lora_spec(
            model,
            packing={"qkv": {"q": width, "k": width, "v": width}},
            adapters=paths,
            max_slots=3,
            max_rank=64,
        )
        pool = LoraPool.build(spec)
        lengths = [length for _, length, _ in segments]
        ids = torch.randint(VOCAB, (sum(lengths),))
        last = torch.tensor(lengths).cumsum(0) - 1
        base = model(ids, last)
        step = LoraStep(tuple(Segment(f"a{a}" if a else None, n, s) for a, n, s in segments))
        with spec.module_map.bind(model, pool), pool.begin_step(step):
            got = model(ids, last)
        assert torch.equal(model(ids, last), base), "unbound again, the model is as it was"

        read = {name: read_lora_file(path) for name, path in paths.items()}
        for i, (a, _, factor) in enumerate(segments):
            if a == 0:
                assert torch.equal(got[i], base[i])
                continue
            adapter, words, mine = read[f"a{a}"], torch.arange(VOCAB), ids[last[i]]
            want = merged(model, adapter, factor, torch.float64)(words, words)
            single = merged(model, adapter, factor, torch.float32)(words, words)
            # Relative to the worst token of a merged float32 model, the sums of one token may be
            # off by more than those of another: in 2,685 draws 3 times at most, 0.5 in the median.
            bound = 8 * ((single - want).norm(dim=1) / want.norm(dim=1)).max()
            assert (got[i] - want[mine]).norm() <= bound * want[mine].norm()
        pool.close()
