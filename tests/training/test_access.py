"""Access counts of a run's rows: kept and read again; damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.errors import InputError
from dmt.hot_rows.profile import AccessProfile
from dmt.training.access import load_profile, save_profile
from tests.training.small import small, source


def assert_equal(found: AccessProfile, expected: AccessProfile) -> None:
    assert (found.tables, found.num_samples) == (expected.tables, expected.num_samples)
    for table in expected.tables:
        ours, theirs = found[table.name], expected[table.name]
        assert (ours.rows.tolist(), ours.counts.tolist()) == (theirs.rows.tolist(), theirs.counts.tolist())
        assert ours.total == theirs.total


def profile_of() -> AccessProfile:
    """The accesses of 100 rows of a small run."""
    profile = AccessProfile(source(small()).tables)
    draw = np.random.default_rng(0)
    profile.add({f: draw.integers(0, 11, 100) for t in profile.tables for f in t.feature_names}, num_samples=100)
    return profile


def test_a_profile_is_kept(tmp_path: Path) -> None:
    profile = profile_of()
    save_profile(profile, tmp_path / "access.parquet")
    assert_equal(load_profile(tmp_path / "access.parquet"), profile)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"Access profile .*bad: cannot be read .* `dmt prepare`"):
        load_profile(tmp_path / "bad")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other")
    with pytest.raises(InputError, match=r"Access profile .*other: cannot be read"):
        load_profile(tmp_path / "other")
    good = tmp_path / "good"
    save_profile(profile_of(), good)
    table = pq.read_table(good)
    header = json.loads(table.schema.metadata[b"dmt"])

    def changed(values: dict[str, object], rows: pa.Table = table) -> str:
        pq.write_table(rows.replace_schema_metadata({"dmt": json.dumps({**header, **values})}), tmp_path / "changed")
        with pytest.raises(InputError) as error:
            load_profile(tmp_path / "changed")
        return str(error.value)

    assert "has format 3; this version reads format 2" in changed({"format": 3})
    assert "num_samples: " in changed({"num_samples": "many"})
    swapped = table.slice(1).take([1, 0, *range(2, len(table) - 1)])
    assert "its rows of table 't_C1' are not those of the table" in changed({}, swapped)
    beyond = [header["tables"][0] | {"num_embeddings": 3}, *header["tables"][1:]]
    assert "its rows of table 't_C1' are not those of the table" in changed({"tables": beyond})
