"""`FeatureAffinity`: what is accepted, and files. No TorchRec here."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity
from dmt.plan.tables import TableSpec
from tests.partitioner.planted import planted_affinity

GOOD = [[1.0, 0.5, 0.2], [0.5, 1.0, 0.3], [0.2, 0.3, 1.0]]
# Not in the order of the features, and one is shared.
TABLES = (
    TableSpec(name="shared", num_embeddings=7, embedding_dim=8, feature_names=("c", "a")),
    TableSpec(name="own", num_embeddings=5, embedding_dim=16, feature_names=("b",)),
)
FACTORS = (1.0, 0.0, 2.5)


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
        (np.diag([np.inf] * 2, 1) - np.diag([np.inf] * 2, -1), "must be finite"),
        (_with(0, 1, 1.01), r"affinity of 'a' with 'b' is 1\.01.*must lie within 0\.\.1"),
        (_with(0, 1, -0.2), r"affinity of 'a' with 'b' is -0\.2.*must lie within 0\.\.1"),
        (_with(1, 2, 0.4, mirror=False), r"affinity of 'b' with 'c' is 0\.4 \(mirrored: 0\.3\).*mirror image"),
        (np.ones((2, 3)), r"shape \[2, 3\] for 3 features; it must be \[3, 3\]"),
        (np.ones(9), r"shape \[9\] for 3 features"),
        ([["x", "y"]], r"not an array of numbers"),
        (np.eye(3) * 1j, "not an array of numbers but of complex128"),
        (np.full((3, 3), "1"), "not an array of numbers but of <U1"),
        ([[object()] * 3] * 3, "not an array of numbers"),
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
    affinity = FeatureAffinity(
        matrix=source.matrix,
        features=source.features,
        num_samples=num_samples,
        measure="cka" if num_samples else "cosine",
    )
    path = tmp_path / "new" / "affinity.npz"
    affinity.save(path)
    loaded = FeatureAffinity.load(path)
    np.testing.assert_array_equal(loaded.matrix, affinity.matrix)
    assert (loaded.features, loaded.num_samples) == (affinity.features, num_samples)
    assert loaded.measure == affinity.measure
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
        (
            {"matrix": np.eye(1), "features": np.array(["a", None], dtype=object)},
            "cannot be read .it holds no plain arrays",
        ),
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


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"format": np.array("one")}, "array 'format' is <U3 of shape \\[\\]; it must be one whole number"),
        ({"format": np.array([1, 1])}, r"array 'format' is int64 of shape \[2\]; it must be one whole number"),
        ({"num_samples": np.float64("nan")}, "array 'num_samples' is float64 .* one whole number"),
        (
            {"features": np.array([["a"], ["b"], ["c"]])},
            r"array 'features' is <U1 of shape \[3, 1\].* text of shape \[F\]",
        ),
        ({"features": np.array("abc")}, r"array 'features' is <U3 of shape \[\]"),
        ({"features": np.arange(3)}, "array 'features' is int64"),
        ({"pooling_factors": np.float64(2)}, r"array 'pooling_factors' is float64 of shape \[\]; it must be numbers"),
        ({"pooling_factors": np.array(["a", "b", "c"])}, "array 'pooling_factors' is <U1"),
        ({"table_names": np.array("t")}, "array 'table_names' is <U1 of shape"),
        (
            {"table_rows": np.int64(7)},
            r"array 'table_rows' is int64 of shape \[\]; it must be whole numbers of shape \[K\]",
        ),
        ({"table_dims": np.array([8.0, 8.0])}, "array 'table_dims' is float64"),
        ({"table_sizes": np.array([[2, 1]])}, r"array 'table_sizes' is int64 of shape \[1, 2\]"),
        ({"table_features": np.array([1, 2, 3])}, "array 'table_features' is int64"),
        ({"matrix": np.eye(3) * 1j}, "matrix is not an array of numbers but of complex128"),
        ({"matrix": np.float64(1)}, r"matrix has shape \[\] for 3 features"),
    ],
)
def test_a_file_with_an_array_of_another_form_is_refused_by_name(tmp_path, arrays, message):
    FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], tables=TABLES).save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        good = {name: archive[name] for name in archive.files}
    np.savez(tmp_path / "bad.npz", **(good | arrays))
    with pytest.raises(InputError, match=rf"^Affinity file .*bad\.npz:? .*{message}"):
        FeatureAffinity.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_read_right_or_refused(tmp_path, save):
    save(tmp_path / "good.npz", matrix=np.array(GOOD), features=np.array(["a", "b", "c"]))
    content = (tmp_path / "good.npz").read_bytes()
    messages = []
    for place in range(0, len(content), 3):
        (tmp_path / "bad.npz").write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            FeatureAffinity.load(tmp_path / "bad.npz")
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("bad.npz" in message for message in messages)


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


def test_tables_and_pooling_factors_go_along():
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], tables=TABLES, pooling_factors=np.array(FACTORS))
    assert (affinity.tables, affinity.pooling_factors) == (TABLES, FACTORS)
    turned = affinity.permuted(["c", "a", "b"])
    assert (turned.tables, turned.pooling_factors) == (TABLES, (2.5, 1.0, 0.0))
    plain = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"])
    assert (plain.tables, plain.pooling_factors) == ((), None)
    assert plain.to_summary() == affinity.to_summary(), "a plan is traced by matrix and names alone"


def test_the_digest_stays_what_it_was():
    # Plans in users' hands hold it.
    assert FeatureAffinity(matrix=GOOD, features=["a", "b", "c"]).to_summary()["digest"] == "b0f1a5208b23c417"


def test_tables_of_torchrec_are_taken():
    config = SimpleNamespace(name="t", num_embeddings=4, embedding_dim=8, feature_names=["a", "b", "c"], pooling="SUM")
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], tables=[config])
    assert affinity.tables == (TableSpec(name="t", num_embeddings=4, embedding_dim=8, feature_names=("a", "b", "c")),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tables": TABLES[:1]},
            r"FeatureAffinity: feature 'b' is in the affinity but not in the tables \(2 features in the tables, "
            r"3 in the affinity\)\. Both must be of one model",
        ),
        (
            {"tables": (*TABLES, TableSpec(name="x", num_embeddings=1, embedding_dim=4, feature_names=("d",)))},
            r"feature 'd' is in the tables but not in the affinity \(4 features in the tables, 3 in the affinity\)",
        ),
        (
            {"tables": (*TABLES, TableSpec(name="x", num_embeddings=1, embedding_dim=4, feature_names=("b",)))},
            "Feature 'b' is given 2 times",
        ),
        ({"pooling_factors": (1.0, 2.0)}, "there are 2 pooling_factors for 3 features; give one for each"),
        ({"pooling_factors": (1.0, math.nan, 2.0)}, "pooling factor of feature 'b' is nan; .*finite and not negative"),
        ({"pooling_factors": (1.0, 2.0, math.inf)}, "pooling factor of feature 'c' is inf"),
        ({"pooling_factors": (-0.5, 2.0, 1.0)}, "pooling factor of feature 'a' is -0.5"),
        ({"pooling_factors": ("many", 2.0, 1.0)}, "pooling_factors is not a list of numbers"),
        ({"pooling_factors": 3}, "pooling_factors is not a list of numbers"),
    ],
)
def test_wrong_tables_and_pooling_factors_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], **fields)


@pytest.mark.parametrize("fields", [{"tables": TABLES}, {"pooling_factors": FACTORS}])
def test_files_keep_tables_and_pooling_factors(tmp_path, fields):
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], num_samples=3, **fields)
    affinity.save(tmp_path / "a.npz")
    loaded = FeatureAffinity.load(tmp_path / "a.npz")
    assert (loaded.tables, loaded.pooling_factors) == (affinity.tables, affinity.pooling_factors)
    assert loaded.to_summary() == affinity.to_summary()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert int(archive["format"]) == 1
        assert all(archive[name].dtype != object for name in archive.files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_dims": None}, r"bad\.npz: array 'table_dims' is absent"),
        ({"table_sizes": np.array([2, 2])}, r"do not fit together: .* 2 sizes with the sum 4, 3 features"),
        ({"table_rows": np.array([7])}, "2 names, 1 rows"),
        ({"table_rows": np.array([7, 0])}, "Table 'own' has num_embeddings=0"),
        ({"table_sizes": np.array([4, -1])}, "table 'own' has -1 features; it needs one at least"),
        ({"table_features": np.array(["c", "a", "x"])}, "feature 'x' is in the tables but not in the affinity"),
    ],
)
def test_a_file_with_broken_tables_is_refused(tmp_path, changes, message):
    FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], tables=TABLES).save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        arrays = {name: archive[name] for name in archive.files} | changes
    np.savez(tmp_path / "bad.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(InputError, match=message):
        FeatureAffinity.load(tmp_path / "bad.npz")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"])
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.npz", tmp_path / "folder", "."):
        with pytest.raises(InputError, match=r"^Affinity file .*: cannot be written \(.*\)\. Give another path"):
            affinity.save(path)
    affinity.save(tmp_path / "a.npz")

    def fill_the_disk(file, **arrays):
        file.write(b"the beginning")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(InputError, match=r"cannot be written .*No space left on device.* free space"):
        FeatureAffinity(matrix=[[1.0]], features=["other"]).save(tmp_path / "a.npz")
    assert FeatureAffinity.load(tmp_path / "a.npz").features == ("a", "b", "c"), "what was there is kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "file", "folder"]


def test_the_earlier_rule_is_named_wherever_it_is_broken():
    matrix = np.eye(5)
    matrix[4, 3] = 0.5
    with pytest.raises(InputError, match=r"affinity of 'f3' with 'f4' is 0 \(mirrored: 0\.5\); .* mirror image"):
        FeatureAffinity(matrix=matrix, features=[f"f{i}" for i in range(5)])
    matrix[1, 0] = matrix[0, 1] = np.nan
    with pytest.raises(InputError, match="must be finite"):
        FeatureAffinity(matrix=matrix, features=[f"f{i}" for i in range(5)])


def test_a_large_matrix_is_copied_a_few_times_only(tmp_path):
    size = 1500
    matrix = np.random.default_rng(0).random((size, size))
    matrix += matrix.T
    matrix /= 2
    names = [f"f{i}" for i in range(size)]
    tracemalloc.start()
    affinity = FeatureAffinity(matrix=matrix, features=names)
    affinity.to_summary()
    affinity.save(tmp_path / "a.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The matrix, the cleaned one, and what is compared.
    assert peak < 4.5 * matrix.nbytes


def test_a_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, matrix=np.zeros((1500, 1500)), features=np.array([str(i) for i in range(1500)]))
    monkeypatch.setattr("dmt.partitioner.affinity._MOST_UNPACKED", 2**20)
    with pytest.raises(
        InputError, match=r"bomb\.npz: cannot be read \(it unpacks to 18\.0 MB; write such a matrix unc"
    ):
        FeatureAffinity.load(path)
    FeatureAffinity(matrix=np.zeros((500, 500)), features=[str(i) for i in range(500)]).save(path)
    assert FeatureAffinity.load(path).num_features == 500  # stored as it is, of any size
