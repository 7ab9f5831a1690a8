"""Column shards side by side again: the bits of the uncut model; embeddings read by name, also when traced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor, KeyedTensor

from dmt.models import DCN, DLRM, ModelOptions
from dmt.models.sparse import JoinedShards
from dmt.models.tower_modules import DLRMTowerModule, feature_vectors
from dmt.plan.split_across_towers import shard_names, split_ids
from dmt.plan.tables import TableSpec

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


def test_joined_shards_come_from_one_split() -> None:
    leaf = torch.arange(36.0).view(3, 12).requires_grad_()
    tables = [
        TableSpec(name=f"t_{name}", num_embeddings=1, embedding_dim=dim, feature_names=(name,))
        for name, dim in (("f", 8), ("g", 4))
    ]
    module = JoinedShards(tables, splits={"f": (4, 4)})
    module.shards = torch.nn.Identity()
    joined = feature_vectors(module(KeyedTensor(["g", "f[4:8]", "f[0:4]"], [4, 4, 4], leaf)), ["f", "g"])
    assert torch.equal(joined[0], torch.cat([leaf[:, 8:], leaf[:, 4:8]], dim=1))
    assert {node for node, _ in joined[0].grad_fn.next_functions} == {joined[1].grad_fn}, "slices cost a matrix each"


def test_a_tower_module_can_be_traced() -> None:
    """TorchRec's train pipelines trace the model; a proxy has no list of keys that could be sorted."""
    module = DLRMTowerModule(FEATURES, embedding_dim=4, tower_dim=2, c=1, p=1)
    arrived = KeyedTensor(["c", "a", "b"], [4, 4, 4], torch.arange(36.0).view(3, 12))
    expected = module({name: arrived[name] for name in FEATURES})
    torch.testing.assert_close(module(arrived), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(module)(arrived), expected)
