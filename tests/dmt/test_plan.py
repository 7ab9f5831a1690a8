"""TowerPlan: rules, files, and the tables it is checked against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmt import InputError, TableSpec, TowerPlan


def table(name: str, *features: str, rows: int = 10, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or (name,))


def test_strided_is_the_papers_naive_assignment() -> None:
    plan = TowerPlan.strided([str(i) for i in range(26)], 8)
    assert [[int(f) for f in tower] for tower in plan.to_lists()] == [
        [0, 8, 16, 24],
        [1, 9, 17, 25],
        [2, 10, 18],
        [3, 11, 19],
        [4, 12, 20],
        [5, 13, 21],
        [6, 14, 22],
        [7, 15, 23],
    ]
    with pytest.raises(InputError, match="num_towers=27 must lie between 1 and the number of features, 26"):
        TowerPlan.strided([str(i) for i in range(26)], 27)


def test_round_trip(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists(
        [["b", "a"], ["c"]],
        strategy="coherent",
        seed=3,
        affinity={"within": 0.5},
        tables=(table("ta", "a", "b"), table("tc", "c")),
        command="dmt partition x",
    )
    plan.save(tmp_path / "deep" / "towers.json")
    assert TowerPlan.load(tmp_path / "deep" / "towers.json") == plan
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["towers.json"]


def test_a_feature_lives_in_one_tower() -> None:
    with pytest.raises(InputError, match=r"Feature 'a' occurs more than once.*tower_0, tower_1"):
        TowerPlan.from_lists([["a", "b"], ["a"]])
    with pytest.raises(InputError, match="Tower 'tower_1' has no feature"):
        TowerPlan.from_lists([["a"], []])
    with pytest.raises(InputError, match="at least one tower"):
        TowerPlan.from_lists([])


def test_a_name_that_no_file_can_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Tower plan .*cannot be written \('utf-8' codec"):
        TowerPlan.from_lists([["b\ud800"]]).save(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(r'{"format": 1, "towers": [{"name": "t", "features": ["\ud800"]}]}')
    with pytest.raises(InputError, match=r"Tower plan .*Invalid JSON: unexpected end of hex escape"):
        TowerPlan.load(tmp_path / "p.json")


def test_plan_against_the_model() -> None:
    plan = TowerPlan.from_lists([["item_id", "brand"], ["user_id"]])
    with pytest.raises(InputError, match=r"Features 'shop', 'city' are in no tower \(5 features, 3 placed\)"):
        plan.check_features(["item_id", "brand", "user_id", "shop", "city"])
    with pytest.raises(InputError, match=r"Feature 'user_id' is in no tower .*placed\)\. Did you mean 'usr_id'\?"):
        TowerPlan.from_lists([["usr_id"]]).check_features(["user_id"])
    with pytest.raises(InputError, match=r"Feature 'brand' is in the tower plan but not in the model.*'brands'"):
        TowerPlan.from_lists([["brand", "brands"]]).check_features(["brands"])


def test_tables_follow_the_plans_order() -> None:
    plan = TowerPlan.from_lists([["c", "a"], ["b", "d"]])
    tables = [table("ta", "a"), table("tbd", "d", "b"), table("tc", "c")]
    assert [[t.name for t in tower] for tower in plan.tables_by_tower(tables)] == [["tc", "ta"], ["tbd"]]


def test_a_shared_table_stays_whole() -> None:
    plan = TowerPlan.from_lists([["a"], ["b"]])
    with pytest.raises(InputError, match=r"Table 'tab' is shared by features of different towers \('a' in tower_0"):
        plan.tables_by_tower([table("tab", "a", "b")])


def test_a_plan_for_another_model_is_refused() -> None:
    plan = TowerPlan.from_lists([["a"]], tables=(table("ta", "a", rows=100),))
    with pytest.raises(InputError, match=r"Table 'ta' is 10 x 8 .* made for 100 x 8"):
        plan.tables_by_tower([table("ta", "a")])
    with pytest.raises(InputError, match="Table 'ta' is given 2 times"):
        plan.tables_by_tower([table("ta", "a"), table("ta", "a")])


def test_a_feature_may_look_up_in_two_tables() -> None:
    tables = [table("ta", "a"), table("tb", "a")]
    assert TowerPlan.from_lists([["a"]]).tables_by_tower(tables) == [tables]


WHOLE = '{"format": 1, "towers": [{"name": "t", "features": ["a"]}], %s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"towers.json: not JSON"),
        ("[]", "has format None; this version reads format 1"),
        ('{"format": 2, "towers": []}', "has format 2; this version reads format 1. Write it with `dmt partition`"),
        ('{"format": 1}', "towers.json: towers: Field required"),
        ('{"format": 1, "towers": [{"name": "t", "features": "abc"}]}', r"towers\.0\.features: .*array \(got 'abc'\)"),
        ('{"format": 1, "towers": [{"name": "t", "features": [1]}]}', r"towers\.0\.features\.0: .*string \(got 1\)"),
        (WHOLE % '"affinity": [1, 2]', r"affinity: .*object \(got \[1, 2\]\). Write it with `dmt partition`"),
        (WHOLE % '"seed": "x"', r"seed: Input should be a valid integer \(got 'x'\)"),
        (WHOLE % '"strategy": 3', "strategy: Input should be a valid string"),
        (WHOLE % '"column_splits": {"a": [4, "4"]}', r"column_splits\.a\.1: Input should be a valid integer"),
        (WHOLE % '"tables": [{"name": "t"}]', r"tables\.0\.num_embeddings: Field required"),
        ('{"format": 1, "towers": [{"name": "t", "features": ["a", "a"]}]}', "towers.json: Feature 'a' occurs more"),
        ('{"format": 1, "towers": 5}', r"towers: Input should be a valid array \(got 5\)"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "towers.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        TowerPlan.load(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"Tower plan .*nowhere\.json: cannot be read .* Write it with `dmt partition`"
    ):
        TowerPlan.load(tmp_path / "nowhere.json")


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    TowerPlan.from_lists([["a"]]).save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["towers"] == [{"name": "tower_0", "features": ["a"]}]
