"""A vLLM engine with its own LoRA kernels and with loramux's: speed, answers, and a long run.

Each engine runs in a process of its own (``bench.engine_child``), where ``LORAMUX_VLLM`` says whose
kernels serve it. Suites: ``decode`` (speed at the shape of Llama-3.1-8B), ``ranks`` (the same with
ranks below the engine's largest), ``answers`` (log-probabilities and greedy tokens beside a float32
reference), ``swapping`` (the same with more adapters than slots), ``soak`` (random adapters for
many steps, every row checked against vLLM's own kernels). The exit status is 1 where a row says
that something failed.
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

from .common import commit, write_results
from .engine_model import Reference, Shape, write_adapters, write_model

LINEARS = list(Shape().linears())
BACKENDS = ("vllm", "loramux")
TOLERANCE = 0.25  # of a log-probability in the soak, where a wrong adapter shows as far more
FAR = 1.0  # from the float32 reference: no rounding of bfloat16 goes there
ENDING = 20  # seconds that a soak leaves of its time, to finish a batch and end its engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default=",".join(SUITES), help="which, comma-separated")
    parser.add_argument("--work", default="/tmp/loramux_engine", help="models, adapters, caches")
    parser.add_argument("--layers", type=int, default=32, help="of decode and ranks")
    parser.add_argument("--answer-layers", type=int, default=8, help="of answers and swapping")
    parser.add_argument("--steps", type=int, default=20000, help="of the soak suite's first engine")
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything")


def run(options: argparse.Namespace) -> None:
    session = Session(Path(options.work), time.time() + options.budget)
    suites = options.suite.split(",")
    rows = [row for row in _written(options.json) if row["suite"] not in suites]
    measured, failed = commit(), False
    for name in suites:
        for row in SUITES[name](session, options):
            rows.append({"suite": name, **row, "commit": measured})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            write_results(options.json, rows)
            failed |= has_failed(row)
    if failed:
        sys.exit(1)


def has_failed(row: dict[str, Any]) -> bool:
    """Whether a row tells of an error, wrong answers, missing steps or layers left to vLLM."""
    return (
        "error" in row
        or row.get("wrong_rows", 0) > 0
        or row.get("steps", 0) < row.get("steps_asked", 0)
        or (row["backend"] == "loramux" and row.get("layers_left") != "none")
    )


def _written(path: str | None) -> list[dict[str, Any]]:
    """What earlier runs of other suites left in the file of results."""
    if path is None or not Path(path).exists():
        return []
    written = json.loads(Path(path).read_text())
    return [{**row, "commit": row.get("commit", written["commit"])} for row in written["rows"]]


class Session:
    """Where the files lie, and until when engines may run."""

    def __init__(self, work: Path, deadline: float) -> None:
        self.work = work
        self.deadline = deadline
        self.started = 0
        work.mkdir(parents=True, exist_ok=True)

    def child(
        self,
        backend: str,
        engine: dict[str, Any],
        adapters: Sequence[Path],
        jobs: list[Any],
        *,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        """Run one engine's jobs: what those found that ended, and ``"error"`` if one did not.

        Args:
            deterministic: of the kernels that torch.compile makes none is chosen by its time, so
                that every engine has the same ones.
        """
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
            VLLM_USE_FLASHINFER_SAMPLER="0", TORCHINDUCTOR_DETERMINISTIC=str(int(deterministic)),
        )  # fmt: skip
        left = self.deadline - time.time()
        if left < 30:
            return {"jobs": [], "error": "no time left"}
        print(f"-- {backend}, {left:.0f} s left", flush=True)
        error = None
        try:
            command = [sys.executable, "-m", "bench.engine_child", str(spec), str(out)]
            code = subprocess.run(command, env=environment, timeout=left).returncode
            if code or not out.exists():
                error = f"ended with {code}"
        except subprocess.TimeoutExpired:
            error = "ran out of time"
        result = json.loads(out.read_text()) if out.exists() else {"jobs": []}
        is_loramux = "loramux" in result.get("wrapper", backend)
        if engine.get("enable_lora") and is_loramux != (backend == "loramux"):
            error = f"served by {result['wrapper']}"
        return {**result, "file": str(out), **({"error": error} if error else {})}


def found(result: dict[str, Any], name: str) -> Any:
    """What an engine's job of this name found; None where it did not end."""
    return next((job["result"] for job in result["jobs"] if job["job"] == name), None)


def of_engine(result: dict[str, Any]) -> dict[str, Any]:
    """What every row tells of its engine."""
    keys = ("vllm", "start_s", "layers_served", "layers_left", "error")
    return {key: result[key] for key in keys if key in result}


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
    jobs = [
        ["decode", {"rows": 32, "cases": [0, 1, 4, 32]}],
        ["prefill", {"tokens": 8192, "cases": [0, 8]}],
    ]
    engines = [("none", 0), ("loramux", 16), ("vllm", 16)]
    yield from _speed(session, options.layers, [16] * 32, engines, jobs)


