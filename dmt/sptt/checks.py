"""Checks before tables are sharded: ranks agree, and every tower can carry out the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torchrec.distributed.types import ParameterSharding

from dmt._torchrec import fused_settings
from dmt.collectives import ranks_that_differ
from dmt.errors import InputError
from dmt.sharding.optimizers import moment_scale_of
from dmt.sharding.schemes import SCHEMES, why_not

if TYPE_CHECKING:
    from dmt.sptt.sharder import TowerSharder

__all__ = ["check_agreement", "check_sharding"]


def check_agreement(sharder: TowerSharder[Any], module: nn.Module, sharding: Mapping[str, ParameterSharding]) -> None:
    """Checks that ranks agree and that every tower can do what it is told; collective over the job.

    Every rank looks at the tables of all towers, so that a fault in one raises everywhere and no rank is left waiting.

    Args:
        sharder: the sharder with its settings.
        module: the module that it shards.
        sharding: sharding of each table, with ranks and placements local to its tower (0..L-1).

    Raises:
        InputError: ranks differ in towers, tables, plan, exchange or moment scale; a table has no sharding, an
            unsupported scheme, a rank outside the tower, shards that do not cover it, or a number format or optimizer
            that its scheme does not have; its optimizer has no moment to scale.
    """
    mesh = sharder.mesh
    tables_by_tower = sharder.tables_by_tower(module)
    tables = [[_table_record(table) for table in of_tower] for of_tower in tables_by_tower]
    plan = [_sharding_record(sharding.get(table.name)) for of_tower in tables_by_tower for table in of_tower]
    exchange, scale = sharder.exchange, sharder.optimizer.moment_scale
    for value, what in (
        (
            tables,
            "other towers or tables than rank 0. Build the same model and load the same tower plan on every rank.",
        ),
        (exchange, f"another id_route or peer_precision than rank 0 ({exchange}). Give every rank the same."),
        (scale, f"another moment_scale than rank 0 ({scale!r}). Give every rank the same."),
        (plan, "another sharding plan than rank 0. Make the plan from the same arguments on every rank."),
    ):
        if differing := ranks_that_differ(value, mesh.global_group):
            raise InputError(f"Ranks {differing} have {what}")
    parameters = sharder.shardable_parameters(module)
    for tower, table in ((tower, table) for tower, of_tower in enumerate(tables_by_tower) for table in of_tower):
        check_sharding(table, sharding.get(table.name), tower=tower, num_ranks=mesh.topology.ranks_per_tower)
        scheme = sharding[table.name].sharding_type
        settings = fused_settings(parameters[table.name], sharder.fused_params)
        if scheme != "data_parallel":
            moment_scale_of(sharder.optimizer.moment_scale, settings, mesh.topology.num_replicas)
        if reason := why_not(table, scheme, fused_params=settings):
            raise InputError(
                f"Table {table.name!r} in tower {tower} is {scheme}, but {reason}. Change the table, its optimizer or "
                "its scheme."
            )


def _table_record(table: Any) -> tuple[Any, ...]:
    kind = (str(table.pooling), str(table.data_type))
    return (table.name, table.num_embeddings, table.embedding_dim, tuple(table.feature_names), *kind)


def _sharding_record(sharding: ParameterSharding | None) -> tuple[Any, ...] | None:
    if sharding is None:
        return None
    cuts = [(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in _shards(sharding)]
    return (sharding.sharding_type, sharding.compute_kernel, tuple(sharding.ranks or ()), cuts)


def _shards(sharding: ParameterSharding) -> list[Any]:
    return list(getattr(sharding.sharding_spec, "shards", None) or [])


def check_sharding(table: Any, sharding: ParameterSharding | None, *, tower: int, num_ranks: int) -> None:
    """Raises `InputError` unless a table's sharding is one that a tower can carry out, naming table and tower.

    Args:
        table: its ``EmbeddingBagConfig``.
        sharding: ranks and placements local to the tower.
        tower: the mesh tower.
        num_ranks: L.
    """
    where = f"Table {table.name!r} in tower {tower}"
    if sharding is None:
        raise InputError(f"{where} is not in the sharding plan. Make the plan with TowerShardingPlanner.")
    if sharding.sharding_type not in SCHEMES:
        raise InputError(f"{where} is sharded {sharding.sharding_type!r}; inside a tower use one of {list(SCHEMES)}.")
    ranks, shards = list(sharding.ranks or []), _shards(sharding)
    outside = [rank for rank in (*ranks, *(s.placement.rank() for s in shards)) if not 0 <= rank < num_ranks]
    if outside:
        raise InputError(
            f"{where} has a shard on rank {outside[0]}; ranks of a plan are local to the tower, 0..{num_ranks - 1}."
        )
    if len(set(ranks)) < len(ranks):
        # With shards of unequal width TorchRec reports a table of another shape, or fails.
        raise InputError(f"{where} has more than one shard on a rank: {ranks}. Give each rank one, of more columns.")
    if sharding.sharding_type in ("row_wise", "data_parallel") and ranks != list(range(num_ranks)):
        raise InputError(
            f"{where} is sharded {sharding.sharding_type!r} over ranks {ranks}; it takes every rank of the tower, "
            f"{list(range(num_ranks))}."
        )
    if sharding.sharding_type == "data_parallel":
        return
    if ranks != [shard.placement.rank() for shard in shards]:
        raise InputError(
            f"{where} lists ranks {ranks} but places its shards on {[shard.placement.rank() for shard in shards]}; the "
            "two must agree."
        )
    rows_are_cut = sharding.sharding_type == "row_wise"
    covered, whole = 0, (table.num_embeddings, table.embedding_dim)
    for shard in shards:
        offset, size = ((covered, 0), (shard.shard_sizes[0], whole[1]))
        if not rows_are_cut:
            offset, size = ((0, covered), (whole[0], shard.shard_sizes[1]))
        if (tuple(shard.shard_offsets), tuple(shard.shard_sizes)) != (offset, size) or min(size) < 1:
            break
        covered += size[0 if rows_are_cut else 1]
    if covered != whole[0 if rows_are_cut else 1]:
        cut = [(list(s.shard_offsets), list(s.shard_sizes)) for s in shards]
        raise InputError(
            f"{where} is {table.num_embeddings} x {table.embedding_dim}, but its shards (offsets, sizes) {cut} do not "
            f"cover it {'from top to bottom' if rows_are_cut else 'from left to right'}; none may be empty."
        )
