"""Adapters of every layout, damaged at random: each is read, or refused by an error with all parts.

The figures of a run are printed (``pytest -s``).
"""

from __future__ import annotations

import gc
import json
import os
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from checkpoints import QKV, REFUSAL, factors, llama_spec, safetensors_bytes, write_with_peft
from loramux.checkpoint import place_modules, read_adapter_info, read_lora_file
from loramux.converters import diffusers, kohya, mlx
from loramux.diffusers_config import KEY
from loramux.errors import AdapterError

MIN_FILES = 1000  # damaged at random, they got 39 to 50 different answers
MAX_SECONDS = 15  # of the processor, for one file; the patterns of a config may take 10
MAX_PYTHON_BYTES = 32 << 20  # the interpreter may grow its table of strings, by 8 MB, at any time
MAX_RESIDENT_BYTES = 32 << 20


class Seed(NamedTuple):
    """A sound adapter, to be damaged."""

    weights: bytes
    config: bytes | None
    convert_keys: Callable | None = None


def peft_seed(folder: Path, **config: object) -> Seed:
    write_with_peft(folder, **config)
    files = (folder / "adapter_model.safetensors", folder / "adapter_config.json")
    return Seed(*(file.read_bytes() for file in files))


def seeds(folder: Path) -> list[Seed]:
    a, b = factors("q").values()
    config = {f"unet.{name}": value for name, value in {"r": 4, "lora_alpha": 8}.items()}
    metadata = {KEY: json.dumps(config)}
    foreign = {
        kohya({"lora_unet_q": "q"}): {
            "lora_unet_q.lora_down.weight": a,
            "lora_unet_q.lora_up.weight": b,
            "lora_unet_q.alpha": torch.tensor(2.0),
        },
        diffusers(): {"unet.q.lora_A.weight": a, "unet.q.lora_B.weight": b},
        mlx(scale=2.0): {"q.lora_a": a.T.contiguous(), "q.lora_b": b.T.contiguous()},
    }
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.*q_proj": 5}}
    return [
        peft_seed(folder / "patterns", target_modules=list(QKV), use_rslora=True, **patterns),
        peft_seed(folder / "ends", target_modules=["embed_tokens", "lm_head"]),
        *(Seed(save(tensors, metadata), None, convert) for convert, tensors in foreign.items()),
    ]


NAMES = st.text(max_size=20) | st.sampled_from(
    ["__metadata__", KEY, "../x", "/etc/passwd", "a\0b", "x" * 300]
    + [f"base_model.model.{name}" for name in ("q.lora_A.weight", "q.alpha", "q.lora_B.x.weight")]
)
SIZES = [-1, 0, 1, 4, 64, 1 << 20, 1 << 30, (1 << 63) - 1, 1 << 63, 10**30, 10**40]
NUMBERS = st.sampled_from([*SIZES, True, None, 1.5, "4", float("nan"), float("inf"), 1e300])
VALUES = st.recursive(
    NUMBERS | NAMES,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(NAMES, values, max_size=3),
    max_leaves=6,
)
ENTRY_FIELDS = {
    "dtype": st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "I32", "F8_E4M3"]) | VALUES,
    "shape": st.lists(NUMBERS, max_size=9) | VALUES,
    "data_offsets": st.lists(NUMBERS, max_size=3) | VALUES,
}
PATTERNS = st.dictionaries(
    st.text(alphabet="aq_proj.*+?()[]{}|^$\\", max_size=12), NUMBERS, min_size=1, max_size=3
)
CONFIG_FIELDS = st.sampled_from(
    ["r", "lora_alpha", "use_rslora", "peft_type", "bias", "init_lora_weights", "target_modules"]
) | st.sampled_from(["use_dora", "auto_mapping", "lora_bias", "fine_tune_type"])


@st.composite
def damaged_header(draw, weights: bytes) -> bytes:
    """The file with its header's JSON changed, and the length made right."""
    end = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:end])
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(header)))
        kinds = ["field", "field", "value", "name", "drop", "swap", "lack", "config"]
        match draw(st.sampled_from(kinds)):
            case "field" if isinstance(header[name], dict):
                field = draw(st.sampled_from(sorted(ENTRY_FIELDS)))
                header[name] = {**header[name], field: draw(ENTRY_FIELDS[field])}
            case "value":
                header[draw(st.sampled_from([name, "__metadata__"]))] = draw(VALUES)
            case "config":
                component = draw(st.sampled_from(["unet.", "", "other."]))
                config = {"unet.r": 4, f"{component}{draw(CONFIG_FIELDS)}": draw(VALUES)}
                header["__metadata__"] = {KEY: json.dumps(config)}
            case "name":
                header[draw(NAMES)] = header.pop(name)
            case "drop" if len(header) > 1:
                del header[name]
            case "swap":
                other = draw(st.sampled_from(sorted(header)))
                header[name], header[other] = header[other], header[name]
            case "lack" if isinstance(header[name], dict) and header[name]:
                header[name] = dict(list(header[name].items())[1:])
    text = json.dumps(header).encode()
    if draw(st.integers(0, 19)) == 0:
        text = text[:-1] + draw(
            st.sampled_from([b',"x":1,"x":1}', b',"x":' + b"[" * 10_000, b"}", b",", b'"\xff"}'])
        )
    return safetensors_bytes(text, weights[end:])


