"""The planner inside a tower: greedy against largest differencing, distance to the optimum, seconds.

Writes JSON and Markdown to ``benchmarks/results/``; see ``benchmarks/README.md``.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import StepWorkload
from dmt.sharding.local_search import pack
from dmt.sharding.packing import Option, Problem, differencing, greedy
from dmt.sharding.plan_tables import plan_tables
from tests.dmt.exact_sharding import exact_optimum, random_tower

__all__ = ["compare_heuristics", "distance_to_optimum", "main", "random_tables", "seconds_to_plan"]

RESULTS = Path(__file__).parent / "results"
# Ties of sums that differ by rounding.
TIE = 1e-9


def random_tables(number: int, seed: int) -> tuple[list[TableSpec], StepWorkload]:
    """Tables with log-uniform rows (10 to 3e7), dims of 16 to 384 and log-normal ids per sample (1 to 200)."""
    rng = np.random.default_rng(seed)
    tables = [
        TableSpec(
            name=f"t{i}",
            num_embeddings=int(10 ** rng.uniform(1, 7.5)),
            embedding_dim=int(rng.choice([16, 32, 64, 128, 256, 384])),
            feature_names=(f"f{i}",),
        )
        for i in range(number)
    ]
    factors = {f"f{i}": float(np.exp(rng.normal(1, 1.2)).clip(1, 200)) for i in range(number)}
    return tables, StepWorkload(pooling_factors=factors)


def compare_heuristics(num_items: int, num_ranks: int, seeds: range) -> dict[str, Any]:
    """One row: how often largest differencing has the lower, the same, the higher busiest rank; log-normal costs."""
    outcome: Counter[str] = Counter()
    ratios, improved = [], []
    for seed in seeds:
        costs = np.random.default_rng(seed).lognormal(0, 1, num_items)
        options = [[Option((float(cost),), (0.0,), 0.0, None, 0)] for cost in costs]
        problem = Problem(options, np.zeros(num_ranks), np.zeros(num_ranks), np.inf, (0.0,))
        one, other = differencing(problem, [0] * num_items).busiest, greedy(problem, [0] * num_items).busiest
        ratios.append(one / other)
        outcome["lower" if one < other * (1 - TIE) else "equal" if one <= other * (1 + TIE) else "higher"] += 1
        found = pack(problem)
        assert found is not None, "without a memory limit everything fits"
        improved.append(found.packing.busiest / min(one, other))
    return {
        "items": num_items,
        "ranks": num_ranks,
        "instances": len(seeds),
        **{f"differencing_{name}": outcome[name] / len(seeds) for name in ("lower", "equal", "higher")},
        "mean_ratio_to_greedy": float(np.mean(ratios)),
        "mean_ratio_after_search": float(np.mean(improved)),
    }


def distance_to_optimum(seeds: range) -> dict[str, Any]:
    """Towers of 3 to 7 tables on 2 or 3 ranks, all schemes, 60 % with a memory limit, against scipy's ``milp``."""
    gaps, infeasible, wrong, ours, theirs = [], 0, 0, 0.0, 0.0
    for seed in seeds:
        tables, model = random_tower(seed, most_tables=7, most_ranks=3)
        begin = time.process_time()
        try:
            # Without the preference for whole tables: the solver has none.
            found = plan_tables(
                [tables], model.topology, workload=model.workload, hardware=model.hardware, column_gain=0.0
            ).seconds
        except InputError:
            found = None
        ours += time.process_time() - begin
        begin = time.process_time()
        best = exact_optimum(tables, model)
        theirs += time.process_time() - begin
        if found is None or best is None:
            infeasible += best is None
            wrong += (found is None) != (best is None)
        else:
            gaps.append(found / best - 1)
    return {
        "instances": len(seeds),
        "infeasible": infeasible,
        "feasibility_misjudged": wrong,
        "within_0.1_percent": float(np.mean(np.array(gaps) < 1e-3)),
        "within_1_percent": float(np.mean(np.array(gaps) < 1e-2)),
        "mean_gap": float(np.mean(gaps)),
        "largest_gap": float(np.max(gaps)),
        "seconds": ours,
        "solver_seconds": theirs,
    }


def seconds_to_plan(num_tables: int, num_towers: int, ranks_per_tower: int, seed: int) -> dict[str, Any]:
    """One row: seconds of CPU (one thread), and the imbalance inside the worst tower."""
    tables, workload = random_tables(num_tables, seed)
    topology = TowerTopology(num_towers=num_towers, ranks_per_tower=ranks_per_tower)
    begin = time.process_time()
    towers = [tables[i::num_towers] for i in range(num_towers)]
    found = plan_tables(towers, topology, workload=workload, column_gain=0.0)
    seconds = time.process_time() - begin
    schemes = Counter(placement.scheme for placement in found.placements.values())
    return {
        "tables": num_tables,
        "towers": num_towers,
        "ranks_per_tower": ranks_per_tower,
        "seconds": seconds,
        "worst_tower_imbalance": max(tower.imbalance for tower in found.towers),
        "schemes": dict(sorted(schemes.items())),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


@click.command()
@click.option("--quick", is_flag=True, help="Few instances and small sizes: seconds instead of minutes.")
@click.option("--seed", default=0, show_default=True, help="First seed.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=False, help="Output folder.")
def main(*, quick: bool, seed: int, out: Path) -> None:
    """Compares, measures, and writes a record into the output folder."""
    many, few = (20, 5) if quick else (100, 40)
    sizes = (
        ((26, 4, 8), (200, 4, 8))
        if quick
        else ((26, 4, 8), (1000, 1, 128), (1000, 16, 8), (4000, 128, 8), (4000, 1, 1024))
    )
    environment = {name: version(name) for name in ("numpy", "scipy")}
    environment |= {"machine": platform.machine(), "date": time.strftime("%Y-%m-%d"), "seed": str(seed)}
    record: dict[str, Any] = {"environment": environment, "heuristics": [], "optimum": [], "time": []}
    name = "planner_quality" + ("_quick" if quick else "")

    def keep(part: str, row: dict[str, Any]) -> None:
        # After each row, so that a run that is stopped leaves what it found.
        record[part].append(row)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        pages = [f"# Planner quality\n\n{json.dumps(environment)}\n"]
        pages += [f"## {part}\n\n{_table(record[part])}" for part in ("heuristics", "optimum", "time") if record[part]]
        (out / f"{name}.md").write_text("\n".join(pages))
        click.echo("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))

    for size in sizes:
        keep("time", seconds_to_plan(*size, seed))
    keep("optimum", distance_to_optimum(range(seed, seed + few)))
    for items, ranks in ((8, 2), (16, 4), (32, 8), (64, 8), (256, 8), (1000, 128)):
        count = many if items < 1000 else many // 10
        keep("heuristics", compare_heuristics(items, ranks, range(seed, seed + count)))


if __name__ == "__main__":
    main()
