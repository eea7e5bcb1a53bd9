"""One family of linears or embeddings an adapter may touch, and how its weights are sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from .errors import SpecError

ShardId = str | int | None


@dataclass(frozen=True)
class LoraTarget:
    """One family of linears an adapter may touch, e.g. every layer's fused ``qkv_proj``.

    Shapes are the unsharded linear's. Each output slice of a fused projection has its own A and B.

    Attributes:
        in_features: input width; for an embedding, the vocabulary.
        out_slices: output widths of the slices in order, e.g. ``(q, k, v)``.
        parallel: how the base linear is split over tensor-parallel ranks. ``"column"`` splits
            output rows: A is replicated, B sharded by the rows of each slice. ``"row"`` splits
            input columns: A is sharded along the input and B replicated, so that each rank's delta
            is a partial sum to add before the layer's own all-reduce. ``"none"``: every rank adds
            the whole delta to an output that is already whole.
        slice_names: stacked-shard id of each slice in a checkpoint; empty for a single linear.
        slice_units: shardable units (heads) of each slice. A slice with fewer units than ranks is
            replicated over groups of ranks, as GQA's K and V are. ``None``: every row is a unit.
        slice_packs: ``(name, slices)`` of checkpoint modules that pack several slices in one
            tensor: their A serves each slice, their B's rows are the slices' in order.
        slice_align: rounds each slice's rank-local width up to a multiple, for a base linear that
            pads its output per rank. The padding rows follow the slice's own; B is zero there.
        layers: stack layers the target exists on; ``None``: all of the spec's.
        kind: ``"embedding"``: a row's input is its token id and the shrink gathers A's column.
        per_segment: the linear sees one row a segment (an LM head over each last token).
        token_fold: the linear sees one row per this many consecutive tokens of a segment.

    Raises:
        SpecError: a declaration that contradicts itself.
    """

    in_features: int
    out_slices: tuple[int, ...]
    parallel: Literal["column", "row", "none"] = "column"
    slice_names: tuple[str | int, ...] = ()
    slice_units: tuple[int, ...] | None = None
    slice_packs: tuple[tuple[str | int, tuple[str | int, ...]], ...] | None = None
    slice_align: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    kind: Literal["linear", "embedding"] = "linear"
    per_segment: bool = False
    token_fold: int = 1

    def __post_init__(self) -> None:
        if self.in_features < 1 or not self.out_slices or min(self.out_slices) < 1:
            raise SpecError(
                f"widths must be positive: in_features={self.in_features}, "
                f"out_slices={self.out_slices}"
            )
        if self.parallel not in ("column", "row", "none"):
            raise SpecError(f"parallel is {self.parallel!r}; use 'column', 'row' or 'none'")
        if self.kind not in ("linear", "embedding"):
            raise SpecError(f"kind is {self.kind!r}; use 'linear' or 'embedding'")
        if self.num_slices > 1 and not self.slice_names:
            raise SpecError(f"{self.num_slices} slices need slice_names, one each")
        if len(set(self.slice_names)) < len(self.slice_names):
            raise SpecError(f"slice_names {self.slice_names} has a name twice")
        for field in ("slice_names", "slice_units", "slice_align"):
            values = getattr(self, field)
            if values and len(values) != self.num_slices:
                raise SpecError(f"{field} has {len(values)} values for {self.num_slices} slices")
        for field in ("slice_units", "slice_align"):
            if min(getattr(self, field) or (1,)) < 1:
                raise SpecError(f"{field} must be positive: {getattr(self, field)}")
        for i, units in enumerate(self.slice_units or ()):
            if self.out_slices[i] % units:
                raise SpecError(f"slice {i} has {self.out_slices[i]} rows, not {units} equal units")
        for name, parts in self.slice_packs or ():
            if unknown := [part for part in parts if part not in self.slice_names]:
                raise SpecError(f"slice_packs[{name!r}] names {unknown}; have {self.slice_names}")
        if self.token_fold < 1 or (self.per_segment and self.token_fold != 1):
            raise SpecError(
                f"token_fold={self.token_fold} with per_segment={self.per_segment}: "
                "fold at least 1 token, and only where rows are per token"
            )

    @property
    def num_slices(self) -> int:
        return len(self.out_slices)

    @property
    def out_features(self) -> int:
        return sum(self.out_slices)

    @property
    def row_grouping(self) -> int:
        """Which rows the linear sees: 1 per token, k per k folded tokens, 0 per segment."""
        return 0 if self.per_segment else self.token_fold

    def input_cols(self, rank: int, world_size: int) -> tuple[int, int]:
        """``(start, size)`` of ``rank``'s input columns.

        Raises:
            SpecError: a row-parallel input that does not divide by the ranks.
        """
        _check_rank(rank, world_size)
        if self.parallel != "row":
            return 0, self.in_features
        if self.in_features % world_size:
            raise SpecError(
                f"{self.in_features} input columns do not split over {world_size} ranks"
            )
        size = self.in_features // world_size
        return rank * size, size

    def slice_rows(self, slice_idx: int, rank: int, world_size: int) -> tuple[int, int]:
        """``(start, size)`` of ``rank``'s output rows within slice ``slice_idx``, unpadded.

        Raises:
            SpecError: units that neither split over the ranks nor replicate over groups of them.
        """
        _check_rank(rank, world_size)
        width = self.out_slices[slice_idx]
        if self.parallel != "column":
            return 0, width
        units = self.slice_units[slice_idx] if self.slice_units else width
        if units % world_size and world_size % units:
            raise SpecError(
                f"slice {slice_idx} has {units} units, which neither split over {world_size} ranks "
                "nor replicate over groups of them"
            )
        parts = min(units, world_size)
        size = width // parts
        return rank * parts // world_size * size, size

    def local_width(self, slice_idx: int, world_size: int) -> int:
        """Rows of slice ``slice_idx`` in one rank's base output, padding included."""
        _, size = self.slice_rows(slice_idx, 0, world_size)
        align = self.slice_align[slice_idx] if self.slice_align else 1
        return -(-size // align) * align

    def shard(self, world_size: int) -> LoraTarget:
        """This target as one rank of ``world_size`` sees it, in that rank's widths."""
        return replace(
            self,
            in_features=self.input_cols(0, world_size)[1],
            out_slices=tuple(self.local_width(i, world_size) for i in range(self.num_slices)),
            slice_units=None,
            slice_align=None,
        )

    def shard_pair(
        self, slice_idx: int, a: torch.Tensor, b: torch.Tensor, rank: int, world_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rank``'s share of one slice: ``a [r, in]``, ``b [out_slice, r]`` to local shapes.

        The results are views of the inputs, except where alignment rows are added to ``b``.
        """
        a, b = self.shard_views(slice_idx, a, b, rank, world_size)
        padding = self.local_width(slice_idx, world_size) - len(b)
        return a, F.pad(b, (0, 0, 0, padding)) if padding else b

    def shard_views(
        self, slice_idx: int, a: torch.Tensor, b: torch.Tensor, rank: int, world_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`shard_pair` without alignment rows: always views."""
        _check_rank(rank, world_size)
        if world_size == 1:
            return a, b
        col, cols = self.input_cols(rank, world_size)
        row, rows = self.slice_rows(slice_idx, rank, world_size)
        if cols != a.shape[1]:
            a = a[:, col : col + cols]
        if rows != len(b):
            b = b[row : row + rows]
        return a, b

    def slice_index(self, shard_id: ShardId) -> int:
        """Which slice a checkpoint module lands on, from its stacked-shard id.

        Raises:
            SpecError: an id that is none of ``slice_names``, or none where there are several.
        """
        if shard_id is None and self.num_slices == 1:
            return 0
        if shard_id in self.slice_names:
            return self.slice_names.index(shard_id)
        raise SpecError(f"shard id {shard_id!r} is none of the target's slices {self.slice_names}")

    def module_slices(self, shard_id: ShardId) -> tuple[int, ...]:
        """The slices a checkpoint module lands on, in the order its B's rows hold them."""
        for name, parts in self.slice_packs or ():
            if name == shard_id:
                return tuple(self.slice_index(part) for part in parts)
        return (self.slice_index(shard_id),)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise SpecError(f"rank {rank} of {world_size}: want 0 <= rank < world_size")
