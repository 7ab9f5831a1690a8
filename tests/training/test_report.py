"""The report: what is claimed of two AUCs, and a page that loads nothing and shows names as they are written."""

from __future__ import annotations

import html
import json
import math
import re

import numpy as np
import pytest

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.training.report.page import auc_standard_error, compare_runs, plot_curves, smooth, write_report

AFFINITY = {"within": 0.4567, "between": 0.3214, "within_strided": 0.3456}
PNG = b"\x89PNG\r\n\x1a\n"


def result(auc=0.78, *, rows=65_536, rate=0.25, embedding=1664.0, mflops=0.499, **more):
    """A result.json of a run; ``embedding`` bytes each way."""
    return {
        "world_size": 4,
        "eval_auc": auc,
        "eval_ne": 0.8102,
        "eval_num_rows": rows,
        "eval_label_rate": rate,
        "mflops_per_sample": mflops,
        "parameters": 892_449,
        "compression_ratio": 1.0,
        "samples_per_second": 27_921.4,
        "bytes_per_sample": {
            "across": 562.2 + 2 * embedding,
            "ids": 208.0,
            "forward": embedding,
            "backward": embedding,
            "dense": 354.2,
            "inside": 2122.0,
        },
        "versions": {"torch": "2.13.0+cpu", "fbgemm-gpu": "absent"},
        **more,
    }


def sharding_of(plan):
    """A sharding plan of ``plan``'s towers, each of its features with a table of 1000 x 32."""
    tables = [
        TableSpec(name=f"t_{feature}", num_embeddings=1000, embedding_dim=32, feature_names=(feature,))
        for feature in plan.features
    ]
    topology = TowerTopology(num_towers=plan.num_towers, ranks_per_tower=2, ranks_per_host=1)
    return plan_tables(plan.tables_by_tower(tables), topology)


@pytest.mark.parametrize(
    ("difference", "claimed"), [(0.0, None), (+0.9, None), (-0.9, None), (+1.1, "higher"), (-2.5, "lower")]
)
def test_a_difference_of_auc_is_claimed_only_beyond_its_noise(difference, claimed):
    """``difference`` is in standard errors of the first AUC."""
    error = auc_standard_error(0.78, num_rows=65_536, label_rate=0.25)
    finding = compare_runs({"flat": result(), "towers": result(0.78 + difference * error)})
    assert finding.within_noise == (claimed is None)
    assert [word for word in ("higher", "lower") if word in finding.accuracy] == [claimed] * (claimed is not None)
    assert error <= finding.auc_noise == pytest.approx(error, rel=0.02), "the larger one"


def record(folder, *lines):
    """The ``metrics.jsonl`` of a run."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_any_curves_are_drawn(tmp_path):
    assert smooth(np.array([0.0, 3.0, 6.0, 0.0, 1.0])).tolist() == [0.0, 3.0, 3.0, 7 / 3, 1.0]
    evaluation = {"step": 7, "eval/auc": 0.7, "eval/ne": 0.9, "eval/num_rows": 2000.0, "eval/label_rate": 0.25}
    flat = record(tmp_path / "flat", {"step": 5, "train/loss": 0.7}, evaluation, {**evaluation, "step": 9})
    one = record(tmp_path / "one", evaluation, {"step": 7, "train/loss": math.nan})
    diverged = record(tmp_path / "diverged", {"step": 7, "train/loss": math.nan})
    for runs in ({"flat": flat, "one": one}, {"diverged": diverged}):
        assert plot_curves(runs, tmp_path / "new" / "curves.png").read_bytes()[:8] == PNG


def page_of(folder, runs, towers, **plan):
    """The page's source, and its text as a reader sees it."""
    pictures = [folder / f"{name}.png" for name in ("affinity", "curves")]
    for picture in pictures:
        picture.write_bytes(PNG)
    plan = TowerPlan.from_lists(towers, **plan)
    about = {"plan": plan, "sharding": sharding_of(plan), "data_description": "clicks of <Tuesday>"}
    path = write_report(folder / "report.html", runs=runs, pictures=pictures, notes=["<script>x()"], **about)
    source = path.read_text(encoding="utf-8")
    return source, html.unescape(" ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", source, flags=re.S).split()))


def test_the_page_loads_nothing_and_shows_numbers_and_names_as_they_are(tmp_path):
    runs = {"<i>flat": result(0.7834), "a & b": result(0.7842, embedding=832.0, mflops=0.491)}
    towers = [["C1", "<b>bold</b>"], ["C2", "C&3"]]
    source, text = page_of(tmp_path, runs, towers, strategy="coherent", affinity=AFFINITY)
    assert not re.findall(r"http|url\(|@import|<script|<link|<i>flat|<b>bold|<Tuesday", source)
    assert source.count("data:image/png;base64,") == 2
    for words in ("<b>bold</b>", "C&3", "clicks of <Tuesday>", "<i>flat", "a & b", "<script>x()"):
        assert words in text, words
    for words in (
        "4 ranks, counted as 4 hosts.",
        "AUC 0.7834 0.7842 1.001",
        "parameters 892,449 892,449 1.000",
        "bytes/sample across hosts: forward 1,664 832 0.500",
        "MFLOPs/sample 0.499 0.491 0.984",
        "measured +0.0008; one standard error is 0.0023",
        "57% of the bytes across hosts 2,226 instead of 3,890 per sample; embeddings alone, forward and backward: 50%",
        "two features of one tower 0.457",
    ):
        assert words in text, words


def test_what_is_not_known_is_a_dash_and_makes_no_claim(tmp_path):
    runs = {name: result(math.nan, rate=1.0, eval_ne=math.nan) for name in ("dlrm", "dmt-dlrm")}
    _, text = page_of(tmp_path, runs, [["a", "b"], ["c"]], strategy="diverse", affinity={})
    assert "two features of one tower -" in text
    assert "AUC - - -" in text
    assert "not known difference of AUC" in text
    assert "the two cannot be compared" in text
