"""`TowerPlan`: assignment of features to towers, saved, loaded and checked."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from dmt.errors import InputError, check_instance, did_you_mean
from dmt.files import read_model, write_or_raise
from dmt.formatting import shorten
from dmt.plan.split_across_towers import shard_names, split_tables
from dmt.plan.tables import TableSpec, feature_names, table_specs
from dmt.plan.topology import TowerTopology

__all__ = ["FORMAT_VERSION", "TowerFeatures", "TowerPlan"]

FORMAT_VERSION = 1
_REMEDY = "Write it with `dmt partition` or `TowerPlan.from_lists(...).save(path)`."


@dataclass(frozen=True)
class TowerFeatures:
    """One tower of a plan."""

    name: str
    """Unique name, by default ``tower_<index>``."""
    features: tuple[str, ...]
    """The features whose tables live in this tower, in the order in which `dmt.models` gives them to its module."""


@dataclass(frozen=True, kw_only=True)
class TowerPlan:
    """An assignment of features to towers, such as the Tower Partitioner's (DMT, section 3.3).

    Every feature is in exactly one tower, or `outside` all towers. The order of towers and of features within them is
    the order of the columns in a multi-tower model's interaction, no matter which ranks hold the towers.

    Raises:
        InputError: there is no tower, a tower is empty, a feature is not a string, a name or a feature occurs twice, or
            an entry of ``column_splits`` has fewer than two shards, an empty shard, or a shard that is in no tower.

    Example:
        >>> plan = TowerPlan.from_lists([["f0", "f2"], ["f1", "f3"]])
        >>> plan.towers[0].features, plan.towers[1].name
        (('f0', 'f2'), 'tower_1')
        >>> TowerPlan.strided(["f0", "f1", "f2"], num_towers=2).to_lists()
        [['f0', 'f2'], ['f1']]
    """

    towers: tuple[TowerFeatures, ...]
    """The towers, in output order."""
    outside: tuple[str, ...] = ()
    """Features outside all towers: every rank holds their tables and looks up its own samples (Neo, section 4)."""
    strategy: str = "manual"
    """How the features were assigned: ``manual``, ``strided``, ``balanced``, ``coherent``, ``diverse``, ``together`` or
    ``apart``."""
    seed: int | None = None
    """The random seed of a learned assignment; None for others."""
    affinity: Mapping[str, Any] = field(default_factory=dict)
    """Measure, settings, notes and `Comparison` fields of a learned assignment, by name, as JSON values; else empty."""
    tables: tuple[TableSpec, ...] = ()
    """The tables the plan was made for, with each column shard as a table. A model's table of the same name must have
    the same features and, unless it is outside towers, ``embedding_dim``; its number of rows may differ."""
    column_splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Number of columns of each shard, by feature, for tables cut across towers. The towers then list the shards, as
    ``ad[0:64]``; `split_tables` cuts the tables, and `dmt.plan.split_across_towers.split_ids` repeats the ids."""
    command: str = ""
    """The ``dmt`` command that made the plan; empty if none did."""

    def __post_init__(self) -> None:
        if not self.towers:
            raise InputError("TowerPlan: towers is empty; give at least one tower.")
        for tower in self.towers:
            if not tower.features:
                raise InputError(f"Tower {tower.name!r} has no feature; drop the tower or move a feature into it.")
        if unnamed := [feature for feature in (*self.features, *self.outside) if not isinstance(feature, str)]:
            raise InputError(f"Feature {unnamed[0]!r:.200} of the tower plan is not a name. Give strings.")
        for kind, names in (("Tower", [t.name for t in self.towers]), ("Feature", [*self.features, *self.outside])):
            if doubled := [name for name, count in Counter(names).items() if count > 1]:
                places = [t.name for t in self.towers if doubled[0] in (t.name, *t.features)]
                places += ["outside"] * (doubled[0] in self.outside)
                raise InputError(
                    f"{kind} {doubled[0]!r} occurs more than once in the tower plan (in {', '.join(places)}); "
                    "each must occur exactly once."
                )
        for feature, widths in self.column_splits.items():
            absent = sorted(set(shard_names(feature, widths)) - set(self.features))
            if len(widths) < 2 or min(widths) < 1 or absent:
                raise InputError(
                    f"column_splits[{feature!r}]={list(widths)} in the tower plan must list at least two positive "
                    f"numbers of columns, and each shard must be in a tower. Shards in no tower: {absent or 'none'}."
                )

    @classmethod
    def from_lists(cls, towers: Iterable[Iterable[str]], *, outside: Iterable[str] = (), **metadata: Any) -> TowerPlan:
        """Makes a plan from a list of feature names for each tower; ``metadata`` are other fields of the plan.

        Raises:
            InputError: a tower or ``outside`` is a string instead of a list, or the plan breaks a rule of `TowerPlan`.
        """
        lists = {f"Tower {number}": features for number, features in enumerate(towers)}
        for place, features in {**lists, "outside": outside}.items():
            if isinstance(features, str):
                raise InputError(f"{place} is the string {features!r}. Give a list of features: [{features!r}].")
        named = (TowerFeatures(f"tower_{number}", tuple(features)) for number, features in enumerate(lists.values()))
        return cls(towers=tuple(named), outside=tuple(outside), **metadata)

    @classmethod
    def strided(cls, features: Sequence[str], num_towers: int) -> TowerPlan:
        """Makes the naive balanced assignment of DMT section 5.2.3: feature i goes to tower i mod T.

        Raises:
            InputError: ``num_towers`` is not between 1 and the number of features, or a feature occurs twice.
        """
        if not 1 <= num_towers <= len(features):
            raise InputError(f"num_towers={num_towers} must be 1 to the number of features or tables, {len(features)}.")
        return cls.from_lists([features[i::num_towers] for i in range(num_towers)], strategy="strided")

    @classmethod
    def balanced(
        cls,
        tables: Sequence[Any],
        topology: TowerTopology,
        *,
        rows: Mapping[str, float] | None = None,
        num_bytes: Mapping[str, float] | None = None,
        max_tower_bytes: float = math.inf,
    ) -> TowerPlan:
        """Makes a plan in which towers, and hosts that hold several of them, send about equally many numbers.

        It suits flat models over towers, whose results do not depend on the plan. The method is greedy: tables that
        send more numbers (rows x ``embedding_dim``) come first, and each goes to the tower that sends least so far and
        has room for it; if none has room, to the tower with the fewest bytes.

        Args:
            tables: tables of the model, ``EmbeddingBagConfig`` or `TableSpec`.
            topology: the number of towers, and their hosts.
            rows: by table name, the number of embeddings that a tower sends to a rank in a step for all features of the
                table. With ``unique`` these are the distinct inputs (`AccessProfile.distinct_rows`). By default all
                features send the same number.
            num_bytes: by table name, the bytes that a table takes in its tower; by default those of its weights.
            max_tower_bytes: bytes for which a tower has room.

        Raises:
            InputError: there are fewer tables than towers, two tables have the same feature or name, ``rows`` or
                ``num_bytes`` lacks a table or has a negative number or NaN, or an argument has the wrong type.

        Example:
            >>> rows = {"ad": 900, "user": 1000, "hour": 24, "site": 150}
            >>> tables = [TableSpec(name=t, num_embeddings=9, embedding_dim=8, feature_names=(t,)) for t in rows]
            >>> two = TowerTopology(num_towers=2, ranks_per_tower=2)
            >>> TowerPlan.balanced(tables, two, rows=rows).to_lists()
            [['ad', 'site'], ['user', 'hour']]
        """
        check_instance("topology", topology, TowerTopology)
        tables, num = table_specs(tables, one_table_per_feature=False), topology.num_towers
        if len(tables) < num:
            raise InputError(f"num_towers={num} must be at most the number of tables, {len(tables)}. Use fewer towers.")
        counts = {table.name: len(table.feature_names) for table in tables} if rows is None else rows
        sizes = {table.name: table.num_bytes for table in tables} if num_bytes is None else num_bytes
        for table, (key, given) in product(tables, {"rows": counts, "num_bytes": sizes}.items()):
            if not given.get(table.name, math.nan) >= 0:
                raise InputError(
                    f"TowerPlan.balanced: {key}[{table.name!r}] is {given.get(table.name, 'missing')}. Give a number "
                    "of at least 0 for every table."
                )
        loads = {table.name: counts[table.name] * table.embedding_dim for table in tables}
        towers: list[list[str]] = [[] for _ in range(num)]
        sums, filled = [0.0] * num, [0.0] * num
        for table in sorted(tables, key=lambda table: -loads[table.name]):
            size = sizes[table.name]
            with_room = [tower for tower in range(num) if filled[tower] + size <= max_tower_bytes]
            possible = with_room or [filled.index(min(filled))]
            least = min(possible, key=lambda tower: (sums[tower], len(towers[tower])))
            towers[least] += table.feature_names
            sums[least] += loads[table.name]
            filled[least] += size
        # The host of each tower in every replica; it differs by more than an offset if hosts share replicas unevenly.
        on_host = [topology.host(ranks[0]) for ranks in topology.tower_groups()]
        hosts = [tuple(on_host[tower::num]) for tower in range(num)]
        held: dict[tuple[int, ...], list[int]] = {place: [] for place in hosts}
        sent = [0.0] * topology.num_hosts
        for tower in sorted(range(num), key=lambda tower: -sums[tower]):
            free = [place for place in held if len(held[place]) < hosts.count(place)]
            least_sent = min(free, key=lambda place: sorted((sent[host] for host in place), reverse=True))
            held[least_sent].append(tower)
            for host in least_sent:
                sent[host] += sums[tower]
        return cls.from_lists([towers[tower] for place in held for tower in held[place]], strategy="balanced")

    @property
    def num_towers(self) -> int:
        """T, the number of towers."""
        return len(self.towers)

    @property
    def features(self) -> list[str]:
        """The features of all towers, tower by tower."""
        return [feature for tower in self.towers for feature in tower.features]

    def to_lists(self) -> list[list[str]]:
        """Returns the features of each tower as lists, the inverse of `from_lists`."""
        return [list(tower.features) for tower in self.towers]

    def check_features(self, features: Iterable[str], *, partly: bool = False) -> None:
        """Raises `InputError` unless the plan and the model have the same features.

        Args:
            features: the features of the model.
            partly: True: ``features`` are those of one collection of several, and the plan may have more.
        """
        model_features = list(features)
        known, placed = set(model_features), {*self.features, *self.outside}
        # Checked first; otherwise every shard would be reported as unknown, and the table's own feature as missing.
        if uncut := [feature for feature in self.column_splits if feature in known]:
            raise InputError(
                f"The tower plan cuts the table of feature {uncut[0]!r} into column shards "
                f"{shard_names(uncut[0], self.column_splits[uncut[0]])}, but the model has the whole table. Build the "
                "model from plan.split_tables(tables), and give it dmt.plan.split_across_towers.split_ids(ids, "
                "plan.column_splits)."
            )
        absent = [f for f in model_features if f not in placed]
        unknown = [f for f in (*self.features, *self.outside) if f not in known and not partly]
        for names, others, fault in (
            (absent, placed - known, "in no tower. Put every feature of the model into the plan, or shrink the model."),
            (unknown, known, "in the tower plan but not in the model. Shrink the plan, or extend the model."),
        ):
            if names:
                shown = shorten([repr(name) for name in names], ", ", most=5)
                subject = f"Feature {shown} is" if len(names) == 1 else f"Features {shown} are"
                raise InputError(f"{subject} {fault}{did_you_mean(names[0], others)}")

    def tables_by_tower(self, tables: Sequence[Any], *, partly: bool = False) -> list[list[Any]]:
        """Checks that tables fit the plan, and returns those of each tower, ordered by their first feature in the plan.

        Tables of features outside towers are in none of the lists; see `outside_tables`. With ``partly``, the plan may
        have features that no table has.

        Raises:
            InputError: a feature is missing or unknown, two tables have the same name, the features of a shared table
                are in different towers or only partly outside, or a table does not match that of its name in `tables`.
        """
        specs = table_specs(tables, one_table_per_feature=False)
        self.check_features(dict.fromkeys(feature_names(specs)), partly=partly)
        recorded = {spec.name: spec for spec in self.tables}
        for spec in specs:
            made_for = replace(recorded.get(spec.name, spec), num_embeddings=spec.num_embeddings)
            if recorded and not set(self.outside).isdisjoint(spec.feature_names):
                # Outside towers a model may use another embedding_dim.
                made_for = replace(made_for, embedding_dim=spec.embedding_dim)
            if made_for != spec:
                raise InputError(
                    f"Table {spec.name!r} has embedding_dim={spec.embedding_dim} and features "
                    f"{shorten(spec.feature_names, ', ')}, but the tower plan was made for {made_for.embedding_dim} "
                    f"and {shorten(made_for.feature_names, ', ')}. Make a new plan for this model."
                )
        tower_of = {f: (t, i) for t, tower in enumerate(self.towers) for i, f in enumerate(tower.features)}
        placed: list[list[tuple[int, Any]]] = [[] for _ in self.towers]
        for table in tables:
            places = [tower_of[f] for f in table.feature_names if f in tower_of]
            first_in: dict[str, str] = {}
            for feature in table.feature_names:
                home = f"in {self.towers[tower_of[feature][0]].name}" if feature in tower_of else "outside"
                first_in.setdefault(home, feature)
            if len(first_in) > 1:
                split = shorten([f"{feature!r} {home}" for home, feature in first_in.items()], ", ")
                raise InputError(
                    f"Table {table.name!r} is shared by features of different towers ({split}). A table lives in "
                    "one tower or outside all towers: keep its features together."
                )
            if places:
                # By the first feature: the order of a tower's features is that of its module's inputs.
                placed[places[0][0]].append((min(i for _, i in places), table))
        return [[table for _, table in sorted(tower, key=lambda entry: entry[0])] for tower in placed]

    def moved_outside(self, features: Iterable[str]) -> TowerPlan:
        """Returns the plan with ``features`` moved outside; raises `InputError` for column shards and empty towers."""
        moved = dict.fromkeys(feature for feature in features if feature not in self.outside)
        towers = (replace(t, features=tuple(f for f in t.features if f not in moved)) for t in self.towers)
        tables = tuple(table for table in self.tables if moved.keys().isdisjoint(table.feature_names))
        return replace(self, towers=tuple(towers), outside=(*self.outside, *moved), tables=tables)

    def outside_tables(self, tables: Sequence[Any]) -> list[Any]:
        """Returns the tables of features outside towers, in the order given."""
        outside = set(self.outside)
        return [table for table in tables if not outside.isdisjoint(table.feature_names)]

    def split_tables(self, tables: Sequence[Any]) -> list[Any]:
        """Returns the uncut model's tables, those of ``column_splits`` cut as by the function `split_tables`."""
        return split_tables(tables, self.column_splits)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; an existing file is replaced in one step.

        Raises:
            InputError: the file cannot be written.
        """
        plain = replace(self, affinity=dict(self.affinity), column_splits=dict(self.column_splits))
        record = {"format": FORMAT_VERSION, **asdict(plain)}
        for table in record["tables"]:
            del table["data_type"]  # a plan is valid for both formats
        with write_or_raise(path, "Tower plan") as scratch:
            scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TowerPlan:
        """Reads a plan that `save` wrote.

        Raises:
            InputError: the file cannot be read, is not JSON or has a different format version, or an entry is absent,
                has the wrong type or breaks a rule of the plan.
        """
        return read_model(path, cls, what="Tower plan", version=FORMAT_VERSION, remedy=_REMEDY)
