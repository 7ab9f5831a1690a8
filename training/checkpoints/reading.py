"""Reading pieces of any layout out of a checkpoint of any other; every rank for itself."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dmt.errors import InputError
from dmt.training.checkpoints.safe_reader import SafeReader
from dmt.training.checkpoints.state import Piece

__all__ = ["read_pieces"]


@dataclass(frozen=True, kw_only=True)
class _Region:
    """A part of a saved tensor, and the live tensor that it goes into."""

    name: str
    offsets: tuple[int, ...]
    into: Tensor


@dataclass(frozen=True, kw_only=True)
class _Share:
    """A column shard of a saved table whose rows' numbers are wanted, and how many of the wanted columns it has."""

    region: _Region
    columns: int


def read_pieces(
    reader: SafeReader,
    pieces: Sequence[Piece],
    *,
    column_shards: Mapping[str, Sequence[int]],
    factors: Mapping[str, float],
) -> None:
    """Fills live tensors with what a checkpoint has in their places.

    A state with one number for each row of each column shard belongs to each of the shard's columns: a new shard takes
    the mean over its own columns. That is exact where the cuts are the same, gives a whole table what an optimizer of
    the whole table would have summed (a mean of means, weighted by columns), and each shard of a table that was whole
    the row's number.

    Args:
        reader: of the checkpoint.
        pieces: what to fill; they are in it, with these sizes.
        column_shards: widths of the column shards of the saved states, see `Manifest.column_shards`.
        factors: what the AdaGrad moments of a table are multiplied by, by table; 1 for others.

    Raises:
        InputError: a file cannot be read after all.
    """
    direct, mixed = [], []
    for piece in pieces:
        shares = list(_shares(piece, column_shards.get(piece.name)))
        if len(shares) > 1:
            mixed.append((piece, shares))
        else:
            direct.append(replace(shares[0].region, into=piece.tensor))
    _read(reader, direct)
    # One at a time: they need room beside the live tensors.
    for piece, shares in mixed:
        shares = [replace(s, region=replace(s.region, into=torch.empty_like(piece.tensor))) for s in shares]
        _read(reader, [share.region for share in shares])
        total = torch.stack([share.region.into.double() * share.columns for share in shares]).sum(dim=0)
        piece.tensor.copy_(total / sum(share.columns for share in shares))
    for piece in pieces:
        if piece.is_moment and (factor := factors.get(piece.table, 1.0)) != 1.0:
            piece.tensor.mul_(factor)


def _shares(piece: Piece, widths: Sequence[int] | None) -> Iterator[_Share]:
    """The saved column shards that a piece has columns of; one for what was not saved shard by shard."""
    if piece.columns is None or widths is None:
        offsets = piece.offsets if piece.columns is None else (piece.first_row,)
        yield _Share(region=_Region(name=piece.name, offsets=offsets, into=piece.tensor), columns=1)
        return
    start, stop = piece.columns
    for shard, (first, end) in enumerate(pairwise(accumulate(widths, initial=0))):
        if start < end and first < stop:
            region = _Region(name=piece.name, offsets=(shard * piece.num_rows + piece.first_row,), into=piece.tensor)
            yield _Share(region=region, columns=min(stop, end) - max(start, first))


def _read(reader: SafeReader, regions: Sequence[_Region]) -> None:
    with warnings.catch_warnings():
        # That each rank reads for itself is the point here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load({}, storage_reader=reader, planner=_RegionPlanner(regions), no_dist=True)
        except dcp.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise InputError(f"{reader.path} cannot be read ({cause}). Use another checkpoint.") from error


class _RegionPlanner(LoadPlanner):
    """Reads regions, whatever the state dict."""

    def __init__(self, regions: Sequence[_Region]) -> None:
        self._regions = list(regions)
        self._tensors: Mapping[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None, "PyTorch gives the index that the reader read"
        self._tensors = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, region in enumerate(self._regions):
            chunk = ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=region.into.size())
            for item in create_read_items_for_chunk_list(region.name, self._tensors[region.name], [chunk]):
                place = MetadataIndex(region.name, region.offsets, number)
                items.append(replace(item, dest_index=place))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = read_item.dest_index.index
        assert number is not None, "every item has the number of its region"
        part = self._regions[number].into
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor is a view of the live one."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("regions are of tensors")
