"""No command replaces what it reads, or a file of another kind."""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt import TableSpec, TowerPlan, TowerTopology
from dmt.errors import InputError
from dmt.sharding.plan_tables import plan_tables
from dmt.simulator.cluster import load_cluster, save_cluster
from dmt.training.commands import check_output_files
from dmt.training.serving import export
from tests.training.small import dmt

MANIFEST = {
    **{"format": export._FORMAT, "model": "dlrm", "step": 1, "tables": "fp32", "hashing": "", "hash_key": ""},
    **{"dense": [], "features": [], "towers": [], "data": {"eval_path": "x.parquet"}, "versions": {}},
}
CONFIG = '[data]\nkind = "columns"\ntrain_path = "x.parquet"\ncategorical = ["c_*"]\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file of each kind, and a link, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)
    for name in ("x.parquet", "other.parquet"):
        pq.write_table(pa.table({"c_a": [1]}), name)
    with zipfile.ZipFile("m.pt2", "w") as archive:
        archive.writestr(f"m/extra/{export._MANIFEST}", json.dumps(MANIFEST))
    save_cluster(load_cluster("a100"), Path("k.toml"))
    checkpoint = Path("run/checkpoint/step-1")
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.toml").write_text(CONFIG)
    (checkpoint / "checkpoint.json").write_text("{}")
    TowerPlan.from_lists([["a"], ["b"]]).save(Path("towers.json"))
    TowerPlan.from_lists([["a"], ["b"]]).save(checkpoint / "towers.json")
    tables = TableSpec(name="t", num_embeddings=9, embedding_dim=8, feature_names=("a",))
    plan_tables([[tables]], TowerTopology(num_towers=1, ranks_per_tower=1)).save("plan.json")
    Path("package.json").write_text('{"name": "site"}')
    Path("notes.txt").write_text("do not lose this")
    Path("rules.toml").write_text("")
    os.link("x.parquet", "hard.parquet")
    scored = pa.table({"row": [0], "logit": [0.5], "probability": [0.6]})
    pq.write_table(scored, "scored.parquet")
    Path("rows").mkdir()
    os.link("x.parquet", "rows/part.parquet")
    return tmp_path


IS_READ, IS_OTHER = "is an input of this command", "exists and is not a "
OF_RUN = "partition --checkpoint run --towers 2 --strategy coherent"
PARTITION = "partition --checkpoint run --tower-module dlrm --towers 2"


@pytest.mark.parametrize(
    ("command", "option", "reason"),
    [
        ("score run --data x.parquet -o x.parquet", "--out", IS_READ),
        ("score run --data x.parquet -o hard.parquet", "--out", IS_READ),
        ("score run --data 'rows/*.parquet' -o rows/part.parquet", "--out", IS_OTHER),
        ("score m.pt2 --data x.parquet -o m.pt2", "--out", IS_READ),
        ("plan c.toml --out c.toml", "--out", IS_READ),
        ("plan demo --out package.json", "--out", IS_OTHER),
        ("bench-comms --out c.toml", "--out", IS_OTHER),
        (f"{PARTITION} --rules rules.toml --out rules.toml", "--out", IS_READ),
        (f"{PARTITION} --out plan.json", "--out", IS_OTHER),
        (f"{OF_RUN} --out run/checkpoint/step-1/towers.json", "--out", "is in a checkpoint"),
        ("demo --data x.parquet --out x.parquet", "--out", IS_READ),
        ("score run --data x.parquet -o s3://bucket/out.parquet", "--out", "is a URL"),
    ],
)
def test_an_output_that_is_an_input_or_of_another_kind_is_refused(
    command: str, option: str, reason: str, files: Path
) -> None:
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    run = dmt(*shlex.split(command), code=2)
    assert run.output.startswith(f"error: {option} "), run.output
    assert reason in run.output
    assert before == {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("scored.parquet", "file of predictions"),
        ("m.pt2", "program"),
        ("k.toml", "cluster"),
        ("plan.json", "sharding plan"),
        ("towers.json", "tower plan"),
        ("rules.toml", "tower plan"),  # an empty file, as mktemp makes
        ("new.json", "tower plan"),
    ],
)
def test_a_file_of_the_kind_is_replaced_and_of_no_other(name: str, kind: str, files: Path) -> None:
    check_output_files({"--out": (Path(name), kind)}, ["notes.txt", "s3://bucket/x", None])
    if Path(name).exists() and Path(name).stat().st_size:
        other = "cluster" if kind != "cluster" else "program"
        with pytest.raises(InputError, match=re.escape(f"--out {name!r} exists and is not a {other}")):
            check_output_files({"--out": (Path(name), other)}, [])
