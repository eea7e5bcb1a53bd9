"""A vLLM engine with its own LoRA kernels and with loramux's: speed, answers, and a long run.

Each engine runs in a process of its own (``bench.engine_child``), where ``LORAMUX_VLLM`` says whose
kernels serve it. Suites: ``decode`` (speed at the shape of Llama-3.1-8B), ``answers`` (log-
probabilities and greedy tokens beside a float32 reference, and ranks below the engine's largest),
``soak`` (random adapters for many steps, every row checked against vLLM's own kernels).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .common import write_results
from .engine_model import Reference, Shape, write_adapters, write_model

LINEARS = list(Shape().linears())
BACKENDS = ("vllm", "loramux")
TOLERANCE = 0.25  # of a log-probability in the soak, where a wrong adapter shows as far more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="decode,answers,soak", help="which, comma-separated")
    parser.add_argument("--work", default="/tmp/loramux_engine", help="models, adapters, caches")
    parser.add_argument("--layers", type=int, default=32, help="of the decode suite")
    parser.add_argument("--answer-layers", type=int, default=8, help="of the answers suite")
    parser.add_argument("--steps", type=int, default=20000, help="of the soak suite")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")


def run(options: argparse.Namespace) -> None:
    session = Session(Path(options.work), time.time() + options.budget)
    suites = options.suite.split(",")
    rows = [row for row in _written(options.json) if row["suite"] not in suites]
    for name in suites:
        for row in SUITES[name](session, options):
            rows.append({"suite": name, **row})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            write_results(options.json, rows)


def _written(path: str | None) -> list[dict[str, Any]]:
    """What earlier runs of other suites left in the file of results."""
    if path is None or not Path(path).exists():
        return []
    return list(json.loads(Path(path).read_text())["rows"])


class Session:
    """Where the files lie, and until when engines may run."""

    def __init__(self, work: Path, deadline: float) -> None:
        self.work = work
        self.deadline = deadline
        self.started = 0
        work.mkdir(parents=True, exist_ok=True)

    def child(
        self, backend: str, engine: dict[str, Any], adapters: Sequence[Path], jobs: list[Any]
    ) -> dict[str, Any]:
        """Run one engine's jobs; its answers, or ``{"error": ...}``."""
        self.started += 1
        spec, out = (self.work / f"{kind}_{self.started}.json" for kind in ("spec", "out"))
        out.unlink(missing_ok=True)
        spec.write_text(
            json.dumps({"engine": engine, "adapters": [str(p) for p in adapters], "jobs": jobs})
        )
        environment = dict(
            os.environ, LORAMUX_VLLM="1" if backend == "loramux" else "0",
            VLLM_CACHE_ROOT=str(self.work / "cache"), VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_HOST_IP="127.0.0.1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
            HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", GLOO_SOCKET_IFNAME="lo",
            NCCL_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false", CUDA_MODULE_LOADING="LAZY",
            VLLM_USE_FLASHINFER_SAMPLER="0",
        )  # fmt: skip
        left = self.deadline - time.time()
        if left < 30:
            return {"error": "no time left"}
        print(f"-- {backend}, {left:.0f} s left", flush=True)
        try:
            command = [sys.executable, "-m", "bench.engine_child", str(spec), str(out)]
            code = subprocess.run(command, env=environment, timeout=left).returncode
        except subprocess.TimeoutExpired:
            return {"error": "ran out of time"}
        if not out.exists():
            return {"error": f"ended with {code} and no result"}
        result = json.loads(out.read_text())
        want = "loramux" in result["wrapper"]
        if engine.get("enable_lora") and want != (backend == "loramux"):
            return {"error": f"served by {result['wrapper']}"}
        return dict(result, file=str(out))


