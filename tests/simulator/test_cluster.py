"""Descriptions of clusters, and what is wrong with them."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import tomli_w

from dmt.errors import InputError
from dmt.simulator.cluster import load_cluster, save_cluster, shipped_clusters

A100 = load_cluster("a100")


def test_shipped_clusters_are_whole_and_say_where_their_numbers_are_from() -> None:
    assert shipped_clusters() == ["a100", "h100", "v100"]
    clusters = [load_cluster(name) for name in ("v100", "a100", "h100")]
    flops = [cluster.matmul_flops for cluster in clusters]
    assert flops == sorted(flops)
    assert all("DMT Table 1" in cluster.source and cluster.ranks_per_host == 8 for cluster in clusters)


def test_a_file_brings_back_what_was_written(tmp_path: Path) -> None:
    rates = replace(A100.all_to_all, uplink_by_ranks={}, host_by_ranks={2: 1.0, 8: 0.5})
    cluster = replace(A100, name='two "hosts"\n🙂', all_to_all=rates)
    save_cluster(cluster, tmp_path / "a" / "cluster.toml")
    assert load_cluster(tmp_path / "a" / "cluster.toml") == cluster
    with pytest.raises(InputError, match=r"^Cluster file .*cluster\.toml/b: cannot be written"):
        save_cluster(cluster, tmp_path / "a" / "cluster.toml" / "b")


def test_larger_groups_reach_less_of_the_uplink() -> None:
    rates = A100.exchange
    shares = [rates.uplink_rate(ranks) / rates.uplink_bytes_per_s for ranks in (2, 8, 32, 128, 512, 4096)]
    assert shares == pytest.approx([1.0, 1.0, 0.8335, 0.667, 0.5, 0.5])
    assert replace(rates, uplink_by_ranks={}).uplink_rate(512) == rates.uplink_bytes_per_s
    assert rates.host_rate(512) == rates.host_bytes_per_s
    assert A100.with_uplink(8.0).all_reduce.uplink_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("matmul_flops", 0, r"matmul_flops: Input should be greater than 0 \(got 0"),
        ("matmul_flops", math.inf, r"matmul_flops: Input should be a finite number"),
        ("step_s", -1.0, r"step_s: Input should be greater than or equal to 0 \(got -1"),
        ("ranks_per_host", -1, r"ranks_per_host: Input should be greater than 0"),
        ("matmul_flop", 1.0, r"matmul_flop: Unexpected keyword argument"),
        ("exchange.latency_s", -1e-6, r"exchange\.latency_s: Input should be greater than or equal to 0"),
        ("all_reduce.host_bytes_per_s", 0.0, r"all_reduce\.host_bytes_per_s: Input should be greater than 0"),
        ("exchange.uplink_by_ranks.many", 0.5, r"exchange\.uplink_by_ranks\.many.*: Input should be a valid int"),
        ("exchange.uplink_by_ranks.8", 1.5, r"exchange\.uplink_by_ranks\.8: Input should be less than or equal"),
    ],
)
def test_nonsense_is_named(name: str, value: float, words: str, tmp_path: Path) -> None:
    save_cluster(A100, tmp_path / "c.toml")
    record = tomllib.loads((tmp_path / "c.toml").read_text())
    *parts, key = name.split(".")
    reduce(dict.__getitem__, parts, record)[key] = value
    (tmp_path / "c.toml").write_text(tomli_w.dumps(record))
    with pytest.raises(InputError, match=words):
        load_cluster(tmp_path / "c.toml")


def test_a_missing_part_a_missing_file_and_a_typo_are_told(tmp_path: Path) -> None:
    save_cluster(A100, tmp_path / "c.toml")
    text = (tmp_path / "c.toml").read_text()
    (tmp_path / "c.toml").write_text(text[: text.index("[exchange]")] + text[text.index("[all_reduce]") :])
    with pytest.raises(InputError, match=r"c\.toml: exchange: Field required\. .*dmt bench-comms"):
        load_cluster(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text(text.replace("hosts = 16\n", "").replace("ranks_per_host = 8\n", ""))
    with pytest.raises(InputError, match=r"c\.toml: hosts: Field required\. .*dmt bench-comms"):
        load_cluster(tmp_path / "c.toml")
    for path in ("a10", str(tmp_path / "none.toml")):
        with pytest.raises(InputError, match=r"neither a file nor a shipped cluster \(a100, h100, v100\)"):
            load_cluster(path)
