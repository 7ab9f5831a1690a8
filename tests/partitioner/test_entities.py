"""Features of one entity in a tower of their own: the rule, and finding them from data."""

from __future__ import annotations

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner
from dmt.partitioner.entities import find_entities
from dmt.plan.distinct import bag_hashes, joint_hashes

FEATURES = ("item_id", "item_shop", "u_age", "u_city", "u_id", "hour", "slot", "u_os")
AFFINITY = FeatureAffinity(matrix=np.eye(len(FEATURES)), features=FEATURES)
USER = ["u_age", "u_city", "u_id", "u_os"]


def towers(num_towers, **rules):
    return TowerPartitioner(num_towers=num_towers, rules=PartitionRules(**rules)).fit(AFFINITY)


@pytest.mark.parametrize("num_towers", [2, 3, 5])
def test_an_entity_has_one_tower_with_nothing_else_in_it(num_towers):
    plan = towers(num_towers, entities={"user": ["u_*"]})
    assert [tower.features for tower in plan.towers if tower.name == "user_0"] == [tuple(USER)]
    rest = [tower for tower in plan.towers if tower.name != "user_0"]
    assert [tower.name for tower in rest] == [f"rest_{i}" for i in range(num_towers - 1)]
    assert sorted(f for tower in rest for f in tower.features) == sorted({*FEATURES} - {*USER})


def test_an_entity_has_several_towers_where_nothing_else_could_fill_them():
    entities = {"user": ["u_*"], "item": ["item_*", "hour", "slot"]}
    assert towers(2, entities=entities).to_lists() == [USER, ["item_id", "item_shop", "hour", "slot"]]
    homes = [{"u" if name in USER else "i" for name in tower} for tower in towers(5, entities=entities).to_lists()]
    assert all(len(home) == 1 for home in homes)
    # Four features of no entity fill four towers; the next ones divide the entity.
    plan = towers(6, entities={"user": ["u_*"]})
    assert [tower.name for tower in plan.towers].count("user_1") == 1


def test_one_foreign_feature_ends_the_sharing_of_a_tower_s_input():
    random = np.random.default_rng(0)
    users, samples = 40, 400
    user = np.repeat(np.arange(users), samples // users)
    ones = np.ones(samples, dtype=np.int64)
    bags = {name: random.integers(0, 1000, users)[user] for name in USER} | {"u_id": user}
    bags |= {name: random.integers(0, 1000, samples) for name in set(FEATURES) - set(USER)}
    hashes = {name: bag_hashes(ones, own) for name, own in bags.items()}

    def share(group):
        return len(np.unique(joint_hashes(hashes[name] for name in group))) / samples

    assert share(USER) == 0.1
    assert share([*USER, "item_id"]) > 0.99
    entity, strided = towers(2, entities={"user": ["u_*"]}), [FEATURES[::2], FEATURES[1::2]]
    assert sum(map(share, strided)) > 1.8 * sum(map(share, entity.to_lists()))
    assert find_entities([hashes], num_towers=2) == {"u_id": sorted(USER)}
    reversed_order = dict(reversed(hashes.items()))
    assert find_entities([reversed_order], num_towers=2) == {"u_id": sorted(USER)}


def test_entities_without_a_key_are_found():
    # A request is an hour, a day and a place together; the items of a shop have its city. No column names either.
    random = np.random.default_rng(1)
    rows = np.repeat(np.arange(64), 16)
    columns = {"hour": random.integers(0, 8, 64)[rows], "day": random.integers(0, 8, 64)[rows]}
    columns |= {"place": random.integers(0, 8, 64)[rows], "id": np.arange(1024)}
    shop = random.integers(0, 100, 1024)
    columns |= {"shop": shop, "city": random.integers(0, 30, 100)[shop]}
    hashes = {name: bag_hashes(np.ones(1024, np.int64), own) for name, own in columns.items()}
    found = find_entities([hashes], num_towers=3)
    assert sorted(found.values()) == [["city", "shop"], ["day", "hour", "place"]]


def test_nothing_repeats():
    hashes = {name: bag_hashes(np.ones(64, np.int64), np.arange(64) + i) for i, name in enumerate("abcd")}
    assert find_entities([hashes], num_towers=2) == {}
    assert find_entities([hashes], num_towers=9) == {}


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"entities": {"user": ["u_*"]}, "categories": {"a": ["*"]}}, "entities and categories are both given"),
        ({"entities": {"rest": ["u_*"]}}, "an entity is named 'rest', as are the features of no entity"),
        ({"entities": {"user": []}}, r"entities\.user: .*at least 1 item"),
        ({"entities": "auto"}, "entities: Input should be a valid dictionary"),
    ],
)
def test_rules_that_are_refused(rules, text):
    with pytest.raises(InputError, match=text):
        PartitionRules(**rules)


@pytest.mark.parametrize(
    ("entities", "text"),
    [
        ({"user": ["user_*"]}, r"entity 'user' has 'user_\*', which matches none of the 8 features"),
        ({"user": ["u_*"], "place": ["u_city"]}, r"feature 'u_city' is in categories \['user', 'place'\]"),
        ({"user": ["u_*"], "item": ["item_*"]}, r"need 3 towers at least \('user' 1, 'item' 1, 'rest' 1\)"),
    ],
)
def test_entities_that_do_not_fit_the_features(entities, text):
    with pytest.raises(InputError, match=text):
        towers(2, entities=entities)


def test_resolved_rules_stay_as_they_are(tmp_path):
    rules = PartitionRules(entities={"user": ["u_*"]}).for_features(FEATURES)
    assert rules.for_features(FEATURES) == rules
    assert rules.categories["rest"] == ("item_id", "item_shop", "hour", "slot")
    (tmp_path / "rules.toml").write_text('[entities]\nuser = ["u_*"]\n')
    assert PartitionRules.load(tmp_path / "rules.toml").for_features(FEATURES) == rules
