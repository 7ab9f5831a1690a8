"""`FeatureInteractions.collect_from_model`: mixed differences of models whose interactions are known."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dmt.errors import InputError
from dmt.partitioner import FeatureInteractions

NAMES = ["a", "b", "c", "d"]
ROWS, IDS = 500, 6


def planted(*products, weight=1.0):
    """Tables, a batch of ids, and log odds that are a sum over features and over products of the named ones."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name=f"t_{n}", num_embeddings=IDS, embedding_dim=4, feature_names=[n]) for n in NAMES]
    model = EmbeddingBagCollection(tables=tables)
    for bag in model.embedding_bags.values():
        torch.nn.init.normal_(bag.weight)
    ids = torch.randint(0, IDS, (len(NAMES) * ROWS,))
    batch = KeyedJaggedTensor(NAMES, ids, lengths=torch.ones(len(ids), dtype=torch.long))

    def forward(model, batch):
        one = {name: vectors[:, 0] for name, vectors in model(batch).to_dict().items()}
        single = torch.stack([torch.tanh(3 * own) for own in one.values()]).sum(dim=0)
        return single + weight * sum(torch.stack([one[name] for name in names]).prod(dim=0) for names in products)

    return model, batch, forward


def pairs_of(found, least=1e-12):
    return {pair.features for pair in found.top_pairs(100) if pair.gain > least}


def test_only_the_pairs_of_the_model_are_found():
    model, batch, forward = planted("ac", "bd")
    found = FeatureInteractions.collect_from_model(model, [batch], forward=forward)
    assert pairs_of(found) == {("a", "c"), ("b", "d")}
    assert found.features == tuple(NAMES)
    assert [table.name for table in found.tables] == [f"t_{name}" for name in NAMES]
    assert model.training


def test_a_product_of_three_is_in_each_of_its_pairs():
    model, batch, forward = planted("abd")
    found = FeatureInteractions.collect_from_model(model, [batch], forward=forward)
    assert pairs_of(found) == {("a", "b"), ("a", "d"), ("b", "d")}


def test_the_gain_is_what_the_interaction_is_worth_in_log_loss():
    # Over all other rows instead of one: the mean of the squared mixed difference of a product of independent values
    # is four times the interaction's own variance, and p (1 - p) v / 2 nats are what variance v of log odds is worth.
    model, batch, forward = planted("ac", weight=0.5)
    found = FeatureInteractions.collect_from_model(model, [batch] * 20, forward=forward)
    with torch.no_grad():
        odds, vectors = forward(model, batch), model(batch)
        product = vectors["a"][:, 0] * vectors["c"][:, 0]
        rows = [vectors[name][:, 0] for name in "ac"]
        alone = rows[0].mean() * rows[1] + rows[1].mean() * rows[0] - rows[0].mean() * rows[1].mean()
        p = torch.sigmoid(odds)
    expected = float((p * (1 - p)).mean() * 0.25 * (product - alone).square().mean() / 2)
    assert found.gains[0, 2] == pytest.approx(expected, rel=0.15)
    assert found.errors[0, 2] < 0.05 * expected


def test_the_gain_is_that_of_a_plain_loop():
    model, batch, forward = planted("ac", "ab")
    found = FeatureInteractions.collect_from_model(model, [batch], forward=forward, seed=3)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).tolist()
    other = dict(zip(order, order[-1:] + order[:-1], strict=True))
    assert all(row != another for row, another in other.items())
    ids = batch.values().reshape(len(NAMES), ROWS)

    def odds_of(**rows):
        mixed = torch.stack([ids[i, rows.get(name, list(range(ROWS)))] for i, name in enumerate(NAMES)])
        with torch.no_grad():
            return forward(model, KeyedJaggedTensor(NAMES, mixed.reshape(-1), lengths=batch.lengths())).double()

    drawn = [other[row] for row in range(ROWS)]
    f, f_a, f_c, f_ac = odds_of(), odds_of(a=drawn), odds_of(c=drawn), odds_of(a=drawn, c=drawn)
    p = torch.sigmoid(f)
    expected = (p * (1 - p) * (f - f_a - f_c + f_ac).square() / 8).mean()
    np.testing.assert_allclose(found.gains[0, 2], expected, rtol=1e-6)


