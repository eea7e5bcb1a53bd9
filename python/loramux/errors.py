"""The errors loramux raises: one family, so that an engine can catch what it means to catch.

Those that a client's request or file can cause are also ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 128  # problems in an error's text


class LoraError(Exception):
    """Base of every error loramux raises on purpose."""


class SpecError(LoraError, ValueError):
    """A declaration (target, spec, override, binding) that contradicts itself or the model."""


class AdapterError(LoraError, ValueError):
    """An adapter file that cannot be served as it is. Lists every offender at once.

    Attributes:
        path: what the caller asked to read.
        problems: one sentence per offender: what was found, what was expected, what to do.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems[:_SHOWN])
        if len(self.problems) > _SHOWN:
            lines += f"\n  and {len(self.problems) - _SHOWN} more"
        super().__init__(f"cannot serve the adapter {path!r}:{lines}")

    def __reduce__(self) -> tuple[type[AdapterError], tuple[str, tuple[str, ...]]]:
        """From one process to another."""
        return type(self), (self.path, self.problems)


class UnknownAdapter(LoraError, ValueError):
    """A request or step names an adapter that this deployment does not serve."""


class PoolExhausted(LoraError, RuntimeError):
    """A step needs more device slots than can be had. Nothing was changed."""


class PlanMismatch(LoraError, ValueError):
    """A plan was used with rows, or in a step, that it was not made for. Nothing was written."""


class BackendUnavailable(LoraError, RuntimeError):
    """``backend="native"`` was asked for where no compiled kernel serves the device and dtype."""