def engine_arguments(
    model: Path,
    *,
    tokens: int,
    max_loras: int = 0,
    max_rank: int = 16,
    adapters: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; no LoRA where ``max_loras`` is 0."""
    arguments = dict(
        model=str(model), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=2048,
        max_num_seqs=32, max_num_batched_tokens=tokens, enable_prefix_caching=False,
        gpu_memory_utilization=0.6, kv_cache_memory_bytes=8 << 30, generation_config="vllm",
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
    )  # fmt: skip
    if max_loras:
        arguments.update(
            enable_lora=True, max_loras=max_loras, max_lora_rank=max_rank,
            max_cpu_loras=max(max_loras, adapters),
        )  # fmt: skip
    return {**arguments, **more}


def decode_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Decode of 32 rows and prefill of 8192 tokens, rank 16 on every linear."""
    shape = Shape(layers=options.layers, vocab=128256)
    model = write_model(session.work / f"dummy_{shape.layers}", shape, with_weights=False)
    folder = session.work / f"adapters_{shape.layers}"
    adapters = write_adapters(folder, shape, [16] * 32, distinct=4)
    baseline: dict[tuple[str, int], float] = {}
    for backend, max_loras in (("none", 0), ("loramux", 32), ("vllm", 32)):
        arguments = engine_arguments(
            model, max_loras=max_loras, tokens=8192, adapters=32, load_format="dummy"
        )
        if max_loras:
            arguments["lora_target_modules"] = LINEARS
        jobs = [
            ["decode", {"rows": 32, "cases": [0, 1, 4, 32]}],
            ["prefill", {"tokens": 8192, "cases": [0, 8]}],
        ]
        result = session.child(backend, arguments, adapters, jobs)
        about = {"backend": backend, "layers": shape.layers, "rank": 16, "max_rank": 16}
        yield from _speed_rows(result, about, baseline)


def _speed_rows(
    result: dict[str, Any], about: dict[str, Any], baseline: dict[tuple[str, int], float]
) -> Iterator[dict[str, Any]]:
    """One row per figure, with what it is over the engine without LoRA."""
    if "error" in result:
        yield {**about, "error": result["error"]}
        return
    for job in result["jobs"]:
        if job["job"] not in ("decode", "prefill"):
            continue
        for figure in job["result"]:
            value = figure["ms_per_step" if job["job"] == "decode" else "ms"]
            key = (job["job"], about["layers"])
            if about["backend"] == "none":
                baseline[key] = value
            over = value / baseline[key] - 1 if key in baseline else None
            yield {
                **about, "figure": job["job"], **figure,
                "over_no_lora": over if over is None else round(over, 4),
                "start_s": result["start_s"],
            }  # fmt: skip


def answers_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Mixed batches beside a float32 reference, in engines of rank 16 and of rank 64."""
    shape = Shape(layers=options.answer_layers)
    model = write_model(session.work / f"random_{shape.layers}", shape, with_weights=True)
    folder = session.work / f"answers_{shape.layers}"
    flat = write_adapters(folder / "flat", shape, [16] * 40)
    mixed = write_adapters(
        folder / "mixed", shape, [8, 16, 64, 8, 5, 64, 32, 8, 8, 16, 8, 64],
        modules=lambda i: LINEARS if i % 3 else ["q_proj", "v_proj", "down_proj"],
    )  # fmt: skip
    rank8 = write_adapters(folder / "rank8", shape, [8] * 4)
    baseline: dict[tuple[str, int], float] = {}

    batches = mixed_batches(shape.vocab)
    results = {}
    for backend in ("none", *BACKENDS):
        arguments = engine_arguments(
            model, max_loras=0 if backend == "none" else 32, tokens=1024, adapters=40
        )
        jobs = [["answers", {"batches": batches, "new": 16}]]
        results[backend] = session.child(backend, arguments, flat, jobs)
    yield from compare(results, batches, Reference(model, flat), "max rank 16, 32 slots")

    batches = swapping_batches(shape.vocab, len(mixed))
    results = {}
    for backend in BACKENDS:
        arguments = engine_arguments(model, max_loras=4, max_rank=64, tokens=1024, adapters=16)
        jobs = [["answers", {"batches": batches, "new": 16}]]
        results[backend] = session.child(backend, arguments, mixed, jobs)
    yield from compare(results, batches, Reference(model, mixed), "max rank 64, 4 slots")

    for backend in ("none", *BACKENDS):
        arguments = engine_arguments(
            model, max_loras=0 if backend == "none" else 4, max_rank=64, tokens=8192, adapters=4
        )
        jobs = [["decode", {"rows": 32, "cases": [0, 1, 4]}]]
        about = {"backend": backend, "layers": shape.layers, "rank": 8, "max_rank": 64}
        yield from _speed_rows(session.child(backend, arguments, rank8, jobs), about, baseline)


def mixed_batches(vocab: int) -> list[dict[str, Any]]:
    """Base rows alone, beside 1, 4 and 32 adapters, others in their slots, and the first again.

    Prompts of 1 to 1500 tokens, so that long ones are prefilled in chunks beside decoding rows.
    """
    chance = random.Random(1)
    chosen = (
        [0] * 12,
        [i % 2 for i in range(13)],
        [i % 5 for i in range(21)],
        [*range(1, 33), *[0] * 8],
        [*range(9, 41), *[0] * 5],
        [*range(1, 9), 0, 0, 0],
    )
    return [_batch(chance, vocab, adapters) for adapters in chosen]


def swapping_batches(vocab: int, adapters: int) -> list[dict[str, Any]]:
    """More adapters in a batch than there are slots: they swap between its steps."""
    chance = random.Random(2)
    return [
        _batch(chance, vocab, [chance.randrange(adapters + 1) for _ in range(40)]) for _ in range(2)
    ]


def _batch(chance: random.Random, vocab: int, adapters: Sequence[int]) -> dict[str, Any]:
    lengths = [chance.choice([1, 7, 33, 64, 100, 250, 400]) for _ in adapters]
    lengths[0] = 1500
    prompts = [[chance.randrange(10, vocab - 10) for _ in range(n)] for n in lengths]
    adapters = list(adapters)
    chance.shuffle(adapters)
    return {"prompts": prompts, "adapters": adapters}


def compare(
    results: dict[str, dict[str, Any]],
    batches: Sequence[dict[str, Any]],
    reference: Reference,
    where: str,
) -> Iterator[dict[str, Any]]:
    """Distances to the reference, and the base rows with the bits of the engine without LoRA."""
    for backend in BACKENDS:
        about = {"backend": backend, "figure": "answers", "engine": where}
        if "error" in results[backend]:
            yield {**about, "error": results[backend]["error"]}
            continue
        answers = results[backend]["jobs"][0]["result"]
        plain = results.get("none", {}).get("jobs")
        distances = {"base": Distance(), "adapter": Distance()}
        same = base = 0
        for i, batch in enumerate(batches):
            requests = zip(batch["adapters"], batch["prompts"], answers[i], strict=True)
            for j, (adapter, prompt, answer) in enumerate(requests):
                distances["adapter" if adapter else "base"].add(reference, adapter, prompt, answer)
                if adapter == 0 and plain:
                    base += 1
                    same += answer == plain[0]["result"][i][j]
        for kind, distance in distances.items():
            yield {**about, "rows": kind, **distance.row()}
        if base:
            yield {**about, "base_requests": base, "with_the_bits_of_no_lora": same}


class Distance:
    """How far answers are from the reference, over many requests.

    A greedy token's regret is how much likelier the reference's own choice is, after the same
    tokens, by the reference.
    """

    def __init__(self) -> None:
        self.errors: list[torch.Tensor] = []
        self.regrets: list[torch.Tensor] = []

    def add(
        self, reference: Reference, adapter: int, prompt: list[int], answer: dict[str, Any]
    ) -> None:
        tokens = [*prompt, *answer["tokens"]]
        want = reference.logprobs(adapter, tokens)
        following = torch.tensor(tokens[1:], device=want.device)
        own, best = want.gather(1, following[:, None])[:, 0].cpu(), want.amax(1).cpu()
        given = len(prompt) - 1
        self.errors.append((torch.tensor(answer["prompt"]) - own[:given]).abs())
        self.regrets.append(best[given:] - own[given:])

    def row(self) -> dict[str, Any]:
        errors, regrets = torch.cat(self.errors), torch.cat(self.regrets)
        return {
            "prompt_tokens": len(errors),
            "mean_error": round(errors.mean().item(), 6),
            "max_error": round(errors.max().item(), 5),
            "greedy_tokens": len(regrets),
            "greedy_as_reference": int((regrets == 0).sum()),
            "mean_regret": round(regrets.mean().item(), 7),
        }


def soak_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Adapters loaded, evicted and swapped at random, every row checked against vLLM's kernels."""
    shape = Shape(layers=2, hidden=1024, inner=2816, heads=8, kv_heads=2)
    model = write_model(session.work / "soak", shape, with_weights=True)
    adapters = write_adapters(
        session.work / "soak_adapters", shape, [(4, 8, 16, 5)[i % 4] for i in range(48)],
        modules=lambda i: LINEARS if i % 2 else ["q_proj", "o_proj", "up_proj"],
    )  # fmt: skip
    chance = random.Random(3)
    prompts = [
        [chance.randrange(10, shape.vocab - 10) for _ in range(chance.randint(16, 90))]
        for _ in range(12)
    ]
    arguments = engine_arguments(model, max_loras=8, tokens=1024, adapters=24)
    expected = session.child(
        "vllm", arguments, adapters, [["expectations", {"prompts": prompts, "new": 40}]]
    )
    about = {"backend": "loramux", "figure": "soak", "adapters": len(adapters), "slots": 8}
    if "error" in expected:
        yield {**about, "error": f"expectations: {expected['error']}"}
        return
    job = {
        "expected_file": expected["file"],
        "prompts": prompts,
        "steps": options.steps,
        "tolerance": TOLERANCE,
        "seconds": max(session.deadline - time.time() - 60, 30),
    }
    result = session.child("loramux", arguments, adapters, [["soak", job]])
    yield {**about, **(result if "error" in result else result["jobs"][0]["result"])}


SUITES = {"decode": decode_suite, "answers": answers_suite, "soak": soak_suite}
