"""`FeatureAffinity`, the input of the partitioner: how similar features' embeddings are, or how much features interact.

Legend: F features, B samples or rows of a batch, D dense columns.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmt.errors import InputError, did_you_mean
from dmt.files import from_record, write_or_raise
from dmt.plan.tables import TableSpec, feature_names, table_specs

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

__all__ = ["FeatureAffinity", "Interaction", "Measure", "check_tables", "noise_bound"]

Measure = Literal["cosine", "interactions"]

# Tolerance for a matrix that was saved as 32-bit floats or as text; a wrong matrix is off by far more.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """A pair or triple of features that predicts the label better than its parts do."""

    features: tuple[str, ...]
    gain: float
    """Decrease of the mean held-out log loss, in nats per row; for a triple, beyond the gains of its pairs."""
    error: float = 0.0
    """Standard error of the gain in nats per row, 0 if unknown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureAffinity:
    """A number for every pair of features: how similar their embeddings are, or how much they interact.

    **Resemblance** (``measure="cosine"``) is the interaction matrix I of the DMT paper (arXiv 2403.00877, section 3.3):
    I(i, j) = abs(mean over samples of e_i . e_j) for embeddings e of length 1. It is 1 if the embeddings of two
    features are always parallel, or always opposite, and 0 if they are unrelated. `collect` measures it on a model.

    **Interactions** (``"interactions"``, not in the paper) are gains in nats per row: how much better two features
    together predict the label than an additive model of all features; for ``triples``, than their pairs do.
    `collect_interactions` measures them on training rows without a model.

    The constructor checks the matrix, makes it exactly symmetric, and keeps it read-only as float64. The partitioner
    does not use the diagonal. With ``tables`` and ``pooling_factors``, towers can be balanced by bytes and lookups.

    Raises:
        InputError: ``matrix`` or ``errors`` is not [F, F], finite, symmetric and in range (the last two up to
            rounding); the message names the worst pair of features. Or a name is empty or repeated, the measure is
            unknown, tables or triples have other features, or ``pooling_factors`` are not F finite numbers >= 0.

    Example:
        >>> matrix = [[1.0, 0.8, 0.1], [0.8, 1.0, 0.2], [0.1, 0.2, 1.0]]
        >>> affinity = FeatureAffinity(matrix=matrix, features=["a", "b", "c"])
        >>> affinity.num_features, float(affinity.matrix[0, 1])
        (3, 0.8)
        >>> affinity.permuted(["c", "a", "b"]).matrix[0].tolist()
        [1.0, 0.1, 0.2]
    """

    matrix: NDArray[np.float64]
    """[F, F] float64, from 0 to 1 for cosines and from 0 for interactions; accepts what `numpy.asarray` does."""
    features: tuple[str, ...]
    """The F names, in the order of rows and columns."""
    measure: Measure = "cosine"
    errors: NDArray[np.float64] | None = None
    """[F, F] float64 standard errors of interactions in nats per row; None if unknown."""
    triples: tuple[Interaction, ...] = ()
    """Triples whose gain beyond their pairs exceeds the measuring error."""
    num_samples: int | None = None
    """Number of measured samples or rows; None if unknown."""
    loss: float | None = None
    """Held-out log loss of the additive model of `collect_interactions`, in nats per row; None if unknown."""
    tables: tuple[TableSpec, ...] = ()
    """Tables of the features, as TorchRec ``EmbeddingBagConfig`` or `TableSpec`, kept as `TableSpec`; () if unknown."""
    pooling_factors: tuple[float, ...] | None = None
    """Mean number of ids per sample of each feature, in the order of ``features``; None if unknown."""
    notes: tuple[str, ...] = ()
    """Warnings about the data, each a whole sentence, for instance that a feature is constant."""

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            raise InputError(f"FeatureAffinity: features={self.features!r} is one string; give a list of names.")
        features = tuple(str(name) if isinstance(name, str) else name for name in self.features)
        _check_features(features)
        if self.measure not in get_args(Measure):
            raise InputError(f"FeatureAffinity: measure={self.measure!r} is unknown; use 'cosine' or 'interactions'.")
        most = math.inf if self.measure == "interactions" else 1.0
        if strange := [name for triple in self.triples for name in triple.features if name not in features]:
            raise InputError(f"FeatureAffinity: triples name {strange[0]!r}, which is not in features. Correct either.")
        cleaned: dict[str, Any] = {
            "features": features,
            "matrix": _clean_matrix("matrix", self.matrix, features, most=most),
            "tables": check_tables(self.tables, features),
            "pooling_factors": _check_pooling_factors(self.pooling_factors, features),
        }
        if self.errors is not None:
            cleaned["errors"] = _clean_matrix("errors", self.errors, features, most=math.inf)
        for name, value in cleaned.items():  # plain assignment fails in a frozen dataclass
            object.__setattr__(self, name, value)

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return len(self.features)

    @property
    def is_interactions(self) -> bool:
        """Whether the numbers are interactions; False for cosines."""
        return self.measure == "interactions"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of a hash of names and matrix; a plan records them to identify its affinity."""
        contents = hashlib.sha256("\0".join(self.features).encode())
        contents.update(np.ascontiguousarray(self.matrix).data)
        return contents.hexdigest()[:16]

    @classmethod
    def collect(
        cls,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        ids: Callable[[Any], Any] = lambda batch: getattr(batch, "sparse_features", batch),
        process_group: ProcessGroup | None = None,
    ) -> FeatureAffinity:
        """Measures how similar the embeddings of a trained model are; the model may be sharded.

        Runs only the embedding collections, each on ``ids(batch)``, in eval mode and without gradients.

        Args:
            model: contains at least one TorchRec ``EmbeddingBagCollection``, plain or sharded by
                ``DistributedModelParallel``, or a plain ``EmbeddingCollection``. Detach a train pipeline first.
            batches: a few thousand samples, in batches of any size.
            ids: returns a batch's ``KeyedJaggedTensor`` on the model's device; by default its ``sparse_features``, if
                it has this attribute, else the batch.
            process_group: ranks that make this call together, each with equally many batches, all held in memory;
                every rank gets the affinity of all samples. Required for a sharded model, with all of its ranks.

        Raises:
            InputError: TorchRec is absent; the model has no embedding collection, has two that look up the same
                feature, is attached to a train pipeline, or is sharded without a group, with tower modules or with
                sequences; there are no samples; a batch's ids lack a feature, have a variable stride or another type;
                embeddings are not finite or differ in width; or batches of a group differ in form (on every rank).
        """
        from dmt.partitioner.collect import collect_affinity  # loads torch

        return collect_affinity(model, batches, ids=ids, process_group=process_group)

    @classmethod
    def collect_interactions(
        cls, batches: Iterable[Any], *, tables: Sequence[Any] = (), seed: int = 0, max_rows: int = 2**20
    ) -> FeatureAffinity:
        """Measures which features interact, on training rows; needs neither a trained model nor TorchRec.

        Fits an additive logistic model of all features. For each pair (and triple), it then makes one Newton step for
        each cell, a combination of the pair's values. The gain is how much these steps lower the log loss of rows held
        out of both fits, averaged over three splits that each hold out a different tenth. The gain of a triple excludes
        that of its pairs. Measuring triples takes about a minute at most, if necessary on fewer rows; a note says if
        they were left out because even 20,000 rows would take longer.

        A value that occurs only once is merged with all others that do. Of a bag, the first 5 ids count, in equal
        shares. Dense columns enter the additive model in up to 32 bins, and one for NaN. More cells than about four per
        row, or than 4 million, are hashed. On a terminal, a bar shows the progress.

        Args:
            batches: training rows only, each once. A batch has ``labels`` [B] of 0 and 1, ``sparse_features`` (a
                ``KeyedJaggedTensor``, or a dict of integer arrays [B] by feature) and optionally ``dense_features``
                [B, D] and ``weights`` [B]: 0 leaves out a row, others count alike. Batches are read one at a time.
            tables: tables of the features, needed for the partitioner's limits.
            seed: seed of the splits, from 0 to 2^32 - 1.
            max_rows: most rows to read, at least 1,000. For hundreds of features, fewer are used, to end in 15 minutes.

        Raises:
            InputError: a batch does not have this form or the first one's columns, there are fewer than 1,000 rows, or
                fewer than 20 of a label, ``tables`` have other features, or ``seed`` or ``max_rows`` is out of range.
        """
        from dmt.partitioner.gains import measure_interactions

        return measure_interactions(batches, tables=tables, seed=seed, max_rows=max_rows)

    def significant(self) -> NDArray[np.float64]:
        """Returns the matrix; for interactions, 0 on the diagonal and for gains that their ``errors`` may explain."""
        if not self.is_interactions:
            return self.matrix
        gains = self.matrix * (1.0 - np.eye(self.num_features))
        if self.errors is not None:
            gains[self.matrix <= noise_bound(math.comb(self.num_features, 2)) * self.errors] = 0.0
        return gains

    def strongest(self, count: int) -> list[Interaction]:
        """Returns at most ``count`` pairs and triples: the largest gains beyond the measuring error, largest first."""
        first, second = np.triu_indices(self.num_features, k=1)
        gains = self.significant()[first, second]
        order = [k for k in np.argsort(-gains, kind="stable")[:count].tolist() if gains[k] > 0]
        pairs = [
            Interaction(
                features=(self.features[first[k]], self.features[second[k]]),
                gain=float(gains[k]),
                error=0.0 if self.errors is None else float(self.errors[first[k], second[k]]),
            )
            for k in order
        ]
        return sorted((*pairs, *self.triples), key=lambda interaction: -interaction.gain)[:count]

    def permuted(self, order: Sequence[str]) -> FeatureAffinity:
        """Returns this affinity with its features in another order.

        Raises `InputError` if ``order`` is not a permutation of the features.
        """
        position = {name: i for i, name in enumerate(self.features)}
        if sorted(order) != sorted(self.features):
            missing, unknown = sorted(set(position) - set(order)), sorted(set(order) - set(position))
            raise InputError(
                f"FeatureAffinity: the order or plan has {len(order)} names, but must name all {self.num_features} "
                f"features once (missing: {missing[:5]}, unknown: {unknown[:5]}). Correct it, or use without()."
            )
        return self._taken([position[name] for name in order])

    def without(self, names: Collection[str]) -> FeatureAffinity:
        """Returns this affinity without the features in ``names``, their tables and triples.

        Raises `InputError` if a feature in ``names`` shares a table with a feature that stays.
        """
        for table in self.tables:
            if len({feature in names for feature in table.feature_names}) > 1:
                raise InputError(
                    f"FeatureAffinity: table {table.name!r} is shared by {list(table.feature_names)!s:.200}, of which "
                    "only some are to be left out (rule 'outside' of a partition). Leave out all of them, or none."
                )
        tables = tuple(table for table in self.tables if table.feature_names[0] not in names)
        triples = tuple(triple for triple in self.triples if set(names).isdisjoint(triple.features))
        left = [i for i, name in enumerate(self.features) if name not in names]
        return self._taken(left, tables=tables, triples=triples)

    def _taken(self, index: Sequence[int], **changes: Any) -> FeatureAffinity:
        """Returns the affinity of the features at positions ``index``, in that order; ``changes`` set fields."""
        return replace(
            self,
            matrix=self.matrix[np.ix_(index, index)],
            features=tuple(self.features[i] for i in index),
            errors=None if self.errors is None else self.errors[np.ix_(index, index)],
            pooling_factors=None if self.pooling_factors is None else tuple(self.pooling_factors[i] for i in index),
            **changes,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes matrix, errors and a JSON header to a numpy ``.npz`` file; replaces an existing file.

        Raises `InputError` if the file cannot be written.
        """
        from pydantic import TypeAdapter

        header = _Header(**{name: getattr(self, name) for name in _Header.__dataclass_fields__ if name != "format"})
        arrays = {"header": np.array(TypeAdapter(_Header).dump_json(header).decode()), "matrix": self.matrix}
        if self.errors is not None:
            arrays["errors"] = self.errors
        # A file object, because numpy appends ".npz" to a path. Uncompressed, because the last digits of a mean are
        # noise: compressing 128 MB of them takes seconds and saves next to nothing.
        with write_or_raise(path, "Affinity file") as scratch, scratch.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureAffinity:
        """Reads a file that `save` wrote. It never unpickles, so an untrusted file cannot run code.

        Raises:
            InputError: the file is absent, damaged, of another kind or format version, or breaks a rule of this class.
        """
        where = f"Affinity file {path}"
        try:
            # Opened here, because numpy does not close a broken archive.
            with open(path, "rb") as file:
                archive = np.load(file, allow_pickle=False)
                arrays = {name: archive[name] for name in archive.files}
            record, matrix = json.loads(str(arrays["header"])), arrays["matrix"]
        except Exception as error:  # numpy, zipfile and zlib raise unrelated classes for a damaged archive
            # For a file that is not an archive, numpy advises allowing pickles, which is wrong and unsafe here.
            reason = "it holds no plain arrays" if "pickle" in str(error) else error
            raise InputError(f"{where}: cannot be read ({reason}). Give one made by FeatureAffinity.save.") from error
        header = from_record(_Header, record, place=where, remedy="Collect the affinity again.")
        fields = {name: getattr(header, name) for name in _Header.__dataclass_fields__ if name != "format"}
        try:
            return cls(matrix=matrix, errors=arrays.get("errors"), **fields)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Header:
    """JSON header of a file: fields of `FeatureAffinity` other than arrays."""

    format: Literal[2] = 2
    """Version of the file format."""
    features: tuple[str, ...]
    measure: Measure
    triples: tuple[Interaction, ...]
    num_samples: int | None
    loss: float | None
    tables: tuple[TableSpec, ...]
    pooling_factors: tuple[float, ...] | None
    notes: tuple[str, ...]