def ranks_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Decode of 32 rows, rank 8 on every linear, in engines whose largest rank is 8 and 64."""
    jobs = [["decode", {"rows": 32, "cases": [0, 1, 4]}]]
    engines = [("loramux", 8), ("loramux", 64), ("vllm", 64)]
    yield from _speed(session, options.layers, [8] * 4, engines, jobs)


def _speed(
    session: Session,
    layers: int,
    ranks: Sequence[int],
    engines: Sequence[tuple[str, int]],
    jobs: list[Any],
) -> Iterator[dict[str, Any]]:
    """One row per figure of every engine, over the one without LoRA and over its own base rows."""
    shape = Shape(layers=layers, vocab=128256)
    model = write_model(session.work / f"dummy_{layers}", shape, with_weights=False)
    folder = session.work / f"adapters_{layers}_{ranks[0]}"
    adapters = write_adapters(folder, shape, ranks, distinct=4)
    no_lora: dict[str, float] = {}
    for backend, max_rank in engines:
        arguments = engine_arguments(
            model, max_loras=len(ranks) if max_rank else 0, max_rank=max_rank, tokens=8192,
            adapters=len(ranks), load_format="dummy",
        )  # fmt: skip
        if max_rank:
            arguments["lora_target_modules"] = LINEARS
        result = session.child(backend, arguments, adapters, jobs)
        about = {"backend": backend, "layers": layers, "rank": ranks[0], "max_rank": max_rank}
        about.update(of_engine(result))
        if "error" in result:
            yield about
        for name, _ in jobs:
            unit = "ms_per_step" if name == "decode" else "ms"
            figures = found(result, name) or []
            for figure in figures:
                value = figure[unit]
                if backend == "none":
                    no_lora[name] = value
                bases = {"over_base": figures[0][unit], "over_no_lora": no_lora.get(name)}
                over = {key: round(value / base - 1, 4) for key, base in bases.items() if base}
                yield {**about, "figure": name, **figure, **over}


def answers_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Mixed batches beside a float32 reference and the bits of an engine without LoRA, rank 16."""
    shape = Shape(layers=options.answer_layers)
    adapters = write_adapters(session.work / "answers", shape, [16] * 40)
    batches = mixed_batches(shape.vocab)
    engines = {"none": {}, **{backend: {"max_loras": 32} for backend in BACKENDS}}
    yield from _answers(session, shape, engines, adapters, batches)


def swapping_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """As answers, with adapters of ranks up to 64 that swap between the steps of a batch."""
    shape = Shape(layers=options.answer_layers)
    adapters = write_adapters(
        session.work / "swapping", shape, [8, 16, 64, 8, 5, 64, 32, 8, 8, 16, 8, 64],
        modules=lambda i: LINEARS if i % 3 else ["q_proj", "v_proj", "down_proj"],
    )  # fmt: skip
    batches = swapping_batches(shape.vocab, len(adapters))
    engines = {backend: {"max_loras": 4, "max_rank": 64} for backend in BACKENDS}
    yield from _answers(session, shape, engines, adapters, batches)


