"""`PartitionRules`: patterns, contradictions, files."""

from __future__ import annotations

import time

import pytest

from dmt.errors import InputError
from dmt.partitioner import PartitionRules

FEATURES = ["user_id", "user_age", "item_id", "item_shop", "hour"]


def test_names_and_patterns_become_features_in_the_order_of_the_model():
    rules = PartitionRules(
        categories={"item": ["item_*"], "user": ["hour", "user_???", "user_id"]},
        together=[["item_shop", "item_id"], ["user_*", "hour", "hour"]],
        apart=[["*_id"]],
        max_work_ratio=2,
    ).for_features(FEATURES)
    assert rules.categories == {"item": ("item_id", "item_shop"), "user": ("user_id", "user_age", "hour")}
    assert rules.together == [("item_id", "item_shop"), ("user_id", "user_age", "hour")]
    assert rules.apart == [("user_id", "item_id")]
    assert rules.max_work_ratio == 2
    assert rules.for_features(FEATURES) == rules


def test_a_name_says_more_than_a_pattern_wherever_it_stands():
    for factors in ({"user_*": 2.0, "user_id": 7.0}, {"user_id": 7.0, "user_*": 2.0}):
        found = PartitionRules(pooling_factors=factors).for_features(FEATURES).pooling_factors
        assert found == {"user_id": 7.0, "user_age": 2.0}


def test_names_may_hold_the_characters_of_patterns():
    features = ["*", "a?", "ab", "x[0:4]", "x[4:8]", "x0", "用户_1", "用户_2"]
    rules = PartitionRules(together=[["*", "ab"], ["a?", "x0"], ["x[0:4]", "ab"], ["x[*"], ["用户_*"]])
    assert rules.for_features(features).together == [
        ("*", "ab"),
        ("a?", "x0"),
        ("ab", "x[0:4]"),
        ("x[0:4]", "x[4:8]"),
        ("用户_1", "用户_2"),
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_work_ratio": 0.9}, r"max_work_ratio: Input should be greater than or equal to 1 \(got 0\.9\)"),
        ({"max_work_ratio": "2"}, r"max_work_ratio: Input should be a valid number \(got '2'\)"),
        ({"max_bytes_ratio": float("inf")}, "max_bytes_ratio: Input should be a finite number"),
        ({"max_bytes_ratio": float("nan")}, "max_bytes_ratio: Input should be a finite number"),
        ({"max_bytes_ratio": True}, "max_bytes_ratio: Input should be a valid number"),
        ({"max_tower_bytes": 0}, "max_tower_bytes: Input should be greater than 0"),
        ({"max_tower_bytes": "1 GB"}, "max_tower_bytes: Input should be a valid number"),
        ({"categories": {"user": "user_*"}}, r"categories\.user: 'str' .* not allowed as a Sequence"),
        ({"categories": {"user": [1]}}, r"categories\.user\.0: Input should be a valid string"),
        ({"categories": {"user": 5}}, r"categories\.user: Input should be an instance of Sequence"),
        ({"categories": ["user"]}, "categories: Input should be a valid dictionary"),
        ({"categories": {1: ["user"]}}, r"categories\.1\.\[key\]: Input should be a valid string"),
        ({"rows": 3}, r"'rows' is no rule\. The rules are categories, towers_per_category, together"),
        (
            {"categories": {"user": ["a"], "item": []}},
            r"categories\.item: Value should have at least 1 item",
        ),
        ({"together": ["a", "b"]}, r"together\.0: 'str' .* not allowed as a Sequence"),
        ({"together": [3]}, r"together\.0: Input should be an instance of Sequence"),
        ({"together": "ab"}, "together: 'str' .* not allowed as a Sequence"),
        ({"apart": None}, "apart: Input should be an instance of Sequence"),
        ({"apart": [["a", 2]]}, r"apart\.0\.1: Input should be a valid string \(got 2\)"),
        ({"pooling_factors": {"a": -1}}, r"pooling_factors\.a: Input should be greater than or equal to 0"),
        ({"pooling_factors": {"a": float("nan")}}, r"pooling_factors\.a: Input should be a finite number"),
        ({"pooling_factors": {"a": True}}, r"pooling_factors\.a: Input should be a valid number"),
        ({"pooling_factors": {"a": "5"}}, r"pooling_factors\.a: Input should be a valid number"),
        ({"pooling_factors": [("a", 1)]}, "pooling_factors: Input should be a valid dictionary"),
        ({"towers_per_category": [2]}, "towers_per_category: Input should be a valid dictionary"),
        (
            {"categories": {"user": ["a"]}, "towers_per_category": {"users": 1}},
            r"'user' is not both in towers_per_category \['users'\] and in .* \['user'\]\. Did you mean 'users'\?",
        ),
        (
            {"categories": {"a": ["a"]}, "towers_per_category": {"a": 0}},
            r"towers_per_category\.a: Input should be greater than or equal to 1",
        ),
        (
            {"categories": {"a": ["a"]}, "towers_per_category": {"a": True}},
            r"category\.a: Input should be a valid integer",
        ),
        (
            {"categories": {"a": ["a"]}, "towers_per_category": {"a": 1.0}},
            r"category\.a: Input should be a valid integer",
        ),
        (
            {"categories": {"a": ["a"], "b": ["b"]}, "towers_per_category": {"a": 1}},
            r"'b' is not both in .* and in categories \['a', 'b'\]\. Give a number for every category or for none",
        ),
    ],
)
def test_wrong_rules_are_refused_when_they_are_made(rules, message):
    with pytest.raises(InputError, match=f"^Partition rules: .*{message}"):
        PartitionRules(**rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"together": [["user_id", "item_idd"]]},
            r"together has 'item_idd', which matches none of the 5 .*'item_id'\?",
        ),
        ({"apart": [["shop*"]]}, r"apart has 'shop\*', which matches none of the 5 features"),
        ({"pooling_factors": {"shop*": 1}}, r"pooling_factors has 'shop\*', which matches none"),
        ({"categories": {"user": ["user*"], "item": ["it?"]}}, r"category 'item' has 'it\?', which matches none"),
        (
            {"categories": {"user": ["user*"]}},
            r"feature 'item_id' is in no category\. Add it to one of \['user",
        ),
        (
            {"categories": {"user": ["user*", "hour"], "rest": ["item*", "h*"]}},
            r"feature 'hour' is in categories \['user', 'rest'\]; each feature must be in one\. Narrow the patterns",
        ),
    ],
)
def test_rules_that_do_not_fit_the_features_are_refused(rules, message):
    with pytest.raises(InputError, match=message):
        PartitionRules(**rules).for_features(FEATURES)


