"""What a model declares about per-request LoRA adapters, and what requests and steps ask for."""

from __future__ import annotations

import bisect
import difflib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, Literal, NamedTuple

import torch

from .errors import AdapterError, SpecError, UnknownAdapter
from .overrides import SIZES, check_overrides, size_problem
from .resource import NodeResourceSpec, Resource, ResourceReqConfig, ResourceStep
from .target import LoraTarget as LoraTarget
from .target import ShardId

_NAMES_SHOWN = 8  # how many served names an error lists
_NAMES_COMPARED = 32  # with a name that is not served; comparing takes about 20 us a name
_NAME_CHARACTERS = 80  # of a client's name that are looked at and shown
LORA_KEY = "lora"  # of the spec, and the YAML block, that sizes a model's other LoRA specs too


class AdapterInfo(NamedTuple):
    """What validation needs to know about an adapter checkpoint, read without its weights.

    Attributes:
        rank: the largest over every LoRA module in the file, those of another spec included.
        unmapped: modules that no target of the spec takes.
        misfits: modules whose shapes do not fit their target, with both shapes.
    """

    rank: int
    unmapped: tuple[str, ...]
    misfits: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Registration:
    """One registration of an adapter's name with a spec, which tells one load from another.

    It equals itself alone: the same name and path registered again are another registration.

    Attributes:
        digest: what the weights must digest to, where the deployment says so.
    """

    name: str
    path: str
    digest: bytes | None


class LoraModuleRef(NamedTuple):
    """Where one checkpoint module's adapter lands: a target, a stack layer, and a slice's id.

    ``shard_id`` is ``None`` for a target of a single slice.
    """

    target: str
    layer: int
    shard_id: ShardId = None


@dataclass(frozen=True)
class LoraBaseOnly:
    """The capture key of a step none of whose rows names an adapter, around the node's own key.

    A node that serves adapters captures each bucket under both keys; the base-only graph records no
    LoRA kernel.
    """

    key: Any = None


class Segment(NamedTuple):
    """The rows one request puts through the model in a step.

    Attributes:
        adapter: the adapter's name, or the registration that a request holds (``LoraSpec.hold``);
            ``None`` runs the base model.
        length: tokens, at least 0.
        scale: the request's own factor on its adapter's delta. No prefix root tells of it, so that
            blocks of a request of any but 1.0 are not to be shared.
    """

    adapter: str | Registration | None
    length: int
    scale: float = 1.0


@dataclass(frozen=True)
class LoraStep(ResourceStep):
    """One step's rows: a segment per request, in the order they are packed.

    ``segments=None`` is a step that no request is in, such as a profile run: no row has an adapter.
    """

    segments: tuple[Segment, ...] | None = None


@dataclass(frozen=True)
class LoraReqConfig(ResourceReqConfig):
    """The adapter a request runs under; ``None`` runs the base model."""

    adapter: str | None = None

    def validate(self, spec: LoraSpec | None = None) -> None:
        """Check a client's value at admission, before any worker sees it.

        Raises:
            UnknownAdapter: (a ``ValueError``) a name that is not a string or, with a ``spec``,
                not served by it. The text names no path and fits an HTTP 400.
        """
        if self.adapter is None:
            return
        if not isinstance(self.adapter, str):
            raise UnknownAdapter(f"adapter must be a name or null, got {short(self.adapter)}")
        if spec is not None and self.adapter not in spec.adapters:
            raise UnknownAdapter(unknown_adapter_text(self.adapter, spec.adapters))


