"""The verdicts on a partition, and the page as a browser would read it."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.partitioner.partition import AffinityComparison, TowerLimits, compare_towers
from dmt.partitioner.report.page import write_partition_report
from dmt.partitioner.verdict import deviations_from_random, judge_balance, judge_meaning, judge_stress, luck_bound
from dmt.report import data_uri, render_page
from tests.partitioner.partitions import made_up_partition


def comparison(within, *, mean=0.2, std=0.01):
    return AffinityComparison(within=within, between=0.2, within_strided=0.2, within_random=mean, std_random=std)


BEYOND = (
    "That is more than unrelated affinities would give (below 9.1): they have structure, as those of untrained vectors "
    "may have too."
)


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_luck_is_bounded_by_the_number_of_assignments():
    assert luck_bound([3]) == pytest.approx(math.sqrt(2 * math.log(100)))
    assert luck_bound([1, 1, 1]) == pytest.approx(luck_bound([3]))  # towers without names: one way
    assert luck_bound([3, 2]) == pytest.approx(math.sqrt(2 * math.log(100 * 10)))
    assert luck_bound([2, 2, 2]) == pytest.approx(math.sqrt(2 * math.log(100 * 15)))


def test_with_categories_fewer_assignments_are_possible():
    user_item = ["user", "user", "item", "item"]
    # 3 ways for each category, against 105 for all four towers.
    assert luck_bound([2, 2, 2, 2], categories=user_item) == pytest.approx(math.sqrt(2 * math.log(100 * 9)))
    assert luck_bound([2, 2, 2, 2]) == pytest.approx(math.sqrt(2 * math.log(100 * 105)))
    assert luck_bound([2, 1], categories=["user", "item"]) == luck_bound([3])


def test_the_best_of_all_assignments_of_noise_stays_below_the_bound():
    # All 105 pairings of 8 features, on affinities without structure.
    def pairings(rest):
        if not rest:
            yield []
        for partner in rest[1:]:
            yield from ([(rest[0], partner), *more] for more in pairings([i for i in rest[1:] if i != partner]))

    every = list(pairings(list(range(8))))
    assert len(every) == 105
    rng, best = np.random.default_rng(0), []
    for _ in range(300):
        noise = rng.normal(size=(8, 8))
        means = np.array([np.mean([noise[i, j] for i, j in pairs]) for pairs in every])
        best.append((means.max() - means.mean()) / means.std())
    bound = luck_bound([2, 2, 2, 2])
    assert np.mean(np.array(best) > bound) < 0.01
    assert np.mean(best) > 0.5 * bound  # not a bound that says nothing


@pytest.mark.parametrize(
    ("strategy", "within", "words", "big"),
    [
        ("coherent", 0.5, BEYOND, "+30.0 std"),
        ("coherent", 0.5, "only towers from another seed of training tell.", "+30.0 std"),
        ("coherent", 0.25, "That may be no more than the best of many assignments, which reaches up to 9.1", "+5.0"),
        ("coherent", 0.21, "these towers mean nothing that shows here", "+1.0 std"),
        ("coherent", 0.1, "these towers mean nothing that shows here", "\u221210.0 std"),
        ("diverse", 0.05, "features that do not resemble each other. Two features", "\u221215.0 std"),
        ("diverse", 0.05, "15.0 standard deviations below that of random towers of the same sizes (0.2000", "\u221215"),
        ("diverse", 0.05, BEYOND, "\u221215.0 std"),
        ("diverse", 0.5, "these towers mean nothing that shows here", "+30.0 std"),
        ("manual", 0.5, BEYOND, "+30.0 std"),
    ],
)
def test_the_affinities_have_structure_beyond_the_bound_only(strategy, within, words, big):
    verdict = judge_meaning(made_up_partition(26, 8, strategy=strategy, comparison=comparison(within)))
    assert words in verdict.sentence
    endings = (BEYOND, "no more than the best of many", "no more than random towers reach")
    assert sum(ending in verdict.sentence for ending in endings) == 1
    assert verdict.big.startswith(big)


def test_with_categories_the_towers_are_judged_inside_them():
    partition = made_up_partition(8, 4, comparison=comparison(0.24))  # 4 deviations
    loads = [
        dataclasses.replace(load, category=category)
        for load, category in zip(partition.loads, ["user", "user", "item", "item"], strict=True)
    ]
    assert "up to 4.3 where" in judge_meaning(partition).sentence
    sentence = judge_meaning(dataclasses.replace(partition, loads=tuple(loads))).sentence
    assert "random towers of the same sizes and categories" in sentence
    assert "(below 3.7): they have structure" in sentence


def test_without_random_towers_to_compare_nothing_is_claimed():
    for numbers in (
        comparison(None),
        comparison(0.3, std=0.0),
        comparison(0.3, mean=None),
        comparison(0.3, std=None),
        comparison(0.3, std=math.nan),
        comparison(0.3, std=5e-324),  # so small that the quotient overflows
    ):
        assert deviations_from_random(numbers) is None
        assert "nothing says whether" in judge_meaning(made_up_partition(comparison=numbers)).sentence


def test_planted_towers_are_clear_and_shuffled_ones_are_not():
    partition = made_up_partition(26, 8)
    found = compare_towers(partition.affinity, partition.plan)
    assert BEYOND in judge_meaning(dataclasses.replace(partition, comparison=found)).sentence
    names = np.random.default_rng(0).permutation(partition.plan.features).tolist()
    towers = tuple(
        dataclasses.replace(t, features=tuple(names.pop() for _ in t.features)) for t in partition.plan.towers
    )
    plan = dataclasses.replace(partition.plan, towers=towers)
    shuffled = dataclasses.replace(partition, plan=plan, comparison=compare_towers(partition.affinity, plan))
    assert BEYOND not in judge_meaning(shuffled).sentence


@pytest.mark.parametrize(
    ("stress", "words"),
    [
        (0.0, "a good fit"),
        (0.1, "a fair fit"),
        (0.15, "Trust the affinity matrix"),
        (0.4, "a poor fit.*More dimensions"),
    ],
)
def test_stress_is_judged_in_kruskals_words(stress, words):
    assert re.search(words, judge_stress(made_up_partition(normalized_stress=stress)).sentence)


def test_stress_says_where_and_what_was_refined():
    sentence = judge_stress(made_up_partition(12, 3, dims=3, num_refined=2)).sentence
    assert "in 3 dimensions" in sentence
    assert "moved 2 of 12 features" in sentence
    assert "on a line" in judge_stress(made_up_partition(dims=1)).sentence
    assert "Refinement" not in judge_stress(made_up_partition()).sentence


def test_balance_is_judged_by_what_is_least_even():
    partition = made_up_partition(5, 2, limits=TowerLimits(balance_ratio=1.0, max_work=250, max_bytes=10))
    loads = [
        dataclasses.replace(load, work=work, num_bytes=size)
        for load, work, size in zip(partition.loads, (300.0, 100.0), (8, 2), strict=True)
    ]
    verdict = judge_balance(dataclasses.replace(partition, loads=tuple(loads)))
    assert (verdict.big, verdict.what) == ("1.60", "largest over mean tower, in bytes")
    for words in (
        "1.20 times in features, 1.50 times in work, 1.60 times in bytes",
        "1.50 times the features of the smallest; at most 1 is allowed (sizes that do not divide",
        "1 of 2 towers exceed the limit of work.",
        "All towers keep the limit of bytes.",
    ):
        assert words in verdict.sentence
    bare = judge_balance(made_up_partition(tables=False, limits=TowerLimits()))
    assert (bare.big, bare.what) == ("1.00", "largest over mean tower, in features")
    assert "limit" not in bare.sentence


def test_limits_held_but_for_rounding_are_kept():
    partition = made_up_partition(4, 2, limits=TowerLimits(max_work=0.3, max_bytes=10))
    loads = [dataclasses.replace(load, work=0.1 + 0.2, num_bytes=10) for load in partition.loads]
    assert loads[0].work > 0.3
    kept = judge_balance(dataclasses.replace(partition, loads=tuple(loads))).sentence
    assert "All towers keep the limit of work. All towers keep the limit of bytes." in kept
    loads = [dataclasses.replace(load, work=0.3 * (1 + 1e-8), num_bytes=11) for load in loads]
    broken = judge_balance(dataclasses.replace(partition, loads=tuple(loads))).sentence
    assert "2 of 2 towers exceed the limit of work. 2 of 2 towers exceed the limit of bytes." in broken


def test_sizes_are_judged_inside_each_category():
    partition = made_up_partition(16, 4, limits=TowerLimits(balance_ratio=1.5))

    def sentence(sizes, categories):
        loads = [
            dataclasses.replace(load, num_features=size, category=category)
            for load, size, category in zip(partition.loads, sizes, categories, strict=True)
        ]
        return judge_balance(dataclasses.replace(partition, loads=tuple(loads))).sentence

    four = ["user", "user", "item", "item"]
    assert "It has 5.00 times the features of the smallest; at most 1.5" in sentence([2, 2, 10, 10], [""] * 4)
    # Between categories sizes are free.
    even = sentence([2, 2, 10, 10], four)
    assert "In category 'user', the largest tower has 1.00 times the features of the smallest (of 2 cat" in even
    assert "at most 1.5 is allowed." in even
    uneven = sentence([3, 2, 7, 4], four)
    assert "In category 'item', the largest tower has 1.75 times" in uneven
    assert "at most 1.5 is allowed (sizes that do not divide" in uneven
    assert "In category 'all', the largest tower has 2.00 times the features of the smallest; at" in sentence(
        [4, 4, 2, 4], ["all"] * 4
    )


def test_bytes_have_three_figures():
    shown = [human_bytes(n) for n in (0, 999, 1000, 9_994, 9_996, 99_960, 123_456_789, 999_499, 999_600, 5 * 10**18)]
    assert shown == [
        "0 bytes", "999 bytes", "1.00 kB", "9.99 kB", "10.0 kB", "100 kB", "123 MB", "999 kB", "1.00 MB", "5000 PB",
    ]  # fmt: skip


# --- page ------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would find: balanced tags, the text, and every address that it would load."""

    VOID = ("meta", "img", "br", "link")
    LOADING = ("src", "href", "srcset", "poster", "action", "data", "background")

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.addresses, self.pieces, self.details = [], [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], "every tag is closed"
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in self.LOADING]
        if tag == "details":
            self.details.append("open" in dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> is out of place at {self.getpos()}"

    def handle_data(self, data):
        if "style" not in self.open:
            self.pieces.append(data)


def test_the_page_is_whole_and_loads_nothing_else(tmp_path):
    path = write_partition_report(made_up_partition(), tmp_path / "new")
    assert path == tmp_path / "new" / "report.html"
    assert {file.name for file in path.parent.iterdir()} == {
        "affinity.png", "coordinates.png", "report.html",
    }  # fmt: skip
    page = Page(path)
    order = ("affinity", "coordinates")
    assert page.addresses == [data_uri(path.parent / f"{name}.png") for name in order]
    assert not {"script", "link", "iframe", "object", "a"} & set(page.tags)
    source = path.read_text(encoding="utf-8")
    assert not [word for word in ("http", "url(", "@import") if word in source]


def test_the_page_shows_the_numbers(tmp_path):
    partition = made_up_partition(12, 3, notes=("The affinities say little.",), comparison=comparison(0.55))
    loads = [dataclasses.replace(load, work=1234.0, num_bytes=12_440_000_000) for load in partition.loads]
    text = Page(write_partition_report(dataclasses.replace(partition, loads=tuple(loads)), tmp_path)).text
    own = partition.affinity.matrix[::3, ::3]  # f0, f3, f6, f9
    for words in (
        "12 features in 3 coherent towers",
        "measured on 65,536 samples",
        "Mind: The affinities say little.",
        "+35.0 std",
        "0.5500 within these towers, 0.2000 \u00b1 0.0100 within random ones, 0.2000 naive",
        f"tower_0 f0 f3 f6 f9 4 1,234 12.4 GB {own[np.triu_indices(4, k=1)].mean():.4f} tower_1",
        f"Here that is {luck_bound([4, 4, 4]):.1f}",
        "Random towers have the sizes of these towers, and obey no other rule",
        "the affinities of an untrained model may pass it",
        "Command dmt partition --towers 3 Strategy coherent, 2 dimensions Seed 0 Affinity digest 0123456789abcdef",
        "Samples 65,536",
        "numpy 2",
    ):
        assert words in text, words
    assert text.index("Mind:") < text.index("standard deviations")
    assert not [word for word in ("luck", "Luck", "99 of 100", "ategor", "column shards") if word in text]
    assert "chosen" not in text


def test_the_page_says_what_other_towers_obey(tmp_path):
    # Named like column shards, two in each tower.
    partition = made_up_partition(4, 2)
    names = iter(["ad[0:1]", "user[0:1]", "ad[1:2]", "user[1:2]"])
    renamed = {name: next(names) for name in partition.plan.features}
    affinity = dataclasses.replace(partition.affinity, features=tuple(map(renamed.get, partition.affinity.features)))
    towers = tuple(
        dataclasses.replace(tower, features=tuple(map(renamed.get, tower.features))) for tower in partition.plan.towers
    )
    plan = dataclasses.replace(partition.plan, towers=towers, column_splits={"ad": (1, 1), "user": (1, 1)})
    loads = tuple(dataclasses.replace(load, category=load.name) for load in partition.loads)
    partition = dataclasses.replace(partition, plan=plan, affinity=affinity, loads=loads)
    text = Page(write_partition_report(partition, tmp_path)).text
    for words in (
        "in turn (strided), whatever their category. Random towers have the sizes and categories of these towers, and",
        "Pairs of column shards of one table count nowhere: these towers may not put them together.",
        f"Here that is {luck_bound([2]):.1f}",
    ):
        assert words in text, words


def test_strategies_are_shown_side_by_side(tmp_path):
    other = made_up_partition(strategy="diverse", comparison=comparison(0.1), normalized_stress=0.21)
    page = Page(write_partition_report(made_up_partition(alternatives=(other,)), tmp_path))
    assert "coherent (chosen)" in page.text
    assert "diverse 0.1000 0.2000 0.2000 0.2000 \u00b1 0.0100 -10.0 0.210" in page.text
    assert "The same for diverse, which was tried too" in page.text
    assert (tmp_path / "affinity_2.png").exists()
    assert data_uri(tmp_path / "coordinates_2.png") in page.addresses


def test_names_from_outside_are_shown_as_written(tmp_path):
    partition = made_up_partition(name="<b>{}</b> & 'x' \"y\" $z_ \u7528\u6237")
    plan = dataclasses.replace(partition.plan, command="dmt partition '<script>x()</script>'")
    page = Page(write_partition_report(dataclasses.replace(partition, plan=plan, notes=("a < b & c",)), tmp_path))
    for words in ("<b>3</b> & 'x' \"y\" $z_ \u7528\u6237", "'<script>x()</script>'", "Mind: a < b & c"):
        assert words in page.text, words
    assert "script" not in page.tags
    assert "b" not in page.tags


def test_long_lists_start_closed_and_unknown_columns_are_left_out(tmp_path):
    few = Page(write_partition_report(made_up_partition(64, 2), tmp_path / "shorten"))
    many = Page(write_partition_report(made_up_partition(65, 2, tables=False), tmp_path / "many"))
    assert (few.details, many.details) == ([True, True], [False, False])
    assert "tower features work bytes affinity within" in few.text
    assert "tower features affinity within" in many.text
    assert "pooling factor" not in many.text


def test_towers_of_one_feature_have_no_affinity_within(tmp_path):
    none = AffinityComparison(within=None, between=0.2, within_strided=None, within_random=None, std_random=None)
    text = Page(write_partition_report(made_up_partition(2, 2, comparison=none, tables=False), tmp_path)).text
    assert "tower_0 f0 1 - tower_1 f1 1 - mean 1 largest / mean 1.00 All towers wait" in text
    assert "coherent - 0.2000 - - - 0.080 Mean affinity" in text
    assert "not known distance from random towers" in text


def test_the_table_of_towers_ends_with_the_balance_and_the_limits(tmp_path):
    partition = made_up_partition(4, 2, limits=TowerLimits(balance_ratio=1.5, max_work=500, max_bytes=10**12))
    loads = [
        dataclasses.replace(load, work=work, num_bytes=size)
        for load, work, size in zip(partition.loads, (300.0, 100.0), (4 * 10**9, 2 * 10**9), strict=True)
    ]
    text = Page(write_partition_report(dataclasses.replace(partition, loads=tuple(loads)), tmp_path)).text
    assert "mean 2 200 3.00 GB largest / mean 1.00 1.50 1.33 limit - 500 1.00 TB All towers wait" in text
    idle = [dataclasses.replace(load, work=0.0, num_bytes=0) for load in made_up_partition().loads]
    text = Page(write_partition_report(made_up_partition(loads=tuple(idle)), tmp_path)).text
    assert "mean 4 0 0 bytes largest / mean 1.00 - - All towers wait" in text


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/.*png' cannot be written \("):
        write_partition_report(made_up_partition(), tmp_path / "file")
    (tmp_path / "page.html").write_text("{{ absent }}")
    with pytest.raises(InputError, match=r"Page .*file/x\.html: cannot be written"):
        render_page(tmp_path / "page.html", tmp_path / "file" / "x.html", {"absent": 1})
