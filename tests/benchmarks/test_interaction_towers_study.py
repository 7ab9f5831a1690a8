"""The record of `benchmarks.interaction_towers`: which seeds are compared, and what is written."""

from __future__ import annotations

import json

import pytest

from benchmarks.interaction_towers import STUDIES, compare, write

DCN = STUDIES["dcn"]


def records_of(seeds, **gains):
    """Made-up runs: the AUC of each arm is that of the seed plus the arm's own gain."""
    return {
        ("flights", arm, seed): {"data": "flights", "arm": arm, "seed": seed, "auc": 0.7 + 0.001 * seed + gains[arm]}
        | {"cpu_seconds": 4.0, "measuring_cpu_seconds": 1.5, "towers": [["c_a"], ["c_b"]], "affinity": [0.1]}
        for arm in DCN.arms
        for seed in seeds
    }


def test_arms_are_compared_seed_by_seed():
    records = records_of(range(6), flat=0.03, strided=0.0, coherent=-0.01, interactions=0.02)
    found = {(row["arm"], row["baseline"]): row for row in compare(DCN, records, "flights", range(6))}
    assert found["interactions", "strided"]["median_difference"] == pytest.approx(0.02)
    assert found["interactions", "coherent"]["num_better"] == 6
    assert found["interactions", "flat"]["num_better"] == 0
    assert found["coherent", "strided"]["wilcoxon_p_holm"] == pytest.approx(4 * 2 / 2**6)


def test_the_record_holds_every_run_and_the_page_says_what_came_out(tmp_path):
    records = records_of(range(3), flat=0.03, strided=0.0, coherent=-0.01, interactions=0.02)
    write(DCN, records, {"flights": [0, 1, 2]}, tmp_path)
    record = json.loads((tmp_path / "interaction_towers.json").read_text())
    assert len(record["runs"]) == 12
    assert not any("affinity" in run for run in record["runs"])
    assert record["about"]["seeds"] == {"flights": [0, 2]}
    page = (tmp_path / "interaction_towers.md").read_text()
    assert "| flights | interactions | strided | 0.7210 (0.0010) | 0.7010 (0.0010) | +0.0200 | 3 of 3 |" in page
    assert "measuring interactions 1.5 CPU seconds" in page
    assert "seed 0: a; b" in page