def noise_bound(count: int) -> float:
    """Returns how many standard errors a gain must exceed to be more than noise, if ``count`` gains are measured.

    If all gains are normal noise, the largest exceeds this bound in at most 1 of 100 measurements (Bonferroni).

    Example:
        >>> round(noise_bound(325), 2)
        4.01
    """
    return NormalDist().inv_cdf(1.0 - 0.01 / max(count, 1))


def _check_features(features: Sequence[str]) -> None:
    if (nameless := [name for name in features if not isinstance(name, str) or not name]) or not features:
        raise InputError(f"FeatureAffinity: features holds {nameless[:3] or 'nothing'}; give non-empty strings.")
    name, count = Counter(features).most_common(1)[0]
    if count > 1:
        raise InputError(f"FeatureAffinity: features has {name!r} {count} times. Name each feature once.")


def _clean_matrix(name: str, matrix: ArrayLike, features: Sequence[str], *, most: float) -> NDArray[np.float64]:
    """Checks a matrix [F, F] with values from 0 to ``most``; returns a read-only float64 copy, exactly symmetric.

    The `InputError` names the pair of features that breaks a rule most.
    """
    size = len(features)
    remedy = f"Give real numbers of shape [{size}, {size}], one row and one column for each feature."
    try:
        given = np.asarray(matrix)
    except ValueError as error:  # rows of different lengths
        why = str(error).rstrip(".")
        raise InputError(f"FeatureAffinity: {name} is not a rectangular array of numbers ({why}). {remedy}") from error
    if given.dtype.kind not in "fiub" or given.shape != (size, size):
        raise InputError(f"FeatureAffinity: {name} is {given.dtype} of shape {list(given.shape)}. {remedy}")
    given = given.astype(np.float64)
    known = np.nan_to_num(given, posinf=0.0, neginf=0.0)
    scale = 1.0 if math.isfinite(most) else max(float(known.max()), 1e-300)
    in_range = "must be from 0 to 1" if math.isfinite(most) else "must not be negative"
    for fault, rule in (
        (np.where(np.isfinite(given), 0.0, np.inf), "must be finite"),
        (np.maximum(-known, known - most) / scale, in_range),
        (np.abs(known - known.T) / scale, "must be symmetric"),
    ):
        row, column = divmod(int(np.argmax(fault)), size)
        if fault[row, column] > ROUNDING:
            a, b, there, back = features[row], features[column], given[row, column], given[column, row]
            raise InputError(
                f"FeatureAffinity: {name}[{a!r}, {b!r}] is {there:g} and {name}[{b!r}, {a!r}] is {back:g}; entries "
                f"{rule}. Check how {name} was computed."
            )
    cleaned = np.clip((given + given.T) / 2, 0.0, most)
    cleaned.flags.writeable = False
    return cleaned


