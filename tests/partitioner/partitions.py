"""Partitions made up for the tests of pictures and reports: quick to make, and of any size."""

from __future__ import annotations

import dataclasses

import numpy as np

from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import AffinityComparison, Partition, TowerContents, TowerLimits, tower_affinity
from dmt.plan.towers import TowerPlan

BALANCED = TowerLimits(balance_ratio=1.0)


def made_up_partition(
    num_features=12,
    num_towers=3,
    *,
    strategy="coherent",
    dims=2,
    seed=0,
    name="f{}",
    spread=0.05,
    tables=True,
    limits=BALANCED,
    **fields,
):
    """Features in groups that are the towers; ``spread`` is how far a group's points scatter around their centre.

    ``fields`` replace fields of the partition.
    """
    rng = np.random.default_rng(seed)
    names = [name.format(i) for i in range(num_features)]
    group = np.arange(num_features) % num_towers
    centres = rng.uniform(-0.5, 0.5, (num_towers, dims))
    points = centres[group] + rng.normal(0, spread, (num_features, dims))
    matrix = np.where(group[:, None] == group, 0.8, 0.15) + rng.normal(0, 0.05, (num_features, num_features))
    matrix = np.clip((matrix + matrix.T) / 2, 0, 1)
    affinity = FeatureAffinity(matrix=matrix, features=names, num_samples=65_536)
    plan = TowerPlan.from_lists(
        [[names[i] for i in np.flatnonzero(group == t)] for t in range(num_towers)],
        strategy=strategy,
        seed=seed,
        affinity={"digest": "0123456789abcdef"},
        command="dmt partition --towers 3",
    )
    within, between = tower_affinity(affinity, plan)
    loads = tuple(
        TowerContents(
            name=tower.name,
            num_features=len(tower.features),
            work=float(rng.integers(800, 1200)) if tables else None,
            num_bytes=int(rng.integers(10**9, 2 * 10**9)) if tables else None,
        )
        for tower in plan.towers
    )
    made = Partition(
        plan=plan,
        affinity=affinity,
        points=points,
        stress=1.25,
        normalized_stress=0.08,
        loads=loads,
        limits=limits,
        comparison=AffinityComparison(
            within=within, between=between, within_strided=0.21, within_random=0.2, std_random=0.02
        ),
    )
    return dataclasses.replace(made, **fields)