@st.composite
def damaged_bytes(draw, content: bytes) -> bytes:
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["set", "set", "cut", "insert", "length", "tail"])):
            case "set":
                content = content[:at] + draw(st.binary(max_size=2)) + content[at + 2 :]
            case "cut":
                content = content[:at]
            case "insert":
                content = content[:at] + draw(st.binary(max_size=9)) + content[at:]
            case "length":
                length = draw(st.sampled_from([n for n in SIZES if 0 <= n < 1 << 64]))
                content = length.to_bytes(8, "little") + content[8:]
            case "tail":
                content += bytes(draw(st.integers(1, 4096)))
    return content


@st.composite
def damaged_config(draw, config: bytes) -> bytes:
    fields = json.loads(config)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(["pattern", "field", "any"]))
        if name == "pattern":
            fields[draw(st.sampled_from(["rank_pattern", "alpha_pattern"]))] = draw(PATTERNS)
        else:
            fields[draw(CONFIG_FIELDS if name == "field" else NAMES)] = draw(VALUES)
    text = json.dumps(fields).encode()
    return draw(damaged_bytes(text)) if draw(st.integers(0, 4)) == 0 else text


@st.composite
def damaged(draw, sound: list[Seed]) -> Seed:
    seed = draw(st.sampled_from(sound))
    weights = draw(damaged_header(seed.weights))
    if draw(st.integers(0, 2)) == 0:
        weights = draw(damaged_bytes(weights))
    config = None if seed.config is None else draw(damaged_config(seed.config))
    return Seed(weights, config, draw(st.sampled_from([seed.convert_keys, None])))


class Figures:
    """What a run came to."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.examples = self.python_bytes = self.resident_bytes = 0
        self.slowest = 0.0

    def answer(self, problem: str) -> None:
        """Count an answer by what was expected, which quotes nothing of the file."""
        parts = REFUSAL.fullmatch(problem)
        assert parts is not None, problem
        text = f"{parts['found'].split()[0]}: {parts['expected']}: {parts['remedy']}"
        self.answers[re.sub(r"\d+", "N", text)[:80]] += 1

    def __str__(self) -> str:
        lines = [f"{count:9,}  {answer}" for answer, count in self.answers.most_common()]
        return "\n".join(
            [
                f"{self.examples:,} files; slowest {self.slowest:.3f} s; at most "
                f"{self.python_bytes:,} bytes of Python objects, {self.resident_bytes:,} resident",
                *lines,
            ]
        )


def read_and_check(folder: Path, seed: Seed, figures: Figures) -> None:
    """Read as a deployment does. What is read must be what the safetensors library reads."""
    file = folder / "adapter_model.safetensors"
    file.write_bytes(seed.weights)
    sidecar = folder / "adapter_config.json"
    sidecar.unlink(missing_ok=True)
    if seed.config is not None:
        sidecar.write_bytes(seed.config)
    spec = llama_spec(convert_keys=seed.convert_keys)
    try:
        adapter = read_lora_file(str(folder), seed.convert_keys)
        info = read_adapter_info(str(folder), spec)
    except AdapterError as error:
        for problem in error.problems:
            figures.answer(problem)
        return
    figures.answers["read"] += 1
    assert (info.unmapped, info.misfits) == adapter.info(spec)[1:]
    library = {tensor.numpy().tobytes() for tensor in map(comparable, load_as_library(seed))}
    for module in adapter.modules.values():
        for factor in (module.a, module.b):
            assert factor.isfinite().all()
            ways = (factor, factor.T.contiguous())  # an MLX file's are transposed
            assert any(comparable(way).numpy().tobytes() in library for way in ways)
    try:
        place_modules(adapter, spec)
    except AdapterError as error:
        for problem in error.problems:
            figures.answer(problem)


def load_as_library(seed: Seed) -> list[torch.Tensor]:
    try:
        return list(load(seed.weights).values())
    except safetensors.SafetensorError as error:
        raise AssertionError("was read, but the library refuses it") from error


def status_bytes(field: str) -> int:
    """A figure of this process in ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def start_of_peak() -> int:
    """Let ``VmHWM``, the most that was resident, count from now on. Returns what is."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_damaged_files_are_read_or_refused_in_bounded_time_and_memory(tmp_path):
    """MIN_FILES of them, and as many more as LORAMUX_TEST_SECONDS give time for."""
    deadline = time.monotonic() + float(os.environ.get("LORAMUX_TEST_SECONDS", 0))
    sound = seeds(tmp_path)
    figures = Figures()
    for seed in sound:
        read_and_check(tmp_path, seed, figures)
    assert figures.answers.pop("read") == len(sound)

    @settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))
    @given(seed=damaged(sound))
    def batch(seed: Seed) -> None:
        gc.disable()  # what the test left behind is not the reader's
        tracemalloc.start()
        resident = start_of_peak()
        started = time.process_time()
        try:
            read_and_check(tmp_path, seed, figures)
        finally:
            seconds = time.process_time() - started
            python_bytes = tracemalloc.get_traced_memory()[1]
            resident_bytes = status_bytes("VmHWM") - resident
            tracemalloc.stop()
            gc.enable()
        figures.examples += 1
        figures.slowest = max(figures.slowest, seconds)
        figures.python_bytes = max(figures.python_bytes, python_bytes)
        figures.resident_bytes = max(figures.resident_bytes, resident_bytes)
        assert seconds < MAX_SECONDS
        assert python_bytes < MAX_PYTHON_BYTES
        assert resident_bytes < MAX_RESIDENT_BYTES

    try:
        while figures.examples < MIN_FILES or time.monotonic() < deadline:
            batch()
    finally:
        print(f"\n{figures}")
    assert figures.answers["read"] > 0
    assert len(figures.answers) > 20
