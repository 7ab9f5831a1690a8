"""`FeatureAffinity.collect` on small TorchRec models in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity
from dmt.partitioner import collect as collection_module
from dmt.plan.tables import TableSpec
from tests.partitioner.planted import FlatModel, batch, collection

NAMES = ["a", "b", "c", "d"]


@pytest.fixture
def generator():
    torch.manual_seed(0)  # TorchRec draws initial weights from the global generator.
    return torch.Generator().manual_seed(1)


def brute_force(model, batches, names):
    """The definition, sample by sample and pair by pair, in float64."""
    total, count = np.zeros((len(names), len(names))), 0
    tables = {
        config.feature_names[0]: ebc.embedding_bags[config.name].weight.detach().double().numpy()
        for ebc in model.sparse_arch.values()
        for config in ebc.embedding_bag_configs()
    }
    for one in batches:
        bags = one.sparse_features.to_dict()
        for sample in range(len(one.dense_features)):
            unit = {}
            for name in names:
                first, last = bags[name].offsets()[sample : sample + 2].tolist()
                vector = tables[name][bags[name].values()[first:last].numpy()].sum(axis=0)
                norm = np.linalg.norm(vector)
                unit[name] = vector / norm if norm else vector
            total += [[unit[i] @ unit[j] for j in names] for i in names]
            count += 1
    return np.abs(total / count)


# With one id per bag no float32 sum is taken: both sides work in float64 from the same float32 weights. Bags are pooled
# in float32, whose rounding is 6e-8 of the largest summand.
@pytest.mark.parametrize(("least", "most", "atol"), [(1, 1, 1e-14), (0, 3, 1e-6)])
def test_it_equals_the_definition(generator, least, most, atol):
    model = FlatModel(collection(NAMES))
    batches = [batch(NAMES, n, generator=generator, least=least, most=most) for n in (5, 1, 16)]
    affinity = FeatureAffinity.collect(model, iter(batches))
    assert (affinity.features, affinity.num_samples) == (tuple(NAMES), 22)
    np.testing.assert_allclose(affinity.matrix, brute_force(model, batches, NAMES), rtol=0, atol=atol)
    present = torch.cat([b.sparse_features["a"].lengths() > 0 for b in batches]).double().mean().item()
    assert affinity.matrix[0, 0] == pytest.approx(present, abs=1e-12)


def test_blocks_of_samples_add_up(generator, monkeypatch):
    model = FlatModel(collection(NAMES))
    batches = [batch(NAMES, 11, generator=generator)]
    whole = FeatureAffinity.collect(model, batches)
    monkeypatch.setattr(collection_module, "BLOCK_ELEMENTS", 3 * 4 * 8)
    np.testing.assert_allclose(FeatureAffinity.collect(model, batches).matrix, whole.matrix, rtol=0, atol=1e-15)


def test_tiny_and_huge_embeddings_are_normalized(generator):
    model = FlatModel(collection(["a", "b"]))
    with torch.no_grad():
        model.sparse_arch["ebc_0"].embedding_bags["t_a"].weight.fill_(1e-30)
        model.sparse_arch["ebc_0"].embedding_bags["t_b"].weight.fill_(-1e30)
    affinity = FeatureAffinity.collect(model, [batch(["a", "b"], 4, generator=generator)])
    np.testing.assert_allclose(affinity.matrix, np.ones((2, 2)), rtol=0, atol=1e-12)


def test_several_collections_are_gathered_in_one_forward(generator):
    split, whole = FlatModel(collection(["a", "b"]), collection(["c", "d"])), FlatModel(collection(NAMES))
    for name in NAMES:
        source = split.sparse_arch["ebc_0" if name in "ab" else "ebc_1"].embedding_bags[f"t_{name}"]
        whole.sparse_arch["ebc_0"].embedding_bags[f"t_{name}"].load_state_dict(source.state_dict())
    batches = [batch(NAMES, 6, generator=generator)]
    found = FeatureAffinity.collect(split, batches)
    assert found.features == tuple(NAMES)
    np.testing.assert_array_equal(found.matrix, FeatureAffinity.collect(whole, batches).matrix)
    part = FeatureAffinity.collect(split.sparse_arch["ebc_1"], batches)
    assert part.features == ("c", "d")
    # Another matrix size sums in another order.
    np.testing.assert_allclose(part.matrix, found.matrix[2:, 2:], rtol=0, atol=1e-15)


def test_towers_of_an_embedding_tower_collection(generator):
    class First(nn.Module):
        def forward(self, embeddings):
            return embeddings["d" if "d" in embeddings.keys() else "a"]  # noqa: SIM118 - a KeyedTensor is no dict

    towers = EmbeddingTowerCollection(
        [EmbeddingTower(collection(["d", "b"]), First()), EmbeddingTower(collection(["a", "c"]), First())]
    )
    affinity = FeatureAffinity.collect(towers, [batch(NAMES, 4, generator=generator).sparse_features])
    assert affinity.features == tuple(NAMES)
    np.testing.assert_allclose(np.diag(affinity.matrix), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "batches", "message"),
    [
        (lambda: nn.Linear(1, 1), [None], "Linear has no embedding collection"),
        (lambda: FlatModel(collection(["a"]), collection(["a"])), [["a"]], "two collections look up feature 'a'"),
        (lambda: FlatModel(collection(["a", "b"])), [["a", "b"], ["a"]], "batch 1 lacks feature 'b' of .*ebc_0"),
        (lambda: FlatModel(collection(["a"]), collection(["b"], dim=4)), [["a", "b"]], r"embedding dims \[4, 8\], but"),
    ],
)
def test_what_cannot_be_measured_is_refused(generator, make, batches, message):
    made = [names and batch(names, 3, generator=generator) for names in batches]
    with pytest.raises(InputError, match=message):
        FeatureAffinity.collect(make(), made)


def test_the_model_is_left_as_it_was(generator):
    model = FlatModel(collection(NAMES))
    model.train()
    model.dropout.eval()
    modes, before = [m.training for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    FeatureAffinity.collect(model, [batch(NAMES, 4, generator=generator)])
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tables_and_pooling_factors_are_measured(generator):
    tables = [
        EmbeddingBagConfig(name="t_1", num_embeddings=20, embedding_dim=8, feature_names=["c", "a"]),
        EmbeddingBagConfig(
            name="t_2", num_embeddings=30, embedding_dim=8, feature_names=["b"], data_type=DataType.FP16
        ),
    ]
    model = FlatModel(EmbeddingBagCollection(tables=tables), collection(["d"]))
    batches = [batch(NAMES, n, generator=generator, least=0, most=4) for n in (7, 9)]
    affinity = FeatureAffinity.collect(model, batches)
    assert affinity.features == tuple(NAMES)
    assert affinity.tables == (
        TableSpec(name="t_1", num_embeddings=20, embedding_dim=8, feature_names=("c", "a")),
        TableSpec(name="t_2", num_embeddings=30, embedding_dim=8, feature_names=("b",)),
        TableSpec(name="t_d", num_embeddings=20, embedding_dim=8, feature_names=("d",)),
    )
    assert [table.num_bytes for table in affinity.tables] == [4 * 160, 2 * 240, 4 * 160]
    ids = [sum(int(one.sparse_features[name].lengths().sum()) for one in batches) for name in affinity.features]
    assert affinity.pooling_factors == tuple(number / 16 for number in ids)


def test_a_history_is_the_sum_of_its_items(generator):
    sizes = {"name": "t", "num_embeddings": 20, "embedding_dim": 8, "feature_names": ["a", "b"]}
    bags, items = EmbeddingBagCollection([EmbeddingBagConfig(**sizes)]), EmbeddingCollection([EmbeddingConfig(**sizes)])
    items.embeddings["t"].weight = bags.embedding_bags["t"].weight
    batches = [batch(["a", "b"], 9, generator=generator, least=0, most=4)]
    pooled, history = (FeatureAffinity.collect(FlatModel(each), batches) for each in (bags, items))
    np.testing.assert_allclose(history.matrix, pooled.matrix, rtol=0, atol=1e-6)
    assert (history.features, history.tables) == (pooled.features, pooled.tables)
    assert history.pooling_factors == pooled.pooling_factors


def test_weights_of_ids_do_not_change_pooling_factors(generator):
    config = EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["a"])
    model = FlatModel(EmbeddingBagCollection(tables=[config], is_weighted=True))
    one = batch(["a"], 5, generator=generator, least=2, most=2)
    ids = one.sparse_features
    weights = torch.rand(10, generator=generator)
    one.sparse_features = KeyedJaggedTensor(ids.keys(), ids.values(), weights=weights, lengths=ids.lengths())
    assert FeatureAffinity.collect(model, [one]).pooling_factors == (2.0,)


def test_a_feature_of_two_tables_is_two_embeddings(generator):
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=features)
        for name, features in (("t", ["a", "b"]), ("u", ["a"]))
    ]
    one = batch(["a", "b"], 6, generator=generator, least=1, most=3)
    affinity = FeatureAffinity.collect(FlatModel(EmbeddingBagCollection(tables=tables)), [one])
    assert affinity.features == ("b", "a@t", "a@u")
    assert [table.feature_names for table in affinity.tables] == [("a@t", "b"), ("a@u",)]
    assert affinity.pooling_factors is None, "the ids of an embedding are those of its feature, of another name"


def test_two_tables_of_one_name_are_left_out(generator):
    first, second = collection(["a"]), collection(["b"])
    second.embedding_bag_configs()[0].name = "t_a"
    affinity = FeatureAffinity.collect(FlatModel(first, second), [batch(["a", "b"], 3, generator=generator)])
    assert affinity.tables == ()
    assert affinity.pooling_factors == (1.0, 1.0)


def test_a_batch_without_rows_adds_nothing(generator):
    model = FlatModel(collection(NAMES))
    full = batch(NAMES, 4, generator=generator)
    empty = batch(NAMES, 0, generator=generator)
    affinity = FeatureAffinity.collect(model, [empty, full, empty])
    assert affinity.num_samples == 4
    np.testing.assert_array_equal(affinity.matrix, FeatureAffinity.collect(model, [full]).matrix)
    with pytest.raises(InputError, match="batches have no samples"):
        FeatureAffinity.collect(model, [empty])
