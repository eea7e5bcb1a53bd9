"""``loramux demo``: train four small adapters, serve them in one batch, compare with PEFT.

Nothing is downloaded. The model is a small Llama over bytes, trained here from random weights;
every adapter learns by heart how its own voice answers four questions.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from .generate import Generation, Row, greedy, until
from .modules import ModuleLoraMap, module_lora_spec
from .pool import LoraPool

END = 0  # the byte that ends an answer
QUESTIONS = (
    "Where is the cat?",
    "What is for dinner?",
    "How is the sea today?",
    "Can you fix my lamp?",
)
BASE_ANSWERS = (
    "The cat is asleep on the sofa.",
    "Soup and a slice of bread.",
    "Calm, with a light wind.",
    "Yes, it needs a new bulb.",
)


class Voice(NamedTuple):
    """An adapter: how it is made and what it learns to answer."""

    config: dict[str, Any]
    answers: tuple[str, str, str, str]


VOICES = {
    "pirate": Voice(
        dict(r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        (
            "Arr, she be hidin' below deck!",
            "Hardtack and rum, ye dog!",
            "Wild and black, matey, arr!",
            "Aye, hand me yer cutlass!",
        ),
    ),
    "poet": Voice(
        dict(r=8, lora_alpha=16, target_modules="all-linear"),
        (
            "In sleep, a small moon on the sill.",
            "Warm bread, and dusk for butter.",
            "It breathes, and I breathe after it.",
            "Let dark be dark; I have a match.",
        ),
    ),
    "robot": Voice(
        dict(
            r=16,
            lora_alpha=16,
            use_rslora=True,
            target_modules=["gate_proj", "up_proj", "down_proj"],
        ),
        (
            "CAT LOCATED. SOFA. 98 PERCENT.",
            "MENU: SOUP. 310 KCAL. ENJOY.",
            "WAVE HEIGHT 0.4 M. STATUS OK.",
            "LAMP FAULT 7. REPLACING BULB.",
        ),
    ),
    "lawyer": Voice(
        dict(r=32, lora_alpha=32, target_modules=["q_proj", "v_proj", "embed_tokens"]),
        (
            "The Cat, as defined, sleeps.",
            "Soup, subject to clause four.",
            "Calm, without any warranty.",
            "Yes, at the owner's sole risk.",
        ),
    ),
}
# The batch that is served: its rows' adapters and questions. Two rows share an adapter.
REQUESTS = (
    (None, 0),
    ("pirate", 0),
    ("poet", 0),
    ("robot", 0),
    ("lawyer", 0),
    ("robot", 2),
    ("poet", 3),
    (None, 1),
)
NEW_TOKENS = 40
# float32: a sum of 344 terms, the model's longest, is off by at most 344 * 2^-24 = 2e-5 of their
# size, and the two sides order the sums of each of a few layers differently.
TOLERANCE = 1e-4  # of the largest logit
REPEATS = 5  # of a timing; the best counts


class Served(NamedTuple):
    """The served batch and its speed in tokens a second, with adapters and all rows base."""

    generation: Generation
    rate: float
    base_rate: float


def run(args: argparse.Namespace) -> int:
    """Train, serve and compare.

    Returns:
        0, or 1 where a logit differs from PEFT's by more than the tolerance.
    """
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, at how PEFT uses it
    torch.set_num_threads(1)  # at these sizes more threads only wait for each other
    torch.manual_seed(args.seed)
    base = make_base(args.steps, args.device)
    rows = [Row(name, to_bytes(QUESTIONS[question] + " ")) for name, question in REQUESTS]
    with TemporaryDirectory() as folder:
        paths = {name: train_adapter(base, name, args.steps, folder) for name in VOICES}
        served = serve(base, paths, rows)
        show(rows, served.generation)
        error, size = difference_to_peft(base, paths, rows, served.generation)
    print(
        f"\nlargest logit difference to PEFT run one adapter at a time: {error:.1e}\n"
        f"tolerance: {TOLERANCE * size:.1e}, {TOLERANCE:.0e} of the largest logit ({size:.1f})\n"
        f"speed: {served.rate:.0f} tokens/s; all rows on the base model {served.base_rate:.0f}, "
        f"so that the adapters cost {served.base_rate / served.rate - 1:.0%}"
    )
    return 0 if error <= TOLERANCE * size else 1


def make_base(steps: int, device: str) -> Any:
    """A small Llama that answers plainly, and has seen other English for the shapes of words."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(device)
    english = torch.tensor(to_bytes("".join(topics.values())), device=device)
    train(model, "base model", BASE_ANSWERS, steps, 3e-3, english)
    return model.eval().requires_grad_(False)


