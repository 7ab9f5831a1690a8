"""Embeddings read by feature name: what is stacked in which order, and what is copied for it."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.models.sparse import JoinedShards
from dmt.models.tower_modules import DLRMTowerModule, feature_vectors, stacked_in_any_order
from dmt.plan.tables import TableSpec
from dmt.sptt.results import LazyKeyedTensor

B, N = 3, 4
ARRIVED = ["f2", "f0", "f1"]
ASKED = ["f0", "f1", "f2"]


def keyed(widths=(N, N, N)) -> KeyedTensor:
    columns = torch.arange(float(B * sum(widths))).view(B, sum(widths))
    return KeyedTensor(ARRIVED, list(widths), columns)


def check_order(embeddings, features) -> None:
    stacked, position = stacked_in_any_order(embeddings, features)
    assert stacked.shape == (B, len(features), N)
    assert sorted(position) == list(range(len(features)))
    for name, place in zip(features, position, strict=True):
        assert torch.equal(stacked[:, place], embeddings[name]), name


def test_columns_of_equal_widths_are_viewed_as_they_arrived() -> None:
    arrived = keyed()
    for embeddings in (arrived, LazyKeyedTensor(arrived, ASKED)):
        stacked, position = stacked_in_any_order(embeddings, ASKED)
        assert stacked.data_ptr() == arrived.values().data_ptr(), "a copy was made"
        assert position == [1, 2, 0]
        check_order(embeddings, ASKED)


def test_replaced_columns_are_the_ones_that_are_read() -> None:
    """TorchRec's semi-sync pipeline puts other columns into a result that was delivered."""
    embeddings = LazyKeyedTensor(keyed(), ASKED)
    embeddings._values = leaf = (embeddings.values().detach() + 100).requires_grad_()
    check_order(embeddings, ASKED)
    stacked, position = stacked_in_any_order(embeddings, ASKED)
    stacked[:, position[0]].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == [1.0] * N + [0.0] * 2 * N


@pytest.mark.parametrize(
    ("embeddings", "features"),
    [
        (keyed(), ["f1", "f2"]),
        (keyed(), ["f1", "f0", "f1"]),
        (keyed((2, N, N)), ["f1", "f0"]),
        (LazyKeyedTensor(keyed(), ASKED), ["f0", "f2"]),
        ({name: keyed()[name] for name in ARRIVED}, ASKED),
    ],
    ids=["some of them", "one of them twice", "unequal widths", "some, by key", "a dict"],
)
def test_anything_else_is_copied_in_the_order_asked_for(embeddings, features) -> None:
    stacked, position = stacked_in_any_order(embeddings, features)
    assert position == list(range(len(features)))
    check_order(embeddings, features)
    before = stacked.clone()
    source = embeddings.values() if hasattr(embeddings, "length_per_key") else embeddings["f0"]
    source.add_(1)
    assert torch.equal(stacked, before), "not a copy"


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
    for embeddings in (keyed(), LazyKeyedTensor(keyed(), ASKED)):
        torch.testing.assert_close(module(embeddings), expected)
        torch.testing.assert_close(traced(embeddings), expected)


def test_joined_shards_come_from_one_split() -> None:
    leaf = torch.arange(float(B * 3 * N)).view(B, 3 * N).requires_grad_()
    table = TableSpec(name="t", num_embeddings=1, embedding_dim=2 * N, feature_names=("f",))
    module = JoinedShards([table], splits={"f": (N, N)}, make_sparse_arch=lambda tables, device: torch.nn.Identity())
    joined = module(KeyedTensor(["g", "f[4:8]", "f[0:4]"], [N, N, N], leaf))
    assert torch.equal(joined["f"], torch.cat([leaf[:, 2 * N :], leaf[:, N : 2 * N]], dim=1))
    split = joined["g"].grad_fn
    assert {node for node, _ in joined["f"].grad_fn.next_functions} == {split}, "slices cost a matrix of zeros each"
    joined["f"].sum().backward()
    assert leaf.grad[0].tolist() == [0.0] * N + [1.0] * 2 * N
