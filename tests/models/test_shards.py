"""Column shards side by side again: the bits of the uncut model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from dmt.models import DCN, DLRM, DMTDLRM, ModelOptions
from dmt.models.sparse import JoinedShards, whole_tables
from dmt.plan.split_across_towers import shard_names, split_ids, split_tables
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan

SPLITS = {"a": (4, 4, 8), "c": (12, 4)}
FEATURES = ["a", "b", "c"]
TABLES = [TableSpec(name=f"t_{f}", num_embeddings=20, embedding_dim=16, feature_names=(f,)) for f in FEATURES]
OPTIONS = ModelOptions(dense_arch_layer_sizes=(8,), over_arch_layer_sizes=(8, 1))


def batch() -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (3 * 9,), generator=generator)
    values = torch.randint(20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths)


def cut_and_whole(model_class: Any) -> tuple[Any, Any]:
    """The model with cut tables, and the uncut one with the same weights."""
    cut, whole = (
        model_class(tables=TABLES, dense_in_features=3, options=OPTIONS, **settings)
        for settings in ({"make_sparse_arch": partial(JoinedShards, splits=SPLITS)}, {})
    )
    state = {name: value for name, value in cut.state_dict().items() if "embedding_bags" not in name}
    for table in TABLES:
        widths = SPLITS.get(table.feature_names[0])
        shards = [table.name] if widths is None else shard_names(table.name, widths)
        columns = [cut.sparse_arch.shards.embedding_bags[shard].weight for shard in shards]
        state[f"sparse_arch.embedding_bags.{table.name}.weight"] = torch.cat(columns, dim=1)
    whole.load_state_dict(state)
    return cut, whole


@pytest.mark.parametrize("model_class", [DLRM, DCN])
def test_a_flat_model_of_shards_is_the_uncut_one_bit_by_bit(model_class: Any) -> None:
    cut, whole = cut_and_whole(model_class)
    dense = torch.rand(9, 3)
    wanted, found = whole(dense, batch()), cut(dense, split_ids(batch(), SPLITS))
    assert torch.equal(found, wanted)
    wanted.sum().backward()
    found.sum().backward()
    grads = whole.sparse_arch.embedding_bags["t_a"].weight.grad.split([4, 4, 8], dim=1)
    for name, grad in zip(shard_names("t_a", SPLITS["a"]), grads, strict=True):
        assert torch.equal(cut.sparse_arch.shards.embedding_bags[name].weight.grad, grad), name


def test_shards_of_towers_become_whole_tables() -> None:
    splits = {feature: (4, 12) for feature in FEATURES}
    towers = [[f"{f}[0:4]" for f in FEATURES], [f"{f}[4:16]" for f in FEATURES]]
    plan = TowerPlan.from_lists(towers, column_splits=splits)
    model = DMTDLRM(
        tables=split_tables(TABLES, splits), tower_plan=plan, dense_in_features=3, tower_dim=4, options=OPTIONS
    )
    whole = whole_tables(model, TABLES, splits)
    assert list(whole.embedding_bags) == ["t_a", "t_b", "t_c"]
    first, second = (tower.embedding for tower in model.sparse_arch.towers)
    ids = split_ids(batch(), splits)
    for feature in FEATURES:
        parts = [first(ids)[f"{feature}[0:4]"], second(ids)[f"{feature}[4:16]"]]
        assert torch.equal(whole(batch())[feature], torch.cat(parts, dim=1)), feature
    other = whole.embedding_bags["t_a"].weight
    other.data.zero_()
    assert first.embedding_bags["t_a[0:4]"].weight.any(), "the weights are copies"
