"""One vLLM engine and the jobs that it does: ``python -m bench.engine_child SPEC OUT``.

``bench.engine`` starts it, in a process of its own per engine, with loramux on or off. SPEC is
``{"engine": arguments of vllm.LLM, "adapters": [paths], "jobs": [[name, options], ...]}``; what
the jobs found goes to OUT as JSON, after each of them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import torch


class Announcement(logging.Handler):
    """The layers that loramux serves and leaves, by its log line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        line = r"it serves (\d+) LoRA layers; with vLLM's own kernels: (.+)"
        if found := re.search(line, record.getMessage()):
            self.layers = {"layers_served": int(found[1]), "layers_left": found[2]}


class Engine:
    """One ``vllm.LLM``; ``steps`` counts its forwards."""

    def __init__(self, arguments: dict[str, Any], adapters: Sequence[str]) -> None:
        from vllm import LLM

        self.announcement = Announcement()
        logging.getLogger("vllm.plugins.loramux").addHandler(self.announcement)
        start = time.perf_counter()
        self.llm = LLM(**arguments)
        self.start_s = time.perf_counter() - start
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.adapters = adapters
        self.has_lora = bool(arguments.get("enable_lora"))
        self.steps = 0
        executor = self.llm.llm_engine.model_executor
        execute = executor.execute_model

        def counted(scheduled: Any, *args: Any, **options: Any) -> Any:
            self.steps += scheduled.total_num_scheduled_tokens > 0
            return execute(scheduled, *args, **options)

        executor.execute_model = counted

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[int],
        new: int | Sequence[int],
        **sampling: Any,
    ) -> list[Any]:
        """Greedy tokens for ``prompts``; adapter 0 is the base, and every one without LoRA."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lengths = [new] * len(prompts) if isinstance(new, int) else new
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False, **sampling
            )
            for n in lengths
        ]
        requests = [
            LoRARequest(f"a{a}", a, self.adapters[a - 1]) if a and self.has_lora else None
            for a in adapters
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(inputs, params, lora_request=requests, use_tqdm=False)

    def prompts(self, count: int, length: int, seed: int = 7) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(10, self.vocab - 10, (length,), generator=generator).tolist()
            for _ in range(count)
        ]

    @staticmethod
    def seconds(call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def decode(engine: Engine, rows: int, cases: Sequence[int], repeats: int = 7) -> list[Any]:
    """Milliseconds of a decode step: two lengths' difference, so that prefill drops out.

    The cases take turns, so that what drifts does so for all; medians, and the least and most.
    """
    short, long = 16, 128
    prompts = engine.prompts(rows, 32)
    cases = cases if engine.has_lora else [0]
    adapters = {count: [i % count + 1 if count else 0 for i in range(rows)] for count in cases}
    ms: dict[int, list[float]] = {count: [] for count in cases}
    for turn in range(1 + repeats):
        for count in cases:
            seconds = [
                engine.seconds(functools.partial(engine.generate, prompts, adapters[count], n))
                for n in (short, long)
            ]
            if turn > 0:  # the first loads the adapters
                ms[count].append((seconds[1] - seconds[0]) / (long - short) * 1e3)
    return [
        {"adapters": count, "rows": rows, **_spread("ms_per_step", ms[count])} for count in cases
    ]


def prefill(engine: Engine, tokens: int, cases: Sequence[int], repeats: int = 7) -> list[Any]:
    """Milliseconds of ``tokens`` prompt tokens, spread over eight requests; as ``decode``."""
    prompts = engine.prompts(8, tokens // 8)
    cases = cases if engine.has_lora else [0]
    ms: dict[int, list[float]] = {count: [] for count in cases}
    for turn in range(1 + repeats):
        for count in cases:
            adapters = [i % count + 1 if count else 0 for i in range(8)]
            seconds = engine.seconds(functools.partial(engine.generate, prompts, adapters, 1))
            if turn > 0:
                ms[count].append(seconds * 1e3)
    return [{"adapters": count, "tokens": tokens, **_spread("ms", ms[count])} for count in cases]


def _spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        name: round(median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def answers(engine: Engine, batches: Sequence[dict[str, Any]], new: int) -> list[Any]:
    """Greedy tokens and log-probabilities of every request of every batch."""
    results = []
    for batch in batches:
        outputs = engine.generate(
            batch["prompts"], batch["adapters"], new, prompt_logprobs=0, logprobs=0
        )
        results.append([_answer(output) for output in outputs])
    return results


def _answer(output: Any) -> dict[str, Any]:
    """The tokens, their own log-probabilities, and those of the prompt."""
    tokens = list(output.outputs[0].token_ids)
    chosen = zip(tokens, output.outputs[0].logprobs, strict=True)
    entries = (output.prompt_logprobs or [None])[1:]  # of the first token there is none
    given = zip(output.prompt_token_ids[1:], entries, strict=True)
    return {
        "prompt": [entry[token].logprob for token, entry in given],
        "tokens": tokens,
        "own": [entry[token].logprob for token, entry in chosen],
    }


def expectations(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[Any]:
    """What every adapter answers to every prompt."""
    results = []
    for adapter in range(len(engine.adapters) + 1):
        outputs = engine.generate(
            prompts, [adapter] * len(prompts), new, prompt_logprobs=0, logprobs=4
        )
        results.append([_expectation(output) for output in outputs])
    return results


def _expectation(output: Any) -> dict[str, Any]:
    """An answer, and at each token the best ones' log-probabilities; keys as JSON has them."""
    best = [
        {str(token): value.logprob for token, value in entry.items()}
        for entry in output.outputs[0].logprobs
    ]
    return {**_answer(output), "best": best}