def unknown_adapter_text(adapter: object, names: Iterable[str]) -> str:
    """Say that ``adapter`` is none of the served ``names``: the nearest and a few others."""
    name, served = str(adapter)[:_NAME_CHARACTERS], sorted(names)
    first = max(0, bisect.bisect(served, name) - _NAMES_COMPARED // 2)
    near = difflib.get_close_matches(name, served[first : first + _NAMES_COMPARED], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    more = f" and {len(served) - _NAMES_SHOWN} more" if len(served) > _NAMES_SHOWN else ""
    listed = ", ".join(map(repr, served[:_NAMES_SHOWN])) or "none"
    return f"no adapter {name!r} is served.{hint} Served: {listed}{more}."


@dataclass(eq=False)
class LoraSpec(NodeResourceSpec):
    """Per-request LoRA adapters for the linears named in ``targets``.

    Attributes:
        num_layers: layers of the stack that the targets belong to.
        targets: target name to its shapes, in the order their sites take within a layer.
        module_map: places a checkpoint module on a target, or ``None`` where it has no place.
        max_slots: adapters resident on the device at once, beside the zero adapter of base rows.
        max_rank: largest rank served.
        cpu_capacity: adapters kept pinned on the host.
        adapters: the names requests ask for, to PEFT directories or safetensors paths. Changed by
            ``add_adapter``, ``remove_adapter`` and ``apply_yaml_overrides`` alone.
        adapter_digests: expected digests of some of them (``identity.adapter_digest``).
        dtype: of the device weights; ``None``: the model's.
        backend: ``"native"`` the compiled kernels or an error, ``"torch"`` the plain definition,
            ``"auto"`` native where it serves the device and dtype.
        convert_keys: rewrites a model-native checkpoint's tensors to PEFT's names first.
        ignored_modules: checkpoint modules that another spec loads.
        dropped_targets: targets of the model that this deployment does not serve.
        arena_bytes: device memory for the weights (of each tensor-parallel rank), of which an
            adapter takes what its own ranks and modules need; ``max_slots`` then only bounds their
            number. Up to 16 MiB beside it serve to move them. ``None``: every slot holds
            ``max_rank`` on every target.

    Raises:
        SpecError: a size below its least value, an unknown backend, or a digest that is of no
            adapter or not 32 bytes.
    """

    num_layers: int
    targets: dict[str, LoraTarget]
    module_map: Callable[[str], LoraModuleRef | None]
    max_slots: int = 4
    max_rank: int = 16
    cpu_capacity: int = 16
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_digests: dict[str, bytes] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    backend: Literal["auto", "torch", "native"] = "auto"
    convert_keys: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    ignored_modules: Callable[[str], bool] | None = None
    dropped_targets: frozenset[str] = frozenset()
    arena_bytes: int | None = None

    def __post_init__(self) -> None:
        self._infos: dict[str, tuple[Registration, AdapterInfo]] = {}
        self._held: Counter[Registration] = Counter()
        self._lock = threading.Lock()
        # What a name stands for; a registration that is served or held stands for itself.
        self._registrations: dict[str | Registration, Registration] = {}
        declared, digests = self.adapters, self.adapter_digests
        if unknown := sorted(digests.keys() - declared.keys()):
            raise SpecError(f"adapter_digests has {unknown}, adapters has none of that name")
        self.adapters, self.adapter_digests = {}, {}
        for name, path in declared.items():
            self._register(name, path, digests.get(name))
        if self.backend not in ("auto", "torch", "native"):
            raise SpecError(f"backend is {self.backend!r}; use 'auto', 'torch' or 'native'")
        for key in ("num_layers", *SIZES):
            size = getattr(self, key)
            if key == "arena_bytes" and size is None:
                continue
            if (problem := size_problem(size)) is not None:
                raise SpecError(f"{key} {problem}")
        for name, target in self.targets.items():
            if outside := [i for i in target.layers or () if not 0 <= i < self.num_layers]:
                raise SpecError(f"target {name!r} has layers {outside} of {self.num_layers}")

    @property
    def num_slots(self) -> int:
        """Device slots, the zero adapter's included."""
        return self.max_slots + 1

    @property
    def resource_class(self) -> type[Resource]:
        """``LoraPool``, imported here so that declaring a spec stays free of the kernels."""
        from .pool import LoraPool

        return LoraPool

    def sites(self) -> list[tuple[str, int]]:
        """``(target, layer)`` of every site: by layer, then by target as declared."""
        return [
            (name, layer)
            for layer in range(self.num_layers)
            for name, target in self.targets.items()
            if target.layers is None or layer in target.layers
        ]

    def registration(self, adapter: str | Registration) -> Registration:
        """What a name stands for now, or the registration itself while it is served.

        Raises:
            UnknownAdapter: no adapter of that name is served, or the registration no longer is.
        """
        return self.registrations([adapter])[0]

    def registrations(self, adapters: Iterable[str | Registration]) -> list[Registration]:
        """:meth:`registration` of each of ``adapters``, all at one moment."""
        with self._lock:
            try:
                return list(map(self._registrations.__getitem__, adapters))
            except KeyError as error:
                (unknown,) = error.args
                served = list(self.adapters)
        if isinstance(unknown, Registration):
            raise UnknownAdapter(
                f"the registration of {unknown.name!r} is neither served nor held any longer: "
                "hold it from admission to the request's last step"
            )
        raise UnknownAdapter(unknown_adapter_text(unknown, served))

    def hold(self, name: str) -> Registration:
        """What ``name`` stands for now, served until ``release`` whatever the name comes to mean.

        A request holds its adapter from admission to its end, so that a replacement or an unload
        meanwhile leaves it on the weights it began with.

        Raises:
            UnknownAdapter: no adapter of that name is served.
        """
        with self._lock:
            registration = self._current(name)
            self._held[registration] += 1
            return registration

    def release(self, registration: Registration) -> None:
        """End one ``hold``."""
        with self._lock:
            self._held[registration] -= 1
            if self._held[registration] <= 0:
                del self._held[registration]
                if self._registrations.get(registration.name) is not registration:
                    self._registrations.pop(registration, None)

    def serves(self, registration: Registration) -> bool:
        """Whether its name still stands for it or a request holds it."""
        return registration in self._registrations

    def _current(self, name: str) -> Registration:
        if name not in self._registrations:
            raise UnknownAdapter(unknown_adapter_text(name, self.adapters))
        return self._registrations[name]

    def adapter_info(self, name: str) -> AdapterInfo:
        """Rank, unmapped and misfitting modules of a configured adapter, read once and cached.

        Raises:
            UnknownAdapter: no adapter of that name is configured.
            AdapterError: its file cannot be served.
        """
        from .checkpoint import read_adapter_info

        registration = self.registration(name)
        with self._lock:
            cached = self._infos.get(name)
        if cached is not None and cached[0] is registration:
            return cached[1]
        info = read_adapter_info(registration.path, self)
        with self._lock:
            self._infos[name] = registration, info
        return info

    def check_adapter(self, name: str, info: AdapterInfo) -> None:
        """Refuse an adapter this deployment cannot serve.

        Raises:
            AdapterError: no LoRA layers, a rank above ``max_rank``, a module outside the declared
                targets or of another size. Lists all of them.
        """
        problems = []
        if info.rank < 1:
            problems.append(
                "it has no LoRA layer; expected at least one module with A and B: give the path of "
                "an adapter"
            )
        if info.rank > self.max_rank:
            problems.append(
                f"its rank is {info.rank}; expected at most the pool's max_rank, "
                f"{self.max_rank}: raise max_rank"
            )
        for module in info.unmapped:
            ref = self.module_map(module)
            if ref is not None and ref.target in self.dropped_targets:
                problems.append(
                    f"module {module!r} is on the target {ref.target!r}, which this deployment "
                    "drops; expected none there: add it to the targets list"
                )
            else:
                problems.append(
                    f"module {module!r} is on none of the targets {sorted(self.targets)}; expected "
                    "one of them: serve it on the model it was trained on, or bring its names in "
                    "line with convert_keys"
                )
        problems.extend(info.misfits)
        if problems:
            raise AdapterError(name, problems)

    def add_adapter(self, name: str, path: str, digest: bytes | None = None) -> Registration:
        """Serve ``name`` from ``path``, whose weights digest to ``digest``, from now on.

        Raises:
            SpecError: a digest that is not 32 bytes.
        """
        with self._lock:
            return self._register(name, path, digest)

    def remove_adapter(self, name: str) -> None:
        """Stop serving ``name``.

        Raises:
            UnknownAdapter: it is not served.
        """
        with self._lock:
            self._current(name)
            self._forget(name)

    def _register(self, name: str, path: str, digest: bytes | None) -> Registration:
        if digest is not None and not (isinstance(digest, bytes) and len(digest) == 32):
            raise SpecError(f"the digest of {name!r} is {digest!r}; expected 32 bytes")
        self._forget(name)
        registration = Registration(name, path, digest)
        self._registrations[name] = self._registrations[registration] = registration
        self.adapters[name] = path
        if digest is not None:
            self.adapter_digests[name] = digest
        return registration

    def _forget(self, name: str) -> None:
        registration = self._registrations.pop(name, None)
        if registration is not None and registration not in self._held:
            del self._registrations[registration]
        for table in (self.adapters, self.adapter_digests, self._infos):
            table.pop(name, None)

    def stop_ignoring(self, modules: Callable[[str], bool]) -> None:
        """Refuse, rather than ignore, the checkpoint modules ``modules`` matches."""
        ignored = self.ignored_modules
        if ignored is not None:
            self.ignored_modules = lambda name: ignored(name) and not modules(name)
            self._infos.clear()

    def apply_yaml_overrides(
        self,
        max_slots: int | None = None,
        max_rank: int | None = None,
        cpu_capacity: int | None = None,
        adapters: dict[str, str] | None = None,
        adapter_digests: dict[str, str] | None = None,
        targets: list[str] | None = None,
        arena_bytes: int | None = None,
    ) -> None:
        """Size this spec as a deployment's YAML says. All is checked before any is set.

        Args:
            adapters: name to path; replaces the configured ones.
            adapter_digests: name to digest in hexadecimal.
            targets: keeps only these of the model's targets. One list serves every LoRA spec of a
                model, so names that only another spec declares are not an error here.

        Raises:
            SpecError: values out of range or of another type; lists all of them.
        """
        block = dict(
            max_slots=max_slots,
            max_rank=max_rank,
            cpu_capacity=cpu_capacity,
            adapters=adapters,
            adapter_digests=adapter_digests,
            targets=targets,
            arena_bytes=arena_bytes,
        )
        given = {key: value for key, value in block.items() if value is not None}
        check_overrides(given, self.adapters)

        for key in SIZES:
            setattr(self, key, given.get(key, getattr(self, key)))
        digests = {name: bytes.fromhex(text) for name, text in (adapter_digests or {}).items()}
        with self._lock:
            if adapters is None:
                adapters = {name: self.adapters[name] for name in digests}
            else:
                for name in list(self.adapters):
                    self._forget(name)
            for name, path in adapters.items():
                self._register(name, path, digests.get(name))
        if targets is not None:
            dropped = frozenset(self.targets) - frozenset(targets)
            self.dropped_targets |= dropped
            self.targets = {n: t for n, t in self.targets.items() if n not in dropped}
        self._infos.clear()


def lora_enabled(model_config: Mapping[str, Any]) -> bool:
    """Whether a deployment's YAML turns LoRA on: a ``resources: lora:`` mapping, empty or not."""
    return _lora_block(model_config) is not None


def served_lora_adapters(model_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The adapter names a deployment's YAML serves; empty when it does not turn LoRA on."""
    adapters = (_lora_block(model_config) or {}).get("adapters")
    return tuple(adapters) if isinstance(adapters, Mapping) else ()


def _lora_block(model_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    resources = model_config.get("resources")
    block = resources.get(LORA_KEY) if isinstance(resources, Mapping) else None
    return block if isinstance(block, Mapping) else None


def node_capture_key(key: Any) -> Any:
    """The node's own part of a capture key, without its ``LoraBaseOnly``."""
    return key.key if isinstance(key, LoraBaseOnly) else key


def resolve_adapter_path(path: str) -> str:
    """The safetensors file an adapter path names.

    That is the path itself, or a PEFT directory's ``adapter_model.safetensors``.
    """
    return os.path.join(path, "adapter_model.safetensors") if os.path.isdir(path) else path
