"""What the report page shows of a sharding plan: ranks, tables, planned beside measured bytes (``sharding.html``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmt.formatting import counted, human_bytes
from dmt.partitioner.report.style import tower_color, tower_ink
from dmt.plan.towers import TowerPlan
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.schemes import TablePlacement
from dmt.training.console import ROWS, sharding_sentence
from dmt.training.report.finding import lookup, ratio

__all__ = ["sharding_context"]

# Ranks and tables beyond so many are folded away.
_SHOWN = 40
_BYTES = "bytes_per_sample."


def sharding_context(sharding: TowerShardingPlan, plan: TowerPlan, run: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts of the section, for the template.

    Args:
        sharding: the plan of the run, with as many towers as ``plan``.
        plan: for the names of the towers.
        run: the run's ``result.json``.
    """
    badges = [
        {"name": tower.name, "color": tower_color(number), "ink": tower_ink(number)}
        for number, tower in enumerate(plan.towers)
    ]
    ranks, tables = _ranks(sharding, badges), _tables(sharding, badges)
    return {
        "sentence": sharding_sentence(sharding),
        "towers": [
            {
                "badge": badges[tower.tower],
                "tables": counted(tower.num_tables, "table"),
                "imbalance": f"{tower.imbalance:.2f}",
                "method": tower.method,
            }
            for tower in sharding.towers[:_SHOWN]
        ],
        "hidden_towers": max(0, len(sharding.towers) - _SHOWN),
        "ranks": ranks[:_SHOWN],
        "more_ranks": ranks[_SHOWN:],
        "tables": tables[:_SHOWN],
        "more_tables": tables[_SHOWN:],
        "notes": list(sharding.notes),
        "bytes": _bytes(run),
        "batch_size": f"{sharding.workload.batch_size:,}",
    }


def _ranks(sharding: TowerShardingPlan, badges: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """In the order of the mesh; where they are too many to be shown, the busiest first."""
    mean = sum(rank.seconds for rank in sharding.ranks) / len(sharding.ranks)
    ranks = list(sharding.ranks)
    if len(ranks) > _SHOWN:
        ranks.sort(key=lambda rank: (-rank.seconds, rank.tower, rank.local))
    return [
        {
            "badge": badges[rank.tower],
            "local": rank.local,
            "cells": [human_bytes(rank.memory), f"{rank.lookups:,.0f}", human_bytes(rank.bytes_sent)],
            "load": f"{rank.seconds / mean:.2f}" if mean else "-",
            "width": f"{100 * rank.seconds / sharding.seconds:.1f}%" if sharding.seconds else "0%",
        }
        for rank in ranks
    ]


def _tables(sharding: TowerShardingPlan, badges: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The costliest first."""
    return [
        {
            "name": table.name,
            "badge": badges[table.tower],
            "scheme": table.placement.scheme,
            "ranks": _rank_words(table.placement, sharding.topology.ranks_per_tower),
            "memory": human_bytes(table.memory),
            # The reason begins with the scheme, which has a column of its own.
            "reason": table.reason.partition(": ")[2] or table.reason,
        }
        for table in sorted(sharding.tables, key=lambda table: (-table.seconds, table.name))
    ]


def _rank_words(placement: TablePlacement, ranks_per_tower: int) -> str:
    ranks = sorted(set(placement.ranks))
    if len(ranks) == ranks_per_tower > 1:
        return "all"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _bytes(run: Mapping[str, Any]) -> list[dict[str, str]]:
    """Planned and measured bytes per sample, kind by kind; none where the run did not record them."""
    rows = []
    for label, path, form in ROWS:
        planned = lookup(run, f"sharding.planned_{path}")
        measured = lookup(run, path)
        if not path.startswith(_BYTES) or planned is None or measured is None:
            continue
        # What is nothing in both agrees too.
        share = 1.0 if planned == measured else ratio(planned, measured)
        apart = "-" if share is None else f"{share - 1:+.1%}" if abs(share - 1) >= 0.0005 else "0.0%"
        rows.append(
            {
                "what": label.partition(" ")[2],
                "planned": form.format(planned),
                "measured": form.format(measured),
                "apart": apart,
            }
        )
    return rows
