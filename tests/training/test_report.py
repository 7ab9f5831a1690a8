"""The report: noise arithmetic first, then the sentences, the curves, and the page as a browser would read it."""

from __future__ import annotations

import base64
import json
import math
from html.parser import HTMLParser
from typing import Any

import matplotlib as mpl
import pytest

from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import ShardingRules
from dmt.training.commands import emit, show_results
from dmt.training.console import ROWS, cells, progress_bar, rows_of
from dmt.training.report.page import RUN_COLORS, auc_standard_error, compare_runs, plot_curves, write_report

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


def sharding_of(plan, ranks=2, **rules):
    """A sharding plan of ``plan``'s towers, each of its features with a table of 1000 x 32."""
    tables = [
        TableSpec(name=f"t_{feature}", num_embeddings=1000, embedding_dim=32, feature_names=(feature,))
        for feature in plan.features
    ]
    topology = TowerTopology(num_towers=plan.num_towers, ranks_per_tower=ranks)
    return plan_tables(plan.tables_by_tower(tables), topology, rules=ShardingRules(**rules))


def test_the_standard_error_is_hanley_and_mcneils():
    # By hand for A = 3/4 and 10 rows of each label: Q1 = 3/5, Q2 = 9/14, A^2 = 9/16, so the numerator is
    # 3/16 + 9 * (3/80) + 9 * (9/112) = 0.1875 + 0.3375 + 0.723214... = 1.248214...; over 100, the root is 0.111724.
    assert auc_standard_error(0.75, num_rows=20, label_rate=0.5) == pytest.approx(0.111724, abs=5e-7)


@pytest.mark.parametrize(
    ("difference", "words", "within"),
    [
        (0.0, "within the noise", True),
        (+0.9, "within the noise", True),
        (-0.9, "within the noise", True),
        (+1.1, "higher by", False),
        (-2.5, "lower by 0.0057, where one standard error of the evaluation is 0.0023", False),
    ],
)
def test_a_difference_of_auc_is_claimed_only_beyond_its_noise(difference, words, within):
    """``difference`` is in standard errors of the first AUC."""
    error = auc_standard_error(0.78, num_rows=65_536, label_rate=0.25)
    finding = compare_runs({"flat": result(), "towers": result(0.78 + difference * error)})
    assert finding.within_noise == within
    assert words in finding.accuracy
    assert within == ("higher" not in finding.accuracy and "lower" not in finding.accuracy)
    assert finding.auc_noise == pytest.approx(error, rel=0.02)


def test_aucs_that_cannot_be_compared_are_not():
    one_label = result(math.nan, rate=0.0)
    finding = compare_runs({"flat": one_label, "towers": one_label})
    assert finding.within_noise
    assert math.isnan(finding.auc_difference)
    assert "cannot be compared: all evaluation rows have the same label" in finding.accuracy


def record(folder, *lines):
    """The ``metrics.jsonl`` of a run."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def evaluation(step, auc, ne=0.9):
    return {"step": step, "eval/auc": auc, "eval/ne": ne, "eval/num_rows": 2000.0, "eval/label_rate": 0.25}


def test_curves_are_drawn_in_the_colors_of_their_runs(tmp_path):
    losses = [{"step": step, "train/loss": 0.7 - step / 1000} for step in range(20, 200, 20)]
    flat = record(tmp_path / "flat", *losses, evaluation(100, 0.7), evaluation(200, 0.75))
    # A single evaluation and no loss.
    towers = record(tmp_path / "towers", evaluation(7, 0.7), {"step": 7, "train/loss": math.nan})
    with mpl.rc_context({"svg.fonttype": "none"}):
        picture = plot_curves({"flat": flat, "towers": towers}, tmp_path / "new" / "curves.svg").read_text().lower()
    assert [color.lower() in picture for color in RUN_COLORS] == [True, True]
    assert plot_curves({"towers": towers}, tmp_path / "curves.png").read_bytes()[:8] == PNG
    plot_curves({"diverged": record(tmp_path / "diverged", {"step": 7, "train/loss": math.nan})}, tmp_path / "no.png")


def test_folders_without_curves_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere/metrics\.jsonl cannot be read \(No such file.*output_dir"):
        plot_curves({"flat": tmp_path / "nowhere"}, tmp_path / "curves.png")
    good = record(tmp_path / "good", evaluation(1, 0.7))
    with pytest.raises(InputError, match=r"curves\.doc.*one of .*png"):
        plot_curves({"flat": good}, tmp_path / "curves.doc")


class Page(HTMLParser):
    """What a browser would find: the text, the tags, which are balanced, and every address that it would load."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.addresses, self.pieces = [], set(), [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], "every tag is closed"
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> is out of place at {self.getpos()}"

    def handle_data(self, data):
        if "style" not in self.open:
            self.pieces.append(data)


