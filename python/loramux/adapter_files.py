"""Bounded reads of an adapter's files, which may come from anyone: safetensors and a JSON sidecar.

The safetensors format is https://huggingface.co/docs/safetensors#format. This reader stands in for
the library's because that one maps the file: a later edit would change loaded weights, and a
truncation would kill the process. Here bytes are read into memory of their own. The writer is for
what this reader reads.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch

from .errors import AdapterError

MAX_HEADER_BYTES = 16 << 20  # about 80,000 tensors
MAX_SIDECAR_BYTES = 4 << 20
_KNOWN_HEADER_BYTES, _HEADERS_KEPT = 1 << 20, 8
_MAX_DIMS = 8
_MAX_PROBLEMS = 100  # of a header's entries, that are told
_CHUNK_BYTES = 4 << 20
_MAX_THREADS = 8  # of 16, most wait for the interpreter's lock: a load takes longer
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE = (
    "a pickle, which can run code as it is read; expected safetensors: re-save the adapter as "
    "safetensors"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON's escape of half a character past 16 bits
_ANEW = "download or export the file anew"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}

T = TypeVar("T")
R = TypeVar("R")


class _Entry(NamedTuple):
    """Where one tensor lies, in bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile(AbstractContextManager["SafetensorsFile"]):
    """An open safetensors file whose header is checked; closed at the end of a ``with``.

    Attributes:
        path: of the file.
        metadata: the header's ``__metadata__``; empty without one.

    Raises:
        AdapterError: not a safetensors file, or one that contradicts itself.
    """

    def __init__(self, path: str) -> None:
        if path.lower().endswith(_PICKLE_SUFFIXES):
            raise AdapterError(path, [f"a {os.path.splitext(path)[1]} file is {_PICKLE}"])
        self.path = path
        with ExitStack() as opened, _readable(path):
            self._file = opened.enter_context(_open(path))
            self._entries, self.metadata, self._start, self._bytes = _read_header(self._file, path)
            opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, on the CPU and aliasing nothing of the file.

        Raises:
            AdapterError: the file cannot be read.
        """
        data = _vectors(self._bytes)
        memory = tensor_memory(data[torch.uint8])[: self._bytes]

        def read_chunk(start: int) -> None:
            self._read(memory[start : start + _CHUNK_BYTES], start)

        in_parallel(read_chunk, range(0, len(memory), _CHUNK_BYTES))
        return {name: _view(data, entry) for name, entry in self._entries.items()}

    def outline(self) -> dict[str, torch.Tensor]:
        """Every tensor, on the meta device where ``read`` can fetch it or a view of it.

        A tensor of one element, and one that starts off its dtype's alignment, is read.

        Raises:
            AdapterError: the file cannot be read.
        """
        data = _vectors(self._bytes, "meta")
        return {name: self._outlined(entry, data) for name, entry in self._entries.items()}

    def read(self, outlined: Iterable[torch.Tensor], memory: memoryview) -> None:
        """Read tensors of ``outline``, or views of some of their rows and columns.

        Args:
            memory: where they are read to, one after another and row after row; at least as large.

        Raises:
            AdapterError: the file cannot be read.
        """
        ranges: list[tuple[int, int]] = []  # of the data; those that touch are joined
        for tensor in outlined:
            starts, size = [int(tensor.storage_offset()) * tensor.itemsize], tensor.nbytes
            if not tensor.is_contiguous():
                stride = tensor.stride(0) * tensor.itemsize
                starts = [starts[0] + row * stride for row in range(len(tensor))]
                size //= len(tensor)
            for start in starts:
                first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
                ranges.append((first, start + size))
        for start, end in ranges:
            self._read(memory[: end - start], start)
            memory = memory[end - start :]

    def _read(self, memory: memoryview, start: int) -> None:
        with _readable(self.path):
            _fill(memory, self._file, self._start + start)

    def _outlined(self, entry: _Entry, data: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
        size = entry.dtype.itemsize
        if entry.end - entry.start > size and entry.start % size == 0:
            return _view(data, entry)
        memory = torch.empty(entry.end - entry.start, dtype=torch.uint8, device="cpu")
        self._read(tensor_memory(memory), entry.start)
        return memory.view(entry.dtype).view(entry.shape)


def read_safetensors(
    path: str, *, weights: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor of a safetensors file, aliasing nothing of the file, and its metadata.

    Args:
        weights: ``False`` returns :meth:`SafetensorsFile.outline`.

    Raises:
        AdapterError: not a safetensors file, or one that contradicts itself.
    """
    with SafetensorsFile(path) as file:
        return file.tensors() if weights else file.outline(), file.metadata


