"""Tower modules: the listings of the DMT paper (section 4) by hand, and reading by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from dmt.errors import InputError
from dmt.models import DCNTowerModule, DINTowerModule, DLRMProductsTowerModule, DLRMTowerModule, PassThroughTowerModule
from dmt.models.dense import mlp


@pytest.fixture
def embeddings():
    # Not in the order of the features, as after sharding.
    return {name: torch.randn(3, 8) for name in ("f2", "f0", "f1")}


FEATURES = ["f0", "f1", "f2"]


@pytest.mark.parametrize(("c", "p"), [(1, 0), (0, 1), (2, 3)])
def test_dlrm_tower_is_listing_1(embeddings, c, p):
    tower = DLRMTowerModule(FEATURES, embedding_dim=8, tower_dim=5, c=c, p=p)
    stacked = torch.stack([embeddings[name] for name in FEATURES], dim=1)
    parts = []
    if p:
        parts.append(functional.linear(stacked.view(3, -1), tower.combine.weight, tower.combine.bias))
    if c:
        flat = functional.linear(stacked.view(9, 8), tower.project.weight, tower.project.bias)
        parts.append(flat.view(3, -1))
    expected = torch.cat(parts, dim=1)
    output = tower(embeddings)
    assert output.shape == (3, tower.out_features) == (3, 5 * (c * 3 + p))
    # Two ways to batch one product: rounding may differ.
    torch.testing.assert_close(output, expected)


def test_dlrm_tower_skips_projections_that_change_no_size(embeddings):
    single = DLRMTowerModule(["f0"], embedding_dim=8, tower_dim=8, c=0, p=1)
    assert torch.equal(single(embeddings), embeddings["f0"])
    each = DLRMTowerModule(FEATURES, embedding_dim=8, tower_dim=8, c=1, p=0)
    assert torch.equal(each(embeddings), torch.cat([embeddings[name] for name in FEATURES], dim=1))
    assert not list(single.parameters())
    assert not list(each.parameters())


@pytest.mark.parametrize(("per_feature", "width"), [(False, 5), (True, 3 * 5)])
def test_dcn_tower_is_listing_2(embeddings, per_feature, width):
    tower = DCNTowerModule(FEATURES, embedding_dim=8, tower_dim=5, rank=4, per_feature=per_feature)
    x = torch.cat([embeddings[name] for name in FEATURES], dim=1)
    w, v, b = tower.crossnet.W_kernels[0], tower.crossnet.V_kernels[0], tower.crossnet.bias[0]
    crossed = x * (x @ v.T @ w.T + b) + x
    output = tower(embeddings)
    torch.testing.assert_close(output, crossed @ tower.project.weight.T + tower.project.bias)
    assert output.shape == (3, tower.out_features) == (3, width)
    # A projection that changes no size is left out: one feature, or each feature as wide as before.
    for features, more in ((["f1"], {}), (FEATURES, {"per_feature": True})):
        same = DCNTowerModule(features, embedding_dim=8, tower_dim=8, rank=4, **more)
        together = torch.cat([embeddings[name] for name in features], dim=1)
        assert torch.equal(same(embeddings), same.crossnet(together))


def test_pass_through_tower_takes_mixed_dims():
    embeddings = {"b": torch.randn(3, 2), "a": torch.randn(3, 4)}
    tower = PassThroughTowerModule(["a", "b"], embedding_dims=[4, 2])
    assert torch.equal(tower(embeddings), torch.cat([embeddings["a"], embeddings["b"]], dim=1))
    assert tower.in_features == tower.out_features == 6
    assert not list(tower.parameters())


@pytest.mark.parametrize(
    "tower",
    [
        DLRMTowerModule(FEATURES, embedding_dim=8, tower_dim=4, c=1, p=1),
        DLRMProductsTowerModule(FEATURES, embedding_dim=8, tower_dim=4, c=1, p=2),
        DCNTowerModule(FEATURES, embedding_dim=8, tower_dim=4, rank=2),
        PassThroughTowerModule(FEATURES, embedding_dims=[8, 8, 8]),
    ],
    ids=lambda tower: type(tower).__name__,
)
def test_towers_read_keyed_tensors_by_name(tower, embeddings):
    in_order = KeyedTensor.from_tensor_list(FEATURES, [embeddings[name] for name in FEATURES])
    shuffled = KeyedTensor.from_tensor_list(["f2", "f0", "f1"], [embeddings[name] for name in ("f2", "f0", "f1")])
    assert torch.equal(tower(in_order), tower(shuffled))
    assert torch.equal(tower(in_order), tower(embeddings))
    assert tower.in_features == 24
    assert tower(embeddings).shape == (3, tower.out_features)


def test_inner_products_are_added_to_the_combinations_alone(embeddings):
    torch.manual_seed(0)
    tower = DLRMProductsTowerModule(FEATURES, embedding_dim=8, tower_dim=5, c=1, p=2)
    paper = DLRMTowerModule(FEATURES, embedding_dim=8, tower_dim=5, c=1, p=2)
    left = paper.load_state_dict({n: v for n, v in tower.state_dict().items() if n != "products.weight"})
    assert not left.missing_keys
    added = tower(embeddings) - paper(embeddings)
    # By hand, pair by pair in row-major order.
    a, b, c = (embeddings[name] for name in FEATURES)
    products = torch.stack([(a * b).sum(1), (a * c).sum(1), (b * c).sum(1)], dim=1)
    torch.testing.assert_close(added[:, :10], products @ tower.products.weight.T)
    assert not added[:, 10:].any()
    assert tower.out_features == paper.out_features
    assert (tower.keeps_interactions, paper.keeps_interactions) == (True, False)
    added.sum().backward()
    assert tower.products.weight.grad.any()


def test_a_tower_of_one_feature_has_no_product(embeddings):
    tower = DLRMProductsTowerModule(["f1"], embedding_dim=8, tower_dim=8, c=0, p=1)
    assert torch.equal(tower(embeddings), embeddings["f1"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DLRMTowerModule(["a"], embedding_dim=8, tower_dim=4, c=0), r"DLRMTowerModule: c \+ p=0 is invalid"),
        (lambda: DLRMTowerModule(["a"], embedding_dim=8, tower_dim=4, p=-1), "p=-1 is invalid; use an integer"),
        (lambda: DLRMProductsTowerModule(["a"], embedding_dim=8, tower_dim=4, c=1, p=0), "Products.*: p=0 is invalid"),
        (lambda: DCNTowerModule(["a"], embedding_dim=8, tower_dim=4, rank=0), "rank=0 is invalid"),
        (lambda: DCNTowerModule(["a"], embedding_dim=8, tower_dim=0), "tower_dim=0 is invalid"),
        (lambda: mlp(4, [8, 2.5]), r"layer_sizes=\[8, 2.5\] is invalid; use integers of at least 1"),
    ],
)
def test_bad_sizes(build, message):
    with pytest.raises(InputError, match=message):
        build()


def sequences(targets: list[int], histories: list[list[int]], table: torch.Tensor) -> dict[str, JaggedTensor]:
    of_target = JaggedTensor(table[targets], lengths=torch.ones(len(targets), dtype=torch.int64))
    ids = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    return {"history": JaggedTensor(table[ids], lengths=lengths), "target": of_target}


@pytest.mark.parametrize("histories", [[[1, 2, 2], [], [4]], [[], [], []], [[0, 1, 2, 3, 4] * 10, [3], [1, 0]]])
@pytest.mark.parametrize(("tower_dim", "largest"), [(3, 300), (8, 1)])
def test_din_attends_to_each_samples_own_history(histories, tower_dim, largest):
    tower = DINTowerModule("target", "history", embedding_dim=4, tower_dim=tower_dim, hidden=5).double()
    assert (tower.in_features, tower.attention.score[0].out_features) == (2 * 4, 5)
    plain, numbers = copy.deepcopy(tower), torch.linspace(-largest, largest, 20, dtype=torch.float64)
    # Scores near each other, and so far apart that powers alone would overflow.
    table, again = (numbers.clone().view(5, 4).requires_grad_() for _ in range(2))
    targets, rows = [3, 0, 1], []
    for target, history in zip(targets, histories, strict=True):
        t, pooled = again[target], numbers.new_zeros(4)
        scores = [plain.attention.score(torch.cat([t, again[h], t - again[h], t * again[h]])) for h in history]
        for h, weight in zip(history, torch.cat(scores).softmax(0) if scores else (), strict=True):
            pooled = pooled + weight * again[h]
        sent = torch.cat([t, pooled]) if tower_dim == 8 else plain.project(torch.cat([t, pooled, t * pooled]))
        rows.append(sent + plain.product.weight[:, 0] * (t @ pooled))
    output = tower(sequences(targets, histories, table))
    assert output.shape == (3, tower.out_features) == (3, tower_dim)
    torch.testing.assert_close(output, torch.stack(rows))
    output.sum().backward()
    torch.stack(rows).sum().backward()
    torch.testing.assert_close(table.grad, again.grad)
    for ours, theirs in zip(tower.parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, expected, rtol=1e-7, atol=1e-5)


def test_din_adds_the_ids_of_a_target_and_makes_no_device_wait():
    tower, table = DINTowerModule("target", "history", embedding_dim=4, tower_dim=3), torch.randn(5, 4)
    whole = sequences([1, 0, 3], [[1], [2, 3], [4]], table)
    whole["target"].values()[:2] = torch.stack([table[2] + table[4], torch.zeros(4)])
    parts = whole | {"target": JaggedTensor(table[[2, 4, 3]], lengths=torch.tensor([2, 0, 1]))}
    assert torch.equal(tower(parts), tower(whole))
    assert tower(sequences([], [], table)).shape == (0, 3)
    # Tensors without numbers have none that could be waited for.
    assert tower.to("meta")({name: of_name.to("meta") for name, of_name in parts.items()}).shape == (3, 3)


def test_din_refuses_pooled_embeddings():
    tower = DINTowerModule("target", "history", embedding_dim=4, tower_dim=3)
    with pytest.raises(InputError, match=r"'target' arrives as pooled embeddings \[3, 4\].* an EmbeddingCollection"):
        tower({"target": torch.ones(3, 4), "history": torch.ones(3, 4)})
    with pytest.raises(InputError, match="hidden=0"):
        DINTowerModule("target", "history", embedding_dim=4, tower_dim=3, hidden=0)
