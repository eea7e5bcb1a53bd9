"""One vLLM engine and the jobs that it does: ``python -m bench.engine_child SPEC OUT``.

``bench.engine`` starts it, in a process of its own per engine, with loramux on or off. SPEC is
``{"engine": arguments of vllm.LLM, "adapters": [paths], "jobs": [[name, options], ...]}``; what
every job found goes to OUT as JSON.
"""

from __future__ import annotations

import functools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch


class Engine:
    def __init__(self, arguments: dict[str, Any], adapters: Sequence[str]) -> None:
        from vllm import LLM

        start = time.perf_counter()
        self.llm = LLM(**arguments)
        self.start_s = time.perf_counter() - start
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.adapters = adapters
        self.has_lora = bool(arguments.get("enable_lora"))
        self.steps = 0
        step = self.llm.llm_engine.step

        def counted() -> Any:
            self.steps += 1
            return step()

        self.llm.llm_engine.step = counted

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
    """Prompt log-probabilities and greedy tokens of every request of every batch."""
    results = []
    for batch in batches:
        outputs = engine.generate(batch["prompts"], batch["adapters"], new, prompt_logprobs=0)
        results.append(
            [
                {"prompt": _prompt_logprobs(output), "tokens": list(output.outputs[0].token_ids)}
                for output in outputs
            ]
        )
    return results


def _prompt_logprobs(output: Any) -> list[float]:
    entries = (output.prompt_logprobs or [None])[1:]  # of the first token there is none
    given = zip(output.prompt_token_ids[1:], entries, strict=True)
    return [entry[token].logprob for token, entry in given]


def expectations(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[Any]:
    """For every adapter and prompt: prompt log-probabilities, tokens, their own and the lead."""
    results = []
    for adapter in range(len(engine.adapters) + 1):
        outputs = engine.generate(
            prompts, [adapter] * len(prompts), new, prompt_logprobs=0, logprobs=2
        )
        results.append([_expectation(output) for output in outputs])
    return results


def _expectation(output: Any) -> dict[str, Any]:
    tokens = list(output.outputs[0].token_ids)
    own, lead = [], []
    for token, entry in zip(tokens, output.outputs[0].logprobs, strict=True):
        ranked = sorted((value.logprob for value in entry.values()), reverse=True)
        own.append(entry[token].logprob)
        lead.append(ranked[0] - ranked[1])
    return {"prompt": _prompt_logprobs(output), "tokens": tokens, "own": own, "lead": lead}


def soak(
    engine: Engine,
    expected_file: str,
    prompts: Sequence[Sequence[int]],
    steps: int,
    tolerance: float,
    seconds: float,
) -> dict[str, Any]:
    """Random batches of random adapters until ``steps`` engine steps are done, every row checked.

    A row may leave the expected tokens only where the expected lead is within the tolerance.
    """
    expected = json.loads(Path(expected_file).read_text())["jobs"][0]["result"]
    chance = random.Random(0)
    requests = wrong = tokens = 0
    memory: list[tuple[int, int, int]] = []
    worst, examples = 0.0, []
    new = len(expected[0][0]["tokens"])
    start, deadline, first = time.perf_counter(), time.perf_counter() + seconds, engine.steps
    while engine.steps - first < steps and time.perf_counter() < deadline:
        picks = [
            (chance.randrange(len(prompts)), chance.randrange(len(expected))) for _ in range(24)
        ]
        lengths = [chance.randint(1, new) for _ in picks]
        outputs = engine.generate(
            [prompts[p] for p, _ in picks],
            [a for _, a in picks],
            lengths,
            prompt_logprobs=0,
            logprobs=2,
        )
        for (prompt, adapter), output in zip(picks, outputs, strict=True):
            got, want = _expectation(output), expected[adapter][prompt]
            error = _row_error(got, want, tolerance)
            requests, tokens = requests + 1, tokens + len(got["tokens"])
            worst = max(worst, error)
            if error > tolerance:
                wrong += 1
                examples = [*examples, [prompt, adapter, error]][:8]
        memory.append(
            (
                engine.steps - first,
                torch.cuda.memory_allocated(),
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            )
        )
    fifth = next(entry for entry in memory if entry[0] >= memory[-1][0] / 5)
    return {
        "steps": engine.steps - first,
        "requests": requests,
        "tokens": tokens,
        "wrong_rows": wrong,
        "examples": examples,
        "worst_error": worst,
        "separation": _separation(expected),
        "seconds": round(time.perf_counter() - start, 1),
        "device_bytes_grown": memory[-1][1] - fifth[1],
        "host_kib_grown": memory[-1][2] - fifth[2],
    }


def _row_error(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> float:
    """The largest difference of a log-probability, up to where greedy tokens part at a near tie."""
    errors = [abs(a - b) for a, b in zip(got["prompt"], want["prompt"], strict=True)]
    for i, token in enumerate(got["tokens"]):
        if token != want["tokens"][i]:
            # What led there was the same: the two best were close, or this is a wrong row.
            errors.append(want["lead"][i] - tolerance)
            break
        errors.append(abs(got["own"][i] - want["own"][i]))
    return max(errors)


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
    for name, options in spec["jobs"]:
        start = time.perf_counter()
        result = JOBS[name](engine, **options)
        done.append({"job": name, "result": result})
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    about = {
        "vllm": vllm.__version__,
        "wrapper": current_platform.get_punica_wrapper(),
        "start_s": round(engine.start_s, 1),
    }
    Path(sys.argv[2]).write_text(json.dumps({**about, "jobs": done}))


if __name__ == "__main__":
    main()
