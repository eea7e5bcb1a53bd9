"""The host tier of the adapter pool: adapters read, sharded for this rank, packed into images.

An image holds one adapter's weights in exactly the bytes that a device slot holds, so that
installing it is one copy. Sites come in the order the model runs them (by layer, then by target as
declared); for every site the A blocks of its slices, then their B blocks:

- A ``[r, in_local]`` row-major; an embedding's A ``[vocab_local, r]``, a token's vector a row.
- B ``[width_local, r]`` row-major, alignment rows zero.
- r is the slice's own rank rounded up to 8 with zeros; a slice the adapter lacks takes no bytes.

Every block starts on 128 bytes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch

from . import _host
from .adapter_files import SafetensorsFile, in_parallel, tensor_memory
from .checkpoint import (
    DTYPE_CODES,
    LoraAdapter,
    PlacedSlice,
    open_lora_file,
    place_modules,
)
from .config import LoraSpec, Registration
from .errors import AdapterError, SpecError
from .identity import joined_digest, tensor_digest
from .site import table_row
from .target import LoraTarget

_RUN_BYTES = 2 << 20  # about what a thread reads, packs and digests at a time
_FAULTS = {1: "a NaN or Inf", 2: "a value too large for the pool's dtype"}


@dataclass(frozen=True)
class LocalSite:
    """One site as this rank holds it; ``local`` has the rank's own widths."""

    target: str
    layer: int
    entry: int  # of its first slice in the slot table
    declared: LoraTarget
    local: LoraTarget


