"""Shares of every table that each host holds, and bytes of replicated weights, from a plan and a built contender."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.types import ShardingPlan

from benchmarks.steps.build import Built
from benchmarks.steps.contenders import EMBEDDING_DIM, Contender
from benchmarks.steps.inputs import distinct_inputs
from benchmarks.steps.needed import HostShare, needed_bytes
from benchmarks.steps.setting import Setting
from benchmarks.steps.towers import own_towers
from dmt.number_formats import NUMBER_FORMATS
from dmt.sharding.schemes import column_widths

__all__ = ["column_cuts", "host_shares", "needed_by", "table_parameters", "weight_bytes"]


def table_parameters(plan: ShardingPlan) -> dict[str, Any]:
    """TorchRec's ``ParameterSharding`` of every table of the one sharded module."""
    (module,) = plan.plan.values()
    return dict(module)  # type: ignore[call-overload]


def column_cuts(plan: ShardingPlan) -> dict[str, list[int]]:
    """By table the widths of its column shards, each of which has an optimizer state of its own."""
    cuts: dict[str, list[int]] = {}
    for table, parameter in table_parameters(plan).items():
        shards = [] if parameter.sharding_spec is None else parameter.sharding_spec.shards
        cuts[table] = column_widths(shards) or [EMBEDDING_DIM]
    return cuts


def host_shares(plan: ShardingPlan, setting: Setting) -> list[HostShare]:
    """Shares of every sharded table that each host holds under a plan whose ranks are those of the job."""
    shares: list[HostShare] = []
    for parameter in table_parameters(plan).values():
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
                shares.append(HostShare(host=host, columns=sum(columns[host].values()), rows=share))
    return shares


def needed_by(built: Built, setting: Setting) -> dict[str, int]:
    """The bytes that a contender must send across hosts in one step, on the first batch of the pool."""
    contender = built.contender
    if contender.family in ("flat", "etc"):
        shares = host_shares(built.plan, setting)
    else:
        # Ranks in the plan are those of a tower; a tower is on one host, and its tables are nowhere else.
        towers = own_towers(contender, setting).towers
        shares = [
            HostShare(
                host=(host := i * setting.hosts // len(towers)),
                columns=EMBEDDING_DIM,
                rows=1.0,
                inputs=_inputs(contender, setting, tower.features if contender.has_towers else [feature], host),
            )
            for i, tower in enumerate(towers)
            for feature in tower.features
        ]
    return needed_bytes(
        setting,
        shares,
        dense_bytes=_dense_bytes(built) // (2 if contender.dense_precision == "bf16" else 1),
        number_bytes=int(NUMBER_FORMATS[contender.precision].num_bytes),
        compression=contender.compression,
    )


def _inputs(contender: Contender, setting: Setting, features: Sequence[str], host: int) -> int | None:
    """Distinct ids of these features together that the ranks of other hosts have in a step; None for all samples."""
    if not contender.is_unique:
        return None
    return distinct_inputs(setting, features, host, of_hosts=contender.is_united)


def weight_bytes(built: Built) -> int:
    """Bytes of all weights that this rank holds."""
    size = 0
    for value in built.model.state_dict().values():
        parts = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        size += sum(part.nbytes for part in parts)
    return size


def _dense_bytes(built: Built) -> int:
    """Bytes of the weights that every rank holds a copy of, data-parallel tables of a flat model included."""
    is_flat = built.contender.family == "flat"
    return sum(
        value.nbytes
        for name, value in built.model.state_dict().items()
        if not isinstance(value, ShardedTensor) and (is_flat or "sparse_arch" not in name)
    )
