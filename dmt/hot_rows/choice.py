"""The choice of rows that have copies: those that save bytes between hosts, of tables that may have any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dmt.formatting import shorten
from dmt.hot_rows.costs import has_single_ids, saved_bytes
from dmt.hot_rows.profile import AccessProfile
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.sharding.optimizers import data_parallel_obstacle, optimizer_name
from dmt.sptt.hot import HomeTable

__all__ = ["choose_rows", "why_no_copies", "why_not_chosen"]


def choose_rows(
    profile: AccessProfile,
    tables: Sequence[TableSpec],
    topology: TowerTopology,
    *,
    batch_size: int,
    distinct: bool,
    max_bytes: float,
) -> dict[str, NDArray[np.int64]]:
    """Chooses the rows whose copies save bytes between hosts, those that save most for their size first.

    Args:
        profile: accesses.
        tables: those that may have copies.
        topology: towers and ranks of a replica.
        batch_size: samples of a rank.
        distinct: True if each rank sends its distinct ids only.
        max_bytes: bytes of the weights of the copies of a rank.

    Returns:
        For each table with such rows their numbers, int64, ascending.

    Example:
        >>> from dmt import TowerTopology
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("f",))
        >>> profile = AccessProfile([table])
        >>> profile.add({"f": [1, 7, 7, 7]}, num_samples=4)
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> settings = {"batch_size": 4, "distinct": False}
        >>> chosen = [choose_rows(profile, [table], topology, **settings, max_bytes=size) for size in (64, 63)]
        >>> [{name: rows.tolist() for name, rows in one.items()} for one in chosen]
        [{'t': [1, 7]}, {'t': [7]}]
    """
    found = []
    for number, table in enumerate(tables):
        counts = profile[table.name]
        if not has_single_ids(profile, table):
            continue
        num_ids = batch_size * profile.ids_per_sample(table)
        gain = saved_bytes(counts, table, topology, num_ids=num_ids, distinct=distinct)
        pays, size = gain > 0, 4 * table.embedding_dim
        rows = counts.rows[pays]
        found.append((gain[pays] / size, np.full(len(rows), number), rows, np.full(len(rows), size)))
    if not found:
        return {}
    gains, numbers, rows, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((rows, numbers, -gains))
    kept = order[np.cumsum(sizes[order]) <= max_bytes]
    by_table = {table.name: np.sort(rows[kept][numbers[kept] == number]) for number, table in enumerate(tables)}
    return {name: of_table for name, of_table in by_table.items() if len(of_table)}


def why_not_chosen(profile: AccessProfile, tables: Sequence[TableSpec]) -> dict[str, str]:
    """Returns the tables of which `choose_rows` takes no row because of their bags, with the reason."""
    means = {table.name: profile.ids_per_sample(table) for table in tables if not has_single_ids(profile, table)}
    return {
        name: f"its bags have {mean:.3g} ids on average, and the sum over the cold ids of a bag is as long as the whole"
        for name, mean in means.items()
    }


def why_no_copies(tables: Mapping[str, HomeTable]) -> dict[str, str]:
    """Returns the tables whose rows cannot have copies that train alike, with the reason.

    Args:
        tables: all tables of a collection, by name.
    """
    users: dict[str, list[str]] = {}
    for name, table in tables.items():
        for feature in table.config.feature_names:
            users.setdefault(feature, []).append(name)
    reasons = {name: _why_no_copies(table, users) for name, table in tables.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _why_no_copies(table: HomeTable, users: Mapping[str, Sequence[str]]) -> str:
    config = table.config
    if "MEAN" in str(config.pooling):
        return "its bags are averaged, and the rank that sums the cold ids of a bag does not know how many are hot"
    if "FP32" not in str(config.data_type):
        return f"its weights are {config.data_type}, and copies are FP32"
    if table.scheme == "column_wise" and optimizer_name(table.settings) == "rowwise_adagrad":
        return "it is cut by columns, and row-wise AdaGrad has a state of its own for each part of a row"
    if "FP32" not in str(table.settings.get("output_dtype", "FP32")).upper():
        return f"its lookup makes {table.settings['output_dtype']}, and that of copies FP32"
    for feature in config.feature_names:
        if len(users[feature]) > 1:
            return f"its feature {feature!r} is also looked up in {shorten(users[feature], ', ')}"
    return data_parallel_obstacle(table.settings).replace("data-parallel tables", "copies")
