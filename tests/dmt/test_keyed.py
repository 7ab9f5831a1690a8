"""`LazyKeyedTensor`: reading by key, reading whole, replacing the columns, and gradients of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.sptt.results import LazyKeyedTensor, split_rows

ROWS = 5
WIDTHS = {"c": 3, "a": 1, "b": 2}  # as they arrive
KEYS = ["a", "b", "c"]  # as they are asked for


def arrived(columns: Tensor | None = None) -> KeyedTensor:
    columns = torch.arange(ROWS * 6.0).view(ROWS, 6).requires_grad_() if columns is None else columns
    return KeyedTensor(list(WIDTHS), list(WIDTHS.values()), columns)


def slices(columns: Tensor) -> dict[str, Tensor]:
    return {"c": columns[:, :3], "a": columns[:, 3:4], "b": columns[:, 4:]}


def test_columns_are_in_the_order_of_the_keys() -> None:
    source = arrived()
    by_key = slices(source.values())
    ordered = LazyKeyedTensor(source, KEYS)
    assert ordered.keys() == list(ordered.to_dict()) == KEYS
    assert ordered.length_per_key() == [1, 2, 3]
    assert ordered.offset_per_key() == [0, 1, 3, 6]
    assert torch.equal(ordered.values(), torch.cat([by_key[key] for key in KEYS], dim=1))
    for key in KEYS:
        assert torch.equal(ordered[key], by_key[key]), key
    assert list(KeyedTensor.regroup([ordered], [["c"], ["b", "a"]])[1][0].shape) == [3]


def test_reading_after_values_gives_the_same_numbers() -> None:
    source = arrived()
    ordered = LazyKeyedTensor(source, KEYS)
    ordered.values()
    for key, part in slices(source.values()).items():
        assert torch.equal(ordered[key], part), key
        assert torch.equal(ordered.to_dict()[key], part), key


def test_nothing_is_copied_where_the_order_is_the_same() -> None:
    source = arrived()
    assert LazyKeyedTensor(source, list(WIDTHS)).values().data_ptr() == source.values().data_ptr()
    ordered = LazyKeyedTensor(source, KEYS)
    first, last = source.values().data_ptr(), source.values().data_ptr() + source.values().nbytes
    assert all(first <= ordered[key].data_ptr() < last for key in KEYS), "reading by key is a view"


def test_one_result_is_read_twice() -> None:
    ordered = LazyKeyedTensor(arrived(), KEYS)
    assert ordered["b"] is ordered["b"]
    assert ordered.values() is ordered.values()
    assert ordered.to_dict()["b"] is ordered["b"]


@pytest.mark.parametrize("whole", [False, True], ids=["by key", "whole"])
def test_gradients_are_those_of_slices(whole: bool) -> None:
    weights = {key: torch.randn(ROWS, width) for key, width in WIDTHS.items()}
    found, expected = arrived(), arrived()
    ordered = LazyKeyedTensor(found, KEYS)
    if whole:
        loss = (ordered.values() * torch.cat([weights[key] for key in KEYS], dim=1)).sum()
    else:
        loss = torch.stack([(ordered[key] * weights[key]).sum() for key in KEYS]).sum()
    loss.backward()
    by_key = slices(expected.values())
    torch.stack([(by_key[key] * weights[key]).sum() for key in KEYS]).sum().backward()
    assert torch.equal(found.values().grad, expected.values().grad)  # type: ignore[arg-type]
    assert found.values().grad.abs().sum() > 0  # type: ignore[union-attr]


def count_nodes(root: object) -> list[str]:
    names, todo, seen = [], [root], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        todo += [parent for parent, _ in node.next_functions]
    return names


def test_all_keys_come_from_one_split() -> None:
    """A slice for each would cost a matrix of zeros for each in the backward pass."""
    ordered = LazyKeyedTensor(arrived(), KEYS)
    names = count_nodes(torch.stack([ordered[key].sum() for key in KEYS]).sum().grad_fn)
    assert sum("Split" in name for name in names) == 1, names
    assert not any("Slice" in name for name in names), names


@pytest.mark.parametrize("read_before", [False, True])
def test_columns_can_be_replaced_in_key_order(read_before: bool) -> None:
    """TorchRec's semi-sync pipeline cuts the graph this way: it puts a detached leaf in the place of the columns."""
    ordered = LazyKeyedTensor(arrived(), KEYS)
    if read_before:
        assert len(ordered.to_dict()) == len(KEYS)
    leaf = (ordered.values().detach() + 100).requires_grad_()
    ordered._values = leaf
    assert ordered.keys() == list(ordered.to_dict()) == KEYS
    assert ordered.values() is leaf
    parts = dict(zip(KEYS, leaf.split([1, 2, 3], dim=1), strict=True))
    for key, part in parts.items():
        assert torch.equal(ordered[key], part), key
        assert torch.equal(ordered.to_dict()[key], part), key
    (ordered["b"].sum() + 2 * ordered["c"].sum()).backward()
    assert leaf.grad is not None, "the leaf is what is read"
    assert leaf.grad[0].tolist() == [0, 1, 1, 2, 2, 2]


def test_to_keeps_order_and_numbers() -> None:
    ordered = LazyKeyedTensor(arrived(), KEYS)
    moved = ordered.to("meta")
    assert moved.keys() == KEYS
    assert moved.values().is_meta
    assert moved["b"].shape == (ROWS, 2)
    same = ordered.to(torch.device("cpu"), non_blocking=True)
    assert torch.equal(same.values(), ordered.values())
    ordered._values = ordered.values().detach() + 1
    assert torch.equal(ordered.to("cpu")["c"], ordered["c"]), "what was put there goes along"


def test_other_keys_than_asked_are_kept() -> None:
    """TorchRec renames a feature that two tables look up to feature@table."""
    source = KeyedTensor(["f@t1", "f@t0"], [2, 1], torch.arange(6.0).view(2, 3))
    ordered = LazyKeyedTensor(source, ["f", "f"])
    assert ordered.keys() == ["f@t1", "f@t0"]
    assert torch.equal(ordered.values(), source.values())
    assert ordered["f@t0"].tolist() == [[2.0], [5.0]]


@pytest.mark.parametrize("asked", [list(WIDTHS), KEYS], ids=["as arrived", "in another order"])
def test_split_rows_gives_the_same_keys_some_samples_at_a_time(asked: list[str]) -> None:
    embeddings = LazyKeyedTensor(arrived(), asked)
    parts = split_rows(embeddings, [2, 0, 3])
    assert [len(part.values()) for part in parts] == [2, 0, 3]
    for key in KEYS:
        assert torch.equal(torch.cat([part[key] for part in parts]), embeddings[key]), key
    assert split_rows(embeddings, [ROWS]) == [embeddings]
