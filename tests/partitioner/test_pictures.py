"""Pictures: what is written in them, what stays apart, and that any partition can be drawn."""

from __future__ import annotations

import dataclasses
import re

import matplotlib as mpl
import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import TowerLimits
from dmt.partitioner.report.pictures import plot_affinity, plot_coordinates, principal_axes
from dmt.partitioner.report.style import drawable
from dmt.plan.towers import TowerPlan
from dmt.report.style import tower_badges
from tests.partitioner.partitions import made_up_partition
from tests.partitioner.planted import planted_affinity

PNG = b"\x89PNG\r\n\x1a\n"


def draw_affinity(partition, path):
    return plot_affinity(partition.affinity, partition.plan, path)


DRAWN = [plot_coordinates, draw_affinity]


def words_of(draw, partition, tmp_path):
    """The texts of a picture, in the order in which they were written."""
    # Without fonttype none, text becomes outlines.
    with mpl.rc_context({"svg.fonttype": "none"}):
        source = draw(partition, tmp_path / "picture.svg").read_text()
    return re.findall(r"<text[^>]*>([^<]*)</text>", source)


# --- every picture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize(
    ("num_features", "num_towers", "fields"),
    [
        (1, 1, {}),
        (3, 3, {"tables": False}),
        (12, 3, {"dims": 1, "strategy": "diverse"}),
        (80, 70, {"dims": 5}),
        (12, 3, {"points": np.zeros((12, 2)), "limits": TowerLimits()}),
        (12, 3, {"name": "$x_{}<&\n\u7528\u6237" + 40 * "long"}),
    ],
)
def test_any_partition_is_drawn(tmp_path, draw, num_features, num_towers, fields):
    partition = made_up_partition(num_features, num_towers, **fields)
    path = draw(partition, tmp_path / "new" / "picture.png")
    assert path == tmp_path / "new" / "picture.png"
    assert path.read_bytes()[:8] == PNG


@pytest.mark.parametrize("draw", DRAWN)
def test_wrong_files_are_refused(tmp_path, draw):
    (tmp_path / "file").touch()
    caller = draw.__name__.replace("draw", "plot")
    with pytest.raises(InputError, match=rf"{caller}: path='.*a\.gifx' needs a suffix .*one of .*png"):
        draw(made_up_partition(), tmp_path / "a.gifx")
    with pytest.raises(InputError, match=rf"{caller}: path='.*a\.png' cannot be written \("):
        draw(made_up_partition(), tmp_path / "file" / "a.png")


def test_64_towers_look_different():
    towers = tower_badges(TowerPlan.strided([f"f{i}" for i in range(64)], 64))
    assert len({(tower["color"], tower["marker"]) for tower in towers}) == 64


def test_names_from_outside_are_made_drawable():
    assert drawable("user\tid") == "user id"
    assert drawable("\u7528id") == "\u25a1id"  # DejaVu Sans, matplotlib's own font, has no Chinese
    assert drawable("0123456789", 10) == "0123456789"
    assert drawable("0123456789a", 10) == "0123...89a"


def test_dollar_signs_start_no_formula(tmp_path):
    assert "$x_1$" in words_of(plot_coordinates, made_up_partition(6, 2, name="$x_{}$"), tmp_path)


@pytest.mark.parametrize("draw", DRAWN)
def test_what_would_be_a_broken_formula_is_drawn(draw, tmp_path):
    # Also a text that is measured before the figure is saved must not be read as a formula.
    partition = made_up_partition(6, 2, name="$\\frac{{${}")
    towers = tuple(dataclasses.replace(t, name=f"$\\frac{{${i}") for i, t in enumerate(partition.plan.towers))
    plan = dataclasses.replace(partition.plan, towers=towers)
    loads = tuple(dataclasses.replace(load, name=t.name) for load, t in zip(partition.loads, towers, strict=True))
    assert words_of(draw, dataclasses.replace(partition, plan=plan, loads=loads), tmp_path)


# --- affinity --------------------------------------------------------------------------------------------------------


