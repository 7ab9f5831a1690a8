"""The step benchmark: plans by hand, ids, arithmetic, and small jobs in which every contender must be right."""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.simulator import _RESULTS, job_of, setting_of
from benchmarks.steps.build import OPTIMIZER, build_plain, own_topology, own_towers, tower_sizes
from benchmarks.steps.check import check_losses, column_cuts
from benchmarks.steps.contenders import CONTENDERS, named, select
from benchmarks.steps.criteo_ids import CRITEO_KAGGLE_ROWS, IDS_FILE, IdSkew, criteo_skews
from benchmarks.steps.flat import flat_plan, flat_sharder, most_data_parallel_rows, tower_plan_by_hand, tower_sharder
from benchmarks.steps.inputs import benchmark_tables, random_batch
from benchmarks.steps.measure import Clocks, Turn
from benchmarks.steps.rank import step_records
from benchmarks.steps.setting import Setting
from benchmarks.train_step import main
from dmt.errors import InputError
from dmt.testing.ranks import RanksFailedError
from dmt.training.build import count_model, fused_params
from dmt.training.step_prediction import work_of
from tests.ranks import run_ranks

SMALL = {"hosts": 2, "ranks_per_host": 2, "mbit_per_s": None, "batch_size": 16, "rounds": 1, "rows_cap": 50}
SIZES = [(2, 2), (4, 2), (4, 1), (1, 2), (2, 4)]


def plan_of(name, setting):
    contender = named(name)
    model = build_plain(contender, setting, tables_device="meta")
    if contender.family == "flat":
        return flat_plan(contender, setting, model, flat_sharder(contender, fused_params(OPTIMIZER)))
    return tower_plan_by_hand(contender, setting, model, tower_sharder(contender, fused_params(OPTIMIZER)))


def parameters_of(plan):
    return {name: parameter for module in plan.plan.values() for name, parameter in module.items()}


