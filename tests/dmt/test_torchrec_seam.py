"""The private names that `dmt/_torchrec.py` leans on still exist; fails first when TorchRec moves them."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

import pytest
import torch

from dmt._torchrec import PRIVATE_NAMES


def resolve(path: str) -> object:
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


@pytest.mark.parametrize("owner", PRIVATE_NAMES)
def test_private_names_are_where_we_expect_them(owner: str) -> None:
    found = resolve(owner)
    for name in PRIVATE_NAMES[owner].split():
        assert hasattr(found, name) or name in inspect.getsource(found), (
            f"{owner}.{name} is gone in torchrec {importlib.metadata.version('torchrec')}, torch {torch.__version__}; "
            "dmt/_torchrec.py was written for TorchRec 1.8.0 and 1.9.2."
        )


def test_the_pipeline_still_asks_for_our_attributes() -> None:
    from torchrec.distributed.train_pipeline import utils

    source = inspect.getsource(utils)
    for name in ("_has_uninitialized_input_dist", "_input_dists", "_dist"):
        assert name in source, f"TorchRec's pipeline no longer reads {name}; see dmt/_torchrec.py PipelinedModule"
