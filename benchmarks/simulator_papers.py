"""Numbers of the papers beside what `dmt what-if` predicts from their hardware; writes results/simulator_papers.md.

    python -m benchmarks.simulator_papers

The models are those of the DMT paper (Criteo-1TB, N = 128, 16,384 samples a GPU, a tower on each host of eight), with
16-bit embeddings between hosts in both dataflows, its "strong baseline" (section 5.1). Tower modules are those of its
section 5.2: DLRM's have D = 64, but with 16 towers c = 0, p = 1 and D = 128; DCN's have D = 128, and with 26 towers
there are none. The clusters are the shipped ones, V100s on 16 hosts at most, as there; nothing is fitted to a figure.
The paper gives its speed-ups as "up to", over all of its cluster sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.report import commit
from dmt.models.complexity import CRITEO_DENSE_FEATURES, criteo_1tb_tables
from dmt.simulator.cluster import load_cluster
from dmt.training.commands.what_if import Prediction, predict_step
from dmt.training.config import TrainingConfig
from dmt.training.job import Job, make_job

__all__ = ["main"]

_HOSTS = {"v100": (2, 4, 8, 16), "a100": (2, 4, 8, 16, 26), "h100": (2, 4, 8, 16, 26)}
_OUT = Path(__file__).parent / "results" / "simulator_papers.md"


_WHY = (
    "Where a ratio is above 1.15 or below 0.85: the papers print no step times, so nothing says how much of a step is",
    "neither exchange nor what the model computes. Kernels' launches, the reading of data and waiting for slower ranks",
    "are in every step of theirs and in none of these (`operator_s` of their GPUs is not published and is 0), and they",
    "shrink what fewer bytes (figures 11 and 12) and fewer FLOPs (figure 10: DCN's fall 2.2 times with two towers,",
    "table 4) gain. Rates of exchanges over 8 to 512 GPUs follow Neo's 7 GB/s at 128 and not DMT's figure 5, which is",
    "a picture without numbers; what is exposed of a small exchange (figure 13) depends on them most.",
)


class Claim(NamedTuple):
    """A number of a paper and the prediction of it."""

    place: str
    what: str
    paper: float
    predicted: float
    note: str


def job(arch: str, hosts: int, *, ratio: int = 1, dataflow: str = "auto") -> Job:
    """A model of the paper on hosts of eight GPUs, flat or with a tower on each host."""
    name = arch if ratio == 1 else f"dmt-{arch}"
    sixteen = {"forward_precision": "fp16", "backward_precision": "fp16"}
    values = {
        "model": {"arch": name, "embedding_dim": 128, **_tower_module(arch, hosts, ratio)},
        "topology": {"num_towers": hosts, "ranks_per_tower": 8},
        "sharding": {"dataflow": dataflow, **sixteen},
        "train": {"batch_size": 16_384},
    }
    return make_job(TrainingConfig.model_validate(values), criteo_1tb_tables(128), CRITEO_DENSE_FEATURES)


def _tower_module(arch: str, hosts: int, ratio: int) -> dict[str, int]:
    if arch == "dcn":
        return {"tower_dim": 128}
    return {"tower_dim": 128, "c": 0, "p": 1} if (hosts, ratio) == (16, 2) else {"tower_dim": 128 // ratio}


def predict(cluster: str, arch: str, hosts: int, *, ratio: int = 1, dataflow: str = "auto") -> Prediction:
    """The step of `job` on a shipped cluster."""
    return predict_step(job(arch, hosts, ratio=ratio, dataflow=dataflow), load_cluster(cluster))


def speedups(arch: str, ratio: int) -> dict[tuple[str, int], tuple[float, float]]:
    """(over flat, over SPTT) of towers, by cluster and hosts."""
    found = {}
    for cluster, sizes in _HOSTS.items():
        for hosts in sizes:
            # DCN's 26 towers go without modules.
            own = 1 if (arch, hosts) == ("dcn", 26) else ratio
            flat, sptt, towers = (
                predict(cluster, arch, hosts, ratio=r, dataflow=d).timeline.seconds
                for r, d in ((1, "flat"), (1, "sptt"), (own, "sptt"))
            )
            found[cluster, hosts] = (flat / towers, sptt / towers)
    return found


def claims() -> list[Claim]:
    """Every number of the papers that has a prediction."""
    dlrm, dcn = speedups("dlrm", 2), speedups("dcn", 2)
    eight = [predict("a100", "dlrm", 8, ratio=r, dataflow="sptt").timeline.seconds for r in (1, 16)]
    flat, towers = (predict("h100", "dcn", 8, ratio=r, dataflow=d) for r, d in ((1, "flat"), (2, "sptt")))
    exposed = flat.timeline.exposed["embeddings"] / max(towers.timeline.exposed["embeddings"], 1e-9)
    computing = flat.timeline.exposed["compute"] / towers.timeline.exposed["compute"]
    return [
        Claim("DMT, figure 10", "DMT-DLRM over flat, most", 1.9, _most(dlrm, 0), _where(dlrm, 0)),
        Claim("DMT, figure 10", "DMT-DCN over flat, most", 1.8, _most(dcn, 0), _where(dcn, 0)),
        Claim("DMT, figure 11", "tower modules over SPTT, most", 1.4, _most(dlrm, 1), _where(dlrm, 1)),
        Claim("DMT, figure 12", "ratio 16 over SPTT, 8 towers", 2.0, eight[0] / eight[1], "a100, 64 GPUs"),
        Claim("DMT, figure 13", "DCN's exposed embedding exchange", 4.6, exposed, "h100, 64 GPUs"),
        Claim("DMT, figure 13", "DCN's computing", 1.4, computing, "h100, 64 GPUs"),
    ]


def _most(found: dict[tuple[str, int], tuple[float, float]], which: int) -> float:
    return max(pair[which] for pair in found.values())


def _where(found: dict[tuple[str, int], tuple[float, float]], which: int) -> str:
    cluster, hosts = max(found, key=lambda key: found[key][which])
    return f"{cluster}, {8 * hosts} GPUs"


def page(rows: Sequence[Claim]) -> str:
    """The table as Markdown."""
    lines = [
        "# Papers and predictions",
        "",
        "Made by `python -m benchmarks.simulator_papers`; its docstring says of which models.",
        "",
        f"- commit: {commit()}",
        "",
        "| place | what | paper | predicted | ratio | where |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.place} | {row.what} | {row.paper:.1f} | {row.predicted:.2f} | {row.predicted / row.paper:.2f} | "
        f"{row.note} |"
        for row in rows
    ]
    return "\n".join([*lines, "", *_WHY]) + "\n"


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=_OUT, show_default=True)
def main(*, out: Path) -> None:
    """Predicts what the papers measured."""
    text = page(claims())
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
