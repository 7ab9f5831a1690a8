"""Embeddings read by feature name: one split of what arrived, in any order, also when traced."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.models.sparse import JoinedShards
from dmt.models.tower_modules import DLRMTowerModule, feature_vectors
from dmt.plan.tables import TableSpec

B, N = 3, 4
ARRIVED = ["f2", "f0", "f1"]
ASKED = ["f0", "f1", "f2"]


def keyed(widths=(N, N, N)) -> KeyedTensor:
    columns = torch.arange(float(B * sum(widths))).view(B, sum(widths))
    return KeyedTensor(ARRIVED, list(widths), columns)


def test_feature_vectors_read_a_keyed_tensor_by_one_split() -> None:
    embeddings = keyed((2, 3, 4))
    embeddings.values().requires_grad_()
    vectors = feature_vectors(embeddings, ["f1", "f2"])
    assert [vector.shape[1] for vector in vectors] == [4, 2]
    assert torch.equal(vectors[0], embeddings.values()[:, 5:])
    nodes = {vector.grad_fn for vector in vectors}
    assert len(nodes) == 1
    assert "Split" in nodes.pop().name()


def test_a_tower_module_can_be_traced() -> None:
    """TorchRec's train pipelines trace the model; a proxy has no list of keys that could be sorted."""
    module = DLRMTowerModule(ASKED, embedding_dim=N, tower_dim=2, c=1, p=1)
    traced = torch.fx.symbolic_trace(module)
    expected = module({name: keyed()[name] for name in ARRIVED})
    torch.testing.assert_close(module(keyed()), expected)
    torch.testing.assert_close(traced(keyed()), expected)


def test_joined_shards_come_from_one_split() -> None:
    leaf = torch.arange(float(B * 3 * N)).view(B, 3 * N).requires_grad_()
    table = TableSpec(name="t", num_embeddings=1, embedding_dim=2 * N, feature_names=("f",))
    module = JoinedShards([table], splits={"f": (N, N)})
    module.shards = torch.nn.Identity()
    joined = module(KeyedTensor(["g", "f[4:8]", "f[0:4]"], [N, N, N], leaf))
    assert torch.equal(joined["f"], torch.cat([leaf[:, 2 * N :], leaf[:, N : 2 * N]], dim=1))
    split = joined["g"].grad_fn
    assert {node for node, _ in joined["f"].grad_fn.next_functions} == {split}, "slices cost a matrix of zeros each"
    joined["f"].sum().backward()
    assert leaf.grad[0].tolist() == [0.0] * N + [1.0] * 2 * N