def test_the_affinity_names_features_towers_and_title(tmp_path):
    affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["ad", "user", "shop"])
    plan = TowerPlan.from_lists([["ad", "user"], ["shop"]])
    with mpl.rc_context({"svg.fonttype": "none"}):
        text = plot_affinity(affinity, plan, tmp_path / "towers.svg").read_text()
        named = plot_affinity(affinity, plan, tmp_path / "own.svg", title="Tuesday").read_text()
    for word in (
        ">ad<",
        ">user<",
        ">shop<",
        "3 features in 2 towers, manual",
        "within towers 0.500, between towers 0.125",
    ):
        assert word in text
    assert "Tuesday" in named
    assert "3 features" not in named


def test_names_of_narrow_towers_are_left_out_before_they_touch(tmp_path):
    affinity, _ = planted_affinity(300, 8, seed=0)

    def shown(num_towers):
        plan = TowerPlan.strided(affinity.features, num_towers)
        words = words_of(lambda a, path: plot_affinity(a, plan, path), affinity, tmp_path)
        return [int(word) for word in words if word.isdigit()]

    assert shown(8) == list(range(8))
    many = shown(300)
    assert many[0] == 0
    assert 10 < len(many) < 40


def test_an_affinity_of_the_wrong_plan_or_format_is_refused(tmp_path):
    affinity, _ = planted_affinity(4, 2, seed=0)
    with pytest.raises(InputError, match=r"missing \['f3'\]"):
        plot_affinity(affinity, TowerPlan.from_lists([["f0", "f1"], ["f2"]]), tmp_path / "a.png")
    with pytest.raises(InputError, match=r"towers\.gifx.*one of .*png"):
        plot_affinity(affinity, TowerPlan.strided(affinity.features, 2), tmp_path / "towers.gifx")


# --- coordinates -----------------------------------------------------------------------------------------------------


def test_the_map_names_features_towers_and_its_meaning(tmp_path):
    words = words_of(plot_coordinates, made_up_partition(6, 2, name="user_{}"), tmp_path)
    assert {f"user_{i}" for i in range(6)} <= set(words)
    assert {"0", "1"} <= set(words)
    assert "6 features in 2 towers, coherent" in words
    assert any("near = alike" in word and "normalized stress 0.080" in word for word in words)
    assert any(
        "near = unlike" in word for word in words_of(plot_coordinates, made_up_partition(strategy="diverse"), tmp_path)
    )


def test_the_map_names_features_up_to_64(tmp_path):
    words = words_of(plot_coordinates, made_up_partition(65, 4), tmp_path)
    assert not [word for word in words if re.fullmatch(r"f\d+", word)]
    assert {"0", "1", "2", "3"} <= set(words)


def test_the_map_counts_the_names_without_room(tmp_path):
    # All in one place: the places around it are soon taken.
    partition = made_up_partition(60, 2, points=np.zeros((60, 2)), name="a_rather_long_name_{}")
    words = words_of(plot_coordinates, partition, tmp_path)
    shown = sum(word.startswith("a_rather") for word in words)
    assert 1 < shown < 60
    assert f"{60 - shown} feature names left out for lack of room" in words


def test_the_map_of_more_dimensions_says_what_it_shows(tmp_path):
    points = np.zeros((12, 3))
    points[:4, 0], points[4:8, 1], points[8:, 2] = (3, -3, 0, 0), (2, -2, 0, 0), (1, -1, 0, 0)
    words = words_of(plot_coordinates, made_up_partition(12, 3, points=points), tmp_path)
    assert "first two of 3 principal axes, 93% of the variance" in words  # 18 + 8 of 18 + 8 + 2
    assert not any("principal" in word for word in words_of(plot_coordinates, made_up_partition(), tmp_path))


def test_principal_axes_keep_distances_and_find_the_widest():
    rng = np.random.default_rng(0)
    plane = rng.normal(size=(20, 2)) * [5.0, 1.0]
    turned, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    flat, share = principal_axes(plane @ turned[:2] + 7.0)
    assert share == pytest.approx(1.0)
    wanted = np.linalg.norm(plane[:, None] - plane[None], axis=2)
    np.testing.assert_allclose(np.linalg.norm(flat[:, None] - flat[None], axis=2), wanted, atol=1e-9)
    assert flat[:, 0].std() > 3 * flat[:, 1].std()
    np.testing.assert_allclose(principal_axes(plane)[0], plane - plane.mean(axis=0))
    assert principal_axes(plane[:, :1])[0][:, 1].tolist() == [0.0] * 20
    assert principal_axes(plane[:1].repeat(3, axis=0) @ turned[:2])[1] == 1.0