def soak(
    engine: Engine,
    expected_file: str,
    prompts: Sequence[Sequence[int]],
    steps: int,
    tolerance: float,
    deadline: float,
) -> dict[str, Any]:
    """Random batches of random adapters until ``steps`` forwards are done, every row checked.

    ``deadline`` is one of ``time.time()``: fewer steps are done where it comes first.
    """
    expected = json.loads(Path(expected_file).read_text())["jobs"][0]["result"]
    chance = random.Random(0)
    requests = wrong = tokens = 0
    memory: list[tuple[int, ...]] = []
    worst, examples = 0.0, []
    new = len(expected[0][0]["tokens"])
    start, first = time.perf_counter(), engine.steps
    while not memory or (memory[-1][0] < steps and time.time() < deadline):
        picks = [
            (chance.randrange(len(prompts)), chance.randrange(len(expected))) for _ in range(24)
        ]
        lengths = [chance.randint(1, new) for _ in picks]
        outputs = engine.generate(
            [prompts[p] for p, _ in picks],
            [a for _, a in picks],
            lengths,
            prompt_logprobs=0,
            logprobs=4,
        )
        for (prompt, adapter), output in zip(picks, outputs, strict=True):
            got, want = _expectation(output), expected[adapter][prompt]
            error = _row_error(got, want)
            requests, tokens = requests + 1, tokens + len(got["tokens"])
            worst = max(worst, error)
            if error > tolerance:
                wrong += 1
                examples = [*examples, [prompt, adapter, error]][:8]
        memory.append((engine.steps - first, *_memory()))
    fifth = next(entry for entry in memory if entry[0] >= memory[-1][0] / 5)
    grown = [last - early for last, early in zip(memory[-1], fifth, strict=True)]
    return {
        "steps": memory[-1][0],
        "requests": requests,
        "tokens": tokens,
        "wrong_rows": wrong,
        "examples": examples,
        "worst_error": worst,
        "separation": _separation(expected),
        "seconds": round(time.perf_counter() - start, 1),
        "allocated_bytes_grown": grown[1],
        "other_device_bytes_grown": grown[2],
        "host_bytes_grown": grown[3],
    }


def _memory() -> tuple[int, int, int]:
    """Bytes allocated by torch, in use on the device beside torch's, and held by this process."""
    free, total = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    others = total - free - torch.cuda.memory_reserved()
    return torch.cuda.memory_allocated(), others, pages * os.sysconf("SC_PAGE_SIZE")


def _row_error(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The largest difference of a log-probability, up to where the greedy tokens part.

    There both tokens are compared, which differ little at a near tie. One that is not among the
    other side's best is at most the least of them there.
    """
    errors = [abs(a - b) for a, b in zip(got["prompt"], want["prompt"], strict=True)]
    for i, token in enumerate(got["tokens"]):
        for name, here, there in ((token, got, want), (want["tokens"][i], want, got)):
            own, best = here["own"][i], there["best"][i]
            other = best.get(str(name))
            errors.append(own - min(best.values()) if other is None else abs(own - other))
        if token != want["tokens"][i]:
            break
    return max(1e9 if isnan(error) else error for error in errors)


def _separation(expected: list[Any]) -> float:
    """The least error that a row under another row's adapter would show, over all of them."""
    least = float("inf")
    for prompt in range(len(expected[0])):
        rows = torch.tensor([adapter[prompt]["prompt"] for adapter in expected])
        distances = (rows[:, None] - rows[None]).abs().amax(-1)
        distances.fill_diagonal_(float("inf"))
        least = min(least, distances.min().item())
    return least


JOBS = {
    "decode": decode,
    "prefill": prefill,
    "answers": answers,
    "expectations": expectations,
    "soak": soak,
}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(spec["engine"], spec["adapters"])
    import vllm
    from vllm.platforms import current_platform

    done = []
    out = Path(sys.argv[2])
    for name, options in spec["jobs"]:
        start = time.perf_counter()
        done.append({"job": name, "result": JOBS[name](engine, **options)})
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        about = {
            "vllm": vllm.__version__,
            "wrapper": current_platform.get_punica_wrapper(),
            "start_s": round(engine.start_s, 1),
            **engine.announcement.layers,
        }
        whole = out.with_suffix(".part")
        whole.write_text(json.dumps({**about, "jobs": done}))
        whole.replace(out)


if __name__ == "__main__":
    main()