def _answers(
    session: Session,
    shape: Shape,
    engines: dict[str, dict[str, int]],
    adapters: list[Path],
    batches: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    model = write_model(session.work / f"random_{shape.layers}", shape, with_weights=True)
    jobs = [["answers", {"batches": batches, "new": 16}]]
    results = {}
    for backend, options in engines.items():
        arguments = engine_arguments(model, tokens=1024, adapters=len(adapters), **options)
        results[backend] = session.child(backend, arguments, adapters, jobs, deterministic=True)
    yield from compare(results, batches, Reference(model, adapters))


def mixed_batches(vocab: int) -> list[dict[str, Any]]:
    """Base rows alone, beside 1, 4 and 32 adapters, others in their slots, and the first again.

    Prompts of 1 to 1500 tokens, so that long ones are prefilled in chunks beside decoding rows.
    Then 32 adapters in every step, and a step that is prefilled in a graph.
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
    batches = [_batch(chance, vocab, adapters) for adapters in chosen]
    short = [chance.randint(1, 31) for _ in range(32)]
    return [*batches, _batch(chance, vocab, range(1, 33), short), _overrun(chance, vocab)]


def swapping_batches(vocab: int, adapters: int) -> list[dict[str, Any]]:
    """More adapters in a batch than there are slots: they swap between its steps.

    Then a step that is prefilled in a graph.
    """
    chance = random.Random(2)
    batches = [
        _batch(chance, vocab, [chance.randrange(adapters + 1) for _ in range(40)]) for _ in range(2)
    ]
    return [*batches, _overrun(chance, vocab)]


def _overrun(chance: random.Random, vocab: int) -> dict[str, Any]:
    """Of 1044 tokens a step takes 1024: the next has 20 of a prompt and 11 decoding rows."""
    return _batch(chance, vocab, [0, 1, 2, 3, 4] * 2 + [0, 1], [990, *[1] * 10, 44])


def _batch(
    chance: random.Random, vocab: int, adapters: Sequence[int], lengths: Sequence[int] = ()
) -> dict[str, Any]:
    if not lengths:
        lengths = [1500, *(chance.choice([1, 7, 33, 64, 100, 250, 400]) for _ in adapters[1:])]
    prompts = [[chance.randrange(10, vocab - 10) for _ in range(n)] for n in lengths]
    adapters = list(adapters)
    chance.shuffle(adapters)
    return {"prompts": prompts, "adapters": adapters}


def compare(
    results: dict[str, dict[str, Any]],
    batches: Sequence[dict[str, Any]],
    reference: Reference,
) -> Iterator[dict[str, Any]]:
    """Distances to the reference, and the base rows with the bits of the engine without LoRA."""
    plain = found(results.get("none", {"jobs": []}), "answers")
    for backend, result in results.items():
        about = {"backend": backend, "figure": "answers", **of_engine(result)}
        answers = found(result, "answers")
        if "error" in result:
            yield about
        if backend == "none" or answers is None:
            continue
        distances = {"base": Distance(), "adapter": Distance()}
        same = base = 0
        difference = 0.0
        for i, batch in enumerate(batches):
            requests = zip(batch["adapters"], batch["prompts"], answers[i], strict=True)
            for j, (adapter, prompt, answer) in enumerate(requests):
                distances["adapter" if adapter else "base"].add(reference, adapter, prompt, answer)
                if adapter == 0 and plain:
                    base += 1
                    same += answer == plain[i][j]
                    pairs = zip(answer["prompt"], plain[i][j]["prompt"], strict=True)
                    difference = max([difference, *(abs(a - b) for a, b in pairs)])
        for kind, distance in distances.items():
            yield {**about, "rows": kind, **distance.row()}
        if plain:
            yield {
                **about,
                "base_requests": base,
                "with_the_bits_of_no_lora": same,
                "max_prompt_difference": round(difference, 6),
            }


class Distance:
    """How far answers are from the reference, over many requests.

    A greedy token's regret is how much likelier the reference's own choice is, after the same
    tokens, by the reference. A row is wrong where one of the values is ``FAR``.
    """

    def __init__(self) -> None:
        self.wrong_rows = 0
        self.values: dict[str, list[torch.Tensor]] = {"error": [], "decode_error": [], "regret": []}

    def add(
        self, reference: Reference, adapter: int, prompt: list[int], answer: dict[str, Any]
    ) -> None:
        tokens = [*prompt, *answer["tokens"]]
        want = reference.logprobs(adapter, tokens)
        following = torch.tensor(tokens[1:], device=want.device)
        own, best = want.gather(1, following[:, None])[:, 0].cpu(), want.amax(1).cpu()
        given = len(prompt) - 1
        row = {
            "error": (torch.tensor(answer["prompt"]) - own[:given]).abs(),
            "decode_error": (torch.tensor(answer["own"]) - own[given:]).abs(),
            "regret": best[given:] - own[given:],
        }
        for name, values in row.items():
            self.values[name].append(values)
        self.wrong_rows += not all(bool((values < FAR).all()) for values in row.values())

    def row(self) -> dict[str, Any]:
        all_of = {name: torch.cat(parts) for name, parts in self.values.items()}
        row: dict[str, Any] = {
            "prompt_tokens": len(all_of["error"]),
            "greedy_tokens": len(all_of["regret"]),
            "greedy_as_reference": int((all_of["regret"] == 0).sum()),
            "wrong_rows": self.wrong_rows,
        }
        for name, values in all_of.items():
            row[f"mean_{name}"] = round(values.mean().item(), 7)
            row[f"max_{name}"] = round(values.max().item(), 5)
        return row


def soak_suite(session: Session, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Adapters loaded, evicted and swapped at random, every row checked against vLLM's kernels.

    Then again, for fewer steps, in an engine whose largest rank is 64: other kernels serve it.
    """
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
    jobs = [["expectations", {"prompts": prompts, "new": 40}]]
    expected = session.child("vllm", arguments, adapters, jobs)
    about = {"figure": "soak", "adapters": len(adapters), "slots": 8}
    if "error" in expected:
        yield {**about, "backend": "vllm", **of_engine(expected)}
        return
    # The first leaves the second time to start and to do its steps.
    for max_rank, steps, after in ((16, options.steps, 130), (64, options.steps // 4, 0)):
        job = {
            "expected_file": expected["file"],
            "prompts": prompts,
            "steps": steps,
            "tolerance": TOLERANCE,
            "deadline": session.deadline - ENDING - after,
        }
        arguments["max_lora_rank"] = max_rank
        result = session.child("loramux", arguments, adapters, [["soak", job]])
        of_soak = {**of_engine(result), **(found(result, "soak") or {})}
        yield {**about, "backend": "loramux", "max_rank": max_rank, "steps_asked": steps, **of_soak}


SUITES = {
    "decode": decode_suite,
    "ranks": ranks_suite,
    "answers": answers_suite,
    "swapping": swapping_suite,
    "soak": soak_suite,
}
