"""Which weights an adapter name stands for, as a prefix cache keys them.

A request on an adapter fills KV pages that differ from the base model's for the same tokens, so its
prompt's chain of block keys hangs from a root of its own, made from the weights.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from .adapter_files import in_parallel, tensor_memory
from .checkpoint import LoraAdapter, read_lora_file
from .config import LoraSpec
from .errors import UnknownAdapter

_DIGEST_DOMAIN = b"loramux adapter digest 1\0"
_ROOT_DOMAIN = b"loramux prefix root 1\0"
_BASE_ROOT = b""
_BLOCK_DOMAIN = b"loramux block key 1\0"
_HEADS_KEPT = 1024


def adapter_digest(adapter: LoraAdapter) -> bytes:
    """SHA-256 over everything an adapter's delta depends on, the same on every rank and process.

    That is every module's name, kind, alpha and rsLoRA flag, and A and B with their dtype and
    shape, so that equal bytes of another shape or dtype digest apart. The order of the modules and
    the memory layout do not enter.

    Returns:
        32 bytes.
    """
    return joined_digest(adapter, in_parallel(tensor_digest, adapter.factors))


def joined_digest(adapter: LoraAdapter, factor_digests: Iterable[bytes]) -> bytes:
    """``adapter_digest`` from the ``tensor_digest`` of each of ``adapter.factors``."""
    digests = iter(factor_digests)
    total = hashlib.sha256(_DIGEST_DOMAIN)
    for name, module in sorted(adapter.modules.items()):
        encoded = name.encode()
        total.update(struct.pack("<q", len(encoded)) + encoded)
        total.update(struct.pack("<d??", module.alpha, module.rslora, module.embedding))
        total.update(next(digests) + next(digests))
    return total.digest()


def tensor_digest(tensor: torch.Tensor, memory: memoryview | None = None) -> bytes:
    """SHA-256 of a tensor's dtype, shape and values, which ``memory`` has for a meta tensor."""
    digest = hashlib.sha256(_digest_head(tensor.dtype, tensor.shape))
    if memory is None:
        memory = tensor_memory(tensor.detach().cpu().contiguous())
    digest.update(memory)
    return digest.digest()


@lru_cache(_HEADS_KEPT)  # most tensors of an adapter share a shape with others
def _digest_head(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype} {list(shape)}\0".encode()


def adapter_prefix_root(digest: bytes | None) -> bytes:
    """The root that the key chains of an adapter's requests hang from.

    It comes from the digest and not from the name: two names for the same weights share pages, and
    one name with new weights does not. ``None`` is the base model, whose root is empty.

    Raises:
        ValueError: not a digest of 32 bytes.
    """
    return _BASE_ROOT if digest is None else _root(digest)


def read_adapter_digest(spec: LoraSpec, path: str) -> bytes:
    """The digest of the adapter at ``path``, read as the pool reads it.

    Raises:
        AdapterError: it cannot be served.
    """
    return adapter_digest(read_lora_file(path, spec.convert_keys))


def prefix_block_keys(root: bytes | None, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of a prompt's whole blocks, each of its tokens and all before them, from a root.

    Args:
        root: what ``AdapterPrefixRoots.root`` says of the request's adapter, or for the base model
            ``adapter_prefix_root(None)``. There is no default: a forgotten adapter would read and
            fill the base model's blocks.
        tokens: token ids of the prompt; those after the last whole block have no key.
        block_size: tokens a block.

    Returns:
        32 bytes a block. Equal keys mean equal weights and equal tokens up to the block's end.

    Raises:
        UnknownAdapter: no root: the request must not be keyed.
        ValueError: a root that is neither empty nor 32 bytes, a block of no token, or a token id
            outside int64.
    """
    if root is None:
        raise UnknownAdapter(
            "the request's adapter has no prefix root: run it without the prefix cache, or key it "
            "under adapter_prefix_root(None) if it is on the base model"
        )
    if len(root) not in (len(_BASE_ROOT), 32):
        raise ValueError(f"a prefix root is empty or 32 bytes, got {len(root)} bytes")
    if block_size < 1:
        raise ValueError(f"a block has 1 token or more, got {block_size}")
    keys = []
    parent = root
    for end in range(block_size, len(tokens) + 1, block_size):
        try:
            block = struct.pack(f"<{block_size}q", *tokens[end - block_size : end])
        except struct.error as error:
            raise ValueError(f"a token id does not fit int64: {error}") from None
        # The parent's length keeps the base's empty root apart from roots that spell tokens.
        head = _BLOCK_DOMAIN + struct.pack("<q", len(parent))
        parent = hashlib.sha256(head + parent + block).digest()
        keys.append(parent)
    return keys


class AdapterPrefixRoots:
    """Adapter name to the root that its requests' key chains hang from. Safe to share by threads.

    A name that is not registered has no root, and a request on it must not be keyed at all: under
    the base model's empty root its pages would serve base requests.
    """

    def __init__(self, roots: Mapping[str, bytes] | None = None) -> None:
        self._roots = dict(roots or {})
        self._lock = threading.Lock()

    @classmethod
    def read(cls, spec: LoraSpec, digests: Mapping[str, bytes] | None = None) -> AdapterPrefixRoots:
        """Every adapter that ``spec`` serves, under its digest in ``digests`` or, for one not in
        it, the digest of its file, read once.

        The pool reads such a file later on: give its spec the digest too (``adapter_digests``), so
        that one which has changed by then is refused. ``LoraRuntime`` does so.

        Raises:
            AdapterError: a file that has to be read cannot be served.
        """
        roots = cls()
        known = digests or {}
        for name, path in list(spec.adapters.items()):
            digest = known[name] if name in known else read_adapter_digest(spec, path)
            roots.register(name, digest)
        return roots

    def register(self, name: str, digest: bytes) -> None:
        """Key requests on ``name`` by the weights that digest to ``digest`` from now on.

        Raises:
            ValueError: not a digest of 32 bytes.
        """
        root = _root(digest)
        with self._lock:
            self._roots[name] = root

    def root(self, name: str) -> bytes | None:
        """The root of ``name``, or ``None``: do not key its requests."""
        with self._lock:
            return self._roots.get(name)

    def unregister(self, name: str) -> None:
        """Stop keying requests on ``name``; harmless where it is not registered."""
        with self._lock:
            self._roots.pop(name, None)


def _root(digest: bytes) -> bytes:
    if not isinstance(digest, bytes) or len(digest) != 32:
        raise ValueError(f"an adapter's digest is 32 bytes, got {digest!r}")
    return hashlib.sha256(_ROOT_DOMAIN + digest).digest()
