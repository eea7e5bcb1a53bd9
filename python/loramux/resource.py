"""The small base classes an engine's per-node resources share. An engine may use or ignore them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

H = TypeVar("H", bound="Hold")


class Hold(ABC):
    """What is held until it is released. A context manager that releases at its end."""

    @abstractmethod
    def release(self) -> None:
        """Give back what is held. Releasing twice is harmless."""

    def __enter__(self: H) -> H:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Resource(ABC):
    """What a node holds while it runs, built from its spec and closed with the node."""

    @classmethod
    @abstractmethod
    def build(cls, spec: Any, **placement: Any) -> Resource:
        """Build what ``spec`` declares, perhaps as a subclass of ``cls``."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything held. Closing twice is harmless."""


@dataclass(eq=False)
class NodeResourceSpec:
    """What one resource of a model needs on the nodes that use it.

    Attributes:
        resource_key: the resource's name in a deployment's ``resources:`` block.
        nodes: names of the nodes that hold it.
    """

    resource_key: str
    nodes: set[str]

    @property
    def resource_class(self) -> type[Resource]:
        """What builds this spec."""
        raise NotImplementedError(f"{type(self).__name__} names no resource class")


@dataclass(frozen=True)
class ResourceReqConfig:
    """What one request asks of a resource."""

    def validate(self, spec: Any = None) -> None:
        """Raise ``ValueError`` for a value that the resource built from ``spec`` cannot honour."""


@dataclass(frozen=True)
class ResourceStep:
    """What one step asks of a resource."""
