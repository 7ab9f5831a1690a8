"""`FeatureAffinity`: what is accepted, and files. No TorchRec here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity
from tests.partitioner.planted import planted_affinity

GOOD = [[1.0, 0.5, 0.2], [0.5, 1.0, 0.3], [0.2, 0.3, 1.0]]


def _with(row, column, value, mirror=True):
    matrix = np.array(GOOD)
    matrix[row, column] = value
    if mirror:
        matrix[column, row] = value
    return matrix


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (_with(0, 2, np.nan), r"affinity of 'a' with 'c' is nan.*must be finite"),
        (_with(1, 2, np.inf), r"affinity of 'b' with 'c' is inf.*must be finite"),
        (_with(0, 1, 1.01), r"affinity of 'a' with 'b' is 1\.01.*must lie within 0\.\.1"),
        (_with(0, 1, -0.2), r"affinity of 'a' with 'b' is -0\.2.*must lie within 0\.\.1"),
        (_with(1, 2, 0.4, mirror=False), r"affinity of 'b' with 'c' is 0\.4 \(mirrored: 0\.3\).*mirror image"),
        (np.ones((2, 3)), r"shape \[2, 3\] for 3 features; it must be \[3, 3\]"),
        (np.ones(9), r"shape \[9\] for 3 features"),
        ([["x", "y"]], r"not an array of numbers"),
        ([[1.0], [1.0, 2.0]], r"not an array of numbers"),
    ],
)
def test_a_wrong_matrix_is_refused_with_the_pair_at_fault(matrix, message):
    with pytest.raises(InputError, match=message):
        FeatureAffinity(matrix=matrix, features=["a", "b", "c"])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "features is empty"),
        (["a", "b", "a"], "feature 'a' is given 2 times"),
        ("abc", "'abc' is one string; give a list"),
        (["a", "b"], r"shape \[3, 3\] for 2 features"),
    ],
)
def test_wrong_names_are_refused(features, message):
    with pytest.raises(InputError, match=message):
        FeatureAffinity(matrix=GOOD, features=features)


def test_rounding_of_32_bit_floats_is_accepted_and_removed():
    matrix = np.array(GOOD, dtype=np.float32)
    matrix[0, 1] += 1e-6
    matrix[2, 2] = 1.000001
    affinity = FeatureAffinity(matrix=torch.from_numpy(matrix), features=["a", "b", "c"])
    assert affinity.matrix.dtype == np.float64
    np.testing.assert_array_equal(affinity.matrix, affinity.matrix.T)
    assert affinity.matrix.max() == 1.0


def test_the_matrix_is_a_read_only_copy():
    mine = np.array(GOOD)
    affinity = FeatureAffinity(matrix=mine, features=["a", "b", "c"])
    mine[0, 1] = mine[1, 0] = 0.9
    assert affinity.matrix[0, 1] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        affinity.matrix[0, 1] = 0.0


def test_permuted_moves_rows_columns_and_names_together():
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], num_samples=7)
    turned = affinity.permuted(["c", "a", "b"])
    assert turned.features == ("c", "a", "b")
    assert turned.num_samples == 7
    np.testing.assert_array_equal(turned.matrix, [[1.0, 0.2, 0.3], [0.2, 1.0, 0.5], [0.3, 0.5, 1.0]])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["a", "b"], r"missing \['c'\]"),
        (["a", "b", "c", "d"], r"unknown \['d'\]"),
        (["a", "b", "b"], "feature 'b' is given 2 times"),
    ],
)
def test_permuted_refuses_what_is_no_permutation(order, message):
    with pytest.raises(InputError, match=message):
        FeatureAffinity(matrix=GOOD, features=["a", "b", "c"]).permuted(order)


def test_permuted_suggests_the_nearest_feature():
    affinity = FeatureAffinity(matrix=GOOD, features=["user_id", "ad_id", "shop"])
    with pytest.raises(InputError, match="Did you mean 'user_id'"):
        affinity.permuted(["usr_id", "ad_id", "shop"])


@pytest.mark.parametrize("num_samples", [None, 4096])
def test_save_and_load_give_the_same_affinity(tmp_path, num_samples):
    source, _ = planted_affinity(9, 3, seed=0)
    affinity = FeatureAffinity(matrix=source.matrix, features=source.features, num_samples=num_samples)
    path = tmp_path / "new" / "affinity.npz"
    affinity.save(path)
    loaded = FeatureAffinity.load(path)
    np.testing.assert_array_equal(loaded.matrix, affinity.matrix)
    assert (loaded.features, loaded.num_samples) == (affinity.features, num_samples)
    assert [p.name for p in path.parent.iterdir()] == ["affinity.npz"]


def test_save_keeps_the_given_name_without_suffix(tmp_path):
    FeatureAffinity(matrix=[[1.0]], features=["only"]).save(tmp_path / "matrix")
    assert FeatureAffinity.load(tmp_path / "matrix").features == ("only",)


def test_a_hand_made_file_with_matrix_and_features_loads(tmp_path):
    np.savez(tmp_path / "own.npz", matrix=np.array(GOOD), features=np.array(["a", "b", "c"]))
    assert FeatureAffinity.load(tmp_path / "own.npz").features == ("a", "b", "c")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"matrix": np.eye(2)}, "has no array 'features'"),
        ({"features": np.array(["a"])}, "has no array 'matrix'"),
        ({"matrix": np.eye(1), "features": np.array(["a"]), "format": np.int64(9)}, "has format 9; this version reads"),
        ({"matrix": -np.eye(1), "features": np.array(["a"])}, r"bad\.npz: .*affinity of 'a' with 'a' is -1"),
        # An array of objects is stored pickled; unpickling could run code.
        ({"matrix": np.eye(1), "features": np.array(["a", None], dtype=object)}, "cannot be read.*allow_pickle"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InputError, match=message):
        FeatureAffinity.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        FeatureAffinity.load(tmp_path / "bad.npz")


def test_an_absent_file_and_a_bare_array_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.npz: cannot be read"):
        FeatureAffinity.load(tmp_path / "none.npz")
    np.save(tmp_path / "bare.npy", np.eye(2))
    with pytest.raises(InputError, match="has no array 'matrix'"):
        FeatureAffinity.load(tmp_path / "bare.npy")


def test_the_summary_is_about_pairs_and_identifies_the_matrix():
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], num_samples=5)
    summary = affinity.to_summary()
    assert summary["mean"] == pytest.approx((0.5 + 0.2 + 0.3) / 3, abs=1e-15)
    assert (summary["min"], summary["max"], summary["num_features"], summary["num_samples"]) == (0.2, 0.5, 3, 5)
    other = FeatureAffinity(matrix=_with(0, 1, 0.51), features=["a", "b", "c"])
    assert summary["digest"] != other.to_summary()["digest"]
    assert FeatureAffinity(matrix=[[1.0]], features=["a"]).to_summary()["mean"] is None
