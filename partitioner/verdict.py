"""Judgements of a partition, as sentences that claim no more than its numbers support."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dmt.partitioner.partition import AffinityComparison, Partition, TowerContents, share_within
from dmt.plan.towers import TowerPlan

__all__ = [
    "Quantity",
    "Verdict",
    "deviations_from_random",
    "judge_balance",
    "judge_meaning",
    "judge_stress",
    "luck_bound",
    "pairs_in_words",
    "quantities",
    "shares_inside",
]

# Below this number of standard deviations, a plan is called no different from random towers.
_SHOWS = 2.0
# The bound holds for unrelated affinities in all but one of this number of cases.
_ODDS = 100.0
# Limits are ratios of sums, and a tower that just holds one may miss it by rounding.
_ROUNDING = 1e-9
# Kruskal's own words for his stress-1 (Psychometrika 29, 1964): 0.2 poor, 0.1 fair, 0.05 good.
_STRESS_WORDS = ((0.05, "good"), (0.1, "fair"), (0.2, "mediocre"), (math.inf, "poor"))
_AIMS = {
    "coherent": ("features that resemble each other", 1.0),
    "diverse": ("features that do not resemble each other", -1.0),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One judgement."""

    big: str
    """The number that it rests on, with its unit."""
    what: str
    """Name of that number."""
    sentence: str
    """The judgement in a sentence or two."""


def deviations_from_random(comparison: AffinityComparison) -> float | None:
    """Mean affinity within towers minus that within random towers, in standard deviations of the latter.

    Positive where the plan's pairs are more alike, and finite; None if there is no such pair or random towers do not
    differ among themselves.
    """
    within, mean, std = comparison.within, comparison.within_random, comparison.std_random
    if within is None or mean is None or std is None or not std > 0.0:
        return None
    deviations = (within - mean) / std
    return deviations if math.isfinite(deviations) else None


def luck_bound(sizes: Sequence[int], *, categories: Sequence[str] = ()) -> float:
    """Bounds the deviation of the best of all assignments if the affinities are unrelated, in standard deviations.

    A partitioner looks for an assignment that differs from random ones, and finds one in noise too. Were the mean
    affinities of the N possible assignments normally distributed, the largest would exceed sqrt(2 ln(100 N)) for fewer
    than 1 of 100 matrices of independent numbers, whatever their dependence (the union bound on Gaussian tails,
    P(z > t) < exp(-t^2 / 2)). N counts the ways to deal the features into towers of these sizes, category by category.

    ``sizes`` are F_t, the features of each tower, ``categories`` that of each tower, one for all where none are given.
    Returns sqrt(2 ln(100 N)), at least 3.03.

    Example:
        >>> round(luck_bound([2, 2]), 2), round(luck_bound([4, 4, 3, 3, 3, 3, 3, 3]), 1)
        (3.38, 9.1)
    """
    of_category: dict[str, list[int]] = {}
    for size, category in zip(sizes, categories or [""] * len(sizes), strict=True):
        of_category.setdefault(category, []).append(size)
    return math.sqrt(2.0 * (sum(map(_log_ways, of_category.values())) + math.log(_ODDS)))


def _log_ways(sizes: Sequence[int]) -> float:
    ways = math.lgamma(sum(sizes) + 1) - sum(math.lgamma(size + 1) for size in sizes)
    # Towers of one size may change places without another assignment.
    ways -= sum(math.lgamma(number + 1) for number in Counter(sizes).values())
    return max(0.0, ways)


