"""Embeddings in the order of their keys, and split by rows."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.sptt.results import in_order, split_rows

ROWS = 5
WIDTHS = {"c": 3, "a": 1, "b": 2}  # as they arrive
KEYS = ["a", "b", "c"]  # as they are asked for


def arrived() -> KeyedTensor:
    return KeyedTensor(list(WIDTHS), list(WIDTHS.values()), torch.arange(ROWS * 6.0).view(ROWS, 6).requires_grad_())


def test_columns_are_in_the_order_of_the_keys() -> None:
    source = arrived()
    ordered = in_order(source, KEYS)
    assert ordered.keys() == KEYS
    assert ordered.length_per_key() == [1, 2, 3]
    for key in KEYS:
        assert torch.equal(ordered[key], source[key]), key
    ordered["b"].sum().backward()
    assert source.values().grad is not None
    assert source.values().grad[0].tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("keys", [list(WIDTHS), ["c", "a@t"]], ids=["the same order", "other keys"])
def test_what_needs_no_order_is_left_alone(keys: list[str]) -> None:
    source = arrived()
    assert in_order(source, keys) is source


def test_split_rows_gives_the_same_keys_some_samples_at_a_time() -> None:
    embeddings = in_order(arrived(), KEYS)
    parts = split_rows(embeddings, [2, 0, 3])
    assert [len(part.values()) for part in parts] == [2, 0, 3]
    for key in KEYS:
        assert torch.equal(torch.cat([part[key] for part in parts]), embeddings[key]), key
