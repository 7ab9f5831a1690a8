"""`check_run`: from a config to a report that compares its run with the plain module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dmt.testing.plain import is_table
from dmt.testing.ranks import run_on_ranks
from dmt.training.check import CheckReport, Finding, make_rows
from dmt.training.check.expected import table_of
from dmt.training.check.on_rank import RankReport, check_on_rank
from dmt.training.check.shrink import CheckedRun, CheckLimits, shrink
from dmt.training.config import TrainingConfig
from dmt.training.console import quiet_libraries
from dmt.training.train import resolve

__all__ = ["check_run", "compare_ranks"]


def check_run(
    config: TrainingConfig,
    limits: CheckLimits | None = None,
    *,
    on_rank: Callable[[int, CheckedRun], RankReport] = check_on_rank,
) -> CheckReport:
    """Checks a run on gloo ranks of this machine against the plain single-process module; reports what differs.

    Args:
        config: the run, as it is made for the cluster.
        limits: how large the check may be.
        on_rank: work of a rank.

    Raises:
        InputError: the run cannot be built as its config says.
        RanksFailedError: a rank failed, died or hangs.
    """
    began = time.perf_counter()
    limits = limits or CheckLimits()
    job = resolve(config, config.topology.build().world_size)
    with TemporaryDirectory(prefix="dmt-check-") as folder:
        run = shrink(job, limits=limits, folder=Path(folder))
        reports = run_on_ranks(_quietly, run.topology.world_size, on_rank, run, timeout_s=limits.timeout_s)
    return compare_ranks(run, reports, seconds=time.perf_counter() - began)


def _quietly(rank: int, on_rank: Callable[[int, CheckedRun], RankReport], run: CheckedRun) -> RankReport:
    quiet_libraries(rank=1)
    return on_rank(rank, run)


def compare_ranks(run: CheckedRun, reports: Sequence[RankReport], *, seconds: float = 0.0) -> CheckReport:
    """Returns the report of all ranks' findings, and of the faults that only show when ranks are compared."""
    findings = [finding for report in reports for finding in report.findings]
    findings += [*_replicas(reports), *_coverage(run, reports)]
    skipped = {name: why for report in reports for name, why in report.skipped.items()}
    if not any(finding.check == "tower gradients" for finding in findings):
        skipped["tower gradients"] = "no tower module has parameters"
    if not run.config.model.has_towers:
        skipped["tower outputs"] = "a flat model has none"
    return CheckReport(
        rows=make_rows(findings, _titles(run), skipped),
        reduced=run.reduced,
        schemes=run.schemes,
        notes=tuple(_notes(run, reports)),
        ranks=len(reports),
        seconds=seconds,
    )


def _replicas(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Compares the bits of everything that several ranks hold: whole tensors, and the shards of several replicas."""
    holders: dict[tuple[str, object], dict[int, str]] = {}
    for rank, report in enumerate(reports):
        for name, digest in report.whole.items():
            holders.setdefault((name, None), {})[rank] = digest
        for name, offsets, sizes, digest in report.shards:
            holders.setdefault((name, (offsets, sizes)), {})[rank] = digest
    for (name, _), digests in holders.items():
        first = min(digests)
        differing = [rank for rank, digest in digests.items() if digest != digests[first]]
        place = f"ranks {differing} differ from rank {first}" if differing else ""
        yield Finding(check="replicas", item=table_of(name), difference=len(differing), allowed=0, place=place)


def _coverage(run: CheckedRun, reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Checks that in each replica every number of a table is in one shard, or whole on all ranks of its tower."""
    replicas = run.topology.num_replicas
    each = " in each replica" if replicas > 1 else ""
    holders = run.topology.ranks_per_tower * (run.topology.num_towers if run.config.dataflow == "flat" else 1)
    shards: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    whole: dict[str, int] = {}
    for report in reports:
        for name, offsets, sizes, _ in report.shards:
            shards.setdefault(name, []).append((offsets, sizes))
        for name in report.whole:
            whole[name] = whole.get(name, 0) + is_table(name)
    names = {name.split(".")[-2]: name for name in (*shards, *(n for n, count in whole.items() if count))}
    for table in run.job.split_tables:
        full = names.get(table.name)
        if full is None:
            yield Finding(check="shards", item=f"table {table.name}", difference=1, allowed=0, place="on no rank")
            continue
        times = torch.zeros(table.num_embeddings, table.embedding_dim)
        for (row, column), (rows, columns) in shards.get(full, []):
            times[row : row + rows, column : column + columns] += 1
        times += whole.get(full, 0) / holders
        wrong = int((times != replicas).sum())
        place = f"{wrong} of its {times.numel()} numbers are not held once{each}" if wrong else ""
        yield Finding(check="shards", item=f"table {table.name}", difference=wrong, allowed=0, place=place)


def _titles(run: CheckedRun) -> dict[str, str]:
    """Returns the comparison of each row; with the plain module, unless it names another."""
    steps, precision, has_replicas = run.limits.steps, run.config.sharding.precision, run.topology.num_replicas > 1
    trained = f"after {steps} steps" + (", tables averaged over replicas" if has_replicas else "")
    between = f"{precision.forward} forward, {precision.backward} backward"
    return {
        "embeddings": "tables, one id per bag",
        "bags": "tables, bags of 0 to 3 ids, unequal batches",
        "tower outputs": f"after the exchange ({between})",
        "logits": "both batches",
        "dense gradients": "means over ranks",
        "tower gradients": "means over ranks",
        "table gradients": "means over ranks" + (" of a replica" if has_replicas else ""),
        "gradient scales": "<g, e> / <e, e> - 1, by kind",
        "formats": "rounding expected over rounding found",
        "losses": f"{steps} steps, and one batch after them",
        "dense weights": trained,
        "table weights": trained,
        "pipeline": "TrainPipelineSparseDist against the plain loop",
        "id routes": "the other one against this one",
        "checkpoint": "read by the plain module, against the trained weights",
        "reload": "under another placement, and its next outputs",
        "replicas": f"what several ranks {'or replicas hold' if has_replicas else 'hold whole'} is equal",
        "shards": "every number of every table once" + (" in each replica" if has_replicas else ""),
    }


def _notes(run: CheckedRun, reports: Sequence[RankReport]) -> Iterator[str]:
    config = run.config
    is_exact = config.sharding.precision.forward == config.sharding.precision.backward == "fp32"
    if not is_exact:
        yield (
            "Losses and weights after training are compared with fp32 between ranks: an optimizer that divides by the "
            "gradient's own size makes a whole step of what rounding leaves of a gradient that cancels. All other rows "
            "have the formats of the config."
        )
    if run.topology.num_replicas > 1 and not any(is_table(name) for report in reports for name, *_ in report.shards):
        yield "Every table is data-parallel, so nothing is averaged over replicas; see sharding.scheme."
    if run.topology.num_replicas > 1 and config.replicas.precision != "fp32":
        yield (
            "Losses and weights after training are compared with replicas averaged in fp32. All other rows have the "
            f"replicas.precision of the config, {config.replicas.precision}."
        )
    widths = {table.name: table.embedding_dim for table in run.job.split_tables}
    cut = {
        name.split(".")[-2]
        for report in reports
        for name, _, sizes, _ in report.shards
        if is_table(name) and sizes[1] < widths[name.split(".")[-2]]
    }
    if cut and config.optimizer.sparse == "rowwise_adagrad":
        yield (
            f"{len(cut)} column-wise tables keep one row-wise AdaGrad state per shard and row, in TorchRec too; the "
            "plain module was given the same. Uncut tables would train a little differently."
        )