def read_sidecar(path: str) -> dict[str, Any] | None:
    """The JSON object in ``adapter_config.json`` beside the file ``path``; ``None`` without one.

    Raises:
        AdapterError: no JSON object, larger than 4 MiB, nested too deep, or with a key given twice.
    """
    sidecar = os.path.join(os.path.dirname(path), "adapter_config.json")
    if not os.path.lexists(sidecar):
        return None
    with _readable(sidecar), _open(sidecar) as file:
        text = file.read(MAX_SIDECAR_BYTES + 1)
    if len(text) > MAX_SIDECAR_BYTES:
        raise AdapterError(
            sidecar,
            [f"is larger than it may be; expected {MAX_SIDECAR_BYTES} bytes: put PEFT's own there"],
        )
    try:
        config = parse_json(text)
    except ValueError as error:
        raise AdapterError(
            sidecar, [f"has {error}; expected JSON as PEFT writes: {_ANEW}"]
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(
            sidecar, [f"is {short(config)}; expected PEFT's LoraConfig as an object: {_ANEW}"]
        )
    return config


@contextmanager
def new_folder(path: str) -> Iterator[None]:
    """Make the folder ``path``, for what the block writes there.

    Raises:
        AdapterError: the folder exists, or the block met an ``OSError``.
    """
    try:
        os.makedirs(path)
        yield
    except OSError as error:
        raise AdapterError(
            path, [f"cannot be written: {error.strerror}; expected the path of a new folder"]
        ) from error


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Write CPU tensors, of the dtypes that are read, as a safetensors file.

    Raises:
        OSError: the file cannot be written.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor_memory(tensor.contiguous()))


