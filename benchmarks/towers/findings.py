"""From the records of the tower study to its findings: comparisons of arms, and how stable the learned towers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.towers.runs import ARCHS, CONTROL_ARMS, LEARNED_ARMS, Run, affinity_of_pairs
from benchmarks.towers.statistics import compare_arms, holm, mean_correlation, mean_rand_index, pair_effects
from benchmarks.towers.trials import STUDY_SETS
from dmt.partitioner import TowerPartitioner

__all__ = ["Records", "auc_by_seed", "control_findings", "main_findings", "pair_findings", "stability_findings"]

Records = Mapping[Run, Mapping[str, Any]]
"""Return value of `benchmarks.towers.runs.Study.train`."""


def auc_by_seed(records: Records, dataset: str, arch: str, arm: str) -> dict[int, float]:
    """Test AUC of one arm by seed."""
    return {
        run.seed: record["auc"]
        for run, record in records.items()
        if (run.dataset, run.arch, run.arm) == (dataset, arch, arm)
    }


def main_findings(records: Records) -> list[dict[str, Any]]:
    """The question of the study: each strategy against strided towers, on every data set and arch."""
    return _compared(records, [(arm, "strided") for arm in LEARNED_ARMS])


def control_findings(records: Records) -> list[dict[str, Any]]:
    """Other comparisons that help to read the main ones, a family of their own; none where no control was trained."""
    if not any(run.arm in CONTROL_ARMS for run in records):
        return []
    return _compared(records, [(arm, "strided") for arm in CONTROL_ARMS] + [(arm, "random") for arm in LEARNED_ARMS])


def _compared(records: Records, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for dataset, arch in _models(records):
        flat = float(np.median(list(auc_by_seed(records, dataset, arch, "flat").values())))
        for arm, baseline in pairs:
            aucs = [auc_by_seed(records, dataset, arch, name) for name in (arm, baseline)]
            key = {"dataset": dataset, "arch": arch, "arm": arm, "baseline": baseline, "flat_median": flat}
            found.append(key | asdict(compare_arms(*aucs)))
    for test in ("mann_whitney_p", "wilcoxon_p"):
        for row, adjusted in zip(found, holm([row[test] for row in found]), strict=True):
            row[f"{test}_holm"] = adjusted
    return found


def pair_findings(records: Records, *, most: int = 3) -> list[dict[str, Any]]:
    """For every data set and arch the pairs of features that matter most for the AUC less that of strided towers.

    Of all towers that were learned for each seed; see `pair_effects`.
    """
    found = []
    for dataset, arch in _models(records):
        baseline = auc_by_seed(records, dataset, arch, "strided")
        runs = [
            (record["towers"], record["auc"] - baseline[run.seed])
            for run, record in sorted(records.items())
            if (run.dataset, run.arch) == (dataset, arch) and run.arm in ("random", *LEARNED_ARMS)
        ]
        effects = pair_effects([towers for towers, _ in runs], [difference for _, difference in runs])
        found += [{"dataset": dataset, "arch": arch, "num_pairs": len(effects)} | row for row in effects[:most]]
    return found


def stability_findings(records: Records) -> list[dict[str, Any]]:
    """For every data set and arch: do seeds agree about the towers, and what affinity do the arms' towers have?

    ``rand_index_*`` compare the towers of different seeds, ``rand_index_halves_*`` those learned from the mean affinity
    of one half of the seeds with those of the other half. ``affinity_*`` are mean affinities of features that share a
    tower, each seed judged by its own flat model; ``affinity_expected`` is that of towers drawn at random.
    """
    found = []
    for dataset, arch in _models(records):
        of_model = {run: record for run, record in records.items() if (run.dataset, run.arch) == (dataset, arch)}

        def values(arm: str, field: str, of_model: Records = of_model) -> list[Any]:
            return [record[field] for run, record in sorted(of_model.items()) if run.arm == arm]

        pairs = values("flat", "affinity")
        features = _in_column_order(values("strided", "towers")[0])
        row: dict[str, Any] = {"dataset": dataset, "arch": arch, "affinity_correlation": mean_correlation(pairs)}
        for arm in LEARNED_ARMS:
            row[f"rand_index_{arm}"] = mean_rand_index(values(arm, "towers"))
            half = len(pairs) // 2
            partitioner = TowerPartitioner(num_towers=STUDY_SETS[dataset].num_towers, strategy=arm)  # type: ignore[arg-type]
            row[f"rand_index_halves_{arm}"] = mean_rand_index(
                [
                    partitioner.fit(affinity_of_pairs(np.mean(part, axis=0).tolist(), features)).to_lists()
                    for part in (pairs[:half], pairs[half:])
                ]
            )
        for arm in (*LEARNED_ARMS, "strided"):
            row[f"affinity_{arm}"] = float(np.mean(values(arm, "affinity_within")))
        row["affinity_expected"] = float(np.mean(values("strided", "affinity_mean")))
        found.append(row)
    return found


def _models(records: Records) -> list[tuple[str, str]]:
    there = {(run.dataset, run.arch) for run in records}
    return [(dataset, arch) for dataset in STUDY_SETS for arch in ARCHS if (dataset, arch) in there]


def _in_column_order(strided_towers: Sequence[Sequence[str]]) -> list[str]:
    """The features as the data have them, which is the order of the pairs of an affinity."""
    longest = max(map(len, strided_towers))
    return [tower[i] for i in range(longest) for tower in strided_towers if i < len(tower)]