@pytest.fixture
def arguments(tmp_path):
    """Arguments of `write_report`, with two pictures that are told apart by their bytes."""
    for name in ("affinity", "curves"):
        (tmp_path / f"{name}.png").write_bytes(PNG + name.encode())
    plan = TowerPlan.from_lists(
        [["C1", "<b>bold</b>"], ["C2", "C&3"]], strategy="coherent", seed=7, affinity=AFFINITY, command="dmt demo --x"
    )
    return {
        "runs": {"dlrm": result(0.7834), "dmt-dlrm": result(0.7842, embedding=832.0, mflops=0.491)},
        "plan": plan,
        "sharding": sharding_of(plan, tables={"t_*": "row_wise"}),
        "pictures": (tmp_path / "affinity.png", tmp_path / "curves.png"),
        "data_description": "clicks of <Tuesday>",
    }


def test_the_page_is_whole_and_loads_nothing_else(tmp_path, arguments):
    path = write_report(tmp_path / "new" / "report.html", **arguments)
    page, source = Page(path), path.read_text()
    assert path == tmp_path / "new" / "report.html"
    pictures = [f"data:image/png;base64,{base64.b64encode(PNG + name).decode()}" for name in (b"affinity", b"curves")]
    assert page.addresses[-2:] == pictures
    assert set(page.addresses[:-2]) == {"../report.html"}, "the partitioner's report beside the first picture"
    assert not {"script", "link", "iframe", "object"} & page.tags
    assert not [word for word in ("http", "url(", "@import") if word in source]


def test_the_page_shows_the_numbers(tmp_path, arguments):
    text = Page(write_report(tmp_path / "report.html", **arguments)).text
    for words in (
        "AUC 0.7834 0.7842 1.001",
        "samples/s 27,921 27,921 1.000",
        "parameters 892,449 892,449 1.000",
        "bytes/sample across hosts: forward 1,664 832 0.500",
        "MFLOPs/sample 0.499 0.491 0.984",
        "within noise difference of AUC, dmt-dlrm minus dlrm measured +0.0008; one standard error is 0.0023",
        "57% of the bytes across hosts 2,226 instead of 3,890 per sample; embeddings alone, forward and backward: 50%",
        "Evaluated on 65,536 rows, 25.0% of them clicks. 4 ranks",
        "two features of one tower 0.457",
        "the same, had the towers been dealt out in turn (strided) 0.346",
        "two features of different towers 0.321 The partitioner looks for",
        "Towers 2, coherent, seed 7",
        "Command dmt demo --x",
        "Versions torch 2.13.0+cpu Method",
    ):
        assert words in text, words
    assert "Note:" not in text


def test_names_from_outside_are_shown_as_written(tmp_path, arguments):
    runs = arguments["runs"]
    arguments |= {"runs": {"<i>flat": runs["dlrm"], "a & b": runs["dmt-dlrm"]}, "notes": ["AUC < 0.5 <script>x()"]}
    page = Page(write_report(tmp_path / "report.html", **arguments))
    for words in ("<b>bold</b>", "C&3", "clicks of <Tuesday>", "<i>flat", "a & b", "Note: AUC < 0.5 <script>x()"):
        assert words in page.text, words
    assert not {"script", "tuesday"} & page.tags


def test_what_is_not_known_is_a_dash_and_makes_no_claim(tmp_path, arguments):
    arguments["plan"] = TowerPlan.from_lists([["a", "b"], ["c"]], strategy="diverse", affinity={})
    arguments["sharding"] = sharding_of(arguments["plan"])
    arguments["runs"] = {name: result(math.nan, rate=1.0, eval_ne=math.nan) for name in ("dlrm", "dmt-dlrm")}
    text = Page(write_report(tmp_path / "report.html", **arguments)).text
    assert "two features of one tower - the same" in text
    assert "AUC - - -" in text
    assert "not known difference of AUC, dmt-dlrm minus dlrm all evaluation rows have" in text


def test_the_sync_of_replicas_has_a_row_only_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    plain: dict[str, Any] = {"eval_auc": 0.75}
    replicated: dict[str, Any] = {"eval_auc": 0.74, "replicas": {"num_replicas": 2, "bytes_per_sample": 4321.4}}
    emit(show_results({"plain": plain}), as_json=False)
    assert "sync" not in capsys.readouterr().out
    emit(show_results({"plain": plain, "replicated": replicated}), as_json=False)
    row = next(line for line in capsys.readouterr().out.splitlines() if "replicas' sync" in line)
    assert row.replace("│", " ").split()[-2:] == ["-", "4,321"]
    assert [path for _, path, _ in rows_of([plain, replicated])] == ["eval_auc", "replicas.bytes_per_sample"]
    assert len(cells(replicated)) == len(ROWS)


def test_progress_without_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(initial=4, total=2004, enabled=True) as bar:
        for _ in range(2000):
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 3, "a line for every step"
    assert lines[-1].startswith("train: 2004/2004 [")
