"""Verdicts claim no more than the numbers support, and the page and its pictures show them."""

from __future__ import annotations

import dataclasses
import math
from html.parser import HTMLParser

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import (
    FeatureAffinity,
    Interaction,
    TowerPartitioner,
    plot_affinity,
    plot_coordinates,
    tower_affinity,
    write_partition_report,
)
from dmt.partitioner.partition import TowerContents, compare_towers, judge_balance, judge_meaning, luck_bound
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from tests.partitioner.planted import planted_affinity
from tests.seeds import seeds


class Page(HTMLParser):
    """The words of a page in a row, what it loads, and its pictures."""

    def __init__(self, path):
        super().__init__()
        self.words, self.addresses, self._skipped = [], [], False
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self._skipped = tag == "style"
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        if not self._skipped:
            self.words.append(data)


def made(num_features=12, num_towers=3, **settings):
    affinity, _ = planted_affinity(num_features, num_towers, seed=0)
    tables = [TableSpec(name=n, num_embeddings=100, embedding_dim=8, feature_names=(n,)) for n in affinity.features]
    return TowerPartitioner(num_towers=num_towers, **settings).partition(affinity, tables=tables)


def interactions(**fields):
    gains = np.zeros((6, 6))
    for i, j, gain in ((0, 3, 0.02), (1, 4, 0.01), (2, 5, 0.0001)):
        gains[i, j] = gains[j, i] = gain
    triple = Interaction(features=("f0", "f1", "f2"), gain=0.005, error=0.0002)
    names = [f"f{i}" for i in range(6)]
    measured = FeatureAffinity(
        **{"matrix": gains, "features": names, "errors": np.full((6, 6), 0.001), "triples": (triple,), "loss": 0.5}
        | {"measure": "interactions", "num_samples": 5000}
        | fields
    )
    return TowerPartitioner(num_towers=3).partition(measured)


def test_luck_is_bounded_by_the_number_of_assignments_as_in_a_normal_distribution():
    matrix = np.random.default_rng(0).normal(0.5, 0.02, (26, 26))
    found = TowerPartitioner(num_towers=8).partition(affinity_of(matrix))
    pairs = found.affinity.matrix[np.triu_indices(26, k=1)]
    ways = math.factorial(26) / (24**2 * 6**6 * 2 * 720)  # into two towers of 4 and six of 3
    expected = np.sqrt(2 * np.log(100 * ways) / (2 * 6 + 6 * 3)) * pairs.std()
    assert 0.8 * expected < luck_bound(found) < 1.1 * expected
    for changes in ([{"category": name} for name in "abababab"], [{"num_blocks": 1}] * 8):
        fewer_ways = tuple(dataclasses.replace(load, **by) for load, by in zip(found.loads, changes, strict=True))
        assert luck_bound(dataclasses.replace(found, loads=fewer_ways)) < luck_bound(found)


def affinity_of(matrix):
    """An affinity whose entries above the diagonal are those of a matrix."""
    above = np.triu(matrix, k=1)
    return FeatureAffinity(matrix=above + above.T, features=[f"f{i}" for i in range(len(matrix))])


