"""Column shards of tables and ids: names and settings; bits of models are in `tests/models`."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from dmt.errors import InputError
from dmt.plan.split_across_towers import split_ids, split_tables

FEATURES = ["ad", "user", "shop"]


def test_ids_keep_their_weights_and_their_batch():
    lengths = torch.randint(0, 6, (3 * 7,))
    values = torch.randint(30, (int(lengths.sum()),))
    ids = KeyedJaggedTensor(FEATURES, values, torch.rand(len(values)), lengths)
    cut = split_ids(ids, {"user": (4, 12)})
    assert cut.keys() == ["ad", "user[0:4]", "user[4:16]", "shop"]
    assert cut.stride() == ids.stride() == 7
    for name, feature in zip(cut.keys(), ["ad", "user", "user", "shop"], strict=True):
        assert torch.equal(cut[name].values(), ids[feature].values())
        assert torch.equal(cut[name].weights(), ids[feature].weights())
        assert torch.equal(cut[name].lengths(), ids[feature].lengths())
    same = split_ids(ids, {})
    assert same.keys() == FEATURES
    assert torch.equal(same.values(), ids.values())


def test_shards_keep_the_settings_of_their_table():
    sizes = {"num_embeddings": 30, "embedding_dim": 16, "pooling": PoolingType.MEAN}
    tables = [EmbeddingBagConfig(name=f"t_{feature}", feature_names=[feature], **sizes) for feature in FEATURES]
    cut = split_tables(tables, {"ad": (4, 12)})
    assert [(t.name, t.feature_names, t.embedding_dim, t.pooling, t.num_embeddings) for t in cut[:2]] == [
        ("t_ad[0:4]", ["ad[0:4]"], 4, PoolingType.MEAN, 30),
        ("t_ad[4:16]", ["ad[4:16]"], 12, PoolingType.MEAN, 30),
    ]
    assert [t.name for t in cut[2:]] == ["t_user", "t_shop"]


def test_ids_with_a_batch_size_for_each_feature_are_refused():
    ids = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(6), lengths=torch.tensor([1, 2, 3]), stride_per_key_per_rank=[[2], [1]]
    )
    with pytest.raises(InputError, match="the features have different batch sizes"):
        split_ids(ids, {"a": (4, 4)})
