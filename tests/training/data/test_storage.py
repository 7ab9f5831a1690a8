"""Data behind a URL: read as files of this machine are, or refused."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from dmt.errors import InputError
from dmt.training.commands.demo import demo_settings
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from dmt.training.data.files import matching_files

from .helpers import criteo_line, numbered_lines, parquet, real_rows, write

NAMES = {"dense": ("d",), "categorical": ("c", "bag")}


@contextmanager
def uploaded(folder: Path) -> Iterator[str]:
    """Copies files into fsspec's store in memory, which each process has for itself."""
    store = fsspec.filesystem("memory")
    store.put(f"{folder}/", "/clicks/", recursive=True)
    store.touch("/clicks/_SUCCESS")
    store.touch("/clicks/.hidden")
    try:
        yield "memory://clicks"
    finally:
        store.rm("/clicks", recursive=True)


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_files_of_a_store_are_read_as_those_of_this_machine(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    if kind == "text":
        (folder / "a.tsv.gz").write_bytes(gzip.compress("\n".join(numbered_lines(30)).encode()))
        config = DataConfig(kind="criteo_tsv", train_path=f"{folder}/a.tsv.gz")
    else:
        parquet(folder / "a.parquet", range(40))
        config = DataConfig(kind="columns", train_path=f"{folder}/a.parquet", **NAMES)
    with uploaded(folder) as url:
        remote = config.model_copy(update={"train_path": str(config.train_path).replace(str(folder), url)})
        found = [
            real_rows(ClickData(each, cache=tmp_path / "prepared").batches("eval", rank=0, world_size=1, batch_size=3))
            for each in (config, remote)
        ]
    assert found[0] == found[1] != []


def test_faults_of_a_store_name_the_url(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", [*numbered_lines(30), criteo_line("7")])
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"\n".join([b"x"] * 9))[:-9])
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    with uploaded(tmp_path) as url:
        for name, settings, message in (
            ("a.tsv", {}, f"^{url}/a.tsv, line 31: column 'label': expected 0 or 1, found 7"),
            ("b.tsv.gz", {}, f"^{url}/b.tsv.gz, line 1 or soon after: the gzip file is cut off or damaged"),
            ("z.tsv", {}, f"^train_path='{url}/z.tsv' matches no file.$"),
            ("c.parquet", {"kind": "columns", **NAMES}, f"^{url}/c.parquet: cannot be read as Parquet"),
        ):
            config = DataConfig(**{"kind": "criteo_tsv", "train_path": f"{url}/{name}", **settings})
            with pytest.raises(InputError, match=message):
                ClickData(config, cache=tmp_path / "prepared")
        assert demo_settings(f"{url}/a.tsv")[:2] == ['data.kind="criteo_tsv"', f'data.train_path="{url}/a.tsv"']


def test_folders_that_spark_writes_are_read(tmp_path: Path) -> None:
    for name in ("day.parquet/part-1.parquet", "day.parquet/_SUCCESS", "day.parquet/.part-1.crc", "a.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted = [str(tmp_path / name) for name in ("a.parquet", "day.parquet/part-1.parquet")]
    assert matching_files(str(tmp_path)) == matching_files(f"{tmp_path}/*.parquet") == wanted
    with uploaded(tmp_path) as url:
        for place in (url, f"{url}/*.parquet"):
            found = [name.partition("/clicks")[2] for name in matching_files(place)]
            assert found == ["/a.parquet", "/day.parquet/part-1.parquet"]
    (tmp_path / "day.parquet" / "hour=1").mkdir()
    with pytest.raises(InputError, match="hour=1 is a folder, whose rows would be left out"):
        matching_files(str(tmp_path))
    (tmp_path / "day.parquet" / "hour=1").rmdir()
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"gone.parquet .* is a link that leads nowhere"):
        matching_files(f"{tmp_path}/*.parquet")
