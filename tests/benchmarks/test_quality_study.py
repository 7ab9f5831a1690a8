"""The quality study: its sizes, its stages, that joined tables train alike, and what is compared and written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.quality.cells import MADE, STAGES, Cell, bytes_across, cell_config, cells_of, tower_sizes
from benchmarks.quality.findings import compared, costs, tuned
from benchmarks.quality.made import write_made
from benchmarks.quality.report import write_results
from benchmarks.quality.runs import own_rates
from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.trials import count_trial, train_and_test
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan


@pytest.fixture(autouse=True)
def no_group_left():
    """Training makes a process group of this process alone, which other tests would meet."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


FLAT = Cell(data="hotel", model="dlrm", towers="flat", seed=0)


def clicks_of(num_features=16, rows=2048):
    generator = torch.Generator().manual_seed(0)
    tables = [
        TableSpec(name=f"t_c_{i}", num_embeddings=9 + i, embedding_dim=16, feature_names=(f"c_{i}",))
        for i in range(num_features)
    ]
    ids = torch.stack([torch.randint(0, 9 + i, (rows,), generator=generator) for i in range(num_features)], dim=1)
    labels = ((ids[:, 0] + ids[:, 4]) % 2 == 0).float()
    part = (torch.randn(rows, 3, generator=generator), ids, labels)
    return Clicks(tables=tuple(tables), train=part, test=part)


@pytest.mark.parametrize("model", ["dlrm", "dlrm-products", "dlrm-each", "dcn"])
@pytest.mark.parametrize("num_towers", [2, 4, 8])
def test_sizes_give_the_ratio_and_the_bytes_that_go_with_it(model, num_towers):
    clicks = clicks_of()
    plan = TowerPlan.strided(clicks.features, num_towers)
    flat = bytes_across(cell_config(FLAT, 16, None), clicks, None, num_towers)
    for ratio in (2, 16):
        cell = replace(FLAT, model=model, towers="strided", num_towers=num_towers, ratio=ratio)
        config = cell_config(cell, 16, "strided")
        assert count_trial(config, clicks).compression_ratio == ratio
        found = bytes_across(config, clicks, plan, num_towers)
        assert found["embeddings"] == pytest.approx(flat["embeddings"] / ratio)
        # 16 features of 16 numbers and their gradients, but for the samples of the tower's own host.
        assert flat["embeddings"] == pytest.approx(2 * 4 * 16 * 16 * (1 - 1 / num_towers))
        assert found["ids"] == flat["ids"]


def test_uneven_features_take_the_next_larger_ratio():
    cell = Cell(data="flights", model="dcn", towers="strided", num_towers=4, ratio=4, seed=0)
    assert tower_sizes(cell, 17) == (16, 0, 1)  # 272 / 64 = 4.25
    assert tower_sizes(replace(cell, model="dlrm", ratio=2, dim=32), 17) == (32, 0, 2)
    assert tower_sizes(replace(cell, data="census", num_towers=8, ratio=16), 33) == (4, 0, 1)


@pytest.mark.parametrize("plan", [None, "strided"])
def test_joined_tables_train_the_same_model(plan):
    clicks = clicks_of(num_features=5)
    cell = Cell(data="hotel", model="dcn", towers="strided" if plan else "flat", num_towers=2, ratio=2, seed=3)
    config = cell_config(cell, 5, plan)
    (alone, metrics), (joined, same) = (train_and_test(config, clicks, 3, joined=way) for way in (False, True))
    assert same.auc == pytest.approx(metrics.auc, abs=1e-4)
    before, after = (dict(model.named_parameters()) for model in (alone, joined))
    assert before.keys() == after.keys()
    # Sums of gradients in another order, over 16 steps of Adam.
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, atol=2e-4, rtol=0)


def test_stages_have_flat_models_first_and_seeds_outermost():
    cells = list(cells_of(STAGES["hotel"], range(400, 402)))
    assert len(cells) == 2 * (2 + 4 * 7)
    assert [cell.towers for cell in cells[:3]] == ["flat", "flat", "strided"]
    assert [cell.seed for cell in cells] == [400] * 30 + [401] * 30
    assert len(set(cells)) == len(cells)
    tuning = list(cells_of(STAGES["hotel-tune"], []))
    assert len(tuning) == 2 * 5 * 5
    assert all(cell.tuning for cell in tuning)


