"""`FeatureAffinity`: what is accepted, and files. No TorchRec here."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, Interaction
from dmt.plan.tables import TableSpec
from tests.partitioner.planted import planted_affinity

GOOD = [[1.0, 0.5, 0.2], [0.5, 1.0, 0.3], [0.2, 0.3, 1.0]]
# Not in the order of the features, and one is shared.
TABLES = (
    TableSpec(name="shared", num_embeddings=7, embedding_dim=8, feature_names=("c", "a")),
    TableSpec(name="own", num_embeddings=5, embedding_dim=16, feature_names=("b",)),
)
FACTORS = (1.0, 0.0, 2.5)


def table_of(name):
    return TableSpec(name="x", num_embeddings=1, embedding_dim=4, feature_names=(name,))


def _with(row, column, value, mirror=True):
    matrix = np.array(GOOD)
    matrix[row, column] = value
    if mirror:
        matrix[column, row] = value
    return matrix


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matrix": _with(0, 2, np.nan)}, r"matrix\['a', 'c'\] is nan.*entries must be finite"),
        ({"matrix": np.diag([np.inf] * 2, 1) - np.diag([np.inf] * 2, -1)}, "must be finite"),
        ({"matrix": _with(0, 1, 1.01)}, r"matrix\['a', 'b'\] is 1\.01.*must be from 0 to 1"),
        ({"matrix": _with(0, 1, -0.2)}, r"matrix\['a', 'b'\] is -0\.2.*must be from 0 to 1"),
        ({"matrix": _with(1, 2, 0.4, mirror=False)}, r"\['b', 'c'\] is 0\.4 and .*\['c', 'b'\] is 0\.3; .*symmetric"),
        ({"matrix": np.ones((2, 3))}, r"of shape \[2, 3\]\. Give real numbers of shape \[3, 3\]"),
        ({"matrix": [[object()] * 3] * 3}, "matrix is object"),
        ({"matrix": [[1.0], [1.0, 2.0]]}, r"not a rectangular array .*part\)\. Give real numbers of shape \[3, 3\]"),
        ({"matrix": 1e-6 * np.diag([2, 2, -1]), "measure": "interactions"}, r"\['c', 'c'\] is -1e-06"),
        ({"matrix": 1e-6 * np.triu(GOOD), "measure": "interactions"}, "must be symmetric"),
        ({"errors": [[0.0]]}, r"errors is float64 of shape \[1, 1\]"),
        ({"measure": "cosines"}, "measure='cosines' is unknown; use 'cosine' or"),
        ({"triples": (Interaction(features=("a", "b", "x"), gain=1.0),)}, "triples name 'x'"),
        ({"features": []}, "features holds nothing"),
        ({"features": ["a", "b", "a"]}, "features has 'a' 2 times"),
        ({"features": "abc"}, "'abc' is one string; give a list"),
        ({"features": ["a", "b"]}, r"of shape \[3, 3\]\. Give real numbers of shape \[2, 2\]"),
        ({"tables": TABLES[:1]}, r"'b' is in the affinity, but not among the features of the tables \(2"),
        ({"tables": (*TABLES, table_of("d"))}, "'d' is in the tables, but not among the features of the affinity"),
        ({"tables": (*TABLES, table_of("b"))}, "Feature 'b' occurs 2 times"),
        ({"pooling_factors": (1.0, 2.0)}, "pooling_factors has length 2; give each of the 3 features"),
        ({"pooling_factors": (1.0, math.nan, 2.0)}, "pooling_factors has nan for feature 'b'"),
        ({"pooling_factors": (-0.5, 2.0, 1.0)}, "pooling_factors has -0.5 for feature 'a'"),
    ],
)
def test_wrong_fields_are_refused_with_what_is_at_fault(fields, message):
    with pytest.raises(InputError, match=message):
        FeatureAffinity(**{"matrix": GOOD, "features": ["a", "b", "c"]} | fields)


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
        (["a", "b"], r"missing: \['c'\]"),
        (["a", "b", "c", "d"], r"unknown: \['d'\]"),
        (["a", "b", "b"], r"missing: \['c'\], unknown: \[\]"),
    ],
)
def test_permuted_refuses_what_is_no_permutation(order, message):
    with pytest.raises(InputError, match=message):
        FeatureAffinity(matrix=GOOD, features=["a", "b", "c"]).permuted(order)


def full():
    triple = Interaction(features=("a", "b", "c"), gain=0.25, error=0.01)
    fields = {"errors": np.array(GOOD) / 10, "triples": (triple,), "loss": 0.5, "notes": ("A note.",)}
    more = {"num_samples": 4096, "tables": TABLES, "pooling_factors": FACTORS, "measure": "interactions"}
    return FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], **fields, **more)


@pytest.mark.parametrize("source", [planted_affinity(9, 3, seed=0)[0], full()], ids=["resemblance", "interactions"])
def test_a_file_brings_back_what_was_saved(tmp_path, source):
    path = tmp_path / "name without suffix"
    source.save(path)
    loaded = FeatureAffinity.load(path)
    np.testing.assert_array_equal(loaded.matrix, source.matrix)
    if source.errors is not None:
        np.testing.assert_array_equal(loaded.errors, source.errors)
    names = ("features", "measure", "triples", "num_samples", "loss", "tables", "pooling_factors", "notes")
    assert [getattr(loaded, name) for name in names] == [getattr(source, name) for name in names]
    with np.load(path, allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "format: Input should be 2"),
        ({"features": ["a", "b", 3]}, "features.2: Input should be a valid string"),
        ({"measure": "x"}, "measure: Input should be"),
        ({"tables": [{"name": "t"}]}, "tables.0.num_embeddings"),
    ],
)
def test_a_file_with_a_wrong_header_is_refused(tmp_path, changes, message):
    full().save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["header"] = np.array(json.dumps(json.loads(str(arrays["header"])) | changes))
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=f"Affinity file .*: .*{message}"):
        FeatureAffinity.load(tmp_path / "a.npz")


class Exploding:
    def __reduce__(self):
        return (pytest.fail, ("a file ran code",))


def test_files_that_are_none_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    for content in (b"", b"PK\x03\x04", b"garbage", pickle.dumps(Exploding())):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"Affinity file .*a\.npz: cannot be read"):
            FeatureAffinity.load(path)
    np.savez(path, matrix=np.array([Exploding()], dtype=object), header=np.array("{}"))
    with pytest.raises(InputError, match="it holds no plain arrays"):
        FeatureAffinity.load(path)
    np.savez(path, features=np.array(["a"]))
    with pytest.raises(InputError, match="cannot be read"):
        FeatureAffinity.load(path)
    with pytest.raises(InputError, match="cannot be read"):
        FeatureAffinity.load(tmp_path / "none.npz")


def test_a_damaged_file_is_read_right_or_refused(tmp_path):
    full().save(tmp_path / "a.npz")
    content, rng = (tmp_path / "a.npz").read_bytes(), np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= int(rng.integers(1, 256))
        (tmp_path / "b.npz").write_bytes(damaged[: rng.integers(1, len(content))] if rng.random() < 0.3 else damaged)
        with contextlib.suppress(InputError):
            assert FeatureAffinity.load(tmp_path / "b.npz").digest == full().digest


def test_the_digest_identifies_the_matrix_and_the_names_alone():
    plain = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"])
    assert plain.digest == FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], tables=TABLES, num_samples=5).digest
    assert plain.digest != FeatureAffinity(matrix=GOOD, features=["a", "b", "d"]).digest
    assert plain.digest != FeatureAffinity(matrix=_with(0, 1, 0.51), features=["a", "b", "c"]).digest


def test_tables_and_pooling_factors_go_along():
    theirs = [SimpleNamespace(**{**vars(table), "pooling": "SUM"}) for table in TABLES]  # as TorchRec's configs
    affinity = FeatureAffinity(matrix=GOOD, features=["a", "b", "c"], tables=theirs, pooling_factors=np.array(FACTORS))
    assert (affinity.tables, affinity.pooling_factors) == (TABLES, FACTORS)
    turned = affinity.permuted(["c", "a", "b"])
    assert (turned.tables, turned.pooling_factors) == (TABLES, (2.5, 1.0, 0.0))


def test_the_strongest_are_those_beyond_their_error():
    gains, errors = np.zeros((4, 4)), np.full((4, 4), 0.01)
    errors[:2, :2] = 0.009
    gains[0, 1] = gains[1, 0] = 0.05
    gains[2, 3] = gains[3, 2] = 0.028
    triple = Interaction(features=("a", "c", "d"), gain=0.04, error=0.001)
    found = FeatureAffinity(
        matrix=gains, features=list("abcd"), measure="interactions", errors=errors, triples=(triple,)
    )
    # Of 6 pairs, 2.9 errors.
    assert [one.features for one in found.strongest(5)] == [("a", "b"), ("a", "c", "d")]
    assert [one.error for one in found.strongest(1)] == [0.009]
    assert (found.significant() > 0).sum() == 2
    turned = found.permuted(["d", "c", "b", "a"]).strongest(5)
    assert [(one.features, one.error) for one in turned] == [(("b", "a"), 0.009), (("a", "c", "d"), 0.001)]
