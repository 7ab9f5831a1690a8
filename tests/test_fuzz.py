"""Damaged files and settings: each is read or refused with an `InputError`, within limits of time and memory.

A few dozen cases run daily, always the same; 2,000 others in ``make faults``, which prints the seed that repeats them
(``make faults SEED=...``).
"""

from __future__ import annotations

import contextlib
import copy
import decimal
import gzip
import io
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dmt.errors import InputError
from dmt.files import atomic_write, read_file
from dmt.partitioner import FeatureAffinity, PartitionRules
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.explanation import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.training.checkpoints.store import MANIFEST_NAME, _digest, read_manifest
from dmt.training.config import TrainingConfig, load_config, to_override, to_toml
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig, read_tables
from dmt.training.job import open_job
from dmt.training.preflight import checked_model
from tests.training.data.helpers import criteo_line

LONGEST_S = 25
MOST_BYTES = 4 << 30


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Lets a case succeed or raise `InputError`, within limits of CPU time and memory."""

    def too_late(*_: object) -> None:
        raise AssertionError(f"not done after {LONGEST_S} s")

    pages, limits = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, limits[1]))
    previous = signal.signal(signal.SIGPROF, too_late)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        with contextlib.suppress(InputError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fuzz(cases: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], object]) -> None:
    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=cases < 20,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def case(value: Any) -> None:
        with bounded():
            check(value)

    case()


def cases(few: int, many: int) -> Any:
    return pytest.mark.parametrize("cases", [few, pytest.param(many, marks=pytest.mark.slow)], ids=["few", "many"])


# Values and bytes that break careless code.

NUMBERS = [-1, 0, 1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30]
NUMBERS += [0.5, 1e-320, 1e308, float("inf"), float("nan")]
TEXTS = ["", "a", "0", "auto", "strided", "a\0b", "\x1b[2J", "~nobody/x", "*" * 50, "x" * 5000, "\U0001f600"]
LEAVES = st.sampled_from([None, True, *NUMBERS, *TEXTS])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner)
)
TOKENS = [b"", *(bytes([byte]) for byte in b'\xff\0\n\r\t,=-#{}"'), b'"""', b"NaN", b"e999", b"0x"]
TOKENS += [b"[" * 5000, b"9" * 5000, b"a." * 5000, rb"\ud800", b"\xef\xbb\xbf", b"\x1f\x8b", b"]"]


@st.composite
def damaged(draw: st.DrawFn, content: bytes, most: int = 3) -> bytes:
    """The content with a few stretches replaced by tokens, or cut off."""
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.sampled_from([0, 1, 1, 4, 10**9])))
        content = content[:at] + draw(st.sampled_from(TOKENS) | st.binary(max_size=4)) + content[end:]
    return content


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