class SlotLayout:
    """Where each site's weights lie in a slot of this rank.

    Attributes:
        sites: in image order.
        num_entries: slices of all sites, the slot table's second dimension.
        slot_bytes: the largest image: every slice at ``max_rank``.
        max_rank: the spec's, rounded up to 8.
    """

    def __init__(self, spec: LoraSpec, dtype: torch.dtype, rank: int = 0, world_size: int = 1):
        if not 0 <= rank < world_size:
            raise SpecError(f"rank {rank} is none of the {world_size} from 0 on")
        if dtype not in DTYPE_CODES:
            raise SpecError(f"a pool of {dtype}; expected one of {list(DTYPE_CODES)}")
        self.spec, self.dtype, self.rank, self.world_size = spec, dtype, rank, world_size
        self.max_rank = padded_rank(spec.max_rank)
        local = {name: target.shard(world_size) for name, target in spec.targets.items()}
        self.sites: list[LocalSite] = []
        self.num_entries = 0
        self.slot_bytes = 0
        for name, layer in spec.sites():
            self.sites.append(
                LocalSite(name, layer, self.num_entries, spec.targets[name], local[name])
            )
            self.num_entries += local[name].num_slices
            ranks = [self.max_rank] * local[name].num_slices
            self.slot_bytes += sum(map(self.block_bytes, block_shapes(local[name], ranks)))

    def block_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes of a block, the gap to the next block's start included."""
        size = shape[0] * shape[1] * self.dtype.itemsize
        return -(-size // _host.BLOCK_ALIGN) * _host.BLOCK_ALIGN


def padded_rank(rank: int) -> int:
    """``rank`` rounded up to what an image holds."""
    return -(-rank // _host.RANK_ALIGN) * _host.RANK_ALIGN


def block_shapes(local: LoraTarget, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Shapes of a site's blocks in image order, from each slice's padded rank."""
    if local.kind == "embedding":
        a_shapes = [(local.in_features, rank) for rank in ranks]
    else:
        a_shapes = [(rank, local.in_features) for rank in ranks]
    return a_shapes + list(zip(local.out_slices, ranks, strict=True))


@dataclass(frozen=True, eq=False)
class LoraImage:
    """One adapter packed for this rank.

    Attributes:
        data: uint8 ``[bytes]``, pinned where the pool is on a CUDA device.
        entries: per table entry ``(A offset, B offset, rank, scale)``, offsets in 128 bytes from
            the image's start.
        digest: ``identity.adapter_digest`` of the adapter that was packed; empty where none was
            asked for.
    """

    data: torch.Tensor
    entries: list[tuple[int, int, int, float]]
    digest: bytes

    def table_row(self, base: int) -> torch.Tensor:
        """The slot table's row once the image lies at ``base`` (in 128 bytes) of the arena."""
        row = self._row.clone()
        row[:, :2] += (base + 2**31) % 2**32 - 2**31  # unsigned sums, in int32
        return row

    @cached_property
    def _row(self) -> torch.Tensor:
        return table_row(self.entries)


class _Block(NamedTuple):
    """One matrix of an image, and where it comes from."""

    name: tuple[str, str]  # "A" or "B", and the module
    factor: torch.Tensor
    part: torch.Tensor  # this rank's rows and columns of it, a view
    turned: bool  # the block is the part's transpose
    shape: tuple[int, int]  # padded
    offset: int  # bytes from the image's start


_Source = tuple[tuple[str, str], torch.Tensor, torch.Tensor, bool]  # a block's first fields


class _Piece(NamedTuple):
    """What is read, checked and digested as one."""

    name: tuple[str, str]
    source: torch.Tensor  # a factor, or this rank's part of one
    blocks: list[_Block]  # what is made of it
    in_file: bool  # its bytes are still to be read
    size: int  # in bytes


def pack_image(
    adapter: LoraAdapter,
    layout: SlotLayout,
    file: SafetensorsFile | None = None,
    *,
    pin: bool = False,
    digest: bool = True,
) -> LoraImage:
    """Check, shard and pack an adapter: each of its tensors in one pass, while it is in cache.

    Args:
        file: what the adapter's meta tensors are read from (``checkpoint.open_lora_file``).
        digest: take the adapter's digest. Without, only this rank's parts are read and checked.

    Raises:
        AdapterError: the spec cannot serve it, the file cannot be read, or a value is not finite in
            the layout's dtype.
    """
    blocks, entries, size = _lay_out(adapter, layout)
    pieces = _pieces(adapter, blocks, whole=digest)
    image = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
    runs = _runs(pieces)
    scratch = _Scratch(max((_file_bytes(run) for run in runs), default=0))
    digests: dict[int, bytes] = {}  # by the factor's id

    def pack(run: list[_Piece]) -> list[str]:
        memory, start, addresses = scratch.memory, scratch.address, []
        if file is not None:
            file.read([piece.source for piece in run if piece.in_file], memory)
        for piece in run:
            read = None
            if piece.in_file:
                addresses.append(start)
                read, memory = memory[: piece.size], memory[piece.size :]
                start += piece.size
            else:
                addresses.append(piece.source.data_ptr())
            if digest:
                digests[id(piece.source)] = tensor_digest(piece.source, read)
        return _pack_run(run, addresses, image, layout.dtype)

    if problems := list(chain.from_iterable(in_parallel(pack, runs))):
        raise AdapterError(adapter.path, problems)
    in_order = (digests[id(factor)] for factor in adapter.factors)
    return LoraImage(image, entries, joined_digest(adapter, in_order) if digest else b"")


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces that lie one after another in the file, in runs of ``_RUN_BYTES`` or a little more."""
    runs: list[list[_Piece]] = []
    size = _RUN_BYTES
    for piece in sorted(pieces, key=lambda piece: piece.source.storage_offset()):
        if size >= _RUN_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.size
    return runs


def _file_bytes(run: list[_Piece]) -> int:
    return sum(piece.size for piece in run if piece.in_file)


class _Scratch(threading.local):
    """Memory of each thread's own, for one run after another: it stays in cache."""

    def __init__(self, size: int) -> None:
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.address, self.memory = data.data_ptr(), tensor_memory(data)


def _lay_out(
    adapter: LoraAdapter, layout: SlotLayout
) -> tuple[list[_Block], list[tuple[int, int, int, float]], int]:
    """The blocks and table entries of an adapter's image, and the image's size in bytes."""
    placed = place_modules(adapter, layout.spec)
    blocks: list[_Block] = []
    entries: list[tuple[int, int, int, float]] = []
    end = 0
    for site in layout.sites:
        parts = [placed.get((site.target, site.layer, i)) for i in range(site.local.num_slices)]
        ranks = [padded_rank(part.a.shape[0]) if part else 0 for part in parts]
        if max(ranks) > layout.max_rank:
            raise AdapterError(
                adapter.path,
                [
                    f"its rank is {max(ranks)}; expected at most {layout.max_rank}, the spec's "
                    "when the pool was built: build a pool of the spec as it is now"
                ],
            )
        sources = _sources(adapter, parts, site, layout)
        offsets = []
        for source, shape in zip(sources, block_shapes(site.local, ranks), strict=True):
            offsets.append(end // _host.BLOCK_ALIGN)
            if source is not None:
                blocks.append(_Block(*source, shape, end))
                end += layout.block_bytes(shape)
        for i, part in enumerate(parts):
            scale = part.scale if part else 0.0
            entries.append((offsets[i], offsets[len(parts) + i], ranks[i], scale))
    return blocks, entries, end


def _sources(
    adapter: LoraAdapter, parts: list[PlacedSlice | None], site: LocalSite, layout: SlotLayout
) -> list[_Source | None]:
    """The first fields of a site's blocks in image order: A of each slice, then B of each."""
    a_sources: list[_Source | None] = [None] * len(parts)
    b_sources = a_sources.copy()
    for i, part in enumerate(parts):
        if part is not None:
            a, b = site.declared.shard_views(i, part.a, part.b, layout.rank, layout.world_size)
            module = adapter.modules[part.module]
            a_sources[i] = ("A", part.module), module.a, a, site.local.kind == "embedding"
            b_sources[i] = ("B", part.module), module.b, b, False
    return a_sources + b_sources


def _pieces(adapter: LoraAdapter, blocks: Iterable[_Block], whole: bool) -> list[_Piece]:
    """The part of each block alone, or every whole factor of an adapter."""
    if not whole:
        return [_piece(block.name, block.part, [block]) for block in blocks]
    made_of = defaultdict(list)
    for block in blocks:
        made_of[id(block.factor)].append(block)
    return [
        _piece((letter, name), factor, made_of[id(factor)])
        for name, module in sorted(adapter.modules.items())
        for letter, factor in (("A", module.a), ("B", module.b))
    ]


def _piece(name: tuple[str, str], source: torch.Tensor, blocks: list[_Block]) -> _Piece:
    return _Piece(name, source, blocks, source.is_meta, source.nbytes)


def _pack_run(
    run: list[_Piece], addresses: list[int], image: torch.Tensor, dtype: torch.dtype
) -> list[str]:
    """Pack the blocks made of pieces, whose sources lie at ``addresses``.

    Returns:
        What is wrong with them. All of a source that was read is checked, packed or not.
    """
    items = [
        (piece, _host_block(block, piece.source, address))
        for piece, address in zip(run, addresses, strict=True)
        for block in piece.blocks
    ]
    blocks = [block for _, block in items]
    problems: dict[tuple[str, str], str] = {}
    for i, fault, index in _host.pack(image.data_ptr(), image.numel(), DTYPE_CODES[dtype], blocks):
        problems.setdefault(
            items[i][0].name,
            f"{_FAULTS[fault]} ({dtype}) at element {index} of this rank's part; expected finite "
            "values: re-save it without, or serve it in float32",
        )
    for piece, address in zip(run, addresses, strict=True):
        source = piece.source
        if not piece.in_file or any(block.part is source for block in piece.blocks):
            continue
        if not _host.all_finite(address, DTYPE_CODES[source.dtype], source.numel()):
            problems.setdefault(
                piece.name, f"{_FAULTS[1]}; expected finite values: re-save it without"
            )
    return [f"{factor} of module {name!r} has {text}" for (factor, name), text in problems.items()]


def _host_block(
    block: _Block, source: torch.Tensor, address: int
) -> tuple[int, int, Sequence[int], Sequence[int], Sequence[int], int]:
    """A block as ``_host.pack`` takes it, made of a source that lies at ``address``."""
    part = block.part
    shape, strides = part.shape, part.stride()
    if part is not source:
        address += int(part.storage_offset() - source.storage_offset()) * part.itemsize
    elif source.is_meta:  # it was read alone, without the columns beside it
        strides = (shape[1], 1)
    if block.turned:
        shape, strides = shape[::-1], strides[::-1]
    return address, DTYPE_CODES[part.dtype], shape, strides, block.shape, block.offset


class LoraStore:
    """Images of up to ``cpu_capacity`` adapters, least recently used out first.

    Concurrent requests for one adapter share one read. An image that leaves the store while a copy
    still reads it lives on until the copy ends: its reader holds it.
    """

    def __init__(self, layout: SlotLayout, *, pin: bool = False) -> None:
        self._layout = layout
        self._pin = pin
        self._lock = threading.Lock()
        self._images: OrderedDict[Registration, LoraImage] = OrderedDict()
        self._is_open = True
        self._loading: dict[Registration, Future[LoraImage]] = {}
        self.load_seconds = 0.0

    def get(self, registration: Registration) -> LoraImage:
        """The image of an adapter as it is registered, read and packed if it is not held.

        Raises:
            AdapterError: the file cannot be served. The store is as it was.
        """
        loading: Future[LoraImage] = Future()
        try:
            with self._lock:
                if (image := self._images.get(registration)) is not None:
                    self._images.move_to_end(registration)
                    return image
                first = self._loading.setdefault(registration, loading)
            if first is not loading:
                return first.result()
            image = self._load(registration)
            self.put(registration, image)
            loading.set_result(image)
            return image
        except BaseException as error:
            if not loading.done():
                loading.set_exception(error)
            raise
        finally:
            with self._lock:
                if self._loading.get(registration) is loading:
                    del self._loading[registration]

    def read(self, path: str, *, digest: bool = True) -> LoraImage:
        """The image of the adapter at ``path``, read and packed but not kept.

        Args:
            digest: as for :func:`pack_image`.

        Raises:
            AdapterError: the file cannot be served.
        """
        started = time.perf_counter()
        with open_lora_file(path, self._layout.spec.convert_keys) as (adapter, file):
            image = pack_image(adapter, self._layout, file, pin=self._pin, digest=digest)
        with self._lock:
            self.load_seconds += time.perf_counter() - started
        return image

    def put(self, registration: Registration, image: LoraImage) -> None:
        """Keep an image, unless its adapter was unloaded while it was read."""
        with self._lock:
            if self._layout.spec.serves(registration) and self._is_open:
                self._images[registration] = image
            if len(self._images) > self._layout.spec.cpu_capacity:
                self._drop_unserved(list(self._images))
            while len(self._images) > self._layout.spec.cpu_capacity:
                self._images.popitem(last=False)

    def drop(self, name: str) -> None:
        """Forget the images of ``name`` that the spec no longer serves."""
        with self._lock:
            self._drop_unserved([held for held in self._images if held.name == name])

    def close(self) -> None:
        """Forget all images, and keep no more of them."""
        with self._lock:
            self._is_open = False
            self._images.clear()

    @property
    def names(self) -> list[str]:
        """Adapters held, least recently used first."""
        with self._lock:
            return [registration.name for registration in self._images]

    def _drop_unserved(self, held: Iterable[Registration]) -> None:
        """Of these, the images that the spec no longer serves. The lock is held."""
        for registration in held:
            if not self._layout.spec.serves(registration):
                del self._images[registration]

    def _load(self, registration: Registration) -> LoraImage:
        if registration.digest is None:
            return self.read(registration.path, digest=False)
        image = self.read(registration.path)
        if registration.digest != image.digest:
            raise AdapterError(
                registration.name,
                [
                    f"its weights digest to {image.digest.hex()}, the deployment expects "
                    f"{registration.digest.hex()}: restore the file or register its new digest"
                ],
            )
        return image
