"""Which LoRA specs a deployment builds from its serving config's ``resources: lora:`` block.

The model's declared specs are sized by the block, narrowed to its ``targets``, and those left with
no target are dropped::

    resources:
      lora:
        max_slots: 8
        max_rank: 64
        adapters: {sql: /adapters/sql, support: /adapters/support}
      vision_lora:      # the key of another LoRA spec: overrides the block for that spec
        max_slots: 2

The config arrives as mappings, from whatever parser (a YAML's: a safe one).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from .checkpoint import read_adapter_info
from .config import LORA_KEY, LoraSpec, lora_enabled, resolve_adapter_path
from .errors import SpecError
from .modules import ModuleLoraMap
from .overrides import check_overrides, override_problems
from .resource import NodeResourceSpec


class Model(Protocol):
    """What a deployment asks of a model. It must be hashable, by identity."""

    def lora_specs(self) -> Sequence[LoraSpec]:
        """New specs, one per node that serves adapters, before any deployment's config."""


def declared_lora_specs(model: Model, model_config: Mapping[str, Any]) -> list[LoraSpec]:
    """The model's LoRA specs, the one keyed ``lora`` first; none without a ``lora:`` block.

    The block sizes those of another key here (``size_lora_specs``). What a spec's own key says is
    for the caller to apply to it afterwards, as with every resource: it has the last word.

    Raises:
        SpecError: problems of the config, all of them; or a spec that cannot be bound, because its
            ``module_map`` is no ``ModuleLoraMap``.
    """
    if not lora_enabled(model_config):
        return []
    specs = sorted(model.lora_specs(), key=lambda spec: spec.resource_key != LORA_KEY)
    for spec in specs:
        if not isinstance(spec.module_map, ModuleLoraMap):
            raise SpecError(
                f"the LoRA spec {spec.resource_key!r} has a {type(spec.module_map).__name__} as "
                "its module_map, expected a ModuleLoraMap: make it with module_lora_spec"
            )
    if problems := _problems(model_config, specs):
        raise SpecError(
            "the deployment's config is refused:" + "".join(map("\n  - {}".format, problems))
        )
    size_lora_specs(specs, model_config)
    return specs


def size_lora_specs(lora: list[LoraSpec], model_config: Mapping[str, Any]) -> None:
    """Apply the config's ``lora:`` block to the LoRA specs of another key.

    A setting that the spec's own block has too is left to that block; its ``adapters`` replace the
    digests of the ``lora:`` block's as well.

    Raises:
        SpecError: values out of range or of another type.
    """
    resources = model_config["resources"]
    for spec in lora:
        if spec.resource_key != LORA_KEY:
            own = resources.get(spec.resource_key) or {}
            block = _inherited(resources[LORA_KEY], own)
            check_overrides(block, spec.adapters)
            spec.apply_yaml_overrides(**block)


def drop_lora_specs_without_targets(specs: list[NodeResourceSpec]) -> list[NodeResourceSpec]:
    """Leave out the LoRA specs of which the config's ``targets`` keep nothing.

    Their pools would hold slots for adapters that they can add nothing to. The modules they owned
    are no one's to load then, so the remaining specs refuse an adapter that touches them.
    """
    kept = [spec for spec in specs if not isinstance(spec, LoraSpec) or spec.targets]
    for dropped in specs:
        if dropped not in kept and isinstance(dropped, LoraSpec):
            for spec in kept:
                if isinstance(spec, LoraSpec):
                    spec.stop_ignoring(_owned_by(dropped))
    return kept


_deployments: WeakKeyDictionary[Model, dict[str, list[LoraSpec]]] = WeakKeyDictionary()
_deployments_lock = threading.Lock()


def lora_specs(model: Model | None, model_config: Mapping[str, Any] | None) -> list[LoraSpec]:
    """The deployment's LoRA specs with its config applied, the one keyed ``lora`` first.

    They are built once per model and ``resources:`` block in a process, so that its callers there
    share the specs, and with them a load or unload at run time. None where LoRA is off.

    Raises:
        SpecError: as ``declared_lora_specs``.
    """
    if model is None or model_config is None or not lora_enabled(model_config):
        return []
    resources = model_config["resources"]
    block = repr(_in_order(resources))
    with _deployments_lock:
        built = _deployments.setdefault(model, {})
        if block not in built:
            specs = declared_lora_specs(model, model_config)
            for spec in specs:
                spec.apply_yaml_overrides(**(resources.get(spec.resource_key) or {}))
            kept = drop_lora_specs_without_targets([*specs])
            built[block] = [spec for spec in specs if spec in kept]
        return list(built[block])


