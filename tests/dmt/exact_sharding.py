"""The exact optimum of a small tower by scipy's ``milp``: a formulation of its own, to judge the planner by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.schemes import SCHEMES, column_shards, row_shards, why_not

__all__ = ["exact_optimum", "random_tower"]

# In the solver costs are microseconds: its tolerances are absolute.
MICRO = 1e6


class Program:
    """Rows and columns of a mixed integer program; the first variable is the cost of the busiest rank."""

    def __init__(self) -> None:
        self.num_variables = 1
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self) -> int:
        self.num_variables += 1
        return self.num_variables - 1

    def constrain(self, coefficients: dict[int, float], lower: float, upper: float) -> None:
        self.rows.append((coefficients, lower, upper))

    def minimum(self, gap: float) -> float | None:
        matrix = np.zeros((len(self.rows), self.num_variables))
        for number, (coefficients, _, _) in enumerate(self.rows):
            matrix[number, list(coefficients)] = list(coefficients.values())
        first = np.arange(self.num_variables) == 0
        found = milp(
            first.astype(float),
            constraints=LinearConstraint(matrix, [row[1] for row in self.rows], [row[2] for row in self.rows]),
            integrality=~first,
            bounds=Bounds(0, np.where(first, np.inf, 1)),
            options={"mip_rel_gap": gap},
        )
        return None if found.x is None else float(found.x[0])


def exact_optimum(tables: Sequence[Any], model: CostModel, *, gap: float = 1e-4) -> float | None:
    """Least possible seconds of the busiest rank; None where nothing fits the memory.

    For each table one cut is chosen; each of its parts goes to one rank, at most one of them to a rank.
    """
    num_ranks, program = model.topology.ranks_per_tower, Program()
    used = {scheme: program.variable() for scheme in SCHEMES}
    cost: list[dict[int, float]] = [{} for _ in range(num_ranks)]
    memory: list[dict[int, float]] = [{} for _ in range(num_ranks)]
    for table in tables:
        rows, columns = table.num_embeddings, table.embedding_dim
        cuts = [("table_wise", [columns])]
        cuts += [("column_wise", column_shards(columns, k)) for k in range(2, min(num_ranks, columns // 4) + 1)]
        taken = []
        for scheme, widths in cuts:
            taken.append((program.variable(), scheme))
            on = [[program.variable() for _ in range(num_ranks)] for _ in widths]
            for width, ranks in zip(widths, on, strict=True):
                program.constrain({taken[-1][0]: -1.0} | dict.fromkeys(ranks, 1.0), 0, 0)
                load = model.shard(table, scheme, rows, width)
                for rank, variable in enumerate(ranks):
                    cost[rank][variable], memory[rank][variable] = load.seconds, load.memory
            for rank in range(num_ranks):
                program.constrain({ranks[rank]: 1.0 for ranks in on}, 0, 1)
        for scheme in ("row_wise", "data_parallel"):
            if why_not(table, scheme, num_ranks=num_ranks):
                continue
            taken.append((program.variable(), scheme))
            heights = row_shards(rows, num_ranks) if scheme == "row_wise" else [rows] * num_ranks
            for rank, height in enumerate(heights):
                cost[rank][taken[-1][0]] = model.shard(table, scheme, heights[0], columns).seconds
                memory[rank][taken[-1][0]] = model.shard(table, scheme, height, columns).memory
        program.constrain({variable: 1.0 for variable, _ in taken}, 1, 1)
        for variable, scheme in taken:
            program.constrain({variable: 1.0, used[scheme]: -1.0}, -np.inf, 0)
    fixed = {used[scheme]: MICRO * model.fixed_seconds(scheme) for scheme in SCHEMES}
    for rank in range(num_ranks):
        scaled = {variable: MICRO * seconds for variable, seconds in cost[rank].items()}
        program.constrain(scaled | fixed | {0: -1.0}, -np.inf, 0)
        if model.hardware.memory_per_rank is not None:
            share = {variable: size / model.hardware.memory_per_rank for variable, size in memory[rank].items()}
            program.constrain(share, 0, 1)
    least = program.minimum(gap)
    return None if least is None else least / MICRO


def random_tower(seed: int, *, most_tables: int = 8, most_ranks: int = 4) -> tuple[list[TableSpec], CostModel]:
    """3 to ``most_tables`` tables of all sizes on 2 to ``most_ranks`` ranks, with and without a memory limit."""
    rng = np.random.default_rng(seed)
    num_ranks, num_tables = int(rng.integers(2, most_ranks + 1)), int(rng.integers(3, most_tables + 1))
    tables = [
        TableSpec(
            name=f"t{i}",
            num_embeddings=int(10 ** rng.uniform(0.5, 6.5)),
            embedding_dim=int(rng.choice([4, 8, 12, 16, 24, 32, 64, 128, 256])),
            feature_names=tuple(f"f{i}_{j}" for j in range(1 if rng.random() < 0.8 else 2)),
        )
        for i in range(num_tables)
    ]
    pooling = {
        feature: float(rng.choice([1, 1, 1, rng.uniform(2, 50)])) for table in tables for feature in table.feature_names
    }
    workload = StepWorkload(
        batch_size=int(rng.choice([256, 1024, 8192])),
        pooling_factors=pooling,
        optimizer=str(rng.choice(["rowwise_adagrad", "adam", "sgd"])),
    )
    topology = TowerTopology(num_towers=1, ranks_per_tower=num_ranks)
    exchange = float(rng.choice([0, 5, 20]))
    model = CostModel(topology=topology, workload=workload, hardware=Hardware(collective_latency_us=exchange))
    total = sum(model.shard(t, "table_wise", t.num_embeddings, t.embedding_dim).memory for t in tables)
    if rng.random() < 0.6:
        room = int(total / num_ranks * rng.uniform(1.02, 1.6))
        hardware = Hardware(collective_latency_us=exchange, memory_per_rank=room)
        model = CostModel(topology=topology, workload=workload, hardware=hardware)
    return tables, model