def judge_meaning(partition: Partition) -> Verdict:
    """Judges the towers' affinity against random towers and against the best of many (`luck_bound`)."""
    if partition.interactions is not None:
        return _judge_interactions(partition)
    comparison, loads = partition.comparison, partition.loads
    deviations = deviations_from_random(comparison)
    aim, sign = _AIMS.get(partition.plan.strategy, ("", 0.0))
    opening = f"The towers put together {aim}. " if aim else ""
    if deviations is None:
        return Verdict(
            big="not known",
            what="distance from random towers",
            sentence=f"{opening}Random towers cannot be told from each other by their affinity, so nothing says "
            "whether these towers mean anything.",
        )
    side = "above" if deviations >= 0 else "below"
    alike = "sizes and categories" if any(load.category for load in loads) else "sizes"
    numbers = (
        f"Two features of one tower have a mean affinity of {comparison.within:.4f}, {abs(deviations):.1f} standard "
        f"deviations {side} that of random towers of the same {alike} "
        f"({comparison.within_random:.4f} \u00b1 {comparison.std_random:.4f}). "
    )
    bound = luck_bound([load.num_features for load in loads], categories=[load.category for load in loads])
    reached = deviations * sign if sign else abs(deviations)
    return Verdict(
        big=f"{deviations:+.1f} std".replace("-", "\u2212"),
        what="affinity within towers, against random towers",
        sentence=opening + numbers + _what_it_says(reached, bound),
    )


