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

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import _host
from .checkpoint import LoraAdapter, PlacedSlice, place_modules, read_lora_file
from .config import LoraSpec, Registration
from .errors import AdapterError
from .identity import adapter_digest
from .site import table_row
from .target import LoraTarget

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType of csrc/lora.h
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
        digest: ``identity.adapter_digest`` of the adapter that was packed.
    """

    data: torch.Tensor
    entries: list[tuple[int, int, int, float]]
    digest: bytes

    def table_row(self, base: int) -> torch.Tensor:
        """The slot table's row once the image lies at ``base`` (in 128 bytes) of the arena."""
        return table_row([(base + a, base + b, rank, scale) for a, b, rank, scale in self.entries])


class _Block(NamedTuple):
    """One matrix of an image (``Block`` of csrc/host/pack.h), and whose it is."""

    module: str
    source: torch.Tensor
    shape: tuple[int, int]  # padded
    offset: int  # bytes from the image's start

    def packed(self) -> tuple[int, ...]:
        return (
            self.source.data_ptr(),
            _DTYPE_CODES[self.source.dtype],
            *self.source.shape,
            *self.source.stride(),
            *self.shape,
            self.offset,
        )


def pack_image(adapter: LoraAdapter, layout: SlotLayout, *, pin: bool = False) -> LoraImage:
    """Check, shard and pack an adapter.

    Raises:
        AdapterError: the spec cannot serve it, or a value is not finite in the layout's dtype.
    """
    placed = place_modules(adapter, layout.spec)
    blocks: list[_Block] = []
    entries: list[tuple[int, int, int, float]] = []
    end = 0
    for site in layout.sites:
        parts = [placed.get((site.target, site.layer, i)) for i in range(site.local.num_slices)]
        offsets = []
        ranks = [padded_rank(len(part.a)) if part else 0 for part in parts]
        for part, source, shape in zip(
            parts * 2,
            _sources(parts, site, layout),
            block_shapes(site.local, ranks),
            strict=True,
        ):
            offsets.append(end // _host.BLOCK_ALIGN)
            if part is not None and source is not None:
                blocks.append(_Block(part.module, source, shape, end))
                end += layout.block_bytes(shape)
        for i, part in enumerate(parts):
            scale = part.scale if part else 0.0
            entries.append((offsets[i], offsets[len(parts) + i], ranks[i], scale))
    data = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    fault, block, index = _host.pack(
        data.data_ptr(),
        end,
        _DTYPE_CODES[layout.dtype],
        [block.packed() for block in blocks],
        os.cpu_count() or 1,
    )
    if fault:
        raise AdapterError(
            adapter.path,
            [
                f"module {blocks[block].module!r} has {_FAULTS[fault]} ({layout.dtype}) at element "
                f"{index} of this rank's part: re-save it without, or serve it in float32"
            ],
        )
    return LoraImage(data, entries, adapter_digest(adapter))


def _sources(
    parts: list[PlacedSlice | None], site: LocalSite, layout: SlotLayout
) -> list[torch.Tensor | None]:
    """This rank's matrices of a site in image order: A of each slice, then B of each."""
    pairs = [
        site.declared.shard_pair(i, part.a, part.b, layout.rank, layout.world_size)
        if part
        else (None, None)
        for i, part in enumerate(parts)
    ]
    embedding = site.local.kind == "embedding"
    return [a.T if embedding and a is not None else a for a, _ in pairs] + [b for _, b in pairs]


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
        self._loading: dict[Registration, Future[LoraImage]] = {}
        self.load_seconds = 0.0

    def get(self, registration: Registration) -> LoraImage:
        """The image of an adapter as it is registered, read and packed if it is not held.

        Raises:
            AdapterError: the file cannot be served. The store is as it was.
        """
        with self._lock:
            if (image := self._images.get(registration)) is not None:
                self._images.move_to_end(registration)
                return image
            loading = self._loading.get(registration)
            mine = loading is None
            if loading is None:
                loading = self._loading[registration] = Future()
        if not mine:
            return loading.result()
        try:
            image = self._load(registration)
        except BaseException as error:
            with self._lock:
                del self._loading[registration]
            loading.set_exception(error)
            raise
        self.put(registration, image)
        with self._lock:
            del self._loading[registration]
        loading.set_result(image)
        return image

    def read(self, path: str) -> LoraImage:
        """The image of the adapter at ``path``, read and packed but not kept.

        Raises:
            AdapterError: the file cannot be served.
        """
        started = time.perf_counter()
        adapter = read_lora_file(path, self._layout.spec.convert_keys)
        image = pack_image(adapter, self._layout, pin=self._pin)
        with self._lock:
            self.load_seconds += time.perf_counter() - started
        return image

    def put(self, registration: Registration, image: LoraImage) -> None:
        """Keep an image, unless its adapter was unloaded while it was read."""
        with self._lock:
            if self._layout.spec.serves(registration):
                self._images[registration] = image
            while len(self._images) > self._layout.spec.cpu_capacity:
                self._images.popitem(last=False)

    def drop(self, name: str) -> None:
        """Forget the images of ``name`` that the spec no longer serves."""
        with self._lock:
            for registration in [r for r in self._images if r.name == name]:
                if not self._layout.spec.serves(registration):
                    del self._images[registration]

    @property
    def names(self) -> list[str]:
        """Adapters held, least recently used first."""
        with self._lock:
            return [registration.name for registration in self._images]

    def _load(self, registration: Registration) -> LoraImage:
        image = self.read(registration.path)
        if registration.digest is not None and registration.digest != image.digest:
            raise AdapterError(
                registration.name,
                [
                    f"its weights digest to {image.digest.hex()}, the deployment expects "
                    f"{registration.digest.hex()}: restore the file or register its new digest"
                ],
            )
        return image
