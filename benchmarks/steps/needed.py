"""Computes the bytes that a step must send across hosts: `needed_bytes`, and `needed_by` for a built contender.

Legend: H hosts, L ranks on each, W = H L ranks, B samples per rank. A host exchanges data for the B (W - L) samples of
other hosts or, if each input is sent once, for the distinct inputs among them.

======== ==============================================================================================================
kind     bytes of all hosts together
======== ==============================================================================================================
ids      to every host that holds a part of a table: 4 bytes (a length) per sample of the other hosts, and 8 bytes (an
         id) times the share of the table's rows that the host holds
forward  from every host, for each sample of the others: the columns of which it holds a part (a host adds its partial
         sums before it sends them), or the columns of its towers' outputs
backward the same numbers as forward, in the other direction
dense    a reduction inside hosts first, then a ring between them: 2 (H - 1) times the gradients
======== ==============================================================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.types import ShardingPlan

from benchmarks.steps.contenders import EMBEDDING_DIM
from benchmarks.steps.inputs import benchmark_tables, distinct_inputs
from benchmarks.steps.setting import Setting
from dmt.plan.tables import NUMBER_BYTES
from dmt.sharding.schemes import column_widths

if TYPE_CHECKING:
    from benchmarks.steps.build import Built

__all__ = [
    *("ID_BYTES", "LENGTH_BYTES", "HostShare", "column_cuts", "host_shares", "needed_by", "needed_bytes"),
    *("table_parameters", "weight_bytes"),
]

ID_BYTES, LENGTH_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """The part of a table that a host holds, each number counted once."""

    host: int
    columns: int
    """Number of columns of which the host holds some rows."""
    rows: float
    """Share of the table's rows of which the host holds some columns."""
    inputs: int | None = None
    """Number of inputs that the ranks of other hosts send to the host; None: one for each of their samples."""


def needed_bytes(
    setting: Setting, shares: Sequence[HostShare], *, dense_bytes: int, number_bytes: int, compression: int = 1
) -> dict[str, int]:
    """Returns, by kind, the bytes that all hosts together must send to other hosts in a step.

    Args:
        setting: sizes of the job.
        shares: a share for every table and every host that holds a part of it.
        dense_bytes: bytes of the gradients of parameters that all ranks hold, as they are sent.
        number_bytes: bytes of a number in outputs and their gradients, as they are sent.
        compression: columns of a table, divided by the columns of a tower's output for it.

    Example:
        Two hosts of two ranks, each with a table of 8 columns, and 10 samples per rank.

        >>> shares = [HostShare(host=0, columns=8, rows=1.0), HostShare(host=1, columns=8, rows=1.0)]
        >>> needed_bytes(Setting(batch_size=10), shares, dense_bytes=100, number_bytes=4)
        {'ids': 480, 'forward': 1280, 'backward': 1280, 'dense': 200}
    """
    samples = setting.batch_size * (setting.world_size - setting.ranks_per_host)
    inputs = [samples if share.inputs is None else share.inputs for share in shares]
    ids = sum(n * (LENGTH_BYTES + ID_BYTES * share.rows) for n, share in zip(inputs, shares, strict=True))
    columns = sum(n * (share.columns // compression) for n, share in zip(inputs, shares, strict=True))
    outputs = columns * number_bytes
    return {"ids": round(ids), "forward": outputs, "backward": outputs, "dense": 2 * (setting.hosts - 1) * dense_bytes}


def table_parameters(plan: ShardingPlan) -> dict[str, Any]:
    """Returns TorchRec's ``ParameterSharding`` of every table, by table name."""
    modules: Any = plan.plan.values()
    return {name: parameter for module in modules for name, parameter in module.items()}


def column_cuts(plan: ShardingPlan) -> dict[str, list[int]]:
    """Returns the widths of each table's column shards, by table name; an empty list for an unsharded table."""
    cuts: dict[str, list[int]] = {}
    for table, parameter in table_parameters(plan).items():
        shards = [] if parameter.sharding_spec is None else parameter.sharding_spec.shards
        cuts[table] = column_widths(shards)
    return cuts


def host_shares(plan: ShardingPlan, setting: Setting, *, unique: bool = False) -> list[HostShare]:
    """Returns the shares that hosts hold of every sharded table, under a plan with global ranks."""
    shares: list[HostShare] = []
    features = {table.name: table.feature_names for table in benchmark_tables(setting)}
    for table, parameter in table_parameters(plan).items():
        if parameter.sharding_spec is None:
            continue  # data-parallel
        shards = parameter.sharding_spec.shards
        columns: dict[int, dict[int, int]] = defaultdict(dict)
        rows: dict[int, dict[int, int]] = defaultdict(dict)
        for shard in shards:
            host = setting.host(shard.placement.rank())
            rows[host][shard.shard_offsets[0]] = shard.shard_sizes[0]
            columns[host][shard.shard_offsets[1]] = shard.shard_sizes[1]
        table_rows = max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards)
        for host, held in rows.items():
            share = sum(held.values()) / table_rows
            if share > 0:
                inputs = distinct_inputs(setting, features[table], host) if unique else None
                shares.append(HostShare(host=host, columns=sum(columns[host].values()), rows=share, inputs=inputs))
    return shares


def needed_by(built: Built, setting: Setting) -> dict[str, int] | None:
    """Returns the bytes that a contender must send across hosts in a step, by kind, for the first batch of the pool.

    Returns None with replicas.
    """
    contender = built.contender
    if contender.num_replicas > 1:
        return None
    if contender.family in ("flat", "etc"):
        shares = host_shares(built.plan, setting, unique=contender.unique)
    else:
        # The plan has ranks local to a tower. A tower is on one host, the only one with its tables.
        towers = built.towers.towers
        shares = [
            HostShare(
                host=(host := i * setting.hosts // len(towers)),
                columns=EMBEDDING_DIM,
                rows=1.0,
                inputs=distinct_inputs(setting, tower.features if contender.has_towers else [feature], host)
                if contender.unique
                else None,
            )
            for i, tower in enumerate(towers)
            for feature in tower.features
        ]
    return needed_bytes(
        setting,
        shares,
        dense_bytes=_dense_bytes(built, setting),
        number_bytes=NUMBER_BYTES[contender.precision],
        compression=contender.compression,
    )


def weight_bytes(built: Built) -> int:
    """Returns the bytes of all weights that this rank holds."""
    size = 0
    for value in built.model.state_dict().values():
        parts = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        size += sum(part.nbytes for part in parts)
    return size


def _dense_bytes(built: Built, setting: Setting) -> int:
    """Returns the bytes of the gradients, as they are sent, of weights that every rank holds."""
    contender = built.contender
    outside = {table.name for table in built.towers.outside_tables(benchmark_tables(setting))}
    size = 0
    for name, value in built.model.state_dict().items():
        if isinstance(value, ShardedTensor):
            continue
        # Copies of a data-parallel table inside a tower are all on one host.
        if contender.family == "flat" or name.split(".")[-2] in outside:
            size += value.nbytes
        elif "sparse_arch" not in name:
            size += value.nbytes // (2 if contender.dense_reduce == "bf16" else 1)
    return size
