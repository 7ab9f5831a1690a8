"""From a matrix of feature affinities to towers: partition, look at the picture, save, compare with the naive towers.

One process, and no TorchRec: this half of the library runs on a laptop. Three groups of four features are planted,
shuffled so that neither runs nor strides of the feature order match them. Run it with

    python examples/learn_towers.py [FOLDER]

It writes towers.json and affinity.png to FOLDER (default runs/learn_towers) and prints the towers found.
"""

import sys
from pathlib import Path

import numpy as np

from dmt import TowerPlan
from dmt.partitioner import FeatureAffinity, TowerPartitioner, plot_affinity, tower_affinity

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/learn_towers")
rng = np.random.default_rng(0)
features = [f"f{i:02}" for i in range(12)]
group = rng.permutation(np.arange(12) % 3)

# Affinities are absolute mean cosines: here 0.6 within a group, 0.1 between groups, and some noise on each pair.
# From a trained model: FeatureAffinity.collect(model, batches).
matrix = np.where(group[:, None] == group[None, :], 0.6, 0.1) + 0.05 * rng.random((12, 12))
matrix = (matrix + matrix.T) / 2
np.fill_diagonal(matrix, 1.0)
affinity = FeatureAffinity(matrix=matrix, features=tuple(features))

plan = TowerPartitioner(num_towers=3, strategy="coherent", seed=0).fit(affinity)
plan.save(folder / "towers.json")
plot_affinity(affinity, plan, folder / "affinity.png")

planted = {frozenset(f for f, g in zip(features, group, strict=True) if g == number) for number in range(3)}
for tower in TowerPlan.load(folder / "towers.json").towers:
    print(f"{tower.name}: {' '.join(tower.features)}")
print(f"planted groups found: {planted == {frozenset(tower.features) for tower in plan.towers}}")
for name, towers in (("learned", plan), ("strided", TowerPlan.strided(features, num_towers=3))):
    within, between = tower_affinity(affinity, towers)
    print(f"{name}: mean affinity {within:.3f} within towers, {between:.3f} between them")
print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