def test_a_file_holds_every_rule(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        """
        together = [["item_*"]]
        apart = [["user_id", "item_id"], ["hour", "user_age"]]
        max_work_ratio = 1.5
        max_bytes_ratio = 2
        max_tower_bytes = 8_000_000_000

        [categories]
        user = ["user_*", "hour"]
        "item-user" = ["item_*"]

        [towers_per_category]
        user = 2
        "item-user" = 1

        [pooling_factors]
        "user_*" = 20
        "нет" = 0.5
        """,
        encoding="utf-8",
    )
    assert PartitionRules.load(path) == PartitionRules(
        categories={"user": ["user_*", "hour"], "item-user": ["item_*"]},
        towers_per_category={"user": 2, "item-user": 1},
        together=[["item_*"]],
        apart=[["user_id", "item_id"], ["hour", "user_age"]],
        pooling_factors={"user_*": 20, "нет": 0.5},
        max_work_ratio=1.5,
        max_bytes_ratio=2,
        max_tower_bytes=8_000_000_000,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_work = 2",
            r"'max_work' is no rule\. Did you mean 'max_work_ratio'\? The rules are categories, towers_per",
        ),
        (
            "[limits]\nmax_work_ratio = 2",
            r"'limits' is no rule\. .* are keys above the first table",
        ),
        (
            "[categories]\nuser = ['a']\nmax_work_ratio = 1.5",
            r"categories\.max_work_ratio: Input should be an instance of Sequence.* above the first table",
        ),
        (
            "[categories]\na = ['a']\napart = [['a', 'b']]",
            r"categories\.apart\.0: Input should be a valid string .* above the first table",
        ),
        (
            "categories.user = ['a']\n[towers_per_category]\nuser = 2\nmax_tower_bytes = 9",
            r"'max_tower_bytes' is not both in towers_per_category .* above the first table",
        ),
        ("[category]\nuser = ['a']", r"'category' is no rule\. Did you mean 'categories'"),
        ("categories = ['a']", "categories: Input should be a valid dictionary"),
        ("pooling_factors = 3", "pooling_factors: Input should be a valid dictionary"),
        ("together = 'a'", "together: 'str' .* not allowed as a Sequence"),
        ("apart = [1]", r"apart\.0: Input should be an instance of Sequence"),
        ("max_work_ratio = '2'", "max_work_ratio: Input should be a valid number"),
        ("max_tower_bytes = -1", "max_tower_bytes: Input should be greater than 0"),
        ("categories.user = []", r"categories\.user: Value should have at least 1 item"),
        ("together = [", "not TOML"),
        ("max_work_ratio = 1.5\nmax_work_ratio = 2", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^Partition rules .*rules\.toml: .*{message}"):
        PartitionRules.load(path)


def test_categories_and_features_may_have_the_names_of_rules(tmp_path):
    text = "[categories]\napart = ['together']\nrest = ['b']\n[towers_per_category]\napart = 2\nrest = 1\n"
    (tmp_path / "rules.toml").write_text(f"{text}[pooling_factors]\ntogether = 3\n")
    rules = PartitionRules.load(tmp_path / "rules.toml")
    assert rules.towers_per_category == {"apart": 2, "rest": 1}
    assert rules.pooling_factors == {"together": 3}


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / "binary.toml"):
        with pytest.raises(InputError, match="cannot be read"):
            PartitionRules.load(path)


def test_thousands_of_features_take_no_time():
    features = [f"feature_{i}" for i in range(4000)]
    rules = PartitionRules(
        categories={"low": ["feature_?", "feature_??", "feature_???"], "high": features[1000:]},
        together=[features[i : i + 2] for i in range(0, 1000, 2)],
        pooling_factors={name: 2.0 for name in features[:1000]},
    )
    begin = time.process_time()
    named = rules.for_features(features)
    assert [len(names) for names in named.categories.values()] == [1000, 3000]
    assert time.process_time() - begin < 2.0  # 0.2 s here; quadratic code would take minutes.
