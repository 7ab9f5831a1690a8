"""`PartitionRules`: patterns, contradictions, files."""

from __future__ import annotations

import pytest
import tomli_w

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
    named = {"user": ["user_*"], "rest": ["hour"]}
    alone = PartitionRules(categories=named, towers_per_category={"rest": 2}).for_features(FEATURES)
    assert alone.categories == {"user": ("user_id", "user_age"), "rest": ("item_id", "item_shop", "hour")}
    assert alone.for_features(FEATURES) == alone
    outside = PartitionRules(categories={"user": ["user_*"]}, outside=["hour", "user_a*"]).for_features(FEATURES)
    assert outside.categories == {"user": ("user_id",), "rest": ("item_id", "item_shop")}
    assert outside.outside == ("user_age", "hour")


def test_names_may_hold_the_characters_of_patterns():
    features = ["*", "a?", "ab", "x[0:4]", "x[4:8]", "x0", "用户_1", "用户_2"]
    rules = PartitionRules(together=[["*", "ab"], ["a?", "x0"], ["x[0:4]", "ab"], ["x[*]"], ["用户_*"]])
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
        ({"max_work_ratio": float("inf")}, "max_work_ratio: Input should be a finite number"),
        ({"max_tower_bytes": 0}, "max_tower_bytes: Input should be greater than 0"),
        ({"towers_per_category": {"a": 0}}, r"towers_per_category\.a: Input should be greater than or equal to 1"),
        ({"categories": ["user"]}, "categories: Input should be a table"),
        ({"categories": {"user": ["a"], "item": []}}, r"categories\.item: Value should have at least 1 item"),
        ({"together": ["a", "b"]}, r"together\.0: 'str' .* not allowed as a Sequence"),
        ({"rows": 3}, r"rows: Extra inputs .* \(got 3\)\. The rules are categories, towers_per_category, together"),
    ],
)
def test_wrong_rules_are_refused_when_they_are_made(rules, message):
    with pytest.raises(InputError, match=f"^Partition rules: .*{message}"):
        PartitionRules(**rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"together": [["user_id", "item_idd"]]}, "together has 'item_idd', which matches none of the 5 .*'item_id'"),
        ({"outside": ["hours"]}, "outside has 'hours', which matches none of the 5 .*'hour'"),
        ({"outside": ["hour"], "together": [["hour"]]}, "has 'hour', which matches none of the 4 features to place"),
        ({"outside": ["*"]}, "Partition rules: outside names all 5 features"),
        ({"apart": [["shop*"]]}, r"apart has 'shop\*', which matches none of the 5 features"),
        ({"categories": {"user": ["user*"], "item": ["it?"]}}, r"category 'item' has 'it\?', which matches none"),
        ({"categories": {"user": ["*r"], "time": ["hour"]}}, r"'hour' is in categories \['user', 'time'\]"),
        ({"categories": {"user": ["user*"]}, "towers_per_category": {"users": 1}}, "has 'users', .* mean 'user'"),
    ],
)
def test_rules_that_do_not_fit_the_features_are_refused(rules, message):
    with pytest.raises(InputError, match=message):
        PartitionRules(**rules).for_features(FEATURES)


def test_a_file_holds_every_rule(tmp_path):
    rules = {
        "categories": {"user": ["user_*", "hour"], "item-user": ["item_*"]},
        "towers_per_category": {"user": 2, "item-user": 1},
        "together": [["item_*"]],
        "apart": [["user_id", "item_id"], ["hour", "user_age"]],
        "max_work_ratio": 1.5,
        "max_tower_bytes": 8_000_000_000,
    }
    (tmp_path / "rules.toml").write_text(tomli_w.dumps(rules))
    assert PartitionRules.load(tmp_path / "rules.toml") == PartitionRules(**rules)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[categories]\nuser = ['a']\nmax_work_ratio = 1.5", r"categories\.max_work_ratio: Input should be"),
        ("[towers_per_category]\nuser = 2\nmax_tower_bytes = 9.5", r"towers_per_category\.max_tower_bytes"),
        pytest.param("a." * 3000 + "b = 1", r"a: Extra inputs .* \(got (too deeply|\{'a)", id="deep"),
        ("together = [", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^Partition rules(:| .*rules\.toml is) .*{message}"):
        PartitionRules.load(path)
    with pytest.raises(InputError, match="cannot be read"):
        PartitionRules.load(tmp_path / "absent.toml")
