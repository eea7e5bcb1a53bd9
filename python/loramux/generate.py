"""Greedy generation for one batch whose rows name different adapters, over a transformers model."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoint import drop_base_copies
from .config import LoraStep, Segment
from .errors import SpecError
from .modules import ModuleLoraMap, module_lora_spec
from .pool import LoraPool
from .runtime import LoraRuntime
from .skeleton import loading


class Row(NamedTuple):
    """One request: its adapter, ``None`` for the base model, and its prompt's token ids."""

    adapter: str | None
    prompt: Sequence[int]


class Generation(NamedTuple):
    """What ``greedy`` produced.

    Attributes:
        tokens: int64 ``[rows, steps]``; what follows a row's first end token means nothing.
        logits: ``[rows, steps, vocab]`` in the model's dtype, that each token was chosen from;
            ``None`` unless asked for.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None


@torch.inference_mode()
def greedy(
    model: Any,
    pool: LoraPool,
    rows: Sequence[Row],
    max_new_tokens: int,
    end_tokens: Collection[int] = (),
    keep_logits: bool = False,
) -> Generation:
    """Continue every row by its most likely tokens, all rows in one batch, with a KV cache.

    A step's rows are all tokens that it puts through the model: the prompts, then one token a row.
    Prompts are padded on the left; a padded prompt is one segment of the padded length.

    Args:
        model: a transformers causal language model, bound to ``pool``.
        rows: prompts of at least one token.
        end_tokens: stop once every row has had one of these.
    """
    device = model.device
    width = max(len(row.prompt) for row in rows)
    padding = [width - len(row.prompt) for row in rows]
    ids = torch.tensor(
        [[0] * pad + list(row.prompt) for pad, row in zip(padding, rows, strict=True)],
        device=device,
    )
    mask = torch.arange(width, device=device) >= torch.tensor(padding, device=device)[:, None]
    mask = mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    # transformers 5 renames the argument, and the output, that the KV cache travels in.
    cache = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    state: dict[str, Any] = {}
    tokens, logits = [], []
    for _ in range(max_new_tokens):
        step = LoraStep(tuple(Segment(row.adapter, ids.shape[1]) for row in rows))
        with pool.begin_step(step):
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **state,
            )
        state = {cache: output[cache]}
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(ids)
        if keep_logits:
            logits.append(output.logits[:, -1:])
        ended |= torch.isin(ids[:, 0], ends)
        if ended.all():
            break
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return Generation(torch.cat(tokens, 1), torch.cat(logits, 1) if keep_logits else None)


def until(tokens: Sequence[int], end_tokens: Collection[int]) -> list[int]:
    """``tokens`` before the first end token."""
    for i, token in enumerate(tokens):
        if token in end_tokens:
            return list(tokens[:i])
    return list(tokens)


def run(args: argparse.Namespace) -> int:
    """``loramux generate``: a model, adapters and prompts of the user's, one line a prompt."""
    with loading(args.model):
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=args.dtype, local_files_only=True
        ).to(args.device)
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    prompts = [(name, text, tokenizer(text).input_ids) for name, text in args.prompt]
    if empty := [text for _, text, tokens in prompts if not tokens]:
        raise SpecError(f"prompts without a token: {empty}; expected one at least in each")
    spec = module_lora_spec(
        model.eval(),
        adapters=dict(args.adapter),
        max_slots=max(1, len(args.adapter)),
        cpu_capacity=max(1, len(args.adapter)),
        convert_keys=drop_base_copies(model.state_dict()),
    )
    ranks = [spec.adapter_info(name).rank for name in spec.adapters]
    spec.max_rank = max([1, *ranks])
    with tqdm(desc="load", unit="adapter", total=len(ranks)) as bar:
        runtime = LoraRuntime.build(
            [spec],
            progress=lambda *_: bar.update(),
            device=args.device,
            dtype=model.dtype,
        )

    rows = [Row(name if name in spec.adapters else None, tokens) for name, _, tokens in prompts]
    end = model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    pool = runtime.pools[spec.resource_key]
    with cast(ModuleLoraMap, spec.module_map).bind(model, pool):
        tokens = greedy(model, pool, rows, args.max_new_tokens, ends).tokens.tolist()
    runtime.close()
    for row, new in zip(rows, tokens, strict=True):
        text = tokenizer.decode([*row.prompt, *until(new, ends)], skip_special_tokens=True)
        print(f"[{row.adapter or 'base'}] {text}")
    return 0