def check_tables(tables: Sequence[Any], features: Sequence[str]) -> tuple[TableSpec, ...]:
    """Returns the tables (TorchRec ``EmbeddingBagConfig`` or `TableSpec`) as `TableSpec`; empty if there are none.

    Raises:
        InputError: the tables and ``features`` do not have the same features, or `table_specs` refuses the tables.
    """
    specs = table_specs(tables)
    places = {"tables": dict.fromkeys(feature_names(specs)), "affinity": dict.fromkeys(features)}
    for here, there in (("tables", "affinity"), ("affinity", "tables")) if specs else ():
        for name in places[here]:
            if name not in places[there]:
                raise InputError(
                    f"FeatureAffinity: feature {name!r} is in the {here}, but not among the features of the {there} "
                    f"({len(places[there])} in all).{did_you_mean(name, places[there])} Give both for the same model."
                )
    return specs


def _check_pooling_factors(factors: Sequence[float] | None, features: Sequence[str]) -> tuple[float, ...] | None:
    if factors is None:
        return None
    numbers = tuple(float(factor) for factor in factors)
    wrong = [
        f"{number:g} for feature {name!r}"
        for name, number in zip(features, numbers, strict=False)
        if not 0 <= number < math.inf
    ]
    if wrong or len(numbers) != len(features):
        raise InputError(
            f"FeatureAffinity: pooling_factors has {wrong[0] if wrong else f'length {len(numbers)}'}; give each of the "
            f"{len(features)} features its mean number of ids per sample, finite and not negative."
        )
    return numbers