def shares_inside(partition: Partition) -> tuple[float, float, float] | None:
    """Part of all measured interaction that is inside these towers, strided and random ones; None if there is none."""
    own = share_within(partition.affinity, partition.plan)
    if own is None:
        return None
    naive = TowerPlan.strided(partition.affinity.features, partition.plan.num_towers)
    pairs = sum(load.num_features * (load.num_features - 1) // 2 for load in partition.loads)
    matrix = partition.affinity.matrix
    total = float(matrix.sum() - matrix.trace()) / 2
    random = (partition.comparison.within_random or 0.0) * pairs / total
    return own, share_within(partition.affinity, naive) or 0.0, random


def _judge_interactions(partition: Partition) -> Verdict:
    shares = shares_inside(partition)
    what = "of the measured interaction is inside towers"
    if shares is None:
        return Verdict(big="none", what=what, sentence="No pair of features was found to interact.")
    own, strided, random = shares
    aim = "together" if partition.plan.strategy == "together" else "apart"
    return Verdict(
        big=f"{own:.0%}",
        what=what,
        sentence=f"The towers keep features {aim} that predict the label together: {own:.0%} of all measured "
        f"interaction is inside towers, {strided:.0%} in strided ones and {random:.0%} in random ones. Only training "
        "tells what that is worth; use several seeds.",
    )


def pairs_in_words(partition: Partition, count: int) -> list[str]:
    """A sentence for each of the pairs of features that interact most; none where no interactions were measured."""
    found = partition.interactions
    if found is None:
        return []
    tower_of = {name: tower.name for tower in partition.plan.towers for name in tower.features}
    lines = []
    for pair in found.top_pairs(count):
        first, second = pair.features
        share = f", {pair.gain / found.loss:.1%} of it" if found.loss else ""
        # Column shards of a feature may be in several towers.
        same = tower_of.get(first) is not None and tower_of.get(first) == tower_of.get(second)
        place = f"both in {tower_of[first]}" if same else "in different towers"
        lines.append(
            f"{first} with {second}: known together, they lower the log loss by {pair.gain:.5f} \u00b1 "
            f"{pair.error:.5f} nats a row{share}; {place}."
        )
    return lines


def _what_it_says(reached: float, bound: float) -> str:
    if reached > bound:
        return (
            f"That is more than unrelated affinities would give (below {bound:.1f}): they have structure, as those of "
            "untrained vectors may have too. Whether it is that of the data, only towers from another seed of training "
            "tell."
        )
    if reached >= _SHOWS:
        return (
            f"That may be no more than the best of many assignments, which reaches up to {bound:.1f} where the "
            "affinities are unrelated; the partitioner looks for the best. Towers from another seed of training would "
            "tell."
        )
    return "That is no more than random towers reach: these towers mean nothing that shows here."


def judge_stress(partition: Partition) -> Verdict:
    """Judges how well the points follow the wanted distances."""
    stress = partition.normalized_stress
    word = next(word for bound, word in _STRESS_WORDS if stress <= bound)
    dims = partition.points.shape[1]
    where = {1: "on a line", 2: "in a plane"}.get(dims, f"in {dims} dimensions")
    advice = "" if word in ("good", "fair") else " Trust the affinity matrix more than the map of the points."
    if word == "poor":
        advice += " More dimensions (dims) follow the distances better."
    refined = ""
    if partition.num_refined:
        refined = (
            f" Refinement on the distances themselves moved {partition.num_refined:,} of "
            f"{len(partition.affinity.features):,} features to another tower than the points suggest."
        )
    return Verdict(
        big=f"{stress:.3f}",
        what="normalized stress of the points",
        sentence=f"The points follow the distances {where} with a {word} fit: normalized stress {stress:.3f}, where 0 "
        f"is perfect and above 0.2 is poor.{advice}{refined}",
    )


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity of all towers."""

    name: str
    values: tuple[float, ...]
    limit: float | None

    @property
    def imbalance(self) -> float | None:
        """Largest over mean tower; None if no tower has any."""
        return max(self.values) * len(self.values) / sum(self.values) if sum(self.values) > 0 else None


def quantities(partition: Partition) -> list[Quantity]:
    """Features, work and bytes of the towers, as far as they are known."""
    loads, limits = partition.loads, partition.limits
    columns: list[tuple[str, list[float], float | None]] = [
        ("features", [load.num_features for load in loads], None),
        ("work", [load.work for load in loads if load.work is not None], limits.max_work),
        ("bytes", [load.num_bytes for load in loads if load.num_bytes is not None], limits.max_bytes),
    ]
    return [
        Quantity(name=name, values=tuple(map(float, values)), limit=limit)
        for name, values, limit in columns
        if len(values) == len(loads)
    ]


def judge_balance(partition: Partition) -> Verdict:
    """Judges how even the towers are, and if they keep the limits."""
    loads, known = partition.loads, quantities(partition)
    ratios = {quantity.name: ratio for quantity in known if (ratio := quantity.imbalance) is not None}
    said = ", ".join(f"{ratio:.2f} times in {name}" for name, ratio in ratios.items())
    sentences = [f"Of the mean, the largest tower carries {said}."]
    if partition.limits.balance_ratio is not None:
        sentences.append(_judge_sizes(loads, partition.limits.balance_ratio))
    for quantity in known:
        if quantity.limit is not None:
            over = sum(value > quantity.limit * (1.0 + _ROUNDING) for value in quantity.values)
            sentences.append(
                f"{over:,} of {len(loads):,} towers exceed the limit of {quantity.name}."
                if over
                else f"All towers keep the limit of {quantity.name}."
            )
    worst = max(ratios, key=ratios.__getitem__)
    return Verdict(
        big=f"{ratios[worst]:.2f}", what=f"largest over mean tower, in {worst}", sentence=" ".join(sentences)
    )


def _judge_sizes(loads: Sequence[TowerContents], asked: float) -> str:
    """Sizes are bounded inside each category: the one with the largest ratio is judged, the first of equals."""
    sizes: dict[str, list[int]] = {}
    for load in loads:
        sizes.setdefault(load.category, []).append(load.num_features)
    ratios = {category: max(own) / min(own) for category, own in sizes.items()}
    worst = max(ratios, key=ratios.__getitem__)
    why = ""
    if ratios[worst] > asked * (1.0 + _ROUNDING):
        why = " (sizes that do not divide differ by one, and features of one table may count as one)"
    subject = f"In category {worst!r}, the largest tower" if worst else "It"
    others = f" (of {len(sizes):,} categories, the least even)" if len(sizes) > 1 else ""
    return (
        f"{subject} has {ratios[worst]:.2f} times the features of the smallest{others}; at most {asked:g} is "
        f"allowed{why}."
    )