def test_the_trainers_batches_and_several_of_them_are_taken():
    model, batch, forward = planted("ac")

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = model

        def forward(self, dense, ids):
            return forward(self.tables, ids)[:, None] + dense.sum(dim=1, keepdim=True)

    given = SimpleNamespace(dense_features=torch.ones(ROWS, 2), sparse_features=batch)
    found = FeatureInteractions.collect_from_model(Whole(), [given, given])
    assert found.num_rows == 2 * ROWS
    assert pairs_of(found, least=1e-9) == {("a", "c")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "FeatureInteractions.collect_from_model: batches gave no row"),
        ({"forward": lambda model, batch: model(batch).values()}, "returned [500, 16]; it must be log odds, [B] or"),
        ({"forward": lambda model, batch: model(batch)["a"][:, 0] / 0}, "log odds of batch 0 are not finite"),
        ({"forward": lambda model, batch: model(batch)["a"][:1, 0]}, "returned 1 log odds for 500 rows of embeddings"),
        ({"forward": lambda model, batch: model(batch)["a"][:, 0].sigmoid()}, "are between 0 and 1, as probabilities"),
        (
            {"model": torch.nn.Linear(2, 2)},
            "FeatureInteractions.collect_from_model: Linear holds no EmbeddingBagCollection",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    model, batch, forward = planted("ac")
    given = {"model": model, "batches": [batch], "forward": forward} | change
    with pytest.raises(InputError, match=re.escape(message)):
        FeatureInteractions.collect_from_model(given.pop("model"), given.pop("batches"), **given)


def one_by_one(batch, rows):
    ids = batch.values().reshape(len(NAMES), ROWS)[:, rows]
    return KeyedJaggedTensor(NAMES, ids.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.long))


def test_rows_that_are_sorted_by_a_feature_are_refused():
    # Exchanged among rows that all have it, "a" interacts with nothing.
    model, batch, forward = planted("ac")
    values = batch.values()[:ROWS]
    sorted_by_a = [one_by_one(batch, values == value) for value in range(IDS)]
    with pytest.raises(InputError, match=r"collect_from_model: feature 'a' is the same in all rows of each batch, but"):
        FeatureInteractions.collect_from_model(model, sorted_by_a, forward=forward)
    # One that is constant everywhere interacts with nothing in truth.
    found = FeatureInteractions.collect_from_model(model, sorted_by_a[:1] * 2, forward=forward)
    assert pairs_of(found) == set()


def test_rows_without_a_weight_are_left_out_and_lend_nothing():
    model, batch, forward = planted("ac")
    weights = torch.ones(ROWS)
    weights[300:] = 0
    given = SimpleNamespace(ids=batch, weights=weights)
    found = FeatureInteractions.collect_from_model(
        model, [given], forward=lambda model, batch: forward(model, batch.ids)
    )
    alone = FeatureInteractions.collect_from_model(model, [one_by_one(batch, slice(300))], forward=forward)
    assert found.num_rows == 300
    np.testing.assert_allclose(found.gains, alone.gains, rtol=1e-12)
    given.weights = torch.arange(ROWS) == 7
    with pytest.raises(InputError, match="batch 0 has 1 row with a weight; another one is drawn"):
        FeatureInteractions.collect_from_model(model, [given], forward=lambda model, batch: forward(model, batch.ids))
    given.weights = torch.zeros(ROWS)
    with pytest.raises(InputError, match="batches gave no row"):
        FeatureInteractions.collect_from_model(model, [given], forward=lambda model, batch: forward(model, batch.ids))


def test_later_batches_must_have_the_features_of_the_first():
    model, batch, forward = planted("ac")
    both = torch.nn.ModuleList(
        [
            model,
            EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(name="t_e", num_embeddings=IDS, embedding_dim=4, feature_names=["e"])]
            ),
        ]
    )
    more = KeyedJaggedTensor(["e"], batch.values()[:ROWS], lengths=torch.ones(ROWS, dtype=torch.long))

    def run(both, batch):
        if batch.with_more:
            both[1](more)
        return forward(both[0], batch.ids)

    batches = [SimpleNamespace(ids=batch, with_more=yes) for yes in (False, True)]
    with pytest.raises(InputError, match="collect_from_model: feature 'e' is not in every batch"):
        FeatureInteractions.collect_from_model(both, batches, forward=run)
