"""Runs in every layout: exported programs have the bits of the plain model at any batch size, and the same metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmt.training.serving.export import export_run, load_program
from dmt.training.serving.score import score, tensors_of
from dmt.training.trained import trained_model
from tests.training.small import small
from tests.training.test_resume import attempt

LAYOUTS: dict[str, dict[str, Any]] = {
    "flat, table-wise": {"arch": "dlrm"},
    "flat, column-wise": {"arch": "dcn", "sharding": {"scheme": "column_wise"}},
    "flat over towers, row-wise": {"arch": "dlrm", "dataflow": "sptt", "sharding": {"scheme": "row_wise"}},
    "towers, row-wise": {"sharding": {"scheme": "row_wise"}},
    "towers, data-parallel": {"sharding": {"scheme": "data_parallel"}},
    "one tower, column-wise": {
        "arch": "dmt-dcn",
        "topology": {"num_towers": 1, "ranks_per_tower": 4},
        "sharding": {"scheme": "column_wise"},
    },
    "a rank a tower": {"topology": {"num_towers": 4, "ranks_per_tower": 1}},
    "replicas": {
        "topology": {"num_towers": 2, "ranks_per_tower": 1, "num_replicas": 2},
        "replicas": {"sync_every": 2},
    },
    "products": {"arch": "dmt-dlrm-products", "model": {"p": 1}, "sharding": {"unique": True}},
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_program_of_any_layout_is_the_plain_model(name: str, tmp_path: Path) -> None:
    sections = dict(LAYOUTS[name])
    train = {"max_steps": 4, "output_dir": str(tmp_path / "run"), "save_every": 4}
    synthetic = {"num_rows": 450, "num_eval_rows": 4500, "num_multi_hot": 2}
    optimizer = {"warmup_steps": 0, "sparse_lr": 0.5, "dense_lr": 0.05}
    config = small(
        sections.pop("arch", "dmt-dlrm"),
        sections.pop("dataflow", "auto"),
        synthetic=synthetic,
        train=train,
        optimizer=optimizer,
        **sections,
    )
    result = attempt(config)
    assert result is not None
    out = tmp_path / "model.pt2"
    assert export_run(tmp_path / "run", out).difference == 0.0
    program, (_, job, model) = load_program(out), trained_model(tmp_path / "run")
    for size in (1, 2, 3, 127, 128, 513, 4096):
        batch = next(job.data.batches("eval", rank=0, world_size=1, batch_size=size))
        with torch.no_grad():
            wanted = model(batch.dense_features, batch.sparse_features).squeeze(1)
            assert torch.equal(program(*tensors_of(batch)), wanted), size
    for served in (out, tmp_path / "run"):
        metrics = score(served, tmp_path / "predictions.parquet").metrics
        assert metrics is not None
        found = metrics.auc, metrics.loss, metrics.num_rows
        assert found == pytest.approx((result["eval_auc"], result["eval_loss"], result["eval_num_rows"]), abs=1e-6)