@st.composite
def changed(draw: st.DrawFn, record: Any, write: Callable[[Any], str] = json.dumps) -> bytes:
    """The record with a few values replaced, dropped or doubled, as bytes; sometimes damaged too."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 2))):
        found = list(places(record))
        if not found:
            break
        parent, key = draw(st.sampled_from(found))
        if draw(st.booleans()):
            parent[key] = draw(VALUES)
        elif isinstance(parent, list) and draw(st.booleans()):
            parent.append(copy.deepcopy(parent[key]))
        else:
            del parent[key]
    content = write(record).encode(errors="surrogatepass")
    return draw(damaged(content)) if draw(st.integers(0, 4)) == 0 else content


TABLES = [TableSpec(name=f"t{i}", num_embeddings=9, embedding_dim=8, feature_names=(f"f{i}",)) for i in range(4)]
TOWERS = TowerPlan.from_lists(
    [["f0", "f1[0:4]", "f2"], ["f3", "f1[4:8]"]], tables=tuple(TABLES), column_splits={"f1": (4, 4)}
)
SHARDING = plan_tables([TABLES[:2], TABLES[2:]], TowerTopology(num_towers=2, ranks_per_tower=2))
MANIFEST = {
    **{"format": 1, "step": 7, "progress": {"epoch": 0, "row": 5, "files": [["a", 1, 2]]}, "versions": {"torch": "2"}},
    **{"files": {"a.txt": {"bytes": 1, "sha256": "00"}}, "column_shards": {"t": [4, 4]}, "moment_scales": {"t": 2.0}},
}
RULES = {
    **{"max_work_ratio": 1.5, "together": [["f1", "f2"]], "apart": [["f1", "f3"]], "categories": {"a": ["f*"]}},
    **{"towers_per_category": {"a": 2}},
}


def saved(plan: TowerPlan | TowerShardingPlan) -> Any:
    with TemporaryDirectory() as folder:
        plan.save(Path(folder, "plan.json"))
        return json.loads(Path(folder, "plan.json").read_text())


def signed(record: Any) -> str:
    return json.dumps({**record, "digest": _digest(record)} if isinstance(record, dict) else record)


def toml(record: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else "" if value is None else value

    return tomli_w.dumps(plain(record))


def read_tower_plan(path: Path) -> None:
    plan = TowerPlan.load(path)
    plan.save(path.with_name("again.json"))
    assert repr(TowerPlan.load(path.with_name("again.json"))) == repr(plan)  # nan is no nan
    plan.tables_by_tower(plan.split_tables(TABLES))


def read_sharding_plan(path: Path) -> None:
    plan = TowerShardingPlan.load(path)
    plan.save(path.with_name("again.json"))
    assert repr(TowerShardingPlan.load(path.with_name("again.json"))) == repr(plan)


def read_config(path: Path) -> None:
    config = load_config(path)
    path.with_name("again.toml").write_text(to_toml(config))
    assert load_config(path.with_name("again.toml")) == config


CONFIG = TrainingConfig().model_dump(mode="json", exclude_none=True)
DEFAULTS = {f"{s}.{key}": value for s, values in TrainingConfig().model_dump().items() for key, value in values.items()}
DEFAULTS |= {f"data.synthetic.{key}": value for key, value in DEFAULTS.pop("data.synthetic").items()}


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """A setting, more often than not with a value of its type."""
    key = draw(st.sampled_from(sorted(DEFAULTS)))
    sizes = st.sampled_from([*NUMBERS, 3, 8, 64, 1000]) | st.integers(1, 100)
    fitting: dict[type, st.SearchStrategy[Any]] = {
        **{bool: st.booleans(), int: sizes, float: sizes | st.floats(0, 10), str: st.sampled_from(TEXTS)},
        **{tuple: st.lists(sizes, max_size=3), type(None): sizes | st.sampled_from(TEXTS)},
    }
    value = draw(fitting.get(type(DEFAULTS[key]), LEAVES) | LEAVES | st.lists(LEAVES, max_size=3))
    return to_override(key, value) if isinstance(value, str) else f"{key}={json.dumps(value)}"


# file name -> record, how it is written and read
RECORDS: dict[str, tuple[Any, Callable[[Any], str], Callable[[Path], object]]] = {
    "towers.json": (saved(TOWERS), json.dumps, read_tower_plan),
    "sharding.json": (saved(SHARDING), json.dumps, read_sharding_plan),
    MANIFEST_NAME: (MANIFEST, signed, lambda path: read_manifest(path.parent)),
    "tables.json": (saved(TOWERS)["tables"], json.dumps, read_tables),
    "rules.toml": (RULES, toml, lambda path: PartitionRules.load(path).for_features(["f1", "f2", "f3"])),
    "config.toml": (CONFIG, toml, read_config),
}


@cases(8, 200)
@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, cases: int, tmp_path: Path) -> None:
    record, write, read = RECORDS[name]

    def check(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        read(tmp_path / name)

    fuzz(cases, changed(record, write), check)


@cases(8, 300)
def test_overrides(cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are accepted make a run, or say why not."""
    monkeypatch.chdir(tmp_path)

    def check(settings: list[str]) -> None:
        checked_model(open_job(load_config("demo", settings)))

    texts = st.builds("{}={}".format, st.sampled_from(sorted(DEFAULTS)), st.text(max_size=9))
    fuzz(cases, st.lists(overrides() | overrides() | texts, min_size=1, max_size=3), check)


@cases(8, 150)
def test_affinities(cases: int, tmp_path: Path) -> None:
    FeatureAffinity(matrix=np.eye(3), features=["a", "b", "c"], num_samples=4).save(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as archive:
        arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
    header = json.loads(str(arrays["header"]))
    values = [None, 0, -1, [], ["a"], "x", [1.0] * 3, {"a": 1}, 1e400, "\ud800"]
    others = [
        np.zeros((3, 3), complex),
        np.array([]),
        np.array([np.inf] * 3),
        np.zeros((0, 0)),
        *(np.array(json.dumps(header | {key: value})) for key in header for value in values),
    ]

    def check(case: tuple[dict[str, Any], bool, bytes]) -> None:
        packed, compressed, _ = case
        buffer = io.BytesIO()
        (np.savez_compressed if compressed else np.savez)(buffer, **packed)
        (tmp_path / "affinity.npz").write_bytes(buffer.getvalue())
        with contextlib.suppress(InputError):
            FeatureAffinity.load(tmp_path / "affinity.npz").save(tmp_path / "again.npz")
        (tmp_path / "affinity.npz").write_bytes(case[2])
        FeatureAffinity.load(tmp_path / "affinity.npz")

    names = st.sampled_from([*arrays, "errors"])
    other = st.dictionaries(names, st.sampled_from(others), max_size=2)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    fuzz(cases, st.tuples(other.map(lambda o: arrays | o), st.booleans(), damaged(buffer.getvalue())), check)


# Data.

SETTINGS = st.fixed_dictionaries(
    {
        "id_mode": st.sampled_from(["hash", "index"]),
        "dense_transform": st.sampled_from(["signed_log1p", "none"]),
        "split_column": st.sampled_from([None, None, "split"]),
        "csv_separator": st.sampled_from([None, ",", "|", " "]),
        "multi_hot": st.sampled_from([(), (), (), ("c",)]),
    }
)


def read_all(path: Path, options: dict[str, Any]) -> None:
    """Everything that training does with a file before a step."""
    columns = {"categorical": ("c",), "dense": ("d",), "kind": "columns"} | options
    if path.name.endswith(".log"):
        columns = {"kind": "criteo_tsv"}
    config = DataConfig(train_path=str(path), num_embeddings=50, eval_fraction=0.5, **columns)
    data = ClickData(config, cache=path.parent / "prepared")
    for _ in data.batches("train", rank=0, world_size=1, batch_size=2):
        pass


CSV = b'label,d,c,split\n1,0.5,3,train\n0,-2e1,"a,b",test\n1,,,train\n0,1,7|8,train\n'
CRITEO = "\n".join(criteo_line(label) for label in "0101").encode() + b"\n"


@cases(8, 250)
def test_text_files(cases: int, tmp_path: Path) -> None:
    def check(case: tuple[tuple[str, bytes], dict[str, Any], bool]) -> None:
        (name, content), options, packed = case
        (tmp_path / name).write_bytes(gzip.compress(content)[:-3] if packed else content)
        read_all(tmp_path / name, options)

    files = st.tuples(st.just("a.csv"), damaged(CSV)) | st.tuples(st.just("a.log"), damaged(CRITEO))
    fuzz(cases, st.tuples(files, SETTINGS, st.sampled_from([False] * 7 + [True])), check)


def raw_text(rows: list[bytes]) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(rows), pa.array(rows, pa.binary()).buffers())


