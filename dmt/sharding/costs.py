"""Costs of a step on a rank under each sharding scheme (Neo, section 4.1). Pure arithmetic.

Legend: B samples per rank, T towers, L ranks per tower; G = T * L * B, the samples whose ids one tower looks up in a
step; P ids per sample of a table, over all its features; F its features, N columns of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from dmt.errors import InputError, did_you_mean
from dmt.plan.tables import ID_BYTES, is_sequence, number_bytes
from dmt.plan.topology import TowerTopology
from dmt.sharding.schemes import Kernel, Scheme, TablePlacement, table_shards

__all__ = ["OPTIMIZERS", "CostModel", "Hardware", "ShardLoad", "SparseOptimizer", "StepWorkload"]

SparseOptimizer = Literal["rowwise_adagrad", "adagrad", "adam", "sgd"]
OPTIMIZERS: tuple[SparseOptimizer, ...] = get_args(SparseOptimizer)

_NUMBER_BYTES = 4  # of an embedding or a gradient, on the link and in memory
# A row is read in the forward pass, and read and written by the fused update.
_LOOKUP_PASSES = 3
# The dense optimizer reads and writes every weight, reads its gradient, and the next step clears it.
_DENSE_PASSES = 4
# Exchanges in a step: ids, outputs and gradients; a data-parallel table only has its all-reduce.
_EXCHANGES: dict[Scheme, int] = {"table_wise": 3, "column_wise": 3, "row_wise": 3, "data_parallel": 1}


@dataclass(frozen=True, kw_only=True)
class StepWorkload:
    """Workload of the tables in one training step.

    Raises:
        InputError: a number is not positive and finite, or the optimizer is unknown.
    """

    batch_size: int = 1024
    """B, samples per rank and step."""
    pooling_factors: Mapping[str, float] = field(default_factory=dict)
    """Mean number of ids per sample (for sequences, their mean length), by feature; 1.0 for features not listed."""
    optimizer: SparseOptimizer = "rowwise_adagrad"
    """Optimizer of the tables; determines the size of the optimizer state."""
    sync_every: int = 1
    """Training steps between two averages of the replicas."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"StepWorkload: optimizer={self.optimizer!r} is unknown; use one of {list(OPTIMIZERS)}.")
        factors = {f"pooling_factors[{feature!r}]": factor for feature, factor in self.pooling_factors.items()}
        _check_positive("StepWorkload", {"batch_size": self.batch_size, "sync_every": self.sync_every} | factors)

    def numbers(self, table: Any) -> float:
        """Returns how many numbers a table adds to a sample: ``embedding_dim`` per feature; for sequences, per id."""
        factors = self.pooling_factors if is_sequence(table) else {}
        return float(sum(table.embedding_dim * factors.get(feature, 1.0) for feature in table.feature_names))

    def check_features(self, features: Collection[str]) -> None:
        """Raises `InputError` if ``pooling_factors`` names a feature that is not one of ``features``."""
        for feature in self.pooling_factors:
            if feature not in features:
                raise InputError(
                    f"pooling_factors names the feature {feature!r}, which no table has."
                    f"{did_you_mean(feature, features)} Remove the entry, or correct the name."
                )


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Memory and speed of a rank. Rates take the place of Neo's scalar weights, so that costs are in seconds.

    The default rates are half of the data-sheet peak of an 80 GB A100 (memory, and NVLink in one direction). The plan
    depends on the ratios of the rates, and on the latency: measure them on your machines.

    Raises:
        InputError: a number is not positive and finite (``collective_latency_us`` may be 0).
    """

    memory_per_rank: int | None = None
    """Bytes for tables, optimizer state, the gradients of data-parallel tables, and looked-up embeddings
    (`ShardLoad.activations`); None: no limit."""
    memory_gb_per_s: float = 1000.0
    """Rate at which a rank reads and writes rows, in 10^9 bytes per second."""
    intra_tower_gb_per_s: float = 150.0
    """Rate at which a rank sends (and at the same time receives) inside its tower, in 10^9 bytes per second."""
    collective_latency_us: float = 20.0
    """Fixed cost of one collective in microseconds, whatever its size."""

    def __post_init__(self) -> None:
        _check_positive("Hardware", {name: value for name, value in vars(self).items() if value is not None})


def _check_positive(owner: str, numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf and not (name == "collective_latency_us" and number == 0):
            least = "of at least" if name == "collective_latency_us" else "above"
            raise InputError(f"{owner}: {name}={number} must be a finite number {least} 0.")


class ShardLoad(NamedTuple):
    """Load of one shard on its rank."""

    seconds: float
    """Seconds of one step: bytes read and written, and bytes sent, each divided by their rate; without fixed costs."""
    memory: int
    """Bytes on the device: weights, optimizer state, and the dense gradient of a data-parallel table. For a table whose
    kernel keeps weights elsewhere, only row-wise AdaGrad's state, and the cache with its index if it has one."""
    activations: int
    """Bytes on the device of the embeddings that a step looks up in the shard, and of their gradients, FP32 (2D sparse
    parallelism, section 2.2): one embedding per feature and sample, even in a row shard; for sequences, one per id."""
    averaged_bytes: float
    """Bytes sent to average weights and optimizer state over the replicas (2D sparse parallelism, section 5), divided
    by the steps between two averages: 4 bytes per number, even for FP16 tables; 0 for data-parallel tables."""
    row_bytes: float
    """Bytes of the rows read per step."""
    id_bytes: float
    """Bytes of ids and lengths that the rank receives from other ranks of its tower per step."""
    output_bytes: float
    """Bytes of embeddings sent to other ranks of its tower in the forward pass; as many bytes of gradients return."""
    reduced_bytes: float
    """Bytes sent per step for the all-reduce of a data-parallel table's gradient."""
    elsewhere: int = 0
    """Bytes of weights and optimizer state in host memory, for a table whose kernel keeps them there."""

    @property
    def needed(self) -> int:
        """All bytes on the device: ``memory`` and ``activations``."""
        return self.memory + self.activations


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds and bytes of shards on one mesh (Neo, section 4.1).

    Message volume is charged to the rank at the busy end of an exchange: the owner of a whole table or of a column
    shard sends (L-1)/L G F N numbers and receives as many gradients, and so does every rank of a row-wise table. A
    table of sequences sends a row for each id, (L-1)/L G P N numbers in all, which the ranks of a row-wise table share.
    The average of replicas is charged at the rate of the tower's links, spread evenly over the steps. The model
    ignores duplicate ids, uneven use of rows, and the slower lookups of tables that are not on the device.
    """

    topology: TowerTopology
    workload: StepWorkload = field(default_factory=StepWorkload)
    hardware: Hardware = field(default_factory=Hardware)

    def shard(
        self, table: Any, scheme: Scheme, rows: int, columns: int, *, kernel: Kernel = "fused", cache: float = 0.0
    ) -> ShardLoad:
        """Returns the load of a shard of ``rows`` x ``columns`` in a step; ``cache`` is its ``cache_load_factor``."""
        ranks = self.topology.ranks_per_tower
        # Peers send the ids of their samples to the tower, so it looks up those of all T L ranks (DMT, section 3.1).
        samples = self.topology.num_towers * ranks * self.workload.batch_size  # G
        features, number = len(table.feature_names), number_bytes(table)
        pooling = sum(float(self.workload.pooling_factors.get(feature, 1.0)) for feature in table.feature_names)
        remote = (ranks - 1) / ranks
        # Row-wise, a rank looks up the ids of its rows; data-parallel, the ids of its peers' samples.
        lookups = samples * pooling / (1 if scheme in ("table_wise", "column_wise") else ranks)
        # Rows returned: a sum for each sample and feature, partial in a row shard; for sequences every row read.
        returned = lookups if is_sequence(table) else samples * features
        row_bytes = lookups * columns * number
        touched = _LOOKUP_PASSES * row_bytes
        activations = math.ceil(2 * returned * columns * _NUMBER_BYTES)
        row_state = {"rowwise_adagrad": 4, "adagrad": 4 * columns, "adam": 8 * columns, "sgd": 0}
        state = rows * row_state[self.workload.optimizer]
        memory = rows * columns * number + state
        ids = outputs = reduced = averaged = 0.0
        if scheme == "data_parallel":
            copies = ranks * self.topology.num_replicas
            # A ring all-reduce sends every number twice, except each rank's part.
            reduced = 2 * (copies - 1) / copies * rows * columns * number
            touched += _DENSE_PASSES * rows * columns * number + 2 * state
            # The gradient is as large as the table, however few rows a batch reads.
            memory += rows * columns * number
            activations //= ranks
        else:
            copies = self.topology.num_replicas
            averaged = 2 * (copies - 1) / copies * (4 * rows * columns + state) / self.workload.sync_every
            # Lengths go to every row shard, an id only to the shard that has its row.
            ids = remote * ID_BYTES * (lookups + samples * features)
            outputs = remote * returned * columns * _NUMBER_BYTES
        seconds = touched / (1e9 * self.hardware.memory_gb_per_s)
        seconds += (ids + 2 * outputs + reduced + averaged) / (1e9 * self.hardware.intra_tower_gb_per_s)
        elsewhere = 0
        if kernel != "fused":
            # FBGEMM keeps a state with one number per row on the device.
            on_device = state if self.workload.optimizer == "rowwise_adagrad" else 0
            elsewhere, memory = memory - on_device, on_device
        if kernel == "fused_uvm_caching":
            # A map of all rows, 4 bytes each; for each cached row its number and its last use, 8 bytes each.
            memory += math.ceil(cache * rows * columns * number) + 4 * rows + 16 * math.ceil(cache * rows)
        return ShardLoad(seconds, memory, activations, averaged, row_bytes, ids, outputs, reduced, elsewhere)

    def shards(self, table: Any, placement: TablePlacement) -> list[tuple[int, ShardLoad]]:
        """Returns (local rank, load) for every shard of a placed table."""
        shards = table_shards(table, placement)
        loads = {
            size: self.shard(table, placement.scheme, *size, kernel=placement.kernel, cache=placement.cache_load_factor)
            for size in {(shard.rows, shard.columns) for shard in shards}
        }
        return [(shard.rank, loads[shard.rows, shard.columns]) for shard in shards]

    def fixed_seconds(self, scheme: Scheme) -> float:
        """Returns the fixed seconds of a scheme's collectives, shared by all tables of a tower that use the scheme."""
        if self.topology.ranks_per_tower == 1:
            return 0.0
        return 1e-6 * self.hardware.collective_latency_us * _EXCHANGES[scheme]
