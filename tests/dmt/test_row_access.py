"""Row-wise shards by an access profile: lookups of ranks, cuts that help, and those that do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError

from dmt import InputError, TableSpec, TowerTopology
from dmt.hot_rows.profile import AccessProfile
from dmt.hot_rows.row_access import access_heights, access_shares, plan_by_access
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import TablePlacement
from dmt.sharding.user_rules import ShardingRules
from dmt.sptt.mesh import TowerMesh
from dmt.training.access import save_profile
from dmt.training.checkpoints import load_plain
from dmt.training.commands import main
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.data.prepare import PrepareOptions, prepare
from dmt.training.job import open_data, open_job, resolve
from dmt.training.resume import checkpoint_folder
from dmt.training.train import train_job
from tests.ranks import run_ranks
from tests.training.small import plain, small

TOPOLOGY = TowerTopology(num_towers=1, ranks_per_tower=4)
TABLE = TableSpec(name="t", num_embeddings=1000, embedding_dim=64, feature_names=("f",))
OTHER = TableSpec(name="u", num_embeddings=900, embedding_dim=8, feature_names=("g",))
CUTS = ((0, 32), (32, 64))
# Lookups cost something beside what is sent.
SLOW_MEMORY = Hardware(memory_gb_per_s=1.0, intra_tower_gb_per_s=100.0)


def profile_of(bag: int) -> AccessProfile:
    """Row r is read in proportion to 1 / (r + 1)."""
    profile, shares = AccessProfile([TABLE]), 1 / np.arange(1, 1001)
    ids = np.random.default_rng(0).choice(1000, size=20_000 * bag, p=shares / shares.sum())
    profile.add({"f": ids}, num_samples=20_000)
    return profile


def planned(hardware: Hardware, bag: int = 1, placement: TablePlacement | None = None) -> TowerShardingPlan:
    pins = {} if placement is None else {"t": placement}
    return plan_tables(
        [[TABLE, OTHER]],
        TOPOLOGY,
        workload=StepWorkload(batch_size=64, pooling_factors={"f": float(bag)}),
        hardware=hardware,
        rules=ShardingRules(schemes=("row_wise",), tables=pins),
    )


def test_lookups_of_ranks_are_those_of_the_profile() -> None:
    profile = profile_of(1)
    plan = plan_by_access(planned(Hardware()), [TABLE, OTHER], profile)
    of_rows = np.bincount(np.repeat(profile["t"].rows, profile["t"].counts), minlength=1000).reshape(4, 250).sum(1)
    # 256 samples of the job; the other table is not in the profile, and every rank has a quarter of its lookups.
    assert [rank.lookups for rank in plan.ranks] == pytest.approx(256 * of_rows / of_rows.sum() + 64)
    assert plan.notes[-2:] == (
        "access profile: 0 of 1 row-wise table cut into unequal rows.",
        "1 table not in the profile with its rows and features: read evenly.",
    )
    assert {rank.memory for rank in plan.ranks} == {rank.memory for rank in planned(Hardware()).ranks}
    entry = plan.tables[0]
    assert entry.placement == planned(Hardware()).placements["t"], "single ids cost little beside what is sent"
    assert "by the profile its ranks have 0.15 to 3.26 x the mean lookups" in entry.reason
    assert entry.reason.endswith("not worth it")
    assert plan.tables[1] == planned(Hardware()).tables[1]


@pytest.mark.parametrize("change", [{"name": "s"}, {"feature_names": ("h",)}, {"num_embeddings": 999}])
def test_the_profile_of_another_model_is_refused(change: dict[str, Any]) -> None:
    other = replace(TABLE, **change)
    plan = plan_tables([[other]], TOPOLOGY, rules=ShardingRules(schemes=("row_wise",)))
    with pytest.raises(
        InputError, match=r"has no table of this plan \(1 table, the first is '[st]'\) with the same rows"
    ):
        plan_by_access(plan, [other], profile_of(1))


def test_column_shards_and_other_widths_are_read_like_the_whole_table() -> None:
    profile = profile_of(20)
    wide = replace(TABLE, embedding_dim=128)
    shards = [replace(TABLE, name=f"t[{a}:{b}]", embedding_dim=b - a, feature_names=(f"f[{a}:{b}]",)) for a, b in CUTS]
    for tables in ([wide], shards):
        plan = plan_tables([tables], TOPOLOGY, hardware=SLOW_MEMORY, rules=ShardingRules(schemes=("row_wise",)))
        found = plan_by_access(plan, tables, profile)
        assert found.notes[-1].startswith(f"access profile: {len(tables)} of {len(tables)} row-wise table")
        for table in tables:
            sizes = found.placements[table.name].sizes
            assert 4 * access_shares(profile["t"], 1000, sizes).max() < 2


def test_unequal_shards_are_taken_where_the_busiest_rank_gains() -> None:
    profile, even = profile_of(20), planned(SLOW_MEMORY, 20)
    plan = plan_by_access(even, [TABLE, OTHER], profile)
    sizes = plan.placements["t"].sizes
    assert sum(sizes) == 1000
    assert list(sizes) == sorted(sizes)
    assert sizes[0] < 20
    # Recomputed from the counts: no rank is far from the mean, where equal blocks had 3.2 times the mean.
    assert 4 * access_shares(profile["t"], 1000, sizes).max() < 1.2
    assert max(rank.lookups for rank in plan.ranks) < 1.2 * np.mean([rank.lookups for rank in plan.ranks])
    equal = plan_by_access(
        planned(SLOW_MEMORY, 20, TablePlacement(scheme="row_wise", ranks=(0, 1, 2, 3), sizes=(250,) * 4)),
        [TABLE, OTHER],
        profile,
    )
    assert plan.seconds < 0.95 * equal.seconds
    assert equal.placements["t"].sizes == (250,) * 4, "what the user says stays"
    assert "make the busiest rank cost 0." in plan.reasons["t"]
    assert sum(rank.memory for rank in plan.ranks) == sum(rank.memory for rank in even.ranks)
    # The plan is one that can be trained by: its own loads come out again where it is pinned.
    again = plan_tables(
        [[TABLE, OTHER]],
        TOPOLOGY,
        workload=plan.workload,
        hardware=plan.hardware,
        rules=ShardingRules(tables=plan.placements),
    )
    assert [rank.memory for rank in again.ranks] == [rank.memory for rank in plan.ranks]


def test_memory_bounds_the_cut() -> None:
    most = max(rank.memory for rank in planned(SLOW_MEMORY, 20).ranks)
    tight = Hardware(memory_per_rank=round(1.3 * most), memory_gb_per_s=1.0, intra_tower_gb_per_s=100.0)
    plan = plan_by_access(planned(tight, 20), [TABLE, OTHER], profile_of(20))
    assert max(plan.placements["t"].sizes) > 250
    assert max(rank.memory for rank in plan.ranks) <= 1.3 * most
    full = Hardware(memory_per_rank=most, memory_gb_per_s=1.0, intra_tower_gb_per_s=100.0)
    assert plan_by_access(planned(full, 20), [TABLE, OTHER], profile_of(20)).placements["t"].sizes == ()


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_blocks_cover_the_rows(mix: float) -> None:
    random = np.random.default_rng(1)
    for _ in range(30):
        rows, blocks = int(random.integers(5, 60)), int(random.integers(1, 6))
        profile = AccessProfile([TableSpec(name="t", num_embeddings=rows, embedding_dim=4, feature_names=("f",))])
        profile.add({"f": random.integers(0, rows, 20) // random.integers(1, 9)}, num_samples=20)
        heights = access_heights(profile["t"], rows, blocks, mix=mix)
        assert sum(heights) == rows
        assert min(heights) >= 1
        shares = access_shares(profile["t"], rows, heights)
        ids = np.repeat(profile["t"].rows, profile["t"].counts)
        own = np.searchsorted(np.cumsum(heights), ids, side="right")
        assert shares == pytest.approx(np.bincount(own, minlength=blocks) / 20)


def test_a_share_of_lookups_scales_them_only() -> None:
    model = CostModel(topology=TOPOLOGY)
    even, half = (model.shard(TABLE, "row_wise", 250, 64, share=share) for share in (None, 0.5))
    assert half.lookups == 2 * even.lookups
    assert (half.memory, half.output_bytes) == (even.memory, even.output_bytes)


def test_dmt_plan_reads_a_profile(tmp_path: Path) -> None:
    config = small("dlrm", "sptt", sharding={"scheme": "row_wise"})
    (tmp_path / "run.toml").write_text(to_toml(config))
    tables = open_data(config)[0].tables
    profile = AccessProfile(tables)
    profile.add({feature: [0] * 9 for table in tables for feature in table.feature_names}, num_samples=9)
    save_profile(profile, tmp_path / "access.parquet")
    found = CliRunner().invoke(
        main, ["plan", f"{tmp_path}/run.toml", "--profile", f"{tmp_path}/access.parquet", "--out", f"{tmp_path}/p.json"]
    )
    assert found.exit_code == 0, found.output
    plan = TowerShardingPlan.load(tmp_path / "p.json")
    assert [rank.lookups > 0 for rank in plan.ranks] == [rank.local == 0 for rank in plan.ranks]
    assert all("its ranks have 0.00 to 2.00 x the mean lookups" in reason for reason in plan.reasons.values())


def profiled(folder: Path, name: str, steps: int, **sections: dict[str, Any]) -> TrainingConfig:
    train = {"max_steps": steps, "output_dir": str(folder / name)}
    sharding = {"scheme": "row_wise", "memory_gb_per_s": 1e-3, **sections.pop("sharding", {})}
    return small("dlrm", "sptt", sharding=sharding, train=train, **sections)


def save_first_rows(config: TrainingConfig, path: Path) -> None:
    """The profile of rows of which the first three alone are read."""
    tables = open_data(config)[0].tables
    profile = AccessProfile(tables)
    profile.add({feature: [0, 1, 2] for table in tables for feature in table.feature_names}, num_samples=3)
    save_profile(profile, path)


def trained_with_profile(rank: int, folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights of a run whose profile is given for its first steps only, and of one that keeps it."""
    path, weights = Path(folder), []
    cut = {"profile": f"{path}/access.parquet"}
    for name, steps, sharding in (("a", 3, cut), ("a", 5, {}), ("b", 5, cut)):
        config = profiled(path, name, steps, sharding=sharding)
        job = resolve(config, 4)
        train_job(job, TowerMesh(job.topology))
        placements = TowerShardingPlan.load(path / name / "sharding.json").placements
        assert {placement.sizes for placement in placements.values()} == ({(2, 9)} if sharding else {()})
        task = plain(config)
        load_plain(task, checkpoint_folder(config))
        weights.append({key: value.clone() for key, value in task.state_dict().items()})
    return weights[1:]


