"""Criteo's format: exact values, and for each malformed line the file, the line and the reason."""

from __future__ import annotations

import gzip
import logging
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import open_source
from dmt.training.data.encode import Encoder, hash_rows
from dmt.training.data.pieces import Piece
from dmt.training.data.readers import CriteoReader
from dmt.training.data.rows import every_row
from dmt.training.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from dmt.training.data.textfile import text_blocks

from .helpers import criteo_line, joined, numbered_lines, write

ENCODER = Encoder(
    dense=CRITEO_DENSE,
    num_embeddings=dict.fromkeys(CRITEO_CATEGORICAL, 1000),
    multi_hot=frozenset(),
    list_separator="|",
    id_mode="hash",
    signed_log1p=True,
)


def read(*paths, skip=False):
    reader = CriteoReader(encoder=ENCODER, skip_bad_lines=skip)
    blocks = [block for path in paths for block in reader.blocks(Piece(path))]
    rows = joined([b.rows(every_row(b)) for b in blocks]) if blocks else None
    return rows, [int(n) for b in blocks for n in b.place.numbers], reader


def test_exact_values(tmp_path):
    lines = [
        criteo_line("1", ["3", "-2", "", *["0"] * 10], ["68fd1e64", "", *["FF"] * 24]),
        criteo_line("0", [*["1"] * 12, "999999999999"], ["0"] * 26),
    ]
    rows, numbers, _ = read(write(tmp_path / "a.tsv", lines))
    assert numbers == [1, 2]
    assert rows.labels.tolist() == [1, 0]
    expected = np.array([[math.log(4), -math.log(3), 0, *[0] * 10], [*[math.log(2)] * 12, math.log1p(999999999999)]])
    np.testing.assert_array_equal(rows.dense, expected.astype(np.float32))
    import pyarrow as pa

    assert rows.bags[0].values[0] == hash_rows(pa.array(["68fd1e64"]), feature="C1", num_embeddings=1000)[0]
    assert rows.bags[1].values[0] == 0
    assert rows.bags[25].values[0] == hash_rows(pa.array(["FF"]), feature="C26", num_embeddings=1000)[0]
    assert all(bags.offsets is None for bags in rows.bags)


def test_one_malformed_line_does_not_change_the_others(tmp_path):
    # A block without one is parsed in another way.
    numbers = ["", "-7", "007", "-0", "9" * 18, "0" * 19 + "5", *["1"] * 7]
    lines = [criteo_line("1", numbers, ["", *["0123456789abcdEF"] * 25]), *numbered_lines(3)]
    clean, _, _ = read(write(tmp_path / "a.tsv", lines))
    rows, found, reader = read(write(tmp_path / "b.tsv", [*lines, criteo_line("0", ["1.5", *["1"] * 12])]), skip=True)
    assert (found, reader.counts) == ([1, 2, 3, 4], {str(tmp_path / "b.tsv"): 1})
    np.testing.assert_array_equal(rows.dense, clean.dense)
    assert [bags.values.tolist() for bags in rows.bags] == [bags.values.tolist() for bags in clean.bags]


def test_a_block_has_the_same_zeros_and_requests_with_a_malformed_line_and_without(tmp_path):
    lines = [criteo_line("1", [number, "-0", *["1"] * 11]) for number in ("7", "07", "007", "7", "-0", "0")]
    reader = CriteoReader(
        encoder=replace(ENCODER, dense=("I2",), signed_log1p=False, group_by="I1"), skip_bad_lines=True
    )
    (clean,) = reader.blocks(Piece(write(tmp_path / "a.tsv", lines)))
    (block,) = reader.blocks(Piece(write(tmp_path / "b.tsv", [*lines, "x"])))
    assert clean.requests.tolist() == block.requests.tolist()
    assert [list(clean.requests).index(number) for number in clean.requests] == [0, 1, 2, 0, 4, 5]
    ungrouped = replace(reader.encoder, group_by=None)
    for name in ("a.tsv", "b.tsv"):
        (block,) = CriteoReader(encoder=ungrouped, skip_bad_lines=True).blocks(Piece(str(tmp_path / name)))
        assert not np.signbit(block.rows(every_row(block)).dense).any()


@pytest.mark.parametrize("variant", ["plain", "gz", "crlf", "no_last_newline", "bom"])
def test_variants_of_a_file_give_the_same_rows(tmp_path, variant):
    lines = numbered_lines(50)
    text = "\n".join(lines) + "\n"
    data = {
        "plain": text.encode(),
        "gz": gzip.compress(text.encode()),
        "crlf": text.replace("\n", "\r\n").encode(),
        "no_last_newline": text[:-1].encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
    }[variant]
    path = tmp_path / ("a.tsv.gz" if variant == "gz" else "a.tsv")
    path.write_bytes(data)
    rows, numbers, _ = read(str(path))
    np.testing.assert_allclose(np.expm1(rows.dense[:, 0]), np.arange(50), rtol=1e-6)
    assert rows.labels.tolist() == [i % 2 for i in range(50)]
    assert numbers == list(range(1, 51))


def test_files_follow_one_another_with_line_numbers_of_their_own(tmp_path):
    first, second = (write(tmp_path / f"{n}.tsv", numbered_lines(n)) for n in (3, 2))
    rows, numbers, _ = read(first, second)
    assert numbers == [1, 2, 3, 1, 2]
    assert rows.num_rows == 5


