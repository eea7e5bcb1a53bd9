"""Bind loramux to an ``nn.Module`` tree: derive its spec, add the deltas in forward hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .config import LoraModuleRef, LoraSpec
from .errors import SpecError
from .ops import StartedDelta, lora_apply_, lora_embedding_, lora_finish_, lora_start
from .plan import StepPlan
from .site import LoraSite
from .target import LoraTarget

if TYPE_CHECKING:
    from .pool import LoraPool

__all__ = ["ModuleLoraMap", "module_lora_spec"]

Packing = Mapping[str, Mapping[str, int]]


class _Shape(NamedTuple):
    """What an adapter sees of a module."""

    kind: Literal["linear", "embedding"]
    in_features: int
    out_features: int

    def __str__(self) -> str:
        return f"{self.kind} {self.in_features} -> {self.out_features}"


class _Leaf(NamedTuple):
    """One linear or embedding of the tree, and the target and layer it is."""

    path: str
    module: nn.Module
    shape: _Shape
    target: str
    layer: int
    by_default: bool  # served unless the caller chooses otherwise


def module_lora_spec(
    module: nn.Module,
    *,
    resource_key: str = "lora",
    nodes: Iterable[str] = ("model",),
    targets: Iterable[str] | None = None,
    packing: Packing | None = None,
    stack: str | None = None,
    lm_head_per_segment: bool = True,
    **sizes: Any,
) -> LoraSpec:
    """A spec for the linears and embeddings of ``module``, which every rank holds whole.

    A linear is an ``nn.Linear`` or transformers' ``Conv1D``. A target is named by what follows the
    layer index: ``model.layers.3.mlp.up_proj`` is target ``mlp.up_proj`` at layer 3. A module
    outside the stack is a target of its whole path, at layer 0; the LM head is at the last layer.

    Not served, so that an adapter which has them is refused: modules in any other ``ModuleList`` (a
    vision tower, a layer's experts), whose rows are not the step's, and embeddings with a
    ``forward`` of their own, such as Gemma's, which scales its output.

    Args:
        module: the model. Only names, shapes and dtypes are read.
        targets: target names to serve, or last components of them such as ``"q_proj"``. ``None``:
            the stack's linears, the token embedding and the LM head.
        packing: last component of a fused linear's path to its slices' names and widths in order,
            e.g. ``{"qkv_proj": {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}}``. A checkpoint
            may have the slices (``...q_proj``) or the fused module.
        stack: path of the ``ModuleList`` of layers. ``None``: the longest one that holds linears; a
            model that has none is a single layer.
        lm_head_per_segment: the LM head sees one row a segment, its last token
            (``logits_to_keep=1`` in transformers), rather than one row a token.
        sizes: ``max_slots``, ``max_rank``, ``adapters`` and other fields of ``LoraSpec``. ``dtype``
            is that of the served weights unless given.

    Raises:
        SpecError: several stacks that could be meant, a target whose shapes differ between layers,
            slices that do not add up, or a name in ``targets`` or ``packing`` that is no target.
    """
    head = _lm_head(module)
    stack = _longest_stack(module) if stack is None else stack
    num_layers = 1 if stack is None else len(_layers(module, stack))
    leaves = _leaves(module, stack, num_layers, head)
    packing = packing or {}
    known = dict.fromkeys(leaf.target for leaf in leaves)
    for fused in packing:
        _matching(fused, known, "packing")
    if targets is None:
        chosen = {leaf.target for leaf in leaves if leaf.by_default}
    else:
        chosen = {name for target in targets for name in _matching(target, known, "targets")}

    served = [leaf for leaf in leaves if leaf.target in chosen]
    weight = next((leaf.module.weight for leaf in served), None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        sizes.setdefault("dtype", weight.dtype)
    return LoraSpec(
        resource_key=resource_key,
        nodes=set(nodes),
        num_layers=num_layers,
        targets={
            name: _target(
                name,
                [leaf for leaf in served if leaf.target == name],
                num_layers,
                packing.get(_last(name)),
                head if lm_head_per_segment else None,
            )
            for name in known
            if name in chosen
        },
        module_map=ModuleLoraMap(leaves, packing),
        dropped_targets=frozenset(known) - chosen,
        **sizes,
    )


class ModuleLoraMap:
    """Where each module of a tree lands in its spec, and what binds the tree to a pool.

    Called with a checkpoint module's name it gives the ``LoraModuleRef``, or ``None`` where the
    tree has no such module. Names are whole paths: one that only ends like a module's has no place.
    """

    def __init__(self, leaves: Iterable[_Leaf], packing: Packing) -> None:
        self._paths: dict[tuple[str, int], str] = {}
        self._refs: dict[str, LoraModuleRef] = {}
        for leaf in leaves:
            self._paths[leaf.target, leaf.layer] = leaf.path
            parent, dot, last = leaf.path.rpartition(".")
            slices = packing.get(last, {})
            self._refs[leaf.path] = LoraModuleRef(leaf.target, leaf.layer, last if slices else None)
            for name in slices:
                self._refs[parent + dot + name] = LoraModuleRef(leaf.target, leaf.layer, name)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Every name that has a place, the slices of fused linears included."""
        return tuple(self._refs)

    def __call__(self, name: str) -> LoraModuleRef | None:
        return self._refs.get(name)

    def bind(self, module: nn.Module, pool: LoraPool, *, beside_gemm: bool = False) -> ExitStack:
        """Make the modules of the pool's targets add their deltas while one of its steps runs.

        Each runs its own forward unchanged. Then, if the step names an adapter, every row's delta
        is added to the output in place; the rows are the output's leading dimensions in order,
        which must be the step's segments in order. Parameters, classes and ``state_dict`` stay
        untouched.

        In a step begun ``layerwise`` each first has the stream wait for its layer's weights. There
        compiled modules run eagerly, or fail where they are compiled with ``fullgraph=True``.

        A step with adapters runs without gradients (``torch.inference_mode()``): a bound module
        serves and does not train. Binding and unbinding drop every graph of ``torch.compile``,
        whose guards do not see hooks; CUDA graphs captured before are the caller's to drop.

        Args:
            beside_gemm: make the deltas of linears beside the linear's own product, where
                ``lora_start`` can: they are then rounded twice (``lora_finish_``).

        Returns:
            What unbinds, by its ``close()`` or as a context manager.

        Raises:
            SpecError: a module is missing, of another shape, or bound already. Nothing is bound.
        """
        hooks = []
        for name, layer in pool.spec.sites():
            target = pool.spec.targets[name]
            path = self._paths.get((name, layer))
            if path is None:
                raise SpecError(
                    f"the pool serves target {name!r} at layer {layer}, this map has "
                    f"{sorted({name for name, _ in self._paths})}: bind with pool.spec.module_map"
                )
            shape = _Shape(target.kind, target.in_features, target.out_features)
            site, plan = pool.site(name, layer), pool.plan(target.row_grouping)
            hook = _DeltaHook(path, shape.kind, layer, pool, site, plan)
            hooks.append((_bindable(module, path, shape), hook))
        binding = ExitStack()
        binding.callback(_drop_traced_graphs)  # last, once the hooks are gone
        for leaf, hook in hooks:
            is_beside = beside_gemm and hook.kind == "linear"
            if is_beside:
                binding.callback(
                    leaf.register_forward_pre_hook(hook.start, with_kwargs=True).remove
                )
            after = leaf.register_forward_hook(hook, with_kwargs=True, always_call=is_beside)
            binding.callback(after.remove)
        _drop_traced_graphs()
        return binding


class _DeltaHook:
    """The forward hook of one module: adds its site's deltas to its output."""

    def __init__(
        self, path: str, kind: str, layer: int, pool: LoraPool, site: LoraSite, plan: StepPlan
    ) -> None:
        self.path, self.kind, self.layer = path, kind, layer
        self.pool, self.site, self.plan = pool, site, plan
        self._started: StartedDelta | None = None

    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: begins the deltas beside the module's own forward."""
        wanted = self._is_wanted()
        self._started = lora_start(_rows_of(args, kwargs), self.site, self.plan) if wanted else None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        started, self._started = self._started, None
        if started is not None:
            self._finish(output, started)
        elif self._is_wanted():
            y = self._rows(output)
            if self.kind == "embedding":
                ids = _input(args, kwargs).reshape(-1).contiguous()
                lora_embedding_(y, ids, self.site, self.plan)
            else:
                lora_apply_(y, _rows_of(args, kwargs), self.site, self.plan)

    def _finish(self, output: Any, started: StartedDelta) -> None:
        try:
            lora_finish_(self._rows(output), started)
        except Exception:  # what was begun still has to end before its memory is another's
            lora_finish_(started.x.new_empty(len(started.x), sum(self.site.widths)), started)
            if output is None:  # the forward has raised
                return
            raise

    def _is_wanted(self) -> bool:
        """Whether the step has adapters; their weights of this layer have come then."""
        if self.pool.active and self.pool.arriving:
            self.pool.wait_layer(self.layer)
        return self.pool.active

    def _rows(self, output: Any) -> torch.Tensor:
        """The output as ``[rows, out]``, a view of it; a ``SpecError`` where that cannot be."""
        if not isinstance(output, torch.Tensor):
            raise SpecError(
                f"module {self.path!r} returned a {type(output).__name__}, expected one tensor: "
                "leave it out of the spec's targets"
            )
        if output.requires_grad:
            raise SpecError(
                f"module {self.path!r} ran with gradients, expected none: run a step that names "
                "adapters under torch.inference_mode() or torch.no_grad()"
            )
        try:
            return output.view(-1, output.shape[-1])
        except RuntimeError:
            raise SpecError(
                f"module {self.path!r} returned shape {tuple(output.shape)} with strides "
                f"{output.stride()}, expected rows that a [rows, out] view can reach: leave it out "
                "of the spec's targets"
            ) from None


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The one input of a bound module, whatever it calls it."""
    x: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A linear's input as ``[rows, in]``, of unit column stride."""
    x = _input(args, kwargs)
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _drop_traced_graphs() -> None:
    """Have ``torch.compile`` trace again, or it would go on with the hooks it saw."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _bindable(module: nn.Module, path: str, expected: _Shape) -> nn.Module:
    """The module at ``path``, where it is what the spec says and is not bound yet."""
    try:
        leaf = module.get_submodule(path)
    except AttributeError:
        raise SpecError(
            f"{type(module).__name__} has no module {path!r}, expected {expected} there: bind the "
            "tree that the spec was derived from"
        ) from None
    found = _shape(leaf)
    if found != expected:
        raise SpecError(f"module {path!r} is {found or type(leaf).__name__}, expected {expected}")
    if any(isinstance(hook, _DeltaHook) for hook in leaf._forward_hooks.values()):
        raise SpecError(f"module {path!r} is bound to a pool already: close that binding first")
    return leaf


def _target(
    name: str,
    leaves: list[_Leaf],
    num_layers: int,
    slices: Mapping[str, int] | None,
    per_segment_head: nn.Module | None,
) -> LoraTarget:
    """The target that ``leaves``, one a layer, have in common."""
    first = leaves[0]
    for leaf in leaves:
        if leaf.shape != first.shape:
            raise SpecError(
                f"target {name!r} is {first.shape} at {first.path!r} but {leaf.shape} at "
                f"{leaf.path!r}, expected one shape: leave it out of targets"
            )
    layers = tuple(leaf.layer for leaf in leaves)
    if len(set(layers)) < len(layers):
        paths = [leaf.path for leaf in leaves]
        raise SpecError(f"target {name!r} names several modules of one layer: {paths}")
    widths = tuple(slices.values()) if slices else (first.shape.out_features,)
    if sum(widths) != first.shape.out_features:
        raise SpecError(
            f"packing of {name!r} has slices {dict(slices or {})}, {sum(widths)} columns together, "
            f"but {first.path!r} has {first.shape.out_features}"
        )
    return LoraTarget(
        in_features=first.shape.in_features,
        out_slices=widths,
        parallel="none",
        slice_names=tuple(slices or ()),
        slice_packs=((_last(name), tuple(slices)),) if slices else None,
        layers=None if len(layers) == num_layers else layers,
        kind=first.shape.kind,
        per_segment=first.module is per_segment_head,
    )


def _leaves(
    module: nn.Module, stack: str | None, num_layers: int, head: nn.Module | None
) -> list[_Leaf]:
    """The linears and embeddings outside other stacks: token embedding first, LM head last."""
    tokens = _token_embedding(module)
    lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    leaves = []
    for path, child in module.named_modules():
        shape = _shape(child)
        enclosing = [name for name in lists if _below(name, path)]
        if shape is None:
            continue
        if not enclosing:
            layer = num_layers - 1 if child is head else 0
            by_default = stack is None or child is head or child is tokens
            leaves.append(_Leaf(path, child, shape, path, layer, by_default))
        elif stack is not None and enclosing[-1] == stack:
            index, _, rest = _below(stack, path).partition(".")
            leaves.append(_Leaf(path, child, shape, rest or stack, int(index), by_default=True))
    return sorted(leaves, key=lambda leaf: (leaf.module is head) - (leaf.module is tokens))


def _shape(module: nn.Module) -> _Shape | None:
    """What an adapter sees of ``module``; ``None`` where a hook could not add its delta."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight and never calls it
    if isinstance(module, nn.Linear):
        return _Shape("linear", module.in_features, module.out_features)
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        if module.max_norm is not None:  # of A's vectors too, where PEFT runs it
            return None
        return _Shape("embedding", module.num_embeddings, module.embedding_dim)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return _Shape("linear", weight.shape[0], weight.shape[1])  # the transpose of a linear's
    return None


def _longest_stack(module: nn.Module) -> str | None:
    """The path of the longest outermost ``ModuleList`` that holds linears."""
    sizes: dict[str, int] = {}
    for path, child in module.named_modules():
        if (
            isinstance(child, nn.ModuleList)
            and not any(_below(outer, path) for outer in sizes)
            and any(_shape(inner) for inner in child.modules())
        ):
            sizes[path] = len(child)
    longest = [path for path, size in sizes.items() if size == max(sizes.values())]
    if len(longest) > 1:
        raise SpecError(f"the stacks {longest} have {sizes[longest[0]]} layers each: pass stack=")
    return longest[0] if longest else None


def _layers(module: nn.Module, stack: str) -> nn.ModuleList:
    try:
        layers = module.get_submodule(stack)
    except AttributeError:
        raise SpecError(f"stack {stack!r} is no module of {type(module).__name__}") from None
    if not isinstance(layers, nn.ModuleList):
        raise SpecError(f"stack {stack!r} is a {type(layers).__name__}, expected a ModuleList")
    return layers


def _lm_head(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    head = get() if get else getattr(module, "lm_head", None)
    return head if isinstance(head, nn.Module) else None


def _token_embedding(module: nn.Module) -> nn.Module | None:
    """What transformers names, or the tree's first embedding."""
    get = getattr(module, "get_input_embeddings", None)
    try:
        found = get() if get else None
    except NotImplementedError:  # transformers' answer for a model without one
        found = None
    embeddings = (child for child in module.modules() if isinstance(child, nn.Embedding))
    return found if isinstance(found, nn.Module) else next(embeddings, None)


def _matching(name: str, known: Iterable[str], argument: str) -> list[str]:
    """The targets called ``name``, whole or by their last component."""
    found = [target for target in known if name in (target, _last(target))]
    if not found:
        raise SpecError(f"{argument} names {name!r}, which is none of the targets {list(known)}")
    return found


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _below(parent: str, path: str) -> str:
    """What follows ``parent`` in ``path``; empty where ``path`` is not below it."""
    if not parent:
        return path
    return path[len(parent) + 1 :] if path.startswith(parent + ".") else ""
