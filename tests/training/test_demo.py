"""The settings that `dmt demo` gives to its two runs."""

from __future__ import annotations

import pytest

from dmt.errors import InputError
from dmt.training.commands.demo import flat_settings
from dmt.training.config import load_config

OF_TOWERS = [
    'sharding.tables={"t_*" = "row_wise"}',
    "sharding.tables.t_C1=row_wise",
    "sharding.memory_gb_per_s=500",
    "sharding.intra_tower_gb_per_s=20.0",
    "sharding.collective_latency_us=0",
    "sharding.id_route=global",
]


@pytest.mark.parametrize("setting", OF_TOWERS)
def test_settings_of_towers_stay_away_from_the_flat_run(setting: str) -> None:
    flat = "model.arch=dlrm"
    with pytest.raises(InputError, match=r"needs the tower dataflow"):
        load_config("demo", [setting, flat])
    assert flat_settings([setting, flat]) == [flat]
    assert load_config("demo", flat_settings([setting, flat])).dataflow == "flat"
    load_config("demo", [setting])


def test_settings_of_both_runs_reach_both() -> None:
    settings = [
        "sharding.scheme=row_wise",
        "sharding.memory_gib=2",
        "sharding.pooling_factors.C1=1.5",
        "sharding.table_precision=fp16",
        "sharding.forward_precision=bf16",
        "sharding.tables_of_another_name=1",
        "train.epochs=2",
        "a word",
    ]
    assert flat_settings(settings) == settings