@pytest.mark.parametrize("strategy", ["coherent", "diverse"])
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_the_best_towers_of_noise_may_be_no_better_than_random(seed, strategy):
    rng = np.random.default_rng(10 + 10 * seed)
    for matrix in (rng.uniform(0, 1, (16, 16)), np.minimum(rng.pareto(1.5, (26, 26)) / 50, 1.0)):
        found = TowerPartitioner(num_towers=len(matrix) // 4, strategy=strategy).partition(affinity_of(matrix))
        assert "These towers may be no better than random" in judge_meaning(found)


def test_planted_towers_have_structure_and_equal_affinities_do_not():
    assert "the affinities have structure" in judge_meaning(made())
    same = TowerPartitioner(num_towers=2).partition(FeatureAffinity(matrix=np.ones((6, 6)), features=list("abcdef")))
    assert "these towers are no better than random" in judge_meaning(same)
    assert "All pairs of features have the same affinity" in same.notes[0]


def test_shares_are_of_what_is_beyond_the_error():
    found = interactions()
    assert found.comparison.within == pytest.approx(0.03 / 0.035)
    assert found.comparison.between == pytest.approx(0.005 / 0.035)
    assert "86% of all interaction beyond the measuring error is inside towers" in judge_meaning(found)


def test_balance_is_the_largest_over_the_mean():
    loads = [(4, 100.0, 10), (4, 300.0, 10)]
    contents = tuple(TowerContents(num_features=n, num_blocks=n, work=work, num_bytes=size) for n, work, size in loads)
    said = "Compared with the mean tower, the largest has 1.00 times the features, 1.50 times the work, 1.00 times"
    assert judge_balance(dataclasses.replace(made(8, 2), loads=contents)) == f"{said} the bytes."


def test_means_within_between_and_of_random_towers_are_those_by_hand():
    matrix = np.array([[1, 0.1, 0.2, 0.3], [0.1, 1, 0.4, 0.5], [0.2, 0.4, 1, 0.6], [0.3, 0.5, 0.6, 1]])
    affinity = FeatureAffinity(matrix=matrix, features=list("abcd"))
    plan = TowerPlan.from_lists([["d", "a", "b"], ["c"]])
    random = [{"a": 0, "b": 0, "c": 1, "d": 1}, {"a": 0, "b": 1, "c": 0, "d": 1}]
    found = compare_towers(affinity, plan, random)
    assert (found.within, found.between) == tower_affinity(affinity, plan) == pytest.approx((0.9 / 3, 1.2 / 3))
    assert (found.within_strided, found.std_random) == (pytest.approx((0.2 + 0.5) / 2), 0.0)
    assert found.within_random == pytest.approx(np.mean([(0.1 + 0.6) / 2, (0.2 + 0.5) / 2]))
    whole = compare_towers(affinity, TowerPlan.from_lists([list("abcd")]), [])
    assert (whole.between, whole.within_random) == (None, None)
    alone = TowerPlan.from_lists([["c", "d"], ["a"], ["b"]])
    assert compare_towers(affinity.permuted(list("bcda")), alone, []).within_strided == 0.1
    with pytest.raises(InputError, match="missing"):
        compare_towers(affinity, TowerPlan.from_lists([["a", "b"], ["c"]]), [])


def test_the_page_of_resemblance_is_whole_and_loads_nothing(tmp_path):
    partition = made()
    path = write_partition_report(partition, tmp_path / "new", links=[("../other.html", "Another page")])
    page = Page(path)
    pictures = [address for address in page.addresses if address.startswith("data:image/png;base64,")]
    assert len(pictures) == 2
    assert [a for a in page.addresses if a not in pictures] == ["../other.html"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["affinity.png", "coordinates.png", "report.html"]
    assert judge_meaning(partition) in page.text
    within, between = partition.comparison.within, partition.comparison.between
    assert f"within these towers {within:.4f} , between them {between:.4f} ;" in page.text
    assert judge_balance(partition) in page.text
    assert "interaction" not in page.text
    for tower in partition.plan.towers:
        assert f"{tower.name} {' '.join(tower.features)}" in page.text


def test_the_page_of_interactions_shows_five_and_no_affinity(tmp_path):
    partition = interactions(notes=("A note.",))
    page = Page(write_partition_report(partition, tmp_path))
    assert "f0, f3 0.02000 \u00b1 0.00100 4.0% tower_" in page.text
    assert "f0, f1, f2 0.00500 \u00b1 0.00020 1.0% in different towers" in page.text
    assert "f2, f5" not in page.text, "a gain within its error"
    assert "Interactions digest" in page.text
    assert "ffinity" not in page.text
    assert "Note: A note." in page.text
    assert not (tmp_path / "coordinates.png").exists()
    noise = Page(write_partition_report(interactions(matrix=np.zeros((6, 6)), triples=()), tmp_path)).text
    assert "the towers are arbitrary" in noise
    assert "No pair or triple of features lowers the log loss" in noise


def test_names_from_outside_are_shown_as_written(tmp_path):
    names = ["<b>&", "$x_{", "\u7528", "a\nb", "c", "d" * 60]
    affinity = FeatureAffinity(matrix=np.random.default_rng(0).uniform(0.5, 0.5, (6, 6)), features=names)
    page = Page(write_partition_report(TowerPartitioner(num_towers=2).partition(affinity), tmp_path))
    assert all(" ".join(name.split()) in page.text for name in names)


@pytest.mark.parametrize("draw", [lambda p, path: plot_affinity(p.affinity, p.plan, path), plot_coordinates])
def test_pictures_that_cannot_be_written_are_refused(draw, tmp_path):
    with pytest.raises(InputError, match=r"Picture .*x\.doc: cannot be written \(Format 'doc' is not supported .*png"):
        draw(made(), tmp_path / "x.doc")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        draw(made(), tmp_path / "file" / "x.png")
    with pytest.raises(InputError, match=r"plot_coordinates: a partition made from interactions has no points\. Use"):
        plot_coordinates(interactions(), tmp_path / "x.png")
    with pytest.raises(InputError, match=r"partition is a TowerPlan\. Pass the result of TowerPartitioner\.partition"):
        write_partition_report(made().plan, tmp_path)