@pytest.mark.ranks
def test_a_run_is_cut_by_its_profile_and_goes_on_without_it(tmp_path: Path) -> None:
    save_first_rows(profiled(tmp_path, "a", 1), tmp_path / "access.parquet")
    ours, wanted = run_ranks(trained_with_profile, 4, str(tmp_path))[0]
    # Rows are added up in the same order wherever they live; dense layers see the same numbers.
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=name)


def test_the_profile_of_hot_rows_and_of_prepared_rows_is_read_unasked(tmp_path: Path) -> None:
    run = profiled(tmp_path, "a", 1)
    save_first_rows(run, tmp_path / "access.parquet")
    hot = profiled(tmp_path, "a", 1, hot_rows={"extra_memory": 0.1, "profile": f"{tmp_path}/access.parquet"})
    sizes = {placement.sizes for placement in open_job(hot).sharding.placements.values()}  # type: ignore[union-attr]
    assert sizes == {(2, 9)}
    prepare(run.data, tmp_path / "prepared", PrepareOptions())
    save_first_rows(run, tmp_path / "prepared" / "access.parquet")
    manifest = json.loads((tmp_path / "prepared" / "manifest.json").read_text())
    manifest["files"]["access.parquet"] = (tmp_path / "prepared" / "access.parquet").stat().st_size
    (tmp_path / "prepared" / "manifest.json").write_text(json.dumps(manifest))
    values = run.model_dump(mode="json") | {"data": {"prepared": str(tmp_path / "prepared")}}
    config = TrainingConfig.model_validate(values)
    # As a checkpoint keeps it, and with tables of another width.
    again = TrainingConfig.model_validate(
        config.model_dump(mode="json") | {"model": values["model"] | {"embedding_dim": 4}}
    )
    for one in (config, again):
        plan = open_job(one).sharding
        assert plan is not None
        assert {placement.sizes for placement in plan.placements.values()} == {(2, 9)}
        assert plan.notes[-1].startswith("access profile: 6 of 6 row-wise tables cut into unequal rows (t_C")
    # A plan that is named is used as it is.
    open_job(run).sharding.save(tmp_path / "plan.json")  # type: ignore[union-attr]
    values["sharding"] = {"dataflow": "sptt", "plan": str(tmp_path / "plan.json")}
    plan = open_job(TrainingConfig.model_validate(values)).sharding
    assert plan is not None
    assert {placement.sizes for placement in plan.placements.values()} == {()}
    values["sharding"]["profile"] = "access.parquet"
    with pytest.raises(
        ValidationError, match=r"plan=.* is used without changes, which sharding\.profile='access\.parquet'"
    ):
        TrainingConfig.model_validate(values)