LISTS = [[0, 1, None, 1], [1, 2**53 + 1, -(2**62), None], [0.0, 1.0, float("inf"), float("nan")]]
LISTS += [[0.5, 1e300, None, 3.0], ["1", "0", None, "x"], ["train", "test", "train", "\0"]]
LISTS += [[True, False, None, True], [[1], [], None, [2, None]]]
LISTS += [[["a"], ["b", None], None, []], [{"a": 1}] * 4, [[[1]]] * 4, [None] * 4, [decimal.Decimal("1.5")] * 4]
LISTS += [[b"1", b"\xff", b"", None], ["1e5", "inf", "0x1", " 1"], ["", "|", "1|2", "\U0001f600"]]
COLUMNS = [pa.array(values) for values in LISTS]
COLUMNS += [pa.array([0, 2**64 - 1, 1, 0], pa.uint64()), pa.array([1, 0, 1, 0], pa.timestamp("us"))]
COLUMNS += [pa.array([0, 1, 0, 1], pa.decimal256(60)), pa.array([1, 0, None, 1], pa.duration("s"))]
COLUMNS += [raw_text([b"1", b"\xff", b"0", b"train"]), pa.array(["1", "0", "1", "train"], pa.large_string())]
COLUMNS += [pa.array(["1", "0", "1", "train"], pa.string_view()), pa.array([0, 1, 0, 1], pa.float16())]
COLUMNS += [column.dictionary_encode() for column in COLUMNS[:5]]


@cases(8, 250)
def test_parquet_files(cases: int, tmp_path: Path) -> None:
    def check(case: tuple[list[pa.Array], dict[str, Any], Any]) -> None:
        columns, options, damage = case
        buffer = io.BytesIO()
        pq.write_table(pa.table(dict(zip(("label", "d", "c", "split"), columns, strict=True))), buffer)
        content = bytearray(buffer.getvalue())
        for place, value in damage:
            content[int(place * len(content))] ^= value
        (tmp_path / "a.parquet").write_bytes(content)
        read_all(tmp_path / "a.parquet", options)

    columns = st.tuples(st.sampled_from(COLUMNS[:1] * 99 + COLUMNS), *[st.sampled_from(COLUMNS[:5] * 3 + COLUMNS)] * 3)
    flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=2)
    fuzz(cases, st.tuples(columns, SETTINGS, st.just([]) | flips), check)


# Files by themselves: no JSON or TOML, pipes, and files that two hosts write.


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        ("JSON", b"{,", r"not JSON \(Expecting property name"),
        ("JSON", b"[" * 100_000, r"not JSON \(maximum recursion depth"),
        ("TOML", b"a = ", r"not TOML \(Invalid value"),
        ("TOML", b"a = " + b"9" * 5000, r"not TOML \(Exceeds the limit"),
    ],
)
def test_what_is_not_of_its_kind(kind: Literal["JSON", "TOML"], content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=rf"Plan a(:| is) {reason}.*Make it again\."):
        read_file(tmp_path / "a", kind, place="Plan a", remedy="Make it again.")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "a pipe cannot be read by every rank"),
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file"),
        (Path("a\0b"), "null byte"),
    ):
        with pytest.raises(InputError, match=rf"X: cannot be read \(.*{reason}"):
            read_file(path, "JSON", place="X", remedy="")


def test_processes_of_two_hosts_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have one process number, as in containers; the bytes reach the disk before the name does."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr("os.fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("replace"), replace(path, to)))
    with atomic_write(tmp_path / "a") as first, atomic_write(tmp_path / "a") as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert ((tmp_path / "a").read_text(), len(list(tmp_path.iterdir()))) == ("first", 1)
    assert events == ["fsync", "replace", "fsync"] * 2
