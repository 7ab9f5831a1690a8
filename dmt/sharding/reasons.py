"""One line for every table: why it is sharded as it is; and notes on the plan as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.formatting import human_bytes
from dmt.sharding.costs import CostModel
from dmt.sharding.plan import TableSharding
from dmt.sharding.rules import Allowed
from dmt.sharding.schemes import SCHEMES, Scheme, TablePlacement

__all__ = ["Reasons", "notes_on"]


class Reasons:
    """Says why each table of one tower has its scheme, from numbers that can be checked.

    Args:
        model: costs.
        placements: of the tower's tables.
        allowed: what the user's rules left open, by table.
    """

    def __init__(
        self, model: CostModel, placements: Mapping[str, TablePlacement], allowed: Mapping[str, Allowed]
    ) -> None:
        self._model, self._placements, self._allowed = model, placements, allowed

    def of(self, table: Any, total: float, rank_seconds: NDArray[np.float64]) -> str:
        """One line: scheme, and the numbers that speak for it.

        Args:
            table: the table.
            total: its cost summed over ranks, in seconds.
            rank_seconds: [L] cost of every rank.
        """
        placement, allowed = self._placements[table.name], self._allowed[table.name]
        scheme = placement.scheme
        if allowed.placement is not None or (allowed.why and len(allowed.schemes) == 1):
            return f"{_words(placement)}: {allowed.why}"
        room = self._model.hardware.memory_per_rank
        whole = self._model.shard(table, "table_wise", table.num_embeddings, table.embedding_dim)
        if scheme in ("row_wise", "column_wise") and room is not None and whole.memory > room:
            return f"{_words(placement)}: {human_bytes(whole.memory)} do not fit a rank's {human_bytes(room)}"
        if "table_wise" not in allowed.schemes:
            return f"{_words(placement)}: {allowed.why}, of which it evens out the ranks best"
        mean = float(rank_seconds.mean())
        if scheme == "table_wise":
            return self._whole_table_reason(table, whole.seconds / mean if mean else 0.0)
        if scheme == "data_parallel":
            own = self._model.shard(table, "data_parallel", table.num_embeddings, table.embedding_dim)
            exchanged = (whole.id_bytes + 2 * whole.output_bytes) / self._model.topology.ranks_per_tower
            if total <= whole.seconds:
                return (
                    f"data_parallel: all-reduce of {human_bytes(own.reduced_bytes)} a rank costs less than "
                    f"{human_bytes(exchanged)} a rank of ids, embeddings and gradients"
                )
        if whole.seconds > mean:
            return f"{_words(placement)}: whole it would be {whole.seconds / mean:.1f} x the mean load of a rank"
        saved = self._fixed({"table_wise"}, without={scheme}) - self._fixed()
        if saved > 0 and all(other.scheme != "table_wise" for other in self._placements.values()):
            return (
                f"{_words(placement)}: no table of its tower is whole, which saves {1e6 * saved:.0f} us of "
                "collectives a step"
            )
        more = self._fixed({"table_wise"}) - self._fixed()
        collectives = f" and, alone, bring {1e6 * more:.0f} us of collectives" if more > 0 else ""
        return (
            f"{_words(placement)}: evens out the ranks; whole it would be {whole.seconds / mean:.2f} x their mean load"
            f"{collectives}"
        )

    def _fixed(self, more: Set[Scheme] = frozenset(), *, without: Set[Scheme] = frozenset()) -> float:
        """Fixed seconds of the tower's schemes, with some more of them and without others."""
        used = {placement.scheme for placement in self._placements.values()}
        return sum(self._model.fixed_seconds(scheme) for scheme in (used - without) | more)

    def _whole_table_reason(self, table: Any, share: float) -> str:
        if self._model.topology.ranks_per_tower == 1:
            return "table_wise: its tower has one rank"
        if len(self._allowed[table.name].schemes) == 1:
            return "table_wise: too few rows and columns to cut"
        return f"table_wise: its ids and embeddings travel once; {share:.2f} x the mean load of a rank"


def notes_on(tables: Sequence[TableSharding], model: CostModel) -> tuple[str, ...]:
    """Notes on the schemes in use."""
    count = {scheme: sum(table.placement.scheme == scheme for table in tables) for scheme in SCHEMES}
    notes = []
    if count["column_wise"] and model.workload.optimizer == "rowwise_adagrad":
        notes.append(
            f"{_tables(count['column_wise'])} column-wise: row-wise AdaGrad keeps one state per shard and row, so "
            "training differs a little from that of the uncut table."
        )
    if count["data_parallel"] and model.topology.num_replicas > 1:
        notes.append(
            f"{_tables(count['data_parallel'])} data-parallel: the all-reduce also crosses the "
            f"{model.topology.num_replicas} replicas, and is counted at the tower's link rate."
        )
    return tuple(notes)


def _tables(count: int) -> str:
    return "1 table is" if count == 1 else f"{count:,} tables are"


def _words(placement: TablePlacement) -> str:
    scheme: Scheme = placement.scheme
    if scheme == "table_wise":
        return f"table_wise on rank {placement.ranks[0]}"
    return f"{scheme} over {len(placement.ranks)} ranks"
