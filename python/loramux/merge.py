"""The static merge of one adapter into base weights."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

import torch

from .checkpoint import LoraAdapter, LoraModule
from .errors import AdapterError

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def merge_adapter(
    state: MutableMapping[str, torch.Tensor],
    adapter: LoraAdapter,
    fan_in_fan_out: Collection[str] = (),
) -> None:
    """Replace every weight the adapter touches by ``W + scale * B @ A``.

    Computed in float32 (float64 for a float64 weight) on the weight's device and rounded once to
    its dtype. The old tensors are not written to. An embedding's weight ``[vocab, dim]`` gets
    ``scale * (B @ A)^T``.

    Args:
        state: a ``state_dict``: ``<module>.weight`` is ``[out, in]``.
        fan_in_fan_out: modules whose weight is ``[in, out]``, as in transformers' ``Conv1D``.

    Raises:
        AdapterError: modules that the state lacks, that do not fit their weight, or whose weight is
            tied to another name's. Nothing was replaced.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(tensor.data_ptr(), []).append(name)
    problems = []
    for module, lora in adapter.modules.items():
        weight = state.get(f"{module}.weight")
        if weight is None:
            problems.append(f"module {module!r} has no {module + '.weight'!r} in the state")
            continue
        shape = (lora.out_features, lora.in_features)
        expected = shape[::-1] if _transposed(module, lora, fan_in_fan_out) else shape
        if weight.shape != expected or weight.dtype not in _DTYPES:
            problems.append(
                f"module {module!r} has a delta {list(expected)}, the weight is "
                f"{list(weight.shape)} {weight.dtype}; expected equal shapes and one of {_DTYPES}"
            )
        if len(tied := names[weight.data_ptr()]) > 1:
            problems.append(
                f"the weights {tied} are one tensor: clone them in the state to untie them"
            )
    if problems:
        raise AdapterError(adapter.path, problems)
    for module, lora in adapter.modules.items():
        weight = state[f"{module}.weight"]
        state[f"{module}.weight"] = _merged(weight, lora, _transposed(module, lora, fan_in_fan_out))


def _transposed(module: str, lora: LoraModule, fan_in_fan_out: Collection[str]) -> bool:
    return lora.embedding or module in fan_in_fan_out


@torch.no_grad()
def _merged(weight: torch.Tensor, lora: LoraModule, transposed: bool) -> torch.Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    b, a = (factor.to(weight.device, dtype) for factor in (lora.b, lora.a))
    delta = b @ a
    return weight.to(dtype).add(delta.T if transposed else delta, alpha=lora.scale).to(weight.dtype)