def test_contenders_are_chosen_by_name_and_pattern() -> None:
    assert [c.name for c in select(["dmt-cr2", "dmt-cr8*rank-towers"])] == [
        *("dmt-cr2", "dmt-cr8+all+rank-towers", "dmt-cr8+fp16+all+rank-towers")
    ]
    assert named("dmt-cr8").plain_model == named("dmt-cr8+fp16+all").plain_model != named("sptt").plain_model
    for pattern in ("flat-zz", "x-*"):
        with pytest.raises(InputError, match=pattern[:2]):
            select([pattern])
    assert "dmt-cr2+all" in CliRunner().invoke(main, ["--list"]).output.split()
    result = CliRunner().invoke(main, ["--contenders", "nobody"])
    assert (result.exit_code, "Contender 'nobody' is unknown" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": "zipf"}, r"ids='zipf' is unknown; use one of \['skewed', 'uniform'\]"),
        ({"hosts": 0}, r"hosts=0 must be at least 1"),
        ({"warm_up_rounds": -1}, r"warm_up_rounds=-1 must not be negative"),
        ({"mbit_per_s": 0}, r"mbit_per_s=0 must be positive"),
        ({"hosts": 1, "ranks_per_host": 1}, r"hosts=1, ranks_per_host=1 is a single rank"),
    ],
)
def test_settings_are_checked(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Setting(**changes)


# Plans by hand.


@pytest.mark.parametrize(("hosts", "ranks_per_host"), SIZES)
@pytest.mark.parametrize("name", ["flat-tw", "flat-cw", "etc-cr2"])
def test_a_plan_by_hand_holds_every_number_of_every_table_once(name: str, hosts: int, ranks_per_host: int) -> None:
    setting = Setting(hosts=hosts, ranks_per_host=ranks_per_host, rows_cap=40)
    tables = {table.name: table for table in benchmark_tables(setting)}
    plan = plan_of(name, setting)
    assert set(parameters_of(plan)) == set(tables)
    by_host: Counter[int] = Counter()
    by_rank: Counter[int] = Counter()
    for table, parameter in parameters_of(plan).items():
        assert parameter.compute_kernel == "fused"
        held = torch.zeros(tables[table].num_embeddings, tables[table].embedding_dim)
        for shard in parameter.sharding_spec.shards:
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            held[row : row + rows, column : column + columns] += 1
            by_rank[shard.placement.rank()] += columns
            by_host[setting.host(shard.placement.rank())] += columns
        assert bool((held == 1).all()), table
        assert sum(column_cuts(plan)[table]) == tables[table].embedding_dim
    assert (len(by_host), len(by_rank)) == (hosts, setting.world_size)
    assert max(by_host.values()) - min(by_host.values()) <= 128
    assert max(by_rank.values()) - min(by_rank.values()) <= 128


def data_parallel_tables(name: str, setting: Setting) -> set[int]:
    """The numbers of rows of the data-parallel tables."""
    rows = {table.name: table.num_embeddings for table in benchmark_tables(setting)}
    plan = parameters_of(plan_of(name, setting))
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
        # An id, a length, and 128 numbers and their gradients, for each sample of the other hosts.
        crossing = chosen.count(False) * 512 * (world - ranks_per_host) * (8 + 4 + 2 * 128 * number_bytes)
        reduced = sum(rows * 128 * 4 for rows, is_small in zip(all_rows, chosen, strict=True) if is_small)
        return crossing + hosts * 2 * (world - 1) / world * reduced

    best = min(product([False, True], repeat=len(all_rows)), key=cost)
    most = most_data_parallel_rows(setting, number_bytes)
    assert best == tuple(rows <= most for rows in all_rows)
    assert any(best)
    assert not all(best)


def test_small_tables_are_data_parallel_where_the_name_says_so() -> None:
    setting = Setting(hosts=2, ranks_per_host=2, batch_size=4096)
    assert max(data_parallel_tables("flat-tw-dp", setting)) == 3194
    assert max(data_parallel_tables("flat-cw-dp15000", setting)) == 14_992
    assert data_parallel_tables("flat-tw", setting) == set()
    assert data_parallel_tables("flat-tw-dp", Setting(hosts=1)) == set(), "nothing crosses hosts"
    assert data_parallel_tables("flat-planner", setting) > data_parallel_tables("flat-tw-dp", setting)


# Ids.


def ids_of(setting: Setting, step: int = 0, rank: int = 0) -> torch.Tensor:
    """[features, B]."""
    ids = random_batch(setting, setting.batch_size, step, rank).sparse_features
    return ids.values().view(len(ids.keys()), -1)


def num_distinct(ids: torch.Tensor) -> list[int]:
    return [len(torch.unique(of_feature)) for of_feature in ids]


def test_drawn_ids_repeat_as_often_as_criteos() -> None:
    real = np.array([one["distinct_of_4096"] for one in json.loads(IDS_FILE.read_text())["features"]])
    ids = ids_of(Setting())
    drawn = np.array(num_distinct(ids))
    assert drawn[real > 300] == pytest.approx(real[real > 300], rel=0.08)
    # 1.1 of the 1.6 % are ids that meet on the same row of a table that is cut.
    assert drawn.sum() / real.sum() == pytest.approx(0.984, abs=0.01)
    for feature, skew in zip(ids, criteo_skews(), strict=True):
        shares = torch.unique(feature, return_counts=True)[1] / 4096
        assert shares.max().item() == pytest.approx(skew.first, abs=0.03)
    assert sum(num_distinct(ids_of(Setting(ids="uniform")))) > 1.5 * sum(drawn), "a draw without skew fails"


def test_a_skew_is_what_it_expects() -> None:
    skew = IdSkew(rows=300, first=0.3, exponent=1.5, shift=4.0)
    shares = np.concatenate([[0.3], skew.shares(np.arange(300.0))])
    assert shares.sum() == pytest.approx(1)
    drawn = torch.bincount(skew.draw(200_000, torch.Generator().manual_seed(0)), minlength=300) / 200_000
    assert drawn.numpy() == pytest.approx(shares, abs=4e-3)
    assert len(criteo_skews()) == len(CRITEO_KAGGLE_ROWS) == 26


@pytest.mark.parametrize("ratio", [2, 4, 16])
def test_products_compress_by_their_ratio_with_the_same_tables_outside(ratio: int) -> None:
    for option in ("", "+outside"):
        products, paper = (named(f"{kind}-cr{ratio}+all+rank-towers{option}") for kind in ("products", "dmt"))
        towers, sizes = own_towers(products, Setting()), tower_sizes(products, Setting())
        assert 4 * sizes["p"] * sizes["tower_dim"] * ratio == len(towers.features) * 128
        assert towers == own_towers(paper, Setting())
        job = job_of(products, Setting())
        assert job is not None
        assert count_model(job).compression_ratio == ratio


# Records and checks.


def turn(*seconds: float, uplink: int | None = None, peak: int | None = None) -> Turn:
    steps = [Clocks(seconds=s, cpu=s / 2, main_cpu=s / 4, no_core=s / 8) for s in seconds]
    return Turn(steps=steps, uplink_bytes=uplink, peak_bytes=peak)


def test_what_unique_sends_is_predicted_as_it_was_measured() -> None:
    run = next(run for run in json.loads((_RESULTS / "steps.json").read_text())["runs"] if run["part"] == "main")
    sent, setting = {e["name"]: e["traffic"]["forward"] for e in run["contenders"]}, setting_of(run)
    for name in ("sptt", "sptt+unique", "sptt+prefetch+hier+mb4+unique+rank-towers+outside"):
        assert work_of(job_of(named(name), setting)).sent["peer_outputs"].uplink == pytest.approx(sent[name], rel=0.01)
    assert job_of(named("dmt-cr2+unique"), setting) is None, "not counted by tower"
    assert job_of(named("flat-tw+vbe"), setting) is None, "the trainer's flat dataflow has no unique inputs"


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    turns = [turn(1.0, 2.0, uplink=100), turn(3.0, 1.0, uplink=100), turn(1, 1, uplink=60), turn(1, 1, uplink=60)]
    first, second = step_records(turns, Setting())
    assert (first["seconds"], second["seconds"]) == (3.0, 2.0)
    assert first["by_rank"]["waiting"] == [0.625, 1.875, 0.625, 0.625]
    assert first["uplink_bytes"] == second["uplink_bytes"] == [50, 30]
    assert step_records([turn(1.0)] * 4, Setting())[0]["uplink_bytes"] is None


def test_a_wrong_loss_is_reported_with_rank_and_step() -> None:
    contender = named("dmt-cr2")
    right = [[0.7, 0.6], [0.7, 0.6]]
    assert check_losses(contender, right, right) == ""
    message = check_losses(contender, [[0.7, 0.6], [0.7, 0.6001]], right)
    assert "dmt-cr2 is wrong: on rank 1 its loss after 1 steps is 0.6001000" in message
    assert "is wrong" in check_losses(contender, [[float("nan"), 0.6]], right[:1])
    assert check_losses(named("dmt-cr2+fp16"), [[0.7, 0.6001]], right[:1]) == ""


# Jobs.


def job(rank: int, names: list[str], out: str, **changes: int) -> None:
    from benchmarks.steps.rank import run_job

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    run_job(Setting(**SMALL | changes), [named(name) for name in names], Path(out))


def spoilt_job(rank: int, out: str) -> None:
    from benchmarks.steps import rank as module

    def load_others(built, weights):
        changed = {name: value + 1.0 * ("t_C7." in name) for name, value in weights.items()}
        load_weights(built, changed if built.contender.name == "sptt" else weights)

    load_weights = module.load_weights
    module.load_weights = load_others
    job(rank, ["flat-tw", "sptt"], out)


def run_of(names: list[str], folder: Path, **changes: int) -> dict[str, dict]:
    run_ranks(partial(job, **changes), 4, names, str(folder / "run.json"))
    run = json.loads((folder / "run.json").read_text())
    found = {contender["name"]: contender for contender in run["contenders"]}
    assert list(found) == names
    for name, contender in found.items():
        assert len(contender["steps"]) == 2, name
        assert set(contender["traffic"]) == {"ids", "forward", "backward", "dense", "inside"}
        assert min(contender["peak_memory_bytes"]) >= min(contender["weight_bytes"]) > 0
    return found


@pytest.mark.ranks
def test_a_small_job_of_each_family(tmp_path: Path) -> None:
    half, small = "sptt+fp16+prefetch+bf16-dense+mb4+unique", "flat-cw-dp+prefetch"
    same, products = "sptt+prefetch+hier+mb4+unique+rank-towers+outside", "products-cr4+all+rank-towers+outside"
    names = [small, "flat-tw+vbe+prefetch", "sptt", same, half]
    names += ["dmt-cr2+fp16", "dmt-cr2+outside", products, "dmt-cr2+r2-intra"]
    found = run_of(names, tmp_path, warm_up_rounds=0)
    # The outputs for 16 samples of each of 4 ranks, of tables on the other host, are all that crosses.
    columns = {
        small: 21 * 128 * 4,  # 5 of 26 tables have at most 21 rows
        "sptt": 26 * 128 * 4,
        "dmt-cr2+fp16": 26 * 64 * 2,
        "dmt-cr2+outside": 19 * 64 * 4,
        products: 19 * 32 * 4,
        # The columns that the rank on the other host looks up for a rank.
        "dmt-cr2+r2-intra": 26 * 64 * 4,
    }
    for name, row_bytes in columns.items():
        assert found[name]["traffic"]["forward"] == 16 * 4 * row_bytes / 2, name
    for name, contender in found.items():
        assert contender["traffic"]["forward"] == contender["traffic"]["backward"], name
    forward, dense = ({name: one["traffic"][kind] for name, one in found.items()} for kind in ("forward", "dense"))
    # Small tables are reduced by DDP's ring through all four ranks, which crosses hosts with 1.5 times their bytes a
    # host; those outside towers are summed inside hosts first.
    ring = dense["sptt"]
    assert dense[small] - ring == pytest.approx(1.5 * 2 * (3 + 4 + 10 + 15 + 18) * 128 * 4, rel=1e-3)
    more = 2 * (3 + 4 + 10 + 15 + 18 + 24 + 27) * 64 * 4
    assert dense["dmt-cr2+outside"] - dense["dmt-cr2+fp16"] == pytest.approx(more, rel=1e-3)
    # Half as many bytes for each number, and each once over the link instead of 1.5 times; buckets are filled up.
    assert dense[half] == pytest.approx(ring / 2 / 1.5, rel=1e-3)
    assert forward[half] < forward["sptt"] / 2
    assert forward[same] < forward["sptt"]


def test_replicas_divide_the_ranks_of_a_host() -> None:
    with pytest.raises(InputError, match=r"'dmt-cr2\+r4-intra' has 4 replicas, which do not divide ranks_per_host=2"):
        own_topology(named("dmt-cr2+r4-intra"), Setting())


@pytest.mark.ranks
@pytest.mark.slow
def test_a_contender_that_computes_something_else_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="Contender sptt is wrong: on rank 0 its loss after 0 steps"):
        run_ranks(spoilt_job, 4, str(tmp_path / "run.json"), fresh=True)


@pytest.mark.ranks
@pytest.mark.slow
def test_every_contender_is_right(tmp_path: Path) -> None:
    run_of([name for name, contender in CONTENDERS.items() if contender.num_replicas <= 2], tmp_path)