def test_own_rates_are_the_best_on_the_tuning_rows():
    cells = [cell for cell in cells_of(STAGES["hotel-tune"], []) if cell.model == "dcn"]
    aucs = {cell: 0.7 + 0.01 * ((cell.sparse, cell.towers) == (2.0, "flat")) for cell in cells}
    records = {cell: {"auc": auc} for cell, auc in aucs.items()}
    flat = Cell(data="hotel", model="dcn", towers="flat", seed=7)
    assert own_rates(records, flat) == replace(flat, sparse=2.0)
    towers = replace(flat, towers="interactions", num_towers=4, ratio=4)
    assert own_rates(records, towers) == towers  # nothing is better than the study's
    assert own_rates(records, replace(flat, data="flights")) is None
    table, comparisons = tuned(records, "hotel")
    assert len(table) == 10
    assert comparisons == []


def made_up(seeds=range(6)):
    """Records whose AUC is the seed's plus a gain of the arm."""
    gains = {"flat": 0.03, "strided": 0.0, "interactions": 0.02}
    records = {}
    for cell in cells_of(replace(STAGES["hotel"], ratios=(4,)), seeds):
        record = {"auc": 0.7 + 0.001 * cell.seed + gains[cell.towers], "ne": 0.8, "mflops_per_sample": 0.1}
        record |= {"compression_ratio": 4.0, "cpu_seconds": 1.0}
        across = {"ids": 100.0, "embeddings": 384.0}
        flat = {str(towers): {"ids": 100.0, "embeddings": 1536.0} for towers in (2, 4, 8)}
        records[cell] = record | {"bytes": flat if cell.towers == "flat" else across}
    return records


def test_costs_and_comparisons_are_paired_by_seed():
    records = made_up(range(7))
    lacking = next(cell for cell in records if cell.towers == "interactions" and cell.model == "dcn")
    del records[lacking]
    rows = {(row["model"], row["towers"]): row for row in costs(records, "hotel", 16)}
    assert rows["dcn", "strided"]["auc_less_flat"] == pytest.approx(-0.03)
    assert rows["dcn", "interactions"]["num_seeds"] == 6
    assert (rows["dcn", "strided"]["bytes"], rows["dcn", "strided"]["flat_bytes"]) == (384.0, 1536.0)
    found = {(row["arm"], row["baseline"]): row for row in compared(records, "hotel", 16)}
    assert found["dcn, interactions", "dcn, strided"]["median_difference"] == pytest.approx(0.02)
    assert found["dcn, interactions", "dcn, strided"]["num_seeds"] == 6
    assert found["dlrm, interactions", "dlrm, flat"]["num_better"] == 0
    # Holm over all comparisons of the data set.
    assert found["dlrm, interactions", "dlrm, strided"]["wilcoxon_p_holm"] == pytest.approx(min(1, len(found) / 2**6))


def test_too_few_seeds_get_no_p_value_and_count_in_no_correction():
    records = made_up(range(7))
    for cell in [cell for cell in records if cell.model == "dcn" and cell.towers == "strided"][:2]:
        del records[cell]
    found = {(row["arm"], row["baseline"]): row for row in compared(records, "hotel", 16)}
    few = found["dcn, interactions", "dcn, strided"]
    assert (few["num_seeds"], few["wilcoxon_p"], few["wilcoxon_p_holm"]) == (5, None, None)
    tested = [row for row in found.values() if row["num_seeds"] == 7]
    assert len(tested) == len(found) - 1
    assert found["dlrm, interactions", "dlrm, strided"]["wilcoxon_p_holm"] == pytest.approx(len(tested) / 2**6)


def test_the_record_says_how_many_seeds_there_are(tmp_path):
    records = made_up()
    del records[next(cell for cell in records if cell.towers == "interactions" and cell.model == "dcn")]
    json_path, page_path, picture = write_results(records, tmp_path)
    assert len(json.loads(json_path.read_text())["runs"]) == len(records)
    page = page_path.read_text()
    assert "| 4 | DCN | strided | -0.0300 (0.0019) |" in page
    assert "| 4 | DCN | interactions | -0.0100 (0.0016, 5) |" in page
    assert "| 4 | 4 | 1536 | 100 | 384 (4.0), 1.00 |" in page
    # What the rule of six seeds changes: 6 signs of one kind have p = 2 / 2^6, and all rows would count.
    num = len(compared(records, "hotel", 16))
    assert f"over all {num} rows, as first planned, the smallest p after the correction is {num / 32:.2g}." in page
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("name", MADE)
def test_drawn_data_are_read_as_the_others(name, tmp_path):
    write_made(name, tmp_path / "made.parquet")
    clicks = read_clicks(tmp_path / "made.parquet", embedding_dim=16)
    assert len(clicks.features) == 16
    assert 60_000 < len(clicks.train[2]) < 70_000
    assert 0.2 < clicks.train[2].mean() < 0.55
