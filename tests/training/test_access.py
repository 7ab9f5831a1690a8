"""Access counts of a run's rows: kept and read again, summed over ranks; damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from dmt.errors import InputError
from dmt.hot_rows.profile import AccessProfile
from dmt.training.access import add_batch, collect_profile, load_profile, save_profile, sum_profiles
from tests.ranks import run_ranks
from tests.training.small import small, source

ROWS = {"num_rows": 3_072, "rows_per_table": 40}


def assert_equal(found: AccessProfile, expected: AccessProfile) -> None:
    assert (found.tables, found.num_samples) == (expected.tables, expected.num_samples)
    for table in expected.tables:
        ours, theirs = found[table.name], expected[table.name]
        assert (ours.rows.tolist(), ours.counts.tolist()) == (theirs.rows.tolist(), theirs.counts.tolist())
        assert (ours.total, ours.missed) == (theirs.total, theirs.missed)


def test_the_rows_of_a_run_are_counted_and_kept(tmp_path: Path) -> None:
    data = source(small(synthetic=ROWS))
    found = collect_profile(data, num_samples=3_072, most_rows=20)
    ids = np.concatenate(
        [b.sparse_features["C2"].values().numpy() for b in data.batches("train", rank=0, world_size=1, batch_size=96)]
    )
    assert found.num_samples == found["t_C2"].total == len(ids) == 3_072
    assert found["t_C2"].missed > 0
    assert len(found["t_C2"].rows) <= 20
    exact = collect_profile(data, num_samples=3_072)
    assert exact["t_C2"].counts.tolist() == np.bincount(ids)[np.unique(ids)].tolist()
    for profile in (found, exact):
        save_profile(profile, tmp_path / "access.parquet")
        assert_equal(load_profile(tmp_path / "access.parquet"), profile)


@pytest.mark.parametrize(
    ("rows", "wanted", "counted"),
    [(3_072, None, 3_072), (700, None, 512), (700, 5_000, 512), (90, 80, 80), (90, None, 90)],
)
def test_data_of_any_size_are_counted(rows: int, wanted: int | None, counted: int) -> None:
    data = source(small(synthetic={"num_rows": rows}))
    assert collect_profile(data, num_samples=wanted).num_samples == counted


def profile_on_rank(rank: int) -> AccessProfile:
    data = source(small(synthetic=ROWS))
    profile = AccessProfile(data.tables)
    for batch in data.batches("train", rank=rank, world_size=dist.get_world_size(), batch_size=64):
        add_batch(profile, batch)
    return sum_profiles(profile, dist.group.WORLD)


@pytest.mark.ranks
def test_ranks_count_what_one_process_counts() -> None:
    expected = collect_profile(source(small(synthetic=ROWS)), num_samples=3_072)
    for found in run_ranks(profile_on_rank, 3):
        assert_equal(found, expected)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"Access profile .*bad: cannot be read .* `dmt prepare`"):
        load_profile(tmp_path / "bad")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other")
    with pytest.raises(InputError, match=r"Access profile .*other: cannot be read"):
        load_profile(tmp_path / "other")
    good = tmp_path / "good"
    save_profile(collect_profile(source(small(synthetic=ROWS)), num_samples=100), good)
    table = pq.read_table(good)
    header = json.loads(table.schema.metadata[b"dmt"])

    def changed(values: dict[str, object], rows: pa.Table = table) -> str:
        pq.write_table(rows.replace_schema_metadata({"dmt": json.dumps({**header, **values})}), tmp_path / "changed")
        with pytest.raises(InputError) as error:
            load_profile(tmp_path / "changed")
        return str(error.value)

    assert "has format 2; this version reads format 1" in changed({"format": 2})
    assert "num_samples: " in changed({"num_samples": "many"})
    assert "counts of table 't_C1' do not fit together" in changed({}, table.slice(1).take([1, 0, *range(2, 50)]))
    assert "counts of table 't_C1' do not fit together" in changed({"totals": [1] * 6})
    assert "its header and its rows do not fit together" in changed({"totals": [1] * 5})
    assert "its header and its rows do not fit together" in changed({"most_rows": 0})
