"""Reading an adapter runs, imports, follows and writes nothing, and allocates by what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save

from checkpoints import factors, llama_spec, safetensors_bytes, write, write_with_peft
from loramux import LoraPool, LoraStep, Segment
from loramux.checkpoint import drop_base_copies, read_adapter_info, read_lora_file
from loramux.converters import diffusers, kohya, mlx, rename
from loramux.errors import AdapterError
from loramux.identity import adapter_digest, read_adapter_digest
from loramux.inspect import inspect_adapter

Q = "model.layers.0.self_attn.q_proj"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ENTRIES = [read_lora_file, inspect_adapter, lambda path: read_adapter_info(path, llama_spec())]
ENTRIES.append(lambda path: read_adapter_digest(llama_spec(), path))

_events: list[tuple[str, tuple]] | None = None


def _record(event: str, args: tuple) -> None:
    if _events is not None:
        _events.append((event, args))


@contextmanager
def audited():
    """The interpreter's audit events (PEP 578) of the block, of every thread."""
    global _events
    if not hasattr(sys, "_loramux_audit"):
        sys._loramux_audit = sys.addaudithook(_record)  # a hook stays for the process's life
    _events = events = []
    try:
        yield events
    finally:
        _events = None


def hostile_config() -> dict:
    """Every field of PEFT's config that names a file, a module or a program, naming one."""
    named = {
        "base_model_name_or_path": "/etc/passwd",
        "revision": "../../etc/passwd",
        "auto_mapping": {"base_model_class": "system", "parent_library": "os"},
        "megatron_core": "antigravity",
        "corda_config": {"cache_file": "/etc/passwd", "covariance_file": "/etc/passwd"},
        "eva_config": {"rho": 2.0, "path": "/etc/passwd"},
        "loftq_config": {"loftq_bits": 4, "path": "/etc/passwd"},
        "lora_ga_config": {"cache_file": "/etc/passwd"},
        "runtime_config": {"ephemeral_gpu_offload": True},
        "task_type": "__import__('os').system('true')",
        "target_modules": "(?P<x>/etc/passwd)",
        "exclude_modules": "/etc/passwd",
    }
    return {**LoraConfig(r=4, lora_alpha=8).to_dict(), **named, "peft_type": "LORA"}


@pytest.mark.parametrize("read", ENTRIES)
def test_C110_reading_opens_its_two_files_and_nothing_they_name(tmp_path, read):
    path = write(tmp_path, factors(Q, 4, 64, 64), json.loads(json.dumps(hostile_config())))
    read(path)  # what Python and torch import at their first use is not the file's doing
    with audited() as events:
        read(path)
    opened = [args for event, args in events if event == "open"]
    assert sorted({os.path.basename(file) for file, *_ in opened}) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert all(os.path.dirname(file) == path for file, *_ in opened)
    assert not any(flags & WRITING for _, _, flags in opened)
    others = {event for event, _ in events} - {"open", "builtins.id"}
    assert {event for event in others if not event.startswith(("ctypes.", "_thread."))} == set()


@pytest.mark.parametrize("read", ENTRIES)
def test_reading_leaves_the_folder_as_it_was(tmp_path, read):
    write_with_peft(tmp_path)

    def snapshot():
        stats = {file.name: (file.stat(), file.read_bytes()) for file in tmp_path.iterdir()}
        return {
            n: (s.st_mtime_ns, s.st_mode, s.st_ino, content) for n, (s, content) in stats.items()
        }

    before = snapshot()
    read(str(tmp_path))
    assert snapshot() == before


