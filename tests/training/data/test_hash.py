"""Hashing: stable literals, agreement of types, spread."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from dmt.errors import InputError
from dmt.training.data.hash import hash_rows


def test_rows_of_known_values_never_change():
    # Literals on purpose: another result would silently scramble every trained model's tables.
    values = pa.array(["68fd1e64", "80e26c9b", "", "\u00e9", None])
    assert hash_rows(values, feature="C1", num_embeddings=100_000).tolist() == [7261, 49784, 76778, 83615, 0]
    assert hash_rows(values, feature="C2", num_embeddings=100_000).tolist() == [39066, 76315, 91686, 83819, 0]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([12, None, 7]),
        pa.array([12, None, 7], pa.int8()),
        pa.array([12.0, None, 7.0]),
        pa.array([12.0, math.nan, 7.0]),
        pa.array(["12", None, "7"]).dictionary_encode(),
        pa.array(["12", None, "7"], pa.large_string()),
        pa.array([12, None, 7]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([1, 2, 0]), pa.array(["7", "12", None])),
    ],
    ids=lambda values: str(values.type),
)
def test_a_value_has_one_row_whatever_its_type(values):
    expected = hash_rows(pa.array(["12", None, "7"]), feature="f", num_embeddings=1000).tolist()
    assert expected[1] == 0
    assert hash_rows(values, feature="f", num_embeddings=1000).tolist() == expected


def test_row_zero_is_kept_for_missing_and_one_row_takes_all():
    many = pa.array(np.arange(5000))
    assert hash_rows(many, feature="f", num_embeddings=7).min() == 1
    assert hash_rows(many, feature="f", num_embeddings=7).max() == 6
    assert hash_rows(pa.array(["a", None]), feature="f", num_embeddings=1).tolist() == [0, 0]
    assert hash_rows(pa.array(["a", None]), feature="f", num_embeddings=2).tolist() == [1, 0]
    assert hash_rows(pa.array([], pa.string()), feature="f", num_embeddings=9).tolist() == []


@pytest.mark.parametrize("values", [np.arange(100_000), np.arange(100_000) * 1024], ids=["dense", "strided"])
def test_values_spread_evenly(values):
    counts = np.bincount(hash_rows(pa.array(values), feature="f", num_embeddings=1001), minlength=1001)[1:]
    # Chi-square with 999 degrees of freedom: mean 999, standard deviation 45; five of them either way.
    assert abs(((counts - 100) ** 2 / 100).sum() - 999) < 5 * 45


@pytest.mark.parametrize("value", [1.5, 2.0**63, math.inf])
def test_a_float_that_is_no_integer_is_no_category(value):
    with pytest.raises(InputError, match=r"Feature 'f': category .+ is not a signed 64-bit integer"):
        hash_rows(pa.array([1.0, value]), feature="f", num_embeddings=10)