def train_adapter(base: Any, name: str, steps: int, folder: str) -> str:
    """Train the adapter of one voice with PEFT. Returns where it is saved."""
    config = LoraConfig(task_type="CAUSAL_LM", **VOICES[name].config)
    model = get_peft_model(copy.deepcopy(base), config)
    train(model, name, VOICES[name].answers, steps, 7e-3)
    path = str(Path(folder) / name)
    model.save_pretrained(path, save_embedding_layers=False)
    return path


def train(
    model: Any,
    name: str,
    answers: Sequence[str],
    steps: int,
    rate: float,
    english: torch.Tensor | None = None,
) -> None:
    """Learn the answers by heart, beside windows of ``english`` where there is any."""
    ids, labels = batch_of(answers, model.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, 2 - 2 * i / steps))
    for _ in tqdm(range(steps), desc=name.rjust(10)):
        step_ids, step_labels = ids, labels
        if english is not None:
            windows = english.unfold(0, ids.shape[1], 1)
            text = windows[torch.randint(len(windows), (4,))]
            step_ids, step_labels = torch.cat([ids, text]), torch.cat([labels, text])
        loss = model(input_ids=step_ids, labels=step_labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        fall.step()


def batch_of(answers: Sequence[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of every question and its answer, padded; only answers are learnt."""
    pairs = [
        (to_bytes(question + " "), [*to_bytes(answer), END])
        for question, answer in zip(QUESTIONS, answers, strict=True)
    ]
    width = max(len(question) + len(answer) for question, answer in pairs)
    ids = torch.full((len(pairs), width), END, device=device)
    labels = torch.full_like(ids, -100)
    for i, (question, answer) in enumerate(pairs):
        end = len(question) + len(answer)
        ids[i, :end] = torch.tensor(question + answer)
        labels[i, len(question) : end] = torch.tensor(answer)
    return ids, labels


def serve(base: Any, paths: dict[str, str], rows: Sequence[Row]) -> Served:
    """Generate for all rows in one batch, and time it against the same rows without adapters."""
    spec = module_lora_spec(base, adapters=paths, max_slots=len(paths), max_rank=32)
    pool = LoraPool.build(spec, device=base.device)
    plain_rows = [Row(None, row.prompt) for row in rows]
    with cast(ModuleLoraMap, spec.module_map).bind(base, pool):
        generation = greedy(base, pool, rows, NEW_TOKENS, keep_logits=True)
        seconds = {True: float("inf"), False: float("inf")}
        for _ in range(REPEATS):
            for adapted, batch in ((True, rows), (False, plain_rows)):
                start = time.perf_counter()
                tokens = greedy(base, pool, batch, NEW_TOKENS).tokens
                tokens.tolist()  # waits for the device
                seconds[adapted] = min(seconds[adapted], time.perf_counter() - start)
    pool.close()
    count = len(rows) * NEW_TOKENS
    return Served(generation, count / seconds[True], count / seconds[False])


@torch.inference_mode()
def difference_to_peft(
    base: Any, paths: dict[str, str], rows: Sequence[Row], generation: Generation
) -> tuple[float, float]:
    """The largest difference of any logit to PEFT's, each row run alone, and the largest logit."""
    assert generation.logits is not None
    models = {name: PeftModel.from_pretrained(copy.deepcopy(base), p) for name, p in paths.items()}
    error = size = 0.0
    for row, tokens, logits in zip(rows, generation.tokens, generation.logits, strict=True):
        ids = torch.cat([torch.tensor(row.prompt, device=base.device), tokens[:-1]])
        model = base if row.adapter is None else models[row.adapter]
        expected = model(input_ids=ids[None]).logits[0, len(row.prompt) - 1 :]
        error = max(error, float((logits - expected).abs().max()))
        size = max(size, float(expected.abs().max()))
    return error, size


def show(rows: Sequence[Row], generation: Generation) -> None:
    """Print what each row was asked and said."""
    print(f"\n{'row':>3}  {'adapter':7}  {'rank':>4}  {'prompt':22}  text")
    for i, (row, tokens) in enumerate(zip(rows, generation.tokens.tolist(), strict=True)):
        name = row.adapter or "base"
        rank = VOICES[name].config["r"] if row.adapter else "-"
        prompt = bytes(row.prompt).decode()
        text = bytes(until(tokens, {END})).decode(errors="replace")
        print(f"{i:3}  {name:7}  {rank:>4}  {prompt:22}  {text}")


def to_bytes(text: str) -> list[int]:
    return list(text.encode())