def parse_json(text: bytes) -> Any:
    """Strict JSON. Raises ``ValueError`` with a phrase that says what it has."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise KeyError(key)
            value[key] = item
        return value

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise ValueError("a string that is no Unicode (half a surrogate pair)") from error
    except KeyError as error:
        raise ValueError(f"the key {error.args[0][:256]!r} twice") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are no UTF-8 (at {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON ({error})") from error
    except ValueError as error:  # of int()
        raise ValueError("a whole number of thousands of digits") from error


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it and keeping it alive."""
    count = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * count).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def in_parallel(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``[function(item) for item in items]`` over threads, for functions that release the GIL."""
    results: list[Any] = [None] * len(items)
    waiting = iter(range(len(items)))

    def work() -> None:
        for i in waiting:  # shared by the threads: each takes the next
            results[i] = function(items[i])

    helpers = [_threads().submit(work) for _ in range(min(len(items), _num_threads()) - 1)]
    try:
        work()
    finally:  # what a helper works on outlives it; one that did not begin is not waited for
        wait(started := [helper for helper in helpers if not helper.cancel()])
    for helper in started:
        helper.result()
    return results


def _num_threads() -> int:
    return min(os.cpu_count() or 1, _MAX_THREADS)


@cache
def _threads() -> ThreadPoolExecutor:
    """The threads that help those that load, started once: it takes a millisecond or two."""
    return ThreadPoolExecutor(_num_threads(), "loramux-files")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of them


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """An ``OSError`` inside says that ``path`` cannot be read."""
    try:
        yield
    except OSError as error:
        raise AdapterError(
            path,
            [
                f"cannot be read ({error.strerror}); expected a file that can: see to its folder "
                "and disk"
            ],
        ) from error


def _open(path: str) -> BinaryIO:
    """Open the regular file ``path``, which no symlink may take out of its folder."""
    if not os.path.isfile(path):
        raise AdapterError(path, [_missing(path)])
    real = Path(os.path.realpath(path))
    folder = Path(os.path.realpath(os.path.dirname(path)))
    if folder not in real.parents and real.parent != _hub_blobs(folder):
        raise AdapterError(
            path,
            [
                f"is a link to {str(real)!r}, outside its folder; expected one inside: put "
                "the file itself there"
            ],
        )
    return open(real, "rb", opener=_open_unchanged)


def _open_unchanged(path: str, flags: int) -> int:
    """A link that has taken the file's place since is not followed, nor a pipe waited for."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no file any more")
    return descriptor


def _missing(path: str) -> str:
    folder = os.path.dirname(path)
    listed = os.listdir(folder) if os.path.isdir(folder) else []
    if pickles := sorted(name for name in listed if name.endswith(_PICKLE_SUFFIXES)):
        return f"no such file, but {pickles}: {_PICKLE}"
    return (
        "no such file; expected a safetensors file or a PEFT directory with one: correct the path"
    )


def _hub_blobs(folder: Path) -> Path | None:
    """Where the Hugging Face cache keeps the files that ``snapshots/<revision>`` links to."""
    for inner in (folder, *folder.parents):
        if inner.parent.name == "snapshots":
            return inner.parent.parent / "blobs"
    return None


def _read_header(
    file: BinaryIO, path: str
) -> tuple[Mapping[str, _Entry], dict[str, str], int, int]:
    """Entries, metadata, and the start and size of the data, checked against the file's size."""
    file_bytes = os.fstat(file.fileno()).st_size
    start = file.read(9)
    header_bytes = int.from_bytes(start[:8], "little")
    data_start = 8 + header_bytes
    if start[8:] != b"{" or header_bytes > MAX_HEADER_BYTES or data_start > file_bytes:
        raise AdapterError(path, [_not_safetensors(start, header_bytes, file_bytes)])
    text = start[8:] + file.read(header_bytes - 1)
    parse = _parse_known_header if len(text) <= _KNOWN_HEADER_BYTES else _parse_header
    try:
        entries, metadata, end, problems = parse(text)
    except ValueError as error:
        problem = f"its safetensors header has {error}; expected the format's JSON: {_ANEW}"
        raise AdapterError(path, [problem]) from error
    if not problems and end != file_bytes - data_start:
        problems = (
            f"its tensors end at byte {end}; expected {file_bytes - data_start}, the file's end: "
            f"{_ANEW}",
        )
    if problems:
        raise AdapterError(path, list(problems))
    return entries, dict(metadata), data_start, end


def _parse_header(
    text: bytes,
) -> tuple[Mapping[str, _Entry], Mapping[str, str], int, Sequence[str]]:
    """Entries, metadata, where the last tensor ends, and what is wrong with them.

    Raises:
        ValueError: no JSON; a phrase says what it has.
    """
    header = parse_json(text)
    entries = {}
    problems = []
    metadata = header.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        problems.append(f"its __metadata__ is {short(metadata)}; expected strings by name: {_ANEW}")
    for name, value in header.items():
        if len(problems) == _MAX_PROBLEMS:
            problems.append(
                f"its header has more of them; expected at most {_MAX_PROBLEMS} faults: {_ANEW}"
            )
            break
        try:
            entries[name] = _parse_entry(value)
        except ValueError as error:
            problems.append(f"tensor {name[:256]!r} has {error}: {_ANEW}")
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start != end:
            problems.append(
                f"tensor {name[:256]!r} starts at byte {entry.start}; expected {end}: {_ANEW}"
            )
        end = entry.end
    return entries, metadata, end, tuple(problems)


# Adapters of one recipe have their header in common.
_parse_known_header = lru_cache(_HEADERS_KEPT)(_parse_header)


def _not_safetensors(start: bytes, header_bytes: int, file_bytes: int) -> str:
    if start.startswith(b"PK\x03\x04") or b"\x80" <= start[:2] <= b"\x80\x05":
        return f"is {_PICKLE}"
    for magic, layout in ((b"GGUF", "GGUF"), (b"\x93NUMPY", "NumPy (TensorRT-LLM)")):
        if start.startswith(magic):
            return f"is a {layout} file; expected safetensors: export the adapter to PEFT"
    return (
        f"is not safetensors: a header of {header_bytes} bytes starting {start[8:]!r} in a file of "
        f"{file_bytes}; expected at most {MAX_HEADER_BYTES} that start with b'{{': {_ANEW}"
    )


def _parse_entry(value: object) -> _Entry:
    """One tensor's header entry. Raises ``ValueError`` with a phrase that says what it has."""
    if not (isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}):
        raise ValueError(f"the entry {short(value)}; expected dtype, shape and data_offsets")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"dtype {str(value['dtype'])[:32]!r}; expected one of {list(_DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    for numbers in (shape, offsets):
        if not (isinstance(numbers, list) and all(map(_is_size, numbers))):
            raise ValueError(f"{short(numbers)}; expected a list of whole numbers")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; expected at most {_MAX_DIMS}")
    count = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or count == 0 or offsets[1] - offsets[0] != count:
        raise ValueError(
            f"data_offsets {offsets[:2]}; expected the {count} bytes of shape {shape}, at least 1"
        )
    return _Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _fill(memory: memoryview, file: BinaryIO, offset: int) -> None:
    """Read the file from byte ``offset`` into ``memory``."""
    while memory:
        count = os.preadv(file.fileno(), [memory], offset)
        if count == 0:
            raise OSError(0, f"it ended at byte {offset}, cut while it was read")
        memory, offset = memory[count:], offset + count


def _vectors(size: int, device: str = "cpu") -> dict[torch.dtype, torch.Tensor]:
    """Memory for ``size`` bytes of data, seen as a vector of each dtype."""
    data = torch.empty(-(-size // 8) * 8, dtype=torch.uint8, device=device)
    return {dtype: data.view(dtype) for dtype in (torch.uint8, *_DTYPES.values())}


def _view(data: Mapping[torch.dtype, torch.Tensor], entry: _Entry) -> torch.Tensor:
    size = entry.dtype.itemsize
    if entry.start % size:
        piece = data[torch.uint8][entry.start : entry.end].clone()
        return piece.view(entry.dtype).view(entry.shape)
    strides, stride = [], 1
    for length in reversed(entry.shape):
        strides.append(stride)
        stride *= length
    return data[entry.dtype].as_strided(entry.shape, strides[::-1], entry.start // size)
