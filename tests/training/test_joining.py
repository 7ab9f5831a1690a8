"""One job in an output folder at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmt.errors import InputError
from dmt.training.resume import hold_folder


def test_a_folder_is_free_again_after_the_job(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match=r"Another job is running in .*train\.output_dir")
    with hold_folder(tmp_path), refused, hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("years of work")
    (tmp_path / ".lock").symlink_to(tmp_path / "diary")
    refused = pytest.raises(InputError, match=r"\.lock cannot be opened as a lock \(.*\)\. Remove it, or give another")
    with refused, hold_folder(tmp_path):
        pass
    assert (tmp_path / "diary").read_text() == "years of work"
