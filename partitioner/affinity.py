"""`FeatureAffinity`: how features relate, as alike embeddings or as interactions; the one measure of the partitioner.

Legend: F features.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
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

# A matrix that went through 32-bit floats or a text file is still accepted; a wrong one is off by far more.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """A pair or triple of features that predicts the label together better than its parts."""

    features: tuple[str, ...]
    gain: float
    """Nats of held-out log loss of a row; of a triple, beyond what its pairs gain."""
    error: float = 0.0
    """Standard error of the gain, where known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureAffinity:
    """A number for every pair of features: how alike their embeddings are, or how much they interact.

    **Resemblance** (``measure="cosine"``) is the interaction matrix I of the DMT paper (arXiv 2403.00877, section 3.3):
    I(i, j) = abs(mean over samples of F_i . F_j) for embeddings F of length 1, 0 where two features have nothing in
    common and 1 where they always point the same (or always the opposite) way. `collect` measures it on a model.

    **Interactions** (``"interactions"``, not in the paper) are gains in nats per row: what two features, known
    together, tell about the label beyond the sum of what all features tell alone; of ``triples``, beyond their pairs.
    `collect_interactions` measures them on training rows without a model.

    A matrix from elsewhere is checked, made exactly symmetric, and kept read-only as float64. The diagonal is never
    used. With ``tables`` and ``pooling_factors``, towers can be balanced by memory and lookup work too.

    Raises:
        InputError: the matrix is not [F, F], finite, symmetric and in range (each up to rounding), or the names are
            empty or repeated; the pair of features at fault is named. Or the tables are not those of the features, or a
            pooling factor is negative or not finite.

    Example:
        >>> matrix = [[1.0, 0.8, 0.1], [0.8, 1.0, 0.2], [0.1, 0.2, 1.0]]
        >>> affinity = FeatureAffinity(matrix=matrix, features=["a", "b", "c"])
        >>> affinity.num_features, float(affinity.matrix[0, 1])
        (3, 0.8)
        >>> affinity.permuted(["c", "a", "b"]).matrix[0].tolist()
        [1.0, 0.1, 0.2]
    """

    matrix: NDArray[np.float64]
    """[F, F] float64; anything that `numpy.asarray` takes may be given."""
    features: tuple[str, ...]
    """The F names, in the order of rows and columns."""
    measure: Measure = "cosine"
    errors: NDArray[np.float64] | None = None
    """[F, F] standard errors of interactions, where known."""
    triples: tuple[Interaction, ...] = ()
    """Triples that interact beyond their pairs."""
    num_samples: int | None = None
    """Number of samples or rows that were measured, where known."""
    loss: float | None = None
    """Log loss of a row under the additive model of `collect_interactions`, in nats: what a gain is a share of."""
    tables: tuple[TableSpec, ...] = ()
    """The tables that the features look up, where known; TorchRec ``EmbeddingBagConfig`` may be given."""
    pooling_factors: tuple[float, ...] | None = None
    """Mean number of ids per sample of each feature, in the order of ``features``, where known."""
    notes: tuple[str, ...] = ()
    """Warnings about the data in whole sentences, such as that a feature is constant."""

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            raise InputError(f"FeatureAffinity: features={self.features!r} is one string; give a list of names.")
        features = tuple(str(name) if isinstance(name, str) else name for name in self.features)
        _check_features(features)
        if self.measure not in get_args(Measure):
            raise InputError(f"FeatureAffinity: measure={self.measure!r} must be 'cosine' or 'interactions'.")
        most = math.inf if self.measure == "interactions" else 1.0
        strange = [name for triple in self.triples for name in triple.features if name not in features]
        if strange:
            raise InputError(f"FeatureAffinity: feature {strange[0]!r} of a triple is not among the features.")
        cleaned: dict[str, Any] = {
            "features": features,
            "matrix": _clean_matrix("matrix", self.matrix, features, most=most),
            "tables": check_tables(self.tables, features),
            "pooling_factors": _check_pooling_factors(self.pooling_factors, features),
        }
        if self.errors is not None:
            cleaned["errors"] = _clean_matrix("errors", self.errors, features, most=math.inf)
        for name, value in cleaned.items():  # a frozen dataclass sets its cleaned fields this way
            object.__setattr__(self, name, value)

    @property
    def num_features(self) -> int:
        """F."""
        return len(self.features)

    @property
    def is_interactions(self) -> bool:
        """True for interactions, False for resemblance."""
        return self.measure == "interactions"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the names and the matrix, which identify the measure that a plan was made from."""
        contents = hashlib.sha256("\0".join(self.features).encode())
        contents.update(np.ascontiguousarray(self.matrix).data)
        return contents.hexdigest()[:16]

    @classmethod
    def collect(
        cls,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        ids: Callable[[Any], Any] = lambda batch: batch.sparse_features,
        process_group: ProcessGroup | None = None,
    ) -> FeatureAffinity:
        """Measures how alike the embeddings of a trained model are, plain or sharded.

        Only the embedding collections run, each on ``ids(batch)``, in eval mode and without gradients.

        Args:
            model: a model with one or more TorchRec ``EmbeddingBagCollection`` anywhere inside, also sharded and
                wrapped in ``DistributedModelParallel``; a train pipeline is detached from it before.
            batches: some thousands of samples, as batches.
            ids: the ``KeyedJaggedTensor`` of a batch, on the model's device.
            process_group: the ranks that call this together, each with equally many batches of its own; all get the
                affinity of all samples. Required for a sharded model, whose ranks must all be in it.

        Raises:
            InputError: TorchRec is absent, no collection or sample is found, the embeddings are not finite or of
                different widths, the model is sharded and there is no group, or its embeddings never leave their
                towers. With a group, on every rank.
        """
        from dmt.partitioner.collect import collect_affinity  # loads torch

        return collect_affinity(model, batches, ids=ids, process_group=process_group)

    @classmethod
    def collect_interactions(
        cls,
        batches: Iterable[Any],
        *,
        tables: Sequence[Any] = (),
        seed: int = 0,
        max_rows: int = 2**20,
    ) -> FeatureAffinity:
        """Measures which features interact, on training rows. No trained model and no TorchRec is needed.

        Fits an additive logistic model of all features, then for each pair (and triple) one step for each cell of its
        values. The gain is how much the steps lower the log loss of rows held out of both fits: the mean of three
        splits, each with another tenth of the rows. Gains of triples are those beyond their pairs; triples take at most
        about a minute, on fewer rows if necessary, and are left out, with a note, if 20,000 rows would take more.

        Rows take 8 bytes per id, at most 2 GiB. Values that occur in one row only are merged, bags count by their first
        5 ids in equal shares, and dense columns enter the additive model in 32 bins. Cells beyond 4 million are hashed.
        On a terminal, a bar shows the progress.

        Args:
            batches: of training rows only, each with ``labels`` [B] of 0 and 1, ``sparse_features`` (a
                ``KeyedJaggedTensor``, or whole numbers [B] by feature), and optionally ``dense_features`` [B, D] and
                ``weights`` [B], 0 for rows to leave out. Consumed one at a time.
            tables: those of the features, to be kept for the partitioner's limits.
            seed: of the splits.
            max_rows: rows to read at most. Hundreds of features are measured on fewer: pairs in about 20 minutes.

        Raises:
            InputError: a batch is not of this form, there are too few rows, or all have one label.
        """
        from dmt.partitioner.gains import measure_interactions

        return measure_interactions(batches, tables=tables, seed=seed, max_rows=max_rows)

    def significant(self) -> NDArray[np.float64]:
        """[F, F] the matrix, with interactions that may be errors of measuring as 0 (`noise_bound`), like the diagonal.

        Resemblance is returned as it is.
        """
        if not self.is_interactions:
            return self.matrix
        gains = self.matrix * (1.0 - np.eye(self.num_features))
        if self.errors is not None:
            gains[self.matrix <= noise_bound(math.comb(self.num_features, 2)) * self.errors] = 0.0
        return gains

    def strongest(self, count: int) -> list[Interaction]:
        """Returns the pairs and triples whose gain exceeds the error of measuring, largest first."""
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

        Raises:
            InputError: ``order`` is not a permutation of the features.
        """
        position = {name: i for i, name in enumerate(self.features)}
        if sorted(order) != sorted(self.features):
            missing, unknown = sorted(set(position) - set(order)), sorted(set(order) - set(position))
            raise InputError(
                f"FeatureAffinity: an order of {len(order)} features for {self.num_features}: missing {missing[:5]}, "
                f"unknown {unknown[:5]}. Name each once."
            )
        return self._taken([position[name] for name in order])

    def without(self, names: Collection[str]) -> FeatureAffinity:
        """Returns this affinity without some features, their tables and triples.

        Raises:
            InputError: one shares a table with a feature that stays.
        """
        for table in self.tables:
            if len({feature in names for feature in table.feature_names}) > 1:
                raise InputError(
                    f"FeatureAffinity: table {table.name!r} is shared by {list(table.feature_names)}, of which only "
                    "some are to be left out. Leave out all of them, or none."
                )
        tables = tuple(table for table in self.tables if table.feature_names[0] not in names)
        triples = tuple(triple for triple in self.triples if set(names).isdisjoint(triple.features))
        left = [i for i, name in enumerate(self.features) if name not in names]
        return self._taken(left, tables=tables, triples=triples)

    def _taken(self, index: Sequence[int], **changes: Any) -> FeatureAffinity:
        """This affinity of some features, by their numbers, in this order, with other fields changed."""
        return replace(
            self,
            matrix=self.matrix[np.ix_(index, index)],
            features=tuple(self.features[i] for i in index),
            errors=None if self.errors is None else self.errors[np.ix_(index, index)],
            pooling_factors=None if self.pooling_factors is None else tuple(self.pooling_factors[i] for i in index),
            **changes,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a numpy ``.npz`` file of the matrix, the errors and a JSON header; an existing file is replaced.

        Raises:
            InputError: the file cannot be written.
        """
        from pydantic import TypeAdapter

        header = _Header(**{name: getattr(self, name) for name in _Header.__dataclass_fields__ if name != "format"})
        arrays = {"header": np.array(TypeAdapter(_Header).dump_json(header).decode()), "matrix": self.matrix}
        if self.errors is not None:
            arrays["errors"] = self.errors
        # Through a file object: given a name, numpy would append ".npz" to it. Uncompressed: the last digits of a mean
        # are noise, and packing 128 MB of them takes seconds and saves next to nothing.
        with write_or_raise(path, "Affinity file") as scratch, scratch.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureAffinity:
        """Reads what `save` wrote. Nothing is unpickled, so a file from elsewhere cannot run code.

        Raises:
            InputError: the file is absent, damaged, not such a file, of another format version, or its contents are
                refused.
        """
        where = f"Affinity file {path}"
        try:
            # Opened here, because numpy leaves a broken archive open.
            with open(path, "rb") as file:
                archive = np.load(file, allow_pickle=False)
                arrays = {name: archive[name] for name in archive.files}
            record, matrix = json.loads(str(arrays["header"])), arrays["matrix"]
        except Exception as error:  # What a damaged archive makes numpy, zipfile and zlib raise has no common class.
            # Numpy's advice on what is no archive at all is to allow pickles: untrue and unsafe here.
            reason = "it holds no plain arrays" if "pickle" in str(error) else error
            raise InputError(f"{where}: cannot be read ({reason}). Give what FeatureAffinity.save wrote.") from error
        header = from_record(_Header, record, place=where, remedy="Collect the affinity again.")
        fields = {name: getattr(header, name) for name in _Header.__dataclass_fields__ if name != "format"}
        try:
            return cls(matrix=matrix, errors=arrays.get("errors"), **fields)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a file holds besides its arrays; the fields of `FeatureAffinity`."""

    format: Literal[2] = 2
    """Version of the file."""
    features: tuple[str, ...]
    measure: Measure
    triples: tuple[Interaction, ...] = field(default=())
    num_samples: int | None
    loss: float | None
    tables: tuple[TableSpec, ...]
    pooling_factors: tuple[float, ...] | None
    notes: tuple[str, ...]


def noise_bound(count: int) -> float:
    """Standard errors that the largest of so many gains of nothing stays below, but for 1 of 100 measurements.

    Bonferroni's bound on normal errors.

    Example:
        >>> round(noise_bound(325), 2)
        4.01
    """
    return NormalDist().inv_cdf(1.0 - 0.01 / max(count, 1))


def _check_features(features: Sequence[str]) -> None:
    nameless = [name for name in features if not isinstance(name, str) or not name]
    if nameless or not features:
        raise InputError(f"FeatureAffinity: features={list(features)[:5]} must be names; give texts, none empty.")
    name, count = Counter(features).most_common(1)[0]
    if count > 1:
        raise InputError(f"FeatureAffinity: feature {name!r} is given {count} times; names must be unique.")


def _clean_matrix(name: str, matrix: ArrayLike, features: Sequence[str], *, most: float) -> NDArray[np.float64]:
    """Checks a matrix [F, F] of 0 to ``most``; returns a read-only float64 copy, exactly symmetric.

    The pair of features that breaks a rule most is named in the `InputError`.
    """
    size = len(features)
    try:
        given = np.asarray(matrix)
        fits = given.dtype.kind in "fiub" and given.shape == (size, size)  # complex numbers would lose a part
    except ValueError as error:  # rows of unlike lengths
        raise InputError(f"FeatureAffinity: {name} is not an array of numbers ({error}).") from error
    if not fits:
        raise InputError(
            f"FeatureAffinity: {name} is {given.dtype} of shape {list(given.shape)}; it must be real numbers of shape "
            f"[{size}, {size}], a row and a column for each feature."
        )
    given = given.astype(np.float64)
    known = np.nan_to_num(given, posinf=0.0, neginf=0.0)
    scale = 1.0 if math.isfinite(most) else max(float(known.max()), 1e-300)
    range_of = "must be 0 to 1" if math.isfinite(most) else "must not be negative"
    for fault, broken in (
        (np.where(np.isfinite(given), 0.0, np.inf), "must be finite"),
        (np.maximum(-known, known - most) / scale, range_of),
        (np.abs(known - known.T) / scale, "must equal its mirror image"),
    ):
        row, column = divmod(int(np.argmax(fault)), size)
        if fault[row, column] > ROUNDING:
            raise InputError(
                f"FeatureAffinity: {name} of {features[row]!r} with {features[column]!r} is {given[row, column]:g} "
                f"(mirrored: {given[column, row]:g}); it {broken}. Check what it was computed from."
            )
    cleaned = np.clip((given + given.T) / 2, 0.0, most)
    cleaned.flags.writeable = False
    return cleaned


def check_tables(tables: Sequence[Any], features: Sequence[str]) -> tuple[TableSpec, ...]:
    """The tables (TorchRec ``EmbeddingBagConfig`` or `TableSpec`) as `TableSpec`; empty if there are none.

    Raises:
        InputError: a feature of the tables is not among ``features``, or the other way round.
    """
    specs = table_specs(tables)
    places = {"tables": dict.fromkeys(feature_names(specs)), "affinity": dict.fromkeys(features)}
    for here, there in (("tables", "affinity"), ("affinity", "tables")) if specs else ():
        for name in places[here]:
            if name not in places[there]:
                raise InputError(
                    f"FeatureAffinity: feature {name!r} is in the {here} but not in the {there} of "
                    f"{len(places[there])} features.{did_you_mean(name, places[there])} Both must be of one model."
                )
    return specs


def _check_pooling_factors(factors: Sequence[float] | None, features: Sequence[str]) -> tuple[float, ...] | None:
    if factors is None:
        return None
    numbers = tuple(float(factor) for factor in factors)
    wrong = [
        f"{number:g} of feature {name!r}"
        for name, number in zip(features, numbers, strict=False)
        if not 0 <= number < math.inf
    ]
    if wrong or len(numbers) != len(features):
        raise InputError(
            f"FeatureAffinity: pooling_factors has {wrong[0] if wrong else f'{len(numbers)} numbers'}; give each of "
            f"the {len(features)} features its mean number of ids per sample, finite and not negative."
        )
    return numbers
