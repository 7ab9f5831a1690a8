"""Data behind a URL: read as files of this machine are, by one rank and by several, or refused."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dmt.errors import InputError
from dmt.training.commands.demo import demo_settings
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import fingerprint, open_source
from dmt.training.data.storage import file_version, matching_files
from dmt.training.data.textfile import lines_before
from tests.ranks import run_ranks

from .helpers import criteo_line, numbered_lines, write
from .test_sharing import config_of, counted_in_small_pieces, group
from .test_start_row import same

NAMES = {"dense": ("d",), "categorical": ("c", "bag", "b2")}


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


def read_on_rank(rank: int, folder: Path, config: DataConfig, pattern: str) -> list[int]:
    """Reads a store's files with other ranks, and this machine's alone; returns the rows parsed in both."""
    place, parsed = {"rank": rank, "world_size": group().size(), "batch_size": 2}, []
    with uploaded(folder) as url, counted_in_small_pieces() as counted:
        remote = open_source(config.model_copy(update={"train_path": f"{url}{pattern}"}))
        for split in ("train", "eval"):
            counted.clear()
            wanted = list(open_source(config).batches(split, epoch=1, **place))
            parsed.append(sum(counted))
            counted.clear()
            found = list(remote.batches(split, group=group(), epoch=1, **place))
            parsed.append(sum(counted))
            assert len(found) == len(wanted) > 0
            assert all(same(a, b) for a, b in zip(wanted, found, strict=True))
        assert [name for name, *_ in remote.files("train")] == [name for name, *_ in open_source(config).files("train")]
        files = remote.files("train")
        again = open_source(remote.config)
        assert again.files("train") == files
        fsspec.filesystem("memory").pipe(f"/clicks/{files[0][0]}", b"other")
        other = remote.config.model_copy(update={"kind": "criteo_tsv", "dense": (), "categorical": ()})
        assert open_source(other).files("train")[0] != files[0]
    return parsed


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["criteo", "csv", "parquet", "gzip"])
def test_ranks_share_the_files_of_a_store(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path, shuffle_rows=16)
    pattern = {"csv": "/?.csv", "parquet": "/*.parquet", "gzip": ""}.get(kind, "/?.tsv")
    ranks = run_ranks(read_on_rank, 2, tmp_path, config, pattern)
    for alone, shared in ((0, 1), (2, 3)):
        own = [parsed[shared] for parsed in ranks]
        assert sum(own) == ranks[0][alone] * (2 if kind == "gzip" else 1)


def test_another_version_of_a_file_of_as_many_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = MemoryFileSystem.info

    def info(store: Any, path: str, **settings: Any) -> dict[str, Any]:
        return told(store, path, **settings) | {"ETag": store.cat_file(path).hex()}

    # As that of HTTP does, the store tells versions apart by an ETag, and not by ukey.
    monkeypatch.setattr(MemoryFileSystem, "ukey", lambda store, path: path)
    monkeypatch.setattr(MemoryFileSystem, "info", info)
    store, found = fsspec.filesystem("memory"), []
    try:
        for text in (b"one", b"two", b"one"):
            store.pipe("/page.csv", text)
            found.append((file_version("memory://page.csv"), fingerprint("memory://page.csv")))
    finally:
        store.rm("/page.csv")
    assert found[0] == found[2] != found[1]
    assert found[1][0][0] == 3


def test_faults_of_a_store_name_the_url(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", [*numbered_lines(30), criteo_line("7")])
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"\n".join([b"x"] * 9))[:-9])
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    with uploaded(tmp_path) as url, counted_in_small_pieces():
        for name, message in (
            ("a.tsv", f"^{url}/a.tsv, line 31: column label: expected 0 or 1, found '7'"),
            ("b.tsv.gz", f"^{url}/b.tsv.gz, line 1 or soon after: the gzip file is cut off or damaged"),
            ("z.tsv", f"^train_path='{url}/z.tsv' matches no file.$"),
        ):
            with pytest.raises(InputError, match=message):
                open_source(DataConfig(kind="criteo_tsv", train_path=f"{url}/{name}")).validate()
        with pytest.raises(InputError, match=f"^{url}/c.parquet: cannot be read as Parquet"):
            open_source(DataConfig(kind="columns", train_path=f"{url}/c.parquet", **NAMES))
        assert demo_settings(f"{url}/a.tsv")[:2] == ['data.kind="criteo_tsv"', f'data.train_path="{url}/a.tsv"']
        # Beyond what was counted before for a file of this name.
        assert lines_before(f"{url}/a.tsv", 2**20) == 31


def test_folders_that_spark_writes_are_read_and_links_to_nowhere_refused(tmp_path: Path) -> None:
    for name in ("day.parquet/part-1.parquet", "day.parquet/_SUCCESS", "day.parquet/.part-1.crc", "a.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted = [str(tmp_path / name) for name in ("a.parquet", "day.parquet/part-1.parquet")]
    assert matching_files(str(tmp_path)) == (wanted, True)
    assert matching_files(f"{tmp_path}/*.parquet") == (wanted, False)
    with uploaded(tmp_path) as url:
        for place in (url, f"{url}/*.parquet"):
            found, _ = matching_files(place)
            assert [name.partition("/clicks")[2] for name in found] == ["/a.parquet", "/day.parquet/part-1.parquet"]
    (tmp_path / "day.parquet" / "hour=1").mkdir()
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds the folder 'hour=1'"):
        matching_files(str(tmp_path))
    (tmp_path / "day.parquet" / "hour=1").rmdir()
    for place in (str(tmp_path), f"{tmp_path}/*.parquet", f"{tmp_path}/gone.parquet"):
        with pytest.raises(InputError, match=r"gone.parquet .* is a link that leads nowhere"):
            matching_files(place)


@pytest.mark.parametrize("url", ["nowhere://a/b.parquet", "s3://bucket/a.parquet"])
def test_a_store_without_its_package_is_refused(url: str, monkeypatch: Any) -> None:
    if url.startswith("s3"):
        monkeypatch.setattr(fsspec.core, "get_filesystem_class", _needs_s3fs)
    with pytest.raises(InputError, match=r"cannot be read: .*Install fsspec's package for such URLs"):
        open_source(DataConfig(kind="columns", train_path=url, **NAMES))


def _needs_s3fs(protocol: str) -> None:
    raise ImportError("Install s3fs to access S3")
