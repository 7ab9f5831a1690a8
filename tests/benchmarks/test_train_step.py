"""The step benchmark: names, plans by hand, arithmetic, and small jobs in which every contender must be right."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.steps.build import OPTIMIZER, build_plain
from benchmarks.steps.check import check_losses
from benchmarks.steps.contenders import FLAT_SCHEMES, all_contenders, parse_contender, select
from benchmarks.steps.flat import flat_plan, flat_sharders, most_data_parallel_rows
from benchmarks.steps.inputs import Batches, benchmark_tables, random_batch
from benchmarks.steps.measure import Clocks, Turn
from benchmarks.steps.needed import HostShare, needed_bytes
from benchmarks.steps.record import Record, step_records
from benchmarks.steps.setting import Setting
from benchmarks.steps.shares import column_cuts, host_shares, table_parameters
from benchmarks.steps.table import run_table
from benchmarks.steps.torchrec_towers import tower_plan_by_hand, tower_sharders
from benchmarks.steps.towers import own_topology
from benchmarks.train_step import main, run_setting
from dmt.errors import InputError
from dmt.testing.ranks import RanksFailedError
from dmt.training.build import fused_params
from tests.ranks import run_ranks

SMALL = {"hosts": 2, "ranks_per_host": 2, "mbit_per_s": None, "batch_size": 16, "rounds": 1, "rows_cap": 50}
SIZES = [(2, 2), (4, 2), (4, 1), (1, 2), (2, 4)]


def plan_of(name, setting):
    contender = parse_contender(name)
    model = build_plain(contender, setting, tables_device="meta")
    if contender.family == "flat":
        (sharder,) = flat_sharders(contender, fused_params(OPTIMIZER))
        return flat_plan(contender, setting, model, sharder)
    (sharder,) = tower_sharders(contender, fused_params(OPTIMIZER))
    return tower_plan_by_hand(contender, setting, model, sharder)


# Names.


def test_every_name_is_read_as_it_is_written() -> None:
    names = [contender.name for contender in all_contenders()]
    assert len(names) == len(set(names))
    assert [parse_contender(name).name for name in names] == names
    dmt = parse_contender("dmt-cr8-2d+prefetch+global+fp16")
    assert dmt.name == "dmt-cr8-2d+fp16+prefetch+global"
    assert (dmt.family, dmt.compression, dmt.precision, dmt.prefetch, dmt.num_replicas, dmt.options) == (
        *("dmt", 8, "fp16", True, 2),
        ("global",),
    )
    assert parse_contender("etc-cr4-twrw").scheme == "table_row_wise"
    assert [parse_contender(name).scheme for name in ("sptt", "dmt-cr2-tw")] == ["planner", "table_wise"]
    assert parse_contender("dmt-cr2+global+unique").name == "dmt-cr2+unique+global"
    assert [parse_contender(f"flat-{way}").data_parallel_rows for way in ("tw", "tw-dp", "cw-dp99")] == [0, None, 99]
    assert [parse_contender(name).is_unique for name in ("sptt", "sptt+unique", "sptt+all", "dmt-cr2+all")] == [
        *(False, True, True, False),
    ]
    assert dmt.plain_model == parse_contender("etc-cr8").plain_model != parse_contender("sptt").plain_model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flat-zz", r"'flat-zz' is unknown"),
        ("flat", r"flat needs one of \['tw'"),
        ("sptt-dp", r"-dp is for flat only"),
        ("flat-planner-dp", r"-dp is for flat only, and its planner chooses by itself"),
        ("flat-tw+unique", r"\+unique is unknown or doubled"),
        ("flat-tw-2d", r"-2d is for sptt and dmt only"),
        ("flat-tw+global", r"\+global is unknown or doubled; flat takes each of \['fp16', 'prefetch'\] once"),
        ("sptt+bf16-dense", r"\+bf16-dense goes with \+fp16 only"),
        ("sptt+fp16+fp16", r"\+fp16 is unknown or doubled"),
        ("dmt", r"-cr is for etc and dmt, which need it"),
        ("sptt-cr2", r"-cr is for etc and dmt"),
        ("dmt-cr3", r"the ratio must divide 128 and be at least 2"),
        ("etc-cr2-grid", r"etc takes twrw or nothing"),
    ],
)
def test_names_that_say_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_contender(name)


def test_patterns_choose_and_an_empty_choice_is_refused() -> None:
    assert [c.name for c in select(["dmt-cr2", "dmt-cr2*2d*", "dmt-cr2"])] == ["dmt-cr2", "dmt-cr2-2d+all"]
    with pytest.raises(InputError, match="No contender matches 'x-"):
        select(["x-*"])


def test_replicas_must_fit_a_host() -> None:
    with pytest.raises(InputError, match="has 2 replicas on each host, but ranks_per_host=1"):
        own_topology(parse_contender("sptt-2d"), Setting(hosts=2, ranks_per_host=1))
    topology = own_topology(parse_contender("sptt-2d"), Setting(hosts=2, ranks_per_host=4))
    assert topology.sharding_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [topology.host(rank) for rank in range(8)] == [0] * 4 + [1] * 4


# Plans by hand.


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SIZES)
@pytest.mark.parametrize(
    "name", [*(f"flat-{way}" for way in FLAT_SCHEMES if way != "planner"), "etc-cr2", "etc-cr2-twrw"]
)
def test_a_plan_by_hand_holds_every_number_of_every_table_once(name: str, hosts: int, ranks_per_host: int) -> None:
    setting = Setting(hosts=hosts, ranks_per_host=ranks_per_host, rows_cap=40)
    tables = {table.name: table for table in benchmark_tables(setting)}
    plan = plan_of(name, setting)
    assert set(table_parameters(plan)) == set(tables)
    for table, parameter in table_parameters(plan).items():
        assert parameter.compute_kernel == "fused"
        held = torch.zeros(tables[table].num_embeddings, tables[table].embedding_dim)
        for shard in parameter.sharding_spec.shards:
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            held[row : row + rows, column : column + columns] += 1
            assert 0 <= shard.placement.rank() < setting.world_size
        assert bool((held == 1).all()), table
        assert sum(column_cuts(plan)[table]) == tables[table].embedding_dim


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SIZES)
@pytest.mark.parametrize("name", ["flat-tw", "flat-cw", "flat-twrw", "flat-grid"])
def test_hosts_and_ranks_hold_as_many_columns_as_can_be(name: str, hosts: int, ranks_per_host: int) -> None:
    setting = Setting(hosts=hosts, ranks_per_host=ranks_per_host)
    plan = plan_of(name, setting)
    by_host: Counter[int] = Counter()
    by_rank: Counter[int] = Counter()
    for share in host_shares(plan, setting):
        by_host[share.host] += share.columns
    for parameter in table_parameters(plan).values():
        for shard in parameter.sharding_spec.shards:
            by_rank[shard.placement.rank()] += shard.shard_sizes[1]
    assert len(by_host) == hosts
    assert max(by_host.values()) - min(by_host.values()) <= 128
    assert len(by_rank) == setting.world_size
    assert max(by_rank.values()) - min(by_rank.values()) <= 128


# Data-parallel tables.


def data_parallel_tables(name: str, setting: Setting) -> set[int]:
    """Their numbers of rows."""
    rows = {table.name: table.num_embeddings for table in benchmark_tables(setting)}
    plan = table_parameters(plan_of(name, setting))
    assert set(plan) == set(rows)
    for parameter in plan.values():
        assert (parameter.compute_kernel == "dense") == (parameter.sharding_type == "data_parallel")
    return {rows[name] for name, parameter in plan.items() if parameter.sharding_type == "data_parallel"}


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("number_bytes", [2, 4])
def test_the_choice_of_data_parallel_tables_is_the_best_of_all(
    hosts: int, ranks_per_host: int, number_bytes: int
) -> None:
    setting = Setting(hosts=hosts, ranks_per_host=ranks_per_host, batch_size=512)
    all_rows = [3, 300, 420, 700, 1024, 1500, 40_000]
    world = setting.world_size

    def cost(chosen: tuple[bool, ...]) -> float:
        sharded = [HostShare(host=0, columns=128, rows=1.0) for is_small in chosen if not is_small]
        crossing = needed_bytes(setting, sharded, dense_bytes=0, number_bytes=number_bytes)
        reduced = sum(rows * 128 * 4 for rows, is_small in zip(all_rows, chosen, strict=True) if is_small)
        return sum(crossing.values()) + hosts * 2 * (world - 1) / world * reduced

    best = min(product([False, True], repeat=len(all_rows)), key=cost)
    most = most_data_parallel_rows(setting, number_bytes)
    assert best == tuple(rows <= most for rows in all_rows)
    assert any(best)
    assert not all(best)


def test_small_tables_are_data_parallel_where_the_name_says_so() -> None:
    setting = Setting(hosts=2, ranks_per_host=2, batch_size=4096)
    assert max(data_parallel_tables("flat-tw-dp", setting)) == 3194
    assert data_parallel_tables("flat-cw-dp20", setting) == {3, 4, 10, 15, 18}
    assert data_parallel_tables("flat-tw", setting) == set()
    assert data_parallel_tables("flat-tw-dp", Setting(hosts=1)) == set(), "nothing crosses hosts"
    found = data_parallel_tables("flat-planner", setting)
    assert found > data_parallel_tables("flat-tw-dp", setting)
    assert max(found) < 12_517


# What must be sent.


def test_needed_bytes_by_hand_for_two_hosts_of_two() -> None:
    setting = Setting(batch_size=10)  # 2 x 2 ranks: each host sends to 20 samples of the other
    whole = [HostShare(host=0, columns=128, rows=1.0), HostShare(host=1, columns=128, rows=1.0)]
    assert needed_bytes(setting, whole, dense_bytes=1000, number_bytes=4) == {
        "ids": 2 * 20 * (8 + 4),
        "forward": 2 * 20 * 128 * 4,
        "backward": 2 * 20 * 128 * 4,
        "dense": 2 * 1000,
    }
    compressed = needed_bytes(setting, whole, dense_bytes=1000, number_bytes=2, compression=4)
    assert compressed["forward"] == compressed["backward"] == 2 * 20 * 32 * 2
    once = [replace(whole[0], inputs=7), whole[1]]
    assert needed_bytes(setting, once, dense_bytes=0, number_bytes=4, compression=2) == {
        "ids": (7 + 20) * (8 + 4),
        "forward": (7 + 20) * 64 * 4,
        "backward": (7 + 20) * 64 * 4,
        "dense": 0,
    }
    halves = [HostShare(host=host, columns=128, rows=0.5) for host in (0, 1)]
    rows = needed_bytes(setting, halves, dense_bytes=0, number_bytes=4)
    assert rows["ids"] == 2 * 20 * (8 * 0.5 + 4)  # each id to one host, a length to both
    assert rows["forward"] == 2 * 20 * 128 * 4


@pytest.mark.parametrize(
    ("scheme", "hosts_per_table", "columns", "rows"),
    [("tw", 1, 128, 1.0), ("cw", 1, 128, 1.0), ("rw", 2, 128, 0.5), ("twrw", 1, 128, 1.0), ("grid", 2, 64, 1.0)],
)
def test_shares_of_hosts_in_each_scheme(scheme: str, hosts_per_table: int, columns: int, rows: float) -> None:
    setting = Setting(rows_cap=40)
    shares = host_shares(plan_of(f"flat-{scheme}", setting), setting)
    large = [share for share in shares if share.columns == columns and share.rows == rows]
    # Some tables have too few rows, or an odd number, for halves of exactly one half.
    assert len(large) >= len(shares) / 2
    assert len(shares) >= 26 * hosts_per_table - 3


# Records.


def turn(*seconds: float, uplink: int | None = None, peak: int | None = None) -> Turn:
    steps = [Clocks(seconds=s, cpu=s / 2, main_cpu=s / 4, no_core=s / 8) for s in seconds]
    return Turn(steps=steps, uplink_bytes=uplink, peak_bytes=peak)


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    turns = [turn(1.0, 2.0, uplink=100), turn(3.0, 1.0, uplink=100), turn(1, 1, uplink=60), turn(1, 1, uplink=60)]
    first, second = step_records(turns, Setting())
    assert (first["seconds"], second["seconds"]) == (3.0, 2.0)
    assert first["by_rank"]["waiting"] == [0.625, 1.875, 0.625, 0.625]
    assert first["uplink_bytes"] == second["uplink_bytes"] == [50, 30]
    assert step_records([turn(1.0)] * 4, Setting())[0]["uplink_bytes"] is None


def test_a_record_has_peaks_and_averagings(tmp_path: Path) -> None:
    record = Record(Setting(), [parse_contender("sptt-2d")], tmp_path / "run.json")
    record.add("sptt-2d", weight_bytes=[7] * 4)
    record.add_turn("sptt-2d", [turn(1.0, peak=100)] * 4)
    for seconds in (0.5, 0.7, 0.1):
        record.add_sync("sptt-2d", [turn(seconds, uplink=8)] * 4)
    record.write()
    run = json.loads((tmp_path / "run.json").read_text())
    (found,) = run["contenders"]
    assert found["peak_memory_bytes"] == [107] * 4
    assert (found["sync_seconds"], found["sync_uplink_bytes"]) == (0.5, [8, 8])
    assert found["amortised_seconds"] == pytest.approx(1.05)
    assert run_table(run).splitlines()[1].split() == ["sptt-2d", "1000", "1000", "1000", "16384", "-", "-", "625"]


def test_a_wrong_loss_is_told_with_rank_and_step() -> None:
    contender = parse_contender("dmt-cr2")
    right = [[0.7, 0.6], [0.7, 0.6]]
    assert check_losses(contender, right, right) == ""
    message = check_losses(contender, [[0.7, 0.6], [0.7, 0.6001]], right)
    assert "dmt-cr2 is wrong: on rank 1 its loss after 1 steps is 0.6001000" in message
    assert "is wrong" in check_losses(contender, [[float("nan"), 0.6]], right[:1])
    assert check_losses(parse_contender("dmt-cr2+fp16"), [[0.7, 0.6001]], right[:1]) == ""


def test_batches_come_again_until_they_are_closed() -> None:
    setting = Setting(rows_cap=40)
    first, second, opening = (random_batch(setting, 4, i, rank=0) for i in range(3))
    assert not torch.equal(first.labels + first.dense_features[:, 0], second.labels + second.dense_features[:, 0])
    assert torch.equal(first.dense_features, random_batch(setting, 4, 0, rank=0).dense_features)
    batches = Batches([opening], [first, second])
    assert [next(batches) for _ in range(4)] == [opening, first, second, first]
    batches.close()
    assert list(batches) == []


def test_a_rate_needs_emulated_hosts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mbit_per_s=200\.0 needs emulated hosts"):
        run_setting(Setting(), select(["sptt"]), tmp_path / "run.json", emulated=False)
    result = CliRunner().invoke(main, ["--no-hosts", "--contenders", "nobody"])
    assert result.exit_code == 2
    assert "Contender 'nobody' is unknown" in result.output
    assert "dmt-cr2-2d+all" in CliRunner().invoke(main, ["--list"]).output.split()


# Jobs.


def job(rank: int, names: list[str], out: str) -> None:
    from benchmarks.steps.rank import run_job

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    run_job(Setting(**SMALL), [parse_contender(name) for name in names], Path(out))


def spoilt_job(rank: int, out: str) -> None:
    from benchmarks.steps import rank as module

    def load_others(built, weights):
        changed = {name: value + 1.0 * ("t_C7." in name) for name, value in weights.items()}
        load_weights(built, changed if built.contender.name == "sptt" else weights)

    load_weights = module.load_weights
    module.load_weights = load_others
    job(rank, ["flat-tw", "sptt"], out)


def run_of(names: list[str], folder: Path) -> dict[str, dict]:
    run_ranks(job, 4, names, str(folder / "run.json"))
    run = json.loads((folder / "run.json").read_text())
    found = {contender["name"]: contender for contender in run["contenders"]}
    assert list(found) == names
    for name, contender in found.items():
        assert len(contender["steps"]) == 2, name
        assert all(step["seconds"] > 0 for step in contender["steps"])
        assert set(contender["traffic"]) == {"ids", "forward", "backward", "dense", "inside"}
        assert min(contender["weight_bytes"]) > 0
        assert min(contender["peak_memory_bytes"]) >= min(contender["weight_bytes"])
        assert (contender["sync_seconds"] is not None) == ("-2d" in name)
    return found


@pytest.mark.ranks
def test_a_small_job_of_each_family(tmp_path: Path) -> None:
    found = run_of(["flat-cw-dp+prefetch", "flat-cw", "sptt+prefetch", "dmt-cr2+fp16+bf16-dense"], tmp_path)
    for name, contender in found.items():
        # The outputs are all that must cross, and nothing crosses twice.
        for kind in ("forward", "backward"):
            assert contender["traffic"][kind] == contender["needed"][kind], (name, kind)
    assert found["flat-cw"]["needed"]["forward"] == 26 * 128 * 16 * 2 * 4
    small, cut = found["flat-cw-dp+prefetch"], found["flat-cw"]
    assert small["needed"]["forward"] == 21 * 128 * 16 * 2 * 4, "5 tables have at most 21 rows"
    assert small["needed"]["dense"] - cut["needed"]["dense"] == 2 * (3 + 4 + 10 + 15 + 18) * 128 * 4
    # DDP's ring goes through all four ranks.
    assert small["traffic"]["dense"] == pytest.approx(1.5 * small["needed"]["dense"], rel=1e-3)
    ours = found["dmt-cr2+fp16+bf16-dense"]
    assert ours["needed"]["forward"] == 26 * 64 * 16 * 2 * 2
    # But for the fill that makes a bucket's halves equal.
    assert ours["traffic"]["dense"] == pytest.approx(ours["needed"]["dense"], rel=1e-3)
    assert ours["needed"]["dense"] < 0.6 * found["sptt+prefetch"]["needed"]["dense"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_contender_that_computes_something_else_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="Contender sptt is wrong: on rank 0 its loss after 0 steps"):
        run_ranks(spoilt_job, 4, str(tmp_path / "run.json"), fresh=True)


@pytest.mark.ranks
@pytest.mark.slow
def test_every_contender_is_right(tmp_path: Path) -> None:
    run_of([contender.name for contender in all_contenders()], tmp_path)
