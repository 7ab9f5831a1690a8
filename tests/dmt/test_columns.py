"""Column shards of tables and ids: names, settings, models with towers; bits of flat models are in `tests/models`."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from dmt.errors import InputError
from dmt.models import DMTDCN, DMTDLRM, ModelOptions
from dmt.plan.split_across_towers import split_ids, split_tables
from dmt.plan.towers import TowerPlan

FEATURES = ["ad", "user", "shop"]


def tables(pooling=PoolingType.SUM):
    return [
        EmbeddingBagConfig(name=f"t_{f}", num_embeddings=30, embedding_dim=16, feature_names=[f], pooling=pooling)
        for f in FEATURES
    ]


def batch(*, weighted=False):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 6, (3 * 7,), generator=generator)
    count = int(lengths.sum())
    values = torch.randint(30, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths, weights=weights)


def test_ids_keep_their_weights_and_their_batch():
    ids = batch(weighted=True)
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
    cut = split_tables(tables(PoolingType.MEAN), {"ad": (4, 12)})
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


@pytest.mark.parametrize("model_class", [DMTDLRM, DMTDCN])
def test_models_with_towers_run_on_shards_and_refuse_whole_tables(model_class):
    splits = {feature: (8, 8) for feature in FEATURES}
    towers = [["ad[0:8]", "user[0:8]"], ["ad[8:16]", "shop[0:8]"], ["user[8:16]", "shop[8:16]"]]
    plan = TowerPlan.from_lists(towers, column_splits=splits)
    options = ModelOptions(dense_arch_layer_sizes=[16], over_arch_layer_sizes=[16, 1])
    model = model_class(
        tables=plan.split_tables(tables()), tower_plan=plan, tower_dim=4, dense_in_features=3, options=options
    )
    logits = model(torch.zeros(7, 3), split_ids(batch(), plan.column_splits))
    assert logits.shape == (7, 1)
    assert logits.isfinite().all()
    with pytest.raises(InputError, match=r"cuts the table of feature 'ad' into column shards .* plan\.split_tables"):
        model_class(tables=tables(), tower_plan=plan, tower_dim=4, dense_in_features=3, options=options)