@pytest.mark.parametrize(
    ("convert_keys", "names"),
    [
        (None, ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight")),
        (kohya({"q": "p"}, scale=2.0), ("q.lora_down.weight", "q.lora_up.weight")),
        (diffusers(), ("unet.q.lora.down.weight", "unet.q.lora.up.weight")),
        (mlx(scale=2.0), ("q.lora_a", "q.lora_b")),
        (rename(str.upper), ("q.lora_A.weight", "q.lora_B.weight")),
        (drop_base_copies({}), ("q.lora_A.weight", "q.lora_B.weight")),
    ],
)
def test_C097_a_converter_writes_to_no_tensor_and_no_mapping_given(convert_keys, names):
    tensors = {name: torch.rand(4, 4) for name in names}
    before = {name: (id(t), t._version, t.clone()) for name, t in tensors.items()}
    (convert_keys or dict)(tensors)
    assert list(tensors) == list(before)
    for name, tensor in tensors.items():
        identity, version, value = before[name]
        assert (id(tensor), tensor._version) == (identity, version)
        assert torch.equal(tensor, value)


def held_in(pool: LoraPool) -> tuple[torch.Tensor, torch.Tensor]:
    held = next(pool.site("qkv", 0).slices(1))
    return held.a, held.b


def test_C040_nothing_done_to_the_files_reaches_what_is_loaded(tmp_path):
    """Overwritten in place, cut, replaced, removed: adapter and pool keep what they read."""
    path = write(tmp_path, factors(Q, 4, 64, 64))
    files = [tmp_path / name for name in ("adapter_model.safetensors", "adapter_config.json")]
    adapter = read_lora_file(path)
    digest = adapter_digest(adapter)
    pool = LoraPool.build(llama_spec(adapters={"a": path}))
    step = LoraStep((Segment("a", 1),))
    with pool.begin_step(step):
        before = [t.clone() for t in held_in(pool)]

    assert before[0].any()

    def overwrite(file):
        with open(file, "r+b") as f:
            f.write(b"\0" * os.path.getsize(file))

    for change in (
        overwrite,
        lambda f: os.truncate(f, 0),
        lambda f: f.write_bytes(b"x"),
        os.remove,
    ):
        for file in files:
            change(file)
        assert adapter_digest(adapter) == digest
        with pool.begin_step(step):
            assert all(map(torch.equal, held_in(pool), before))
    with pytest.raises(AdapterError, match="no such file"):
        read_lora_file(path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_C109_what_is_no_file_is_refused_without_opening_it(tmp_path, name, make):
    path = write(tmp_path, factors(Q))
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with audited() as events, pytest.raises(AdapterError, match=r"no such file|outside its folder"):
        read_lora_file(path)
    assert name not in {os.path.basename(args[0]) for event, args in events if event == "open"}


def test_C109_a_link_within_the_folder_is_followed(tmp_path):
    path = write(tmp_path, factors(Q))
    os.rename(tmp_path / "adapter_model.safetensors", tmp_path / "step_500.safetensors")
    os.symlink("step_500.safetensors", tmp_path / "adapter_model.safetensors")
    assert read_lora_file(path).rank == 4


# Run with the address space bounded: what would allocate a gigabyte, touched or not, is no
# AdapterError.
BOUNDED = """
import resource, sys, time
from loramux.checkpoint import read_lora_file
from loramux.errors import AdapterError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (768 << 20),) * 2)
for path in sys.argv[1:]:
    started = time.process_time()
    try:
        read_lora_file(path)
    except AdapterError as error:
        assert len(str(error)) < 1 << 20
        print("refused", time.process_time() - started < 10)
"""


def test_C113_a_claim_of_gigabytes_is_refused_within_768_megabytes(tmp_path):
    gigabyte = 1 << 30
    length = gigabyte.to_bytes(8, "little")
    claim = {"dtype": "F32", "shape": [gigabyte // 4], "data_offsets": [0, gigabyte]}
    contents = {
        "header": length + b"{",
        "sparse_header": length + b"{",
        "tensor": safetensors_bytes({"a": claim}, b"0" * 64),
        "lists": safetensors_bytes(b'{"a":[' + b"[]," * (5 << 20) + b"[]]}"),
        "objects": safetensors_bytes(b'{"a":[' + b"{}," * (5 << 20) + b"{}]}"),
        "names": safetensors_bytes(b'{"' + b"a" * (15 << 20) + b'":{}}'),
        "metadata": safetensors_bytes(
            {"__metadata__": {"lora_adapter_metadata": "[" * (15 << 20)}}
        ),
        "nested": safetensors_bytes(b"{" + b'"a":{' * (3 << 20)),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    os.truncate(tmp_path / "sparse_header.safetensors", gigabyte + 64)
    sidecar = tmp_path / "sidecar" / "adapter_model.safetensors"
    sidecar.parent.mkdir()
    sidecar.write_bytes(save(factors(Q)))
    (sidecar.parent / "adapter_config.json").write_bytes(b"{")
    os.truncate(sidecar.parent / "adapter_config.json", gigabyte)
    files = [*map(str, tmp_path.glob("*.safetensors")), str(sidecar)]
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, *files], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["refused True"] * (len(contents) + 1)
