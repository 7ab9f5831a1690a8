"""Blocks: which features stay together, their loads, and which blocks must be apart."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import Interaction, PartitionRules
from dmt.partitioner.problem import make_blocks
from dmt.plan.tables import TableSpec
from tests.partitioner.instances import affinity_of


def blocks_of(features, *, specs=(), factors=None, **rules):
    measured = affinity_of(list(features))
    named = PartitionRules(**rules).for_features(measured.features)
    measured = dataclasses.replace(measured, tables=tuple(specs), pooling_factors=factors)
    return make_blocks(measured, named)


def shared(*groups):
    return [
        TableSpec(name=f"t{i}", num_embeddings=10 * (i + 1), embedding_dim=4, feature_names=group)
        for i, group in enumerate(groups)
    ]


def test_chains_of_rules_and_shared_tables_join_to_one_block():
    specs = shared(("a", "b"), ("c",), ("d", "e"), ("f",))
    blocks = blocks_of("fedcba", specs=specs, together=[["b", "c"], ["c", "d", "d"]], factors=(5, 4, 3, 2, 1, 0))
    assert blocks.names == (("a", "b", "c", "d", "e"), ("f",))
    # Pooling 0 + 1 + 2 + 3 + 4 times 4 columns; each table is there once: 10 + 20 + 30 rows.
    assert blocks.loads.tolist() == [[5, 1], [40, 20], [60 * 4 * 4, 40 * 4 * 4]]
    assert blocks.apart is None
    assert blocks_of("ba", together=[[], ["a"]]).loads.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_the_order_of_the_features_does_not_matter():
    specs = shared(("a", "b"), ("c",), ("d",))
    rules = {"apart": [["c", "d"], ["a", "d"]], "categories": {"x": ["a", "b", "c"], "y": ["d"]}}
    first, *others = (blocks_of(order, specs=specs, **rules) for order in itertools.permutations("abcd"))
    for other in others:
        assert other.names == first.names
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


def test_the_cost_is_the_gains_between_the_blocks_of_a_tower():
    rng, names = np.random.default_rng(0), list("abcdefg")
    triples = tuple(Interaction(features=three, gain=rng.random()) for three in itertools.combinations(names, 3))
    affinity = dataclasses.replace(affinity_of(names), measure="interactions", triples=triples)
    blocks = blocks_of(names, together=[["a", "d"]]).within("abcdef")
    block_of = {name: i for i, block in enumerate(blocks.names) for name in block}
    pairs = [((a, b), affinity.matrix[names.index(a), names.index(b)]) for a, b in itertools.combinations(names, 2)]
    for labels in rng.integers(0, 2, (5, 5)):
        gains = 0.0
        for group, gain in [*pairs, *((triple.features, triple.gain) for triple in triples)]:
            places = {block_of.get(name) for name in group}
            if None not in places and len(places) > 1 and len({labels[place] for place in places}) == 1:
                gains += gain
        assert blocks.costs(affinity, sign=-1.0).of(labels, blocks.loads[0]) == pytest.approx(-gains)


def test_what_is_apart_is_so_for_whole_blocks():
    blocks = blocks_of("abcd", together=[["a", "b"]], apart=[["b", "c"], ["d", "d"]])
    assert blocks.names == (("a", "b"), ("c",), ("d",))
    assert blocks.apart.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    part = blocks.within(["a", "b", "c"])
    assert (part.names, part.apart.tolist()) == (blocks.names[:2], [[False, True], [True, False]])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"together": [["a", "b"], ["b", "c"]], "apart": [["a", "c"]]}, r"'a' and 'c' must not .* joins 'a', 'b', 'c'"),
        ({"apart": [["d", "e"]]}, "'d' and 'e' must not share .* joins 'd', 'e'"),
        ({"categories": {"x": ["a", "b", "c", "d"], "y": ["e"]}}, "'d' is in category 'x' and 'e' in 'y', but a"),
        ({"categories": {"x": ["a"], "y": ["b", "c", "d", "e"]}, "together": [["a", "b"]]}, "'a' is in category 'x'"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(rules, message):
    with pytest.raises(InputError, match=message):
        blocks_of("abcde", specs=shared(("a",), ("b",), ("c",), ("d", "e")), **rules)