def served_lora_targets(lora: list[LoraSpec]) -> list[str] | None:
    """The targets to keep where the config lists none: those that a configured adapter touches.

    Every other target would hold zeros in every slot, yet cost its kernels at every step and its
    memory. The first spec keeps all of its targets if no adapter touches one; a later spec left
    with none is not built. One list serves every spec: a name that two declare is kept for both.

    Call it once, before any worker starts, and give every process the config with this list as
    ``resources: lora: targets:``, so that all build the same specs. A deployment that will load
    adapters for more targets at run time lists its targets itself.

    Returns:
        The list, or ``None`` when nothing narrows.

    Raises:
        AdapterError: a configured adapter cannot be read.
    """
    declared = dict.fromkeys(name for spec in lora for name in spec.targets)
    touched = [_touched_targets(spec) for spec in lora]
    if touched and not touched[0]:
        touched[0] = set(lora[0].targets)
    kept = [name for name in declared if any(name in names for names in touched)]
    return kept if len(kept) < len(declared) else None


def validate_deployment(
    model_config: Mapping[str, Any] | None, model: Model | None = None
) -> list[str]:
    """Every problem that the config's LoRA blocks have, each with its path in the YAML.

    With the ``model``, also what only its specs tell: targets that none of them declares, and the
    blocks of its LoRA specs of other keys.
    """
    return _problems(model_config or {}, [] if model is None else model.lora_specs())


def _problems(model_config: Mapping[str, Any], specs: Iterable[LoraSpec]) -> list[str]:
    resources = model_config.get("resources")
    if resources is None:
        return []
    if not isinstance(resources, Mapping):
        return [f"resources must be a mapping, got {resources!r}"]
    if LORA_KEY not in resources:
        return []
    block = resources[LORA_KEY]
    if not isinstance(block, Mapping):
        return [f"resources.{LORA_KEY} must be a mapping, got {block!r}: write {{}} for defaults"]
    specs = list(specs)
    declared = [name for s in specs if s.resource_key == LORA_KEY for name in s.adapters]
    problems = _block_problems(LORA_KEY, block, specs, declared)
    for spec in specs:
        own = resources.get(spec.resource_key)
        if spec.resource_key == LORA_KEY or own is None:
            continue
        if isinstance(own, Mapping):
            inherited = _inherited(block, own)
            adapters = inherited.get("adapters", spec.adapters)
            problems += _block_problems(spec.resource_key, own, specs, adapters)
        else:
            problems.append(f"resources.{spec.resource_key} must be a mapping, got {own!r}")
    return problems


def _block_problems(
    key: str, block: Mapping[str, Any], specs: Sequence[LoraSpec], adapters: Any
) -> list[str]:
    problems = override_problems(block, adapters)
    paths = block.get("adapters")
    for name, path in paths.items() if isinstance(paths, Mapping) else ():
        if isinstance(path, str) and not os.path.isfile(file := resolve_adapter_path(path)):
            problems.append((f"adapters.{name}", f"names no file: {file!r} does not exist"))
    targets = block.get("targets")
    if targets == []:
        problems.append(("targets", "keeps nothing: name targets, or leave the lora block out"))
    declared = {target for spec in specs for target in spec.targets}
    if specs and isinstance(targets, list):
        for i, target in enumerate(targets):
            if isinstance(target, str) and target not in declared:
                near = difflib.get_close_matches(target, declared, n=1)
                meant = f"did you mean {near[0]!r}" if near else f"they are {sorted(declared)}"
                problems.append(
                    (f"targets[{i}]", f"is {target!r}, no target of the model: {meant}")
                )
    return [f"resources.{key}.{path} {problem}" for path, problem in problems]


def _inherited(block: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What of the ``lora:`` block holds for a spec with a block of its own."""
    replaced = {*own, "adapter_digests"} if "adapters" in own else set(own)
    return {key: value for key, value in block.items() if key not in replaced}


def _in_order(value: Any) -> Any:
    """A config's value with the keys of its mappings, whatever they are, in one order."""
    if isinstance(value, Mapping):
        return sorted((repr(key), _in_order(inner)) for key, inner in value.items())
    return [*map(_in_order, value)] if isinstance(value, list) else value


def _owned_by(spec: LoraSpec) -> Callable[[str], bool]:
    return lambda module: spec.module_map(module) is not None


def _touched_targets(spec: LoraSpec) -> set[str]:
    """The spec's targets that some configured adapter has a module on, from the files' headers."""
    # A spec that has no targets and ignores nothing reports every module of a file as unmapped.
    bare = dataclasses.replace(spec, targets={}, ignored_modules=None)
    refs = [
        spec.module_map(module)
        for path in spec.adapters.values()
        for module in read_adapter_info(path, bare).unmapped
    ]
    return {ref.target for ref in refs if ref is not None} & set(spec.targets)
