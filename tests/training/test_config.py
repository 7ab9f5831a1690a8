"""`TrainingConfig`: files, overrides and what a wrong one is told. Pure Python, no rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import ValidationError

from dmt.errors import InputError
from dmt.training.commands import main
from dmt.training.config import TrainingConfig, _keys, load_config, shipped_configs, to_override, to_toml
from dmt.training.data.config import DataConfig
from tests.training.small import small

COLUMNS = {"kind": "columns", "train_path": "day_*.csv", "categorical": ["c_*"], "num_embeddings_per_feature": {"c": 7}}


def shipped(name: str) -> dict[str, Any]:
    return load_config(name).model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    "values",
    [
        *map(shipped, shipped_configs()),
        {"data": COLUMNS},
        {"model": {"arch": "dcn", "over_arch": [8, 1]}, "train": {"max_steps": 3, "eval_every": 2}},
        {"data": {"kind": "criteo_tsv", "train_path": 'quote"d\\ back.tsv', "eval_fraction": 0.5}},
    ],
)
def test_a_resolved_config_reads_again_as_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    config = TrainingConfig.model_validate(values)
    file = tmp_path / "resolved.toml"
    file.write_text(to_toml(config))
    assert load_config(file) == config
    assert to_toml(load_config(file)) == file.read_text()


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.batch_size=512", lambda c: c.train.batch_size, 512),
        ("train.batch_size = 512 ", lambda c: c.train.batch_size, 512),
        ("optimizer.dense_lr=1e-4", lambda c: c.optimizer.dense_lr, 1e-4),
        ("model.arch=dcn", lambda c: c.model.arch, "dcn"),
        ('model.arch="dcn"', lambda c: c.model.arch, "dcn"),
        ("model.over_arch=[8, 1]", lambda c: c.model.over_arch, (8, 1)),
        ("towers.plan=runs/a=b.json", lambda c: c.towers.plan, "runs/a=b.json"),
        ("data.synthetic.num_rows=7", lambda c: c.data.synthetic.num_rows, 7),
        ("data.shuffle_seed=3", lambda c: c.data.shuffle_seed, 3),
        ("train={epochs = 3}", lambda c: c.train.epochs, 3),
        ("train.output_dir=~/${USER_OF_TEST}", lambda c: c.train.output_dir, str(Path.home() / "ann")),
        ("train.output_dir=2024-run", lambda c: c.train.output_dir, "2024-run"),
        (to_override("train.output_dir", Path('\U0001f600"\x1b\\')), lambda c: c.train.output_dir, '\U0001f600"\x1b\\'),
    ],
)
def test_overrides(override: str, read: Any, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_OF_TEST", "ann")
    found = read(load_config("demo", [override]))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=3", r"'train\.batchsize' is unknown\. Did you mean 'batch_size'\? Valid here: batch_size, "),
        ("data.synthetic.num_grups=3", r"'data\.synthetic\.num_grups' is unknown\. Did you mean 'num_groups'\?"),
        ("batch_size=2", r"'batch_size' is unknown\. Did you mean 'train\.batch_size'\?"),
        ("data.num_rows=2", r"'data\.num_rows' is unknown\. Did you mean 'data\.synthetic\.num_rows'\?"),
        ("optimizer.sparse_lr=-1", r"optimizer\.sparse_lr: .*greater than 0 \(got -1\)"),
        ("model.arch=dlm", r"model\.arch: .*'dlrm', 'dcn', 'dmt-dlrm', 'dmt-dcn' or 'dmt-dlrm-products' \(got 'dlm'\)"),
        ("data.categorical=item", r"data\.categorical: Input should be a list, in brackets \(got 'item'\)"),
        ("sharding.tables.t=rowwise", r"Input should be 'table_wise', .* or 'fused_uvm_caching' \(got 'rowwise'\)"),
        ("replicas.moment_scale=2", r"moment_scale=2\.0 must be above 0 and at most num_replicas=1"),
        ("towers.outside=hour", r"towers\.outside: 'hour' is neither 'none' nor 'auto'\. List .* such as \[\"hour\"\]"),
        ("train.batch_size=true", r"train\.batch_size: Input should be a valid integer \(got True\)"),
        ("optimizer.dense_lr=true", r"optimizer\.dense_lr: Input should be a valid number \(got True\)"),
        ("train.output_dir=$NOWHERE/out", r"'\$NOWHERE/out' is empty, or names an environment variable that is not"),
        ("train.output_dir=$EMPTY_OF_TEST", r"train\.output_dir: '\$EMPTY_OF_TEST' is empty, or names"),
        ("model.embedding_dim=6", r"model\.embedding_dim: Input should be a multiple of 4 \(got 6\)"),
        ("model.options={a = 1}", r"model\.options=\{'a': 1\} are settings of your own model"),
        ("model.over_arch=[8, 4]", r"model\.over_arch=\[8, 4\] must end in 1"),
        ("sharding.dataflow=flat", r"='flat' cannot train a multi-tower model, but model\.arch='dmt-dlrm' is one"),
        # not an override, and sections and values mixed up
        ("train.batch_size", r"'train\.batch_size' is not of the form section\.key=value"),
        ("train.batch_size=1000000000", r"train\.batch_size: .*less than or equal to 16777216"),
        ('train.output_dir="x', r"Override .* is not TOML \(Unterminated.*Correct the TOML value, or put text in"),
        ("model.c=" + "9" * 5000, r"^.{0,12000}$"),
        ("train.batch_size.x=3", r"'train\.batch_size\.x=3': 'batch_size' is a value, not a section"),
    ],
)
def test_a_wrong_override_is_told_where_and_why(override: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_OF_TEST", "")
    with pytest.raises(InputError, match=message):
        load_config("demo", [override])


def test_a_file_of_the_name_of_a_shipped_config_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").write_text("[train]\nepochs = 9\n", encoding="utf-8-sig")  # as Windows writes it
    monkeypatch.chdir(tmp_path)
    assert load_config("demo").train.epochs == 9


def test_prepared_rows_replace_the_raw_ones_of_a_file_and_are_read_in_its_order(tmp_path: Path) -> None:
    file, prepared = tmp_path / "raw.toml", ["data.prepared=p", "data.shuffle_seed=3"]
    file.write_text(to_toml(TrainingConfig.model_validate({"data": {**COLUMNS, "shuffle_rows": 7}})))
    assert load_config(file, prepared).data == DataConfig(prepared="p", shuffle_rows=7, shuffle_seed=3)
    with pytest.raises(InputError, match="label does not apply to kind='prepared'"):
        load_config(file, [*prepared, "data.label=y"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_embeddings": 5}, "num_embeddings does not apply to kind='synthetic'"),
        ({"kind": "criteo_tsv"}, "kind='criteo_tsv' needs train_path"),
        ({"kind": "criteo_tsv", "train_path": "a", "id_mode": "index"}, "does not fit kind='criteo_tsv' .hex ids"),
        ({"kind": "criteo_tsv", "train_path": "a", "split_column": "s"}, "split_column does not apply to kind='cri"),
        ({"kind": "columns", "train_path": "a"}, "kind='columns' needs categorical"),
        ({**COLUMNS, "eval_path": "b", "split_column": "s"}, "both select the evaluation rows"),
        ({"source": "a:b", "categorical": ["c"], "timestamps": ["t"]}, "timestamps does not apply to kind='source'"),
        ({"source": "a:b", "categorical": ["c"], "group_by": "u"}, "group_by does not apply to kind='source'"),
        ({"synthetic": {"num_features": 3, "num_groups": 4}}, "num_groups=4 exceeds num_features=3"),
        ({"synthetic": {"num_features": 3, "num_multi_hot": 4, "num_groups": 1}}, "num_multi_hot=4 exceeds"),
        ({"prepared": "p", "eval_fraction": 0.3}, "eval_fraction does not apply to kind='prepared'"),
        ({"prepared": "p", "sequences": {"a": "b"}}, "sequences does not apply to kind='prepared'"),
        ({"prepared": "p", "label": "y"}, "label does not apply to kind='prepared'"),
        ({**COLUMNS, "vocabulary": "p"}, "needs id_mode='frequency'"),
        ({**COLUMNS, "prepared": "p"}, "prepared does not apply to kind='columns'"),
        ({**COLUMNS, "max_length": 5}, "max_length limits sequences"),
        ({"kind": "prepared"}, "kind='prepared' needs prepared"),
        ({"source": "a:b"}, "kind='source' needs categorical"),
        ({"source": "a:b", "categorical": ["c"], "id_mode": "frequency"}, "needs files, but kind='source' has none"),
    ],
)
def test_settings_of_data_that_do_not_fit_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        DataConfig.model_validate(settings)


HOT, PAIR = {"extra_memory": 0.01}, {"num_replicas": 2}
# model and its dataflow, settings, and what is said
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("dcn flat", {"train": {"micro_batches": 2}}, r"micro_batches=2 needs the tower dataflow, but this run is flat"),
    ("dlrm sptt", {"sharding": {"dataflow": "sptt", "scheme": "planner"}}, "is TorchRec's planner.* has the tower"),
    ("dmt-dlrm sptt", {"hot_rows": HOT}, "hot rows need a flat model; towers send outputs of tower modules"),
    ("dlrm flat", {"hot_rows": HOT}, "needs sharding.dataflow='sptt' and .* but this run has 'flat'"),
    ("dlrm sptt", {"hot_rows": HOT, "sharding": {"dataflow": "sptt", "table_precision": "fp16"}}, "'sptt' and 'fp16'"),
    ("dlrm sptt", {"hot_rows": HOT, "topology": PAIR}, "hot rows need num_replicas=1"),
    ("dmt-dcn sptt", {"topology": PAIR, "replicas": {"sync_every": 4}, "train": {"eval_every": 6}}, "not a multiple"),
    ("dmt-dlrm sptt", {"sharding": {"tables": {"*": "fused_uvm"}}, "topology": PAIR}, "read whole"),
    ("dlrm sptt", {"sharding": {"dataflow": "sptt", "tables": {"*": "fused_uvm"}}, "hot_rows": HOT}, "read whole"),
    (
        "dmt-dlrm sptt",
        {"topology": {"num_towers": 1}, "train": {"dense_reduce": "hierarchical"}},
        r"dense_reduce='hierarchical' .* one host of \d ranks\. Set topology\.ranks_per_host to the",
    ),
]


@pytest.mark.parametrize(("model", "sections", "message"), TOGETHER, ids=[row[-1][:30] for row in TOGETHER])
def test_what_does_not_go_together_is_refused(model: str, sections: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        small(*model.split(), **sections)


def test_there_are_at_most_ninety_keys_and_seventy_options() -> None:
    assert len(list(_keys(TrainingConfig))) <= 90
    options = [option for command in main.commands.values() for option in command.params]
    assert sum(isinstance(option, click.Option) for option in options) <= 70
