"""The command line: what it prints, its exit status, and what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from checkpoints import tiny_llama, write_with_peft
from loramux import LoraPool, demo, generate, module_lora_spec
from loramux.cli import main

WORDS = [f"w{i}" for i in range(96)]
PROMPTS = {"base": "w1 w2 w3", "wide": "w4", "narrow": "w5 w6 w7 w8 w9"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with its tokenizer, two adapters, and what PEFT says alone to each prompt."""
    root = tmp_path_factory.mktemp("saved")
    base = tiny_llama().eval()
    base.generation_config.eos_token_id = 11
    base.save_pretrained(root / "model")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "model")
    models = {"base": base}
    for name, fields in {
        "wide": dict(r=16, target_modules=["q_proj", "up_proj", "embed_tokens"], base_copies=True),
        "narrow": dict(r=3, target_modules=["v_proj", "lm_head"]),
    }.items():
        models[name] = write_with_peft(root / name, tiny_llama(), **fields).eval()
    answers = {}
    for name, text in PROMPTS.items():
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        answers[name] = greedy_alone(models[name], ids, 12)
    return root, answers


@torch.inference_mode()
def greedy_alone(model, ids: torch.Tensor, steps: int) -> list[int]:
    """Without padding, batch or KV cache."""
    for _ in range(steps):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[0, -steps:].tolist()


def arguments(root) -> list[str]:
    return [
        "generate",
        f"--model={root / 'model'}",
        f"--adapter=wide={root / 'wide'}",
        f"--adapter=narrow={root / 'narrow'}",
        "--max-new-tokens=12",
    ]


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["generate", "--help"]])
def test_help_imports_neither_torch_nor_transformers(argv):
    code = (
        "import sys\n"
        "from loramux.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)


def test_generate_says_what_peft_says_to_each_prompt_alone(saved, capsys):
    root, answers = saved
    prompts = [f"--prompt={name}:{text}" for name, text in PROMPTS.items()]
    assert main([*arguments(root), *prompts, f"--prompt=:{PROMPTS['base']}"]) == 0
    printed = capsys.readouterr()
    assert "2/2" in printed.err  # adapters loaded
    lines = printed.out.splitlines()
    expected = []
    for name in (*PROMPTS, "base"):
        said = " ".join(WORDS[token] for token in generate.until(answers[name], {11}))
        expected.append(f"[{name}] {PROMPTS[name]} {said}".strip())
    assert lines == expected


def test_padded_rows_are_as_alone_and_generation_stops_once_all_have_ended():
    """GPT-2, whose positions are absolute: padding must not count as any."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(model.transformer.wpe.weight)
    rows = [generate.Row(None, prompt) for prompt in ([1, 2, 3, 4, 5], [6])]
    alone = [greedy_alone(model, torch.tensor([row.prompt]), 12) for row in rows]
    ends = {alone[0][1], alone[1][3]}
    steps = max(len(generate.until(tokens, ends)) for tokens in alone) + 1
    assert steps < 12
    spec = module_lora_spec(model)
    pool = LoraPool.build(spec)
    with spec.module_map.bind(model, pool):
        made = generate.greedy(model, pool, rows, 12, ends)
    assert made.tokens.tolist() == [tokens[:steps] for tokens in alone]
    assert made.logits is None


@pytest.mark.parametrize(("tolerance", "status"), [(1e-4, 0), (0.0, 1)])
def test_the_demo_compares_with_peft(monkeypatch, capsys, tolerance, status):
    monkeypatch.setattr(demo, "TOLERANCE", tolerance)
    assert main(["demo", "--steps", "2"]) == status
    out = capsys.readouterr().out
    table = [line.split()[:3] for line in out.splitlines()[2 : 2 + len(demo.REQUESTS)]]
    assert [row[1] for row in table] == [name or "base" for name, _ in demo.REQUESTS]
    assert "largest logit difference to PEFT" in out
    assert "tokens/s" in out


def test_an_adapter_that_cannot_be_served_is_one_message(saved, capsys, tmp_path):
    root, _ = saved
    write_with_peft(tmp_path / "dora", tiny_llama(), use_dora=True)
    argv = [*arguments(root), f"--adapter=bad={tmp_path / 'dora'}", "--prompt=bad:w1"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "loramux: cannot serve the adapter" in err
    assert "dora" in err
    assert "Traceback" not in err


def test_a_prompt_without_a_token_is_refused(saved, capsys):
    root, _ = saved
    assert main([*arguments(root), "--prompt=wide:w1", "--prompt=wide: "]) == 2
    assert "prompts without a token: [' ']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--prompt=nosuch:w1"], "--prompt names nosuch; adapters: wide, narrow"),
        (["--prompt=:w1", "--adapter=wide=x"], "--adapter names wide more than once"),
        (["--prompt=:w1", "--adapter=base=x"], "cannot be named 'base'"),
        (["--prompt=wide"], "'wide' is not NAME:TEXT"),
        (["--prompt=:w1", "--max-new-tokens=0"], "0 is not positive"),
        (["--prompt=:w1", "--model=nosuch"], "--model nosuch has no config.json"),
        (["--prompt=:w1", "--device=gpu"], "'gpu' is neither cpu nor cuda"),
        (["--prompt=:w1", "--device=cuda:99"], "'cuda:99' is not there"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(saved, capsys, extra, text):
    root, _ = saved
    with pytest.raises(SystemExit) as end:
        main([*arguments(root), *extra])
    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("command", "package"), [("demo", "peft"), ("generate", "transformers")])
def test_a_missing_package_names_the_extra_to_install(saved, monkeypatch, capsys, command, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"loramux.{command}")
    argv = ["demo"] if command == "demo" else [*arguments(saved[0]), "--prompt=:w1"]
    assert main(argv) == 2
    assert f"needs {package}: pip install loramux[demo]" in capsys.readouterr().err