BAD = {
    "columns": ("\t".join(["1"] * 39), r"expected 40 columns \(tab-separated: label, I1-I13, C1-C26\), found 39"),
    "more columns": (criteo_line() + "\t5", r"expected 40 columns .*, found 41"),
    "label": (criteo_line("2"), r"column label: expected 0 or 1, found '2'"),
    "no label": (criteo_line(""), r"column label: expected 0 or 1, found nothing"),
    "empty line": ("", r"column label: expected 0 or 1, found nothing"),
    "integer": (criteo_line("0", [*["1"] * 4, "x7", *["1"] * 8]), r"column I5: .*whole number.*found 'x7'"),
    "float": (criteo_line("0", ["1.5", *["1"] * 12]), r"column I1: expected a whole number or nothing, found '1\.5'"),
    "0x": (criteo_line("0", ["0x10", *["1"] * 12]), r"column I1: .*found '0x10'"),
    "plus": (criteo_line("0", ["+5", *["1"] * 12]), r"column I1: .*found '\+5'"),
    "space": (criteo_line("0", ["5 ", *["1"] * 12]), r"column I1: .*found '5 '"),
    "19 digits": (criteo_line("0", ["-1" + "0" * 18, *["1"] * 12]), r"column I1: .*found '-10{18}'"),
    "17 hex digits": (criteo_line("0", None, ["0" * 17, *["0a"] * 25]), r"column C1: .*found '0{17}'"),
    "huge": (criteo_line("0", ["9" * 30, *["1"] * 12]), r"column I1: .*found '9{30}'"),
    "hex": (criteo_line("0", None, ["0g", *["0a"] * 25]), r"column C1: expected a hexadecimal number.*found '0g'"),
    "quote": (criteo_line("0", None, ['"', *["0a"] * 25]), r"column C1: .*found '\"'"),
    "lone carriage return": (criteo_line("0", None, ["0a\r0b", *["0a"] * 25]), r"column C1: .*found '0a 0b'"),
    "utf-8": (
        criteo_line("0", None, ["\udcff", *["0a"] * 25]),
        r"expected text in UTF-8, found byte 0xff at position 29",
    ),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_malformed_line_is_named(tmp_path, kind, packed):
    line, reason = BAD[kind]
    data = "\n".join([*numbered_lines(6), line, *numbered_lines(3), "later fault", ""]).encode(errors="surrogateescape")
    path = tmp_path / ("bad.tsv.gz" if packed else "bad.tsv")
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(InputError, match=rf"bad\.tsv(\.gz)?, line 7: {reason}.*skip_bad_lines"):
        read(str(path))
    rows, numbers, reader = read(str(path), skip=True)
    assert numbers == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert rows.num_rows == 9
    assert reader.counts == {str(path): 2}


def test_left_out_lines_are_counted_and_warned_of_once(tmp_path, caplog):
    path = write(tmp_path / "a.tsv", [criteo_line(), "x", criteo_line(), "", "y"])
    data = open_source(DataConfig(kind="criteo_tsv", train_path=path, eval_path=path, skip_bad_lines=True))
    with caplog.at_level(logging.WARNING):
        assert data.validate(rank=1).bad_rows == 3
        assert not caplog.records, "rank 0 alone warns"
        for _ in range(2):
            assert data.validate().train_rows == 2
            assert len(list(data.batches("train", rank=0, world_size=1, batch_size=1))) == 2
    assert data.bad_lines == {path: 3}
    assert [r.getMessage() for r in caplog.records] == [f"{path}: left out 3 malformed rows (skip_bad_lines=true)."]


def test_line_numbers_across_blocks_match_a_line_by_line_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dmt.training.data.readers.text_blocks", lambda path, **at: text_blocks(path, block_bytes=700, **at)
    )
    rng = random.Random(0)
    lines = [rng.choice(["", "x", criteo_line("3"), criteo_line(), criteo_line("1")]) for _ in range(300)]
    _, numbers, reader = read(write(tmp_path / "a.tsv", lines), skip=True)
    good = [i + 1 for i, line in enumerate(lines) if line in (criteo_line(), criteo_line("1"))]
    assert numbers == good
    assert sum(reader.counts.values()) == 300 - len(good)


def test_an_empty_file_has_no_rows(tmp_path):
    for name in ("a.tsv", "a.tsv.gz"):
        (tmp_path / name).touch()
        assert read(str(tmp_path / name))[0] is None


def test_a_cut_off_gzip_is_an_error(tmp_path):
    rng = random.Random(0)
    whole = gzip.compress(
        "\n".join(criteo_line("0", [str(rng.getrandbits(30)), *["1"] * 12]) for _ in range(500)).encode()
    )
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.tsv\.gz, line \d+ or soon after: the gzip file is cut off or damaged"):
        read(str(path))
    path.write_bytes(whole[:-20] + b"x" * 20)
    with pytest.raises(InputError, match=r"a\.tsv\.gz, line \d+ or soon after: the gzip file is cut off or damaged"):
        read(str(path))


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match=r"none\.tsv: cannot be read \(No such file"):
        read(str(tmp_path / "none.tsv"))
    write(tmp_path / "plain.tsv.gz", numbered_lines(1))
    with pytest.raises(InputError, match=r"plain\.tsv\.gz: not a gzip file, in spite of its name"):
        read(str(tmp_path / "plain.tsv.gz"))


def test_a_file_without_line_ends_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"0" * (17 << 20))
    with pytest.raises(InputError, match=r"a\.bin, line 1: longer than 16 MiB"):
        read(str(tmp_path / "a.bin"))
