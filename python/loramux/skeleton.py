"""Transformers models in folders: without their weights, and as adapters hold copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .checkpoint import ConvertKeys, Tensors, drop_base_copies
from .errors import SpecError
from .tensor_names import copied_module


@contextmanager
def loading(folder: str) -> Iterator[None]:
    """Whatever transformers raises over ``folder``, as a ``SpecError``."""
    try:
        yield
    except Exception as error:
        raise SpecError(
            f"{folder} cannot be loaded ({type(error).__name__}: {error}); expected a folder that "
            "transformers' AutoModelForCausalLM loads: download or save the model anew"
        ) from error


def load_skeleton(folder: str) -> Any:
    """The causal language model in ``folder`` on the meta device, from its config alone.

    Names, shapes, module classes and ties are the model's.

    Raises:
        SpecError: transformers has no such model.
    """
    with loading(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def drop_copies_of(folder: str) -> ConvertKeys:
    """``drop_base_copies`` of the model in ``folder``, which is read only where there are copies.

    Raises:
        SpecError: by what is returned: transformers cannot load the model.
    """

    def drop_copies(tensors: Tensors) -> Tensors:
        if not any(map(copied_module, tensors)):
            return tensors
        with loading(folder):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", local_files_only=True
            )
        return drop_base_copies(model.state_dict())(tensors)

    return drop_copies
