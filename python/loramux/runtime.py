"""What an engine holds of a running deployment: its pools, and which adapters requests may name."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from .config import LoraReqConfig, LoraSpec, Registration, Segment, unknown_adapter_text
from .errors import AdapterError, SpecError, UnknownAdapter
from .identity import AdapterPrefixRoots, adapter_prefix_root
from .pool import LoraPool
from .resource import Hold
from .store import LoraImage

_JOINT_DOMAIN = b"loramux digest over specs 1\0"


class ServedAdapter(NamedTuple):
    """One adapter that requests may name.

    Attributes:
        path: where its weights were read. For the operator; a client is told names only.
        digest: of its weights (``identity.adapter_digest``); of which spec serves which, where not
            every spec serves the same.
        created: when it was loaded, in seconds since the epoch.
    """

    name: str
    path: str
    digest: bytes
    created: int


class AdapterHold(Hold):
    """One request's hold on the weights it was admitted on, whatever their name comes to mean.

    A request on the base model holds nothing.

    Attributes:
        adapter: the name the request gave.
        root: what its prefix keys hang from (``identity.prefix_block_keys``). It does not tell of
            a ``scale``: requests of any but 1.0 are not to be keyed.
    """

    def __init__(
        self,
        adapter: str | None,
        root: bytes,
        pools: Iterable[LoraPool],
        held: Mapping[LoraPool, Registration],
    ) -> None:
        self.adapter, self.root = adapter, root
        self._keyed = {pool.spec.resource_key: held.get(pool) for pool in pools}
        self._held = list(held.items())

    def segment(self, resource_key: str, length: int, scale: float = 1.0) -> Segment:
        """The request's segment in a step of one spec's pool: base rows where that spec does not
        serve the adapter.

        Raises:
            SpecError: the runtime has no pool of that key.
        """
        if resource_key not in self._keyed:
            raise SpecError(f"no pool has the key {resource_key!r}: use one of {[*self._keyed]}")
        return Segment(self._keyed[resource_key], length, scale)

    def release(self) -> None:
        """End the request. Releasing twice is harmless."""
        while True:
            try:
                pool, registration = self._held.pop()
            except IndexError:
                return
            _end_hold(pool, registration)


class LoraRuntime:
    """The adapters of one deployment, across all of its specs.

    Every method may be called from any thread; a load's files are read while requests go on. An
    adapter may be named once every pool can serve it and its prefix root is registered; an unload
    takes both back first. Requests admitted before finish on the weights they began with,
    from the pools' memory or, where that let an image go, from its file again: a file that changed
    since is refused then, so new weights belong in a new path.

    Args:
        pools: one per spec. The adapters configured in their specs are read and checked; of one
            whose digest is configured, only the header.
        progress: called after each of them with how many are done and how many there are.

    Attributes:
        pools: by resource key.
        roots: of the names served now. A request takes its own from ``admit``, together with the
            weights that it is the root of.

    Raises:
        AdapterError: a configured adapter cannot be served.
        SpecError: two pools of one resource key.
    """

    def __init__(
        self, pools: Iterable[LoraPool], progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.pools: dict[str, LoraPool] = {}
        for pool in pools:
            if self.pools.setdefault(pool.spec.resource_key, pool) is not pool:
                raise SpecError(f"two pools have the resource key {pool.spec.resource_key!r}")
        self.roots = AdapterPrefixRoots()
        self._served: dict[str, ServedAdapter] = {}
        self._changing = threading.Lock()  # one load or unload at a time
        self._lock = threading.Lock()  # what admission reads; never held while a file is read
        names = dict.fromkeys(name for pool in self._pools for name in pool.spec.adapters)
        with ExitStack() as undo:  # no digest of a runtime that is not to be stays with its specs
            for done, name in enumerate(names, 1):
                self._serve_configured(name, undo)
                if progress is not None:
                    progress(done, len(names))
            undo.pop_all()

    @classmethod
    def build(
        cls,
        specs: Iterable[LoraSpec],
        *,
        progress: Callable[[int, int], None] | None = None,
        **placement: Any,
    ) -> LoraRuntime:
        """Build a pool for every spec; ``placement`` as ``LoraPool`` takes it."""
        return cls((LoraPool.build(spec, **placement) for spec in specs), progress)

    def admit(self, request: LoraReqConfig) -> AdapterHold:
        """Admit a request: hold its adapter's weights until ``release``.

        Raises:
            UnknownAdapter: (a ``ValueError``) no such adapter is served. Fits an HTTP 400.
        """
        request.validate()
        name = request.adapter
        if name is None:
            return AdapterHold(None, adapter_prefix_root(None), self._pools, {})
        held: dict[LoraPool, Registration] = {}
        with ExitStack() as undo, self._lock:
            self._check_served(name)
            for pool in self._pools:
                if name in pool.spec.adapters:
                    held[pool] = pool.spec.hold(name)
                    undo.callback(_end_hold, pool, held[pool])
            # Of what is held: another runtime may share the specs.
            root = adapter_prefix_root(self._digest(name, held))
            undo.pop_all()
        return AdapterHold(name, root, self._pools, held)

    def load(self, name: str, path: str) -> ServedAdapter:
        """Serve the adapter at ``path`` as ``name``, on every spec.

        Loading the weights that are served under the name already changes nothing.

        Raises:
            AdapterError: the file cannot be served, or the name is served with other weights.
                Nothing was changed.
        """
        with self._changing:
            images = self._read(name, path)
            if name not in self._served:
                return self._install(name, path, images)
            serving = [pool for pool in self._pools if name in pool.spec.adapters]
            for pool in serving:
                if pool.spec.registration(name).digest != images[pool].digest:
                    raise AdapterError(path, [f"{name!r} is served with other weights: replace it"])
            if len(serving) < len(self.pools):  # it was configured for some specs alone
                return self._install(name, path, images)
            return self._served[name]

    def replace(self, name: str, path: str) -> ServedAdapter:
        """Serve the adapter at ``path`` as ``name``, which is served already, from now on.

        Raises:
            UnknownAdapter: it is not served.
            AdapterError: the file cannot be served. Nothing was changed.
        """
        with self._changing:
            self._check_served(name)
            return self._install(name, path, self._read(name, path))

    def unload(self, name: str) -> None:
        """Stop serving ``name``: its root is gone first, its memory once no request holds it.

        Raises:
            UnknownAdapter: it is not served.
        """
        with self._changing:
            self._check_served(name)
            with self._lock:
                self.roots.unregister(name)
                del self._served[name]
                for pool in self._pools:
                    if name in pool.spec.adapters:
                        pool.spec.remove_adapter(name)
            self._free(name)

    def list(self) -> Sequence[ServedAdapter]:
        """The adapters that requests may name, by name."""
        with self._lock:
            return sorted(self._served.values())

    def model_cards(self, parent: str) -> Sequence[dict[str, Any]]:
        """The served adapters as OpenAI's ``GET /v1/models`` lists models; no path is among it.

        Args:
            parent: the base model's id.
        """
        return [
            {
                "id": adapter.name,
                "object": "model",
                "created": adapter.created,
                "owned_by": "loramux",
                "parent": parent,
            }
            for adapter in self.list()
        ]

    def close(self) -> None:
        """Close every pool."""
        for pool in self._pools:
            pool.close()

    @property
    def _pools(self) -> Iterable[LoraPool]:
        return self.pools.values()

    def _check_served(self, name: str) -> None:
        if name not in self._served:
            raise UnknownAdapter(unknown_adapter_text(name, self._served))

    def _serve_configured(self, name: str, undo: ExitStack) -> None:
        serving = {}
        for pool in self._pools:
            spec = pool.spec
            if name not in spec.adapters:
                continue
            if name in spec.adapter_digests:
                spec.check_adapter(name, spec.adapter_info(name))
            else:
                path = spec.adapters[name]
                image = pool.read(path)
                undo.callback(pool.unload, name)  # once the spec is as it was
                undo.callback(spec.add_adapter, name, path)
                pool.adopt(spec.add_adapter(name, path, image.digest), image)
            serving[pool] = spec.registration(name)
        path = next(iter(serving.values())).path
        self._publish(name, path, self._digest(name, serving))

    def _read(self, name: str, path: str) -> dict[LoraPool, LoraImage]:
        if not (isinstance(name, str) and name):
            raise AdapterError(path, [f"it was to be served as {name!r}: give it a name"])
        return {pool: pool.read(path) for pool in self._pools}

    def _install(self, name: str, path: str, images: Mapping[LoraPool, LoraImage]) -> ServedAdapter:
        with self._lock:
            self.roots.unregister(name)  # while it may be of other weights than the specs'
            self._served.pop(name, None)
            serving = {}
            for pool, image in images.items():
                serving[pool] = pool.spec.add_adapter(name, path, image.digest)
                pool.adopt(serving[pool], image)
            served = self._publish(name, path, self._digest(name, serving))
        self._free(name)
        return served

    def _publish(self, name: str, path: str, digest: bytes) -> ServedAdapter:
        self.roots.register(name, digest)
        self._served[name] = ServedAdapter(name, path, digest, int(time.time()))
        return self._served[name]

    def _free(self, name: str) -> None:
        for pool in self._pools:
            pool.unload(name)

    def _digest(self, name: str, serving: Mapping[LoraPool, Registration]) -> bytes:
        """One digest of what the specs serve under a name: theirs, where all serve it alike."""
        digests = {}
        for pool, registration in serving.items():
            if registration.digest is None:
                raise UnknownAdapter(
                    f"{name!r} was registered with its spec, without a digest: load it here"
                )
            digests[pool.spec.resource_key] = registration.digest
        if not digests:
            raise UnknownAdapter(unknown_adapter_text(name, ()))
        if len(digests) == len(self.pools) and len(distinct := set(digests.values())) == 1:
            return distinct.pop()
        total = hashlib.sha256(_JOINT_DOMAIN)
        for key, digest in sorted(digests.items()):
            encoded = key.encode()
            total.update(struct.pack("<q", len(encoded)) + encoded + digest)
        return total.digest()


def _end_hold(pool: LoraPool, registration: Registration) -> None:
    pool.spec.release(registration)
    if not pool.spec.serves(registration):
        pool.unload(registration.name)
