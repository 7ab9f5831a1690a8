"""A program that reads a file of Criteo's with two workers, for tests of what becomes of them: FILE WAY.

It prints one JSON object for each stage: what it has read, and the processes that it has started.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dmt.errors import InputError
from dmt.training.data import pieces
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import Encoder
from dmt.training.data.passes import make_reader
from dmt.training.data.readers import CriteoReader
from dmt.training.data.sharing import PieceReader
from dmt.training.data.workers import BatchThread, read_ahead


def descendants(pid: int) -> list[int]:
    """All processes below one, but for Python's tracker of shared memory."""
    found = []
    # Of all its threads: one that makes batches starts them.
    for child in " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        found += [] if b"resource_tracker" in command else [int(child)]
        found += descendants(int(child))
    return found


def tell(**what: Any) -> None:
    print(json.dumps({**what, "pids": descendants(os.getpid())}), flush=True)


def main() -> None:
    file, way = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = DataConfig(kind="criteo_tsv", train_path=file)
    columns: dict[str, Any] = {"dense": ["I1"], "num_embeddings": {"C1": 1000}, "multi_hot": frozenset()}
    encoder = Encoder(**columns, list_separator="|", id_mode="hash", signed_log1p=False)
    read = PieceReader(partial(make_reader, config, encoder), encoder.layout)
    pieces.PIECE_BYTES = 400
    cut = pieces.pieces_of([file])
    ahead = BatchThread().ahead(read_ahead(read, cut, 2))
    first = next(ahead)
    tell(began=True, rows=first[0].num_rows)
    if way == "wait":
        time.sleep(60)
    if way == "error":
        raise InputError("training has diverged")
    os.killpg(0, signal.SIGTERM)  # as torchrun does
    found = [first, *ahead]
    same = all(
        report.fault == own.fault and (rows.words == packed.words).all()
        for (report, rows), (own, packed) in zip(found, map(read, cut), strict=True)
    )
    tell(same=same, number=len(found), fault=next((r.fault for r, _ in found if r.fault), None))
    early = read_ahead(read, cut, 2)
    next(early)
    early.close()
    del early
    gc.collect()
    tell(closed=True, kept=sum(isinstance(found, BaseProcess) for found in gc.get_objects()))
    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.1,)  # after which it looks for dead ones
    before = descendants(os.getpid())
    early = read_ahead(read, cut, 2)
    next(early)
    os.kill(max(set(descendants(os.getpid())) - set(before)), signal.SIGKILL)
    tell(
        error=error_of(lambda: [*early]),
        mistake=error_of(lambda: [*read_ahead(replace(read, open_reader=wrong), cut, 1)]),
    )


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""


class Wrong(CriteoReader):
    """A reader with a mistake."""

    def _check(self, part: Any) -> Any:
        return 1 / 0


def wrong() -> CriteoReader:
    columns: dict[str, Any] = {"dense": ["I1"], "num_embeddings": {"C1": 1000}, "multi_hot": frozenset()}
    return Wrong(encoder=Encoder(**columns, list_separator="|", id_mode="hash", signed_log1p=False))


if __name__ == "__main__":
    main()
