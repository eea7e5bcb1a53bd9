"""What an engine holds of a running deployment: its pools, and which adapters requests may name."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .config import LoraReqConfig, LoraSpec, Registration, Segment, unknown_adapter_text
from .errors import AdapterError, SpecError, UnknownAdapter
from .identity import AdapterPrefixRoots, adapter_prefix_root
from .pool import LoraPool
from .resource import Hold
from .store import LoraImage


class ServedAdapter(NamedTuple):
    """One adapter that requests may name.

    Attributes:
        path: where its weights were read. For the operator; a client is told names only.
        digest: of its weights (``identity.adapter_digest``).
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
        root: what its prefix keys hang from (``identity.prefix_block_keys``).
    """

    def __init__(
        self, adapter: str | None, root: bytes, held: Mapping[LoraPool, Registration]
    ) -> None:
        self.adapter, self.root = adapter, root
        self._held = dict(held)
        self._keyed = {pool.spec.resource_key: held[pool] for pool in held}

    def segment(self, resource_key: str, length: int, scale: float = 1.0) -> Segment:
        """The request's segment in a step of one spec's pool: base rows where that spec does not
        serve the adapter."""
        return Segment(self._keyed.get(resource_key), length, scale)

    def release(self) -> None:
        """End the request. Releasing twice is harmless."""
        while self._held:
            pool, registration = self._held.popitem()
            pool.spec.release(registration)
            if not pool.spec.serves(registration):
                pool.unload(registration.name)


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
        for done, name in enumerate(names, 1):
            self._serve_configured(name)
            if progress is not None:
                progress(done, len(names))

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
            return AdapterHold(None, adapter_prefix_root(None), {})
        with self._lock:
            self._check_served(name)
            root = adapter_prefix_root(self._served[name].digest)
            serving = [pool for pool in self._pools if name in pool.spec.adapters]
            return AdapterHold(name, root, {pool: pool.spec.hold(name) for pool in serving})

    def load(self, name: str, path: str) -> ServedAdapter:
        """Serve the adapter at ``path`` as ``name``, on every spec.

        Loading the weights that are served under the name already changes nothing.

        Raises:
            AdapterError: the file cannot be served, or the name is served with other weights.
                Nothing was changed.
        """
        with self._changing:
            images = self._read(name, path)
            served = self._served.get(name)
            if served is None:
                return self._install(name, path, images)
            if served.digest != _joint_digest(image.digest for image in images.values()):
                raise AdapterError(path, [f"{name!r} is served with other weights: replace it"])
            return served

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

    def _serve_configured(self, name: str) -> None:
        serving = [pool for pool in self._pools if name in pool.spec.adapters]
        for pool in serving:
            spec = pool.spec
            if name in spec.adapter_digests:
                spec.check_adapter(name, spec.adapter_info(name))
            else:
                path = spec.adapters[name]
                image = pool.read(path)
                pool.adopt(spec.add_adapter(name, path, image.digest), image)
        spec = serving[0].spec
        digest = _joint_digest(pool.spec.adapter_digests[name] for pool in serving)
        self._publish(name, spec.adapters[name], digest)

    def _read(self, name: str, path: str) -> dict[LoraPool, LoraImage]:
        if not (isinstance(name, str) and name):
            raise AdapterError(path, [f"it was to be served as {name!r}: give it a name"])
        return {pool: pool.read(path) for pool in self._pools}

    def _install(self, name: str, path: str, images: Mapping[LoraPool, LoraImage]) -> ServedAdapter:
        digest = _joint_digest(image.digest for image in images.values())
        with self._lock:
            self.roots.unregister(name)  # while it may be of other weights than the specs'
            for pool, image in images.items():
                pool.adopt(pool.spec.add_adapter(name, path, image.digest), image)
            served = self._publish(name, path, digest)
        self._free(name)
        return served

    def _publish(self, name: str, path: str, digest: bytes) -> ServedAdapter:
        self.roots.register(name, digest)
        self._served[name] = ServedAdapter(name, path, digest, int(time.time()))
        return self._served[name]

    def _free(self, name: str) -> None:
        for pool in self._pools:
            pool.unload(name)


def _joint_digest(digests: Iterable[bytes]) -> bytes:
    """One digest of what several specs serve under a name: theirs, where they read it alike."""
    distinct = list(dict.fromkeys(digests))
    return distinct[0] if len(distinct) == 1 else hashlib.sha256(b"".join(distinct)).digest()
