"""Which runs the tower study has, and how it continues; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.towers.runs import Study, affinity_of_pairs, random_plan
from dmt.errors import InputError


def study(folder: Path, **settings: object) -> Study:
    (folder / "hotel.parquet").touch()
    return Study(data=folder, progress=folder / "runs.jsonl", seeds=(0, 1), **settings)


def test_waves_cover_every_arm_of_the_data_that_is_there(tmp_path: Path) -> None:
    flat, learned, controls = study(tmp_path).waves()
    assert {run.dataset for run in flat} == {"hotel"}
    assert [len(flat), len(learned), len(controls)] == [4, 12, 12]
    assert {run.arm for run in learned} == {"strided", "coherent", "diverse"}
    assert study(tmp_path, controls=False).waves()[2] == []


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has none of flights\.parquet, hotel\.parquet, census\.parquet"):
        Study(data=tmp_path, progress=tmp_path / "runs.jsonl", seeds=(0, 1))


def test_finished_runs_are_not_trained_again(tmp_path: Path) -> None:
    small = study(tmp_path, controls=False)
    settings = study_settings(small)
    keys = [vars(run) for wave in small.waves() for run in wave]
    lines = [json.dumps({**key, "settings": settings, "auc": 0.5}) for key in keys]
    small.progress.write_text("\n".join(lines) + "\n")
    # The file of clicks is empty: any training would fail.
    assert [record["auc"] for record in small.train().values()] == [0.5] * 16


def test_a_progress_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    whole, part = study(tmp_path), study(tmp_path, max_rows=100)
    run = whole.waves()[0][0]
    whole.progress.write_text(json.dumps({**vars(run), "settings": study_settings(whole), "auc": 0.5}) + "\n")
    assert list(whole.finished()) == [run]
    with pytest.raises(InputError, match=r"holds runs of other settings \(hotel\)"):
        part.finished()


def test_the_affinity_comes_back_from_its_pairs() -> None:
    matrix = np.array([[1.0, 0.1, 0.2, 0.3], [0.1, 1.0, 0.4, 0.5], [0.2, 0.4, 1.0, 0.6], [0.3, 0.5, 0.6, 1.0]])
    found = affinity_of_pairs(matrix[np.triu_indices(4, k=1)].tolist(), list("abcd"))
    assert found.matrix.tolist() == matrix.tolist()


def test_random_towers_are_balanced_and_follow_the_seed() -> None:
    features = [f"f{i}" for i in range(17)]
    plans = [random_plan(features, 4, seed).to_lists() for seed in (0, 0, 1)]
    assert sorted(map(len, plans[0])) == [4, 4, 4, 5]
    assert sorted(name for tower in plans[0] for name in tower) == sorted(features)
    assert plans[0] == plans[1] != plans[2]


def study_settings(of: Study) -> str:
    return of._settings("hotel")
