"""Blocks: what stays together, what it takes, what must part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import PartitionRules
from dmt.partitioner.problem import make_blocks
from dmt.plan.tables import TableSpec
from tests.partitioner.instances import affinity_of


def blocks_of(features, *, specs=(), shards=None, pooling=None, **rules):
    named = PartitionRules(**rules).for_features(
        [f for f in features if not any(f in s for s in (shards or {}).values())] + list(shards or {})
    )
    return make_blocks(features, specs, named, pooling=pooling or dict.fromkeys(features, 1.0), shards=shards or {})


def shared(*groups):
    return [
        TableSpec(name=f"t{i}", num_embeddings=10 * (i + 1), embedding_dim=4, feature_names=group)
        for i, group in enumerate(groups)
    ]


def test_chains_of_rules_and_shared_tables_join_to_one_block():
    specs = shared(("a", "b"), ("c",), ("d", "e"), ("f",))
    blocks = blocks_of(
        "fedcba",
        specs=specs,
        together=[["b", "c"], ["c", "d", "d"]],
        pooling=dict(zip("abcdef", range(6), strict=True)),
    )
    assert blocks.names == (("a", "b", "c", "d", "e"), ("f",))
    # Pooling 0 + 1 + 2 + 3 + 4 times 4 columns; each table is there once: 10 + 20 + 30 rows.
    assert blocks.loads.tolist() == [[5, 1], [40, 20], [60 * 4 * 4, 40 * 4 * 4]]
    assert (blocks.apart, blocks.category) == (None, ("", ""))


def test_without_tables_only_features_count():
    blocks = blocks_of("ba", together=[[], ["a"]])
    assert blocks.names == (("a",), ("b",))
    assert blocks.loads.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_the_order_of_the_features_does_not_matter():
    specs = shared(("a", "b"), ("c",), ("d",))
    rules = {"apart": [["c", "d"], ["a", "d"]], "categories": {"x": ["a", "b", "c"], "y": ["d"]}}
    first, *others = (blocks_of(order, specs=specs, **rules) for order in itertools.permutations("abcd"))
    for other in others:
        assert (other.names, other.category) == (first.names, first.category)
        np.testing.assert_array_equal(other.loads, first.loads)
        np.testing.assert_array_equal(other.apart, first.apart)


def test_the_matrix_has_the_means_between_blocks():
    affinity = affinity_of(list("cadb"))
    blocks = blocks_of("cadb", together=[["a", "d"]])
    index = [[affinity.features.index(name) for name in names] for names in blocks.names]
    wanted = [[affinity.matrix[np.ix_(rows, columns)].mean() for columns in index] for rows in index]
    np.testing.assert_allclose(blocks.matrix(affinity.matrix, affinity.features), wanted, rtol=1e-15)
    single = blocks_of("cadb")
    np.testing.assert_array_equal(single.matrix(affinity.matrix, affinity.features), affinity.permuted("abcd").matrix)


def test_what_is_apart_is_so_for_whole_blocks_and_all_shards():
    blocks = blocks_of("abcd", together=[["a", "b"]], apart=[["b", "c"], ["d", "d"]])
    assert blocks.names == (("a", "b"), ("c",), ("d",))
    assert blocks.apart.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    shards = {"a": ["a[0:4]", "a[4:8]"]}
    blocks = blocks_of(["a[0:4]", "a[4:8]", "b", "c"], shards=shards, apart=[["a", "b"]])
    # Shards part from each other and from what their feature parts from.
    assert blocks.apart.astype(int).tolist() == [[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_a_category_takes_its_own():
    blocks = blocks_of("abcd", categories={"x": ["b", "d"], "y": ["a", "c"]}, apart=[["b", "d"], ["a", "d"]])
    own = blocks.in_category("x")
    assert (own.names, own.category, own.apart.tolist()) == (
        (("b",), ("d",)),
        ("x", "x"),
        [[False, True], [True, False]],
    )
    assert own.loads.shape == (3, 2)


def test_shards_are_of_the_category_of_their_feature():
    shards = {"a": ["a[0:4]", "a[4:8]"]}
    blocks = blocks_of(["a[0:4]", "a[4:8]", "b"], shards=shards, categories={"x": ["a"], "y": ["b"]})
    assert blocks.category == ("x", "x", "y")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"together": [["a", "b"], ["b", "c"]], "apart": [["a", "c"]]},
            r"'a' and 'c' must not share a tower \(apart\), but a shared table or a rule of together keeps 'a', 'b'",
        ),
        ({"apart": [["d", "e"]]}, r"'d' and 'e' must not share .* keeps 'd', 'e' in one\. Drop one of the rules"),
        (
            {"categories": {"x": ["a", "b", "c", "d"], "y": ["e"]}},
            r"'d' is of category 'x' and 'e' of 'y', but they must share a tower \(by a shared table or a rule of tog",
        ),
        (
            {"categories": {"x": ["a"], "y": ["b", "c", "d", "e"]}, "together": [["a", "b"]]},
            "'a' is of category 'x' and 'b' of 'y', but they must share",
        ),
    ],
)
def test_rules_that_contradict_each_other_are_refused(rules, message):
    with pytest.raises(InputError, match=f"^Partition rules: {message}"):
        blocks_of("abcde", specs=shared(("a",), ("b",), ("c",), ("d", "e")), **rules)


def test_what_is_cut_cannot_stay_together_with_another():
    with pytest.raises(InputError, match=r"feature 'a' must share a tower with others, but its table is cut"):
        blocks_of(["a[0:4]", "a[4:8]", "b"], shards={"a": ["a[0:4]", "a[4:8]"]}, together=[["a", "b"]])
