"""`FeatureAffinity`: how alike the embeddings of each pair of features are, as `measure_affinity.py` measures it.

Legend: F features, N embedding dim, B samples of a batch.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmt.errors import InputError, did_you_mean
from dmt.files import open_file, write_or_raise
from dmt.formatting import human_bytes
from dmt.plan.tables import TableSpec, feature_names, table_specs

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

__all__ = [
    "FORMAT_VERSION",
    "FORMS",
    "FeatureAffinity",
    "Forms",
    "check_features",
    "check_pooling_factors",
    "check_tables",
    "read_arrays",
    "tables_from_arrays",
    "tables_to_arrays",
    "write_arrays",
]


FORMAT_VERSION = 1
"""Format version of the files written here, and the only one read."""

# The file: named arrays in numpy's .npz format, nothing pickled. For every array its number of dimensions, the kinds of
# its dtype, and both in words (F features, K tables; -1 samples: not known). `_clean_matrix` checks the matrix, [F, F].
Forms = Mapping[str, tuple[int, str, str]]
FORMS: Forms = {
    "format": (0, "iu", "one whole number"),
    "features": (1, "U", "text of shape [F]"),
    "num_samples": (0, "iu", "one whole number"),
    "measure": (0, "U", "cosine or cka"),
    "pooling_factors": (1, "iuf", "numbers of shape [F]"),
    "table_names": (1, "U", "text of shape [K]"),
    "table_rows": (1, "iu", "whole numbers of shape [K]"),
    "table_dims": (1, "iu", "whole numbers of shape [K]"),
    "table_sizes": (1, "iu", "whole numbers of shape [K]"),
    "table_features": (1, "U", "text of shape [F]"),
}
# A few megabytes can unpack to gigabytes; what is larger than this is read if it is stored without compression.
_MOST_UNPACKED = 2**30
_TABLE_ARRAYS = ("table_names", "table_rows", "table_dims", "table_sizes", "table_features")
# A matrix that went through 32-bit floats or a text file is still accepted; a wrong one is off by far more.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureAffinity:
    """The interaction matrix I of the DMT paper (arXiv 2403.00877, section 3.3), with the features' names.

    I(i, j) = abs(mean over samples of F_i . F_j) for embeddings F of length 1: 0 where two features have nothing in
    common, 1 where they always point the same (or always the opposite) way. Tables of different widths have no cosines:
    there, ``measure`` is ``"cka"``, linear CKA of each pair of features (`dmt.partitioner.measure_affinity` says why).

    `collect` measures it on a trained model. A matrix from elsewhere is checked, made exactly symmetric, and kept
    read-only as float64. The diagonal (below 1 for a feature that is sometimes absent) is never used for partitioning.

    With ``tables`` and ``pooling_factors``, towers can be balanced by memory and lookup work too, without TorchRec.

    Raises:
        InputError: the matrix is not [F, F], finite, symmetric and within 0..1 (each up to rounding), or the names
            are empty, repeated or of another number. The pair of features at fault is named. Or the tables are not
            those of the features, or a pooling factor is negative or not finite.

    Example:
        >>> matrix = [[1.0, 0.8, 0.1], [0.8, 1.0, 0.2], [0.1, 0.2, 1.0]]
        >>> affinity = FeatureAffinity(matrix=matrix, features=["a", "b", "c"])
        >>> affinity.num_features, float(affinity.matrix[0, 1])
        (3, 0.8)
        >>> affinity.permuted(["c", "a", "b"]).matrix[0].tolist()
        [1.0, 0.1, 0.2]
    """

    matrix: NDArray[np.float64]
    """I, [F, F] float64; anything that `numpy.asarray` takes may be given."""
    features: tuple[str, ...]
    """The F names, in the order of rows and columns."""
    num_samples: int | None = None
    """Number of samples the mean was taken over, where known."""
    measure: Literal["cosine", "cka"] = "cosine"
    """The paper's mean cosine, or linear CKA, which `collect` takes where the tables have different widths."""
    tables: tuple[TableSpec, ...] = ()
    """The tables that the features look up, where known; TorchRec ``EmbeddingBagConfig`` may be given."""
    pooling_factors: tuple[float, ...] | None = None
    """Mean number of ids per sample of each feature, in the order of ``features``, where known."""

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            raise InputError(f"FeatureAffinity: features={self.features!r} is one string; give a list of names.")
        features = tuple(str(name) if isinstance(name, str) else name for name in self.features)
        check_features(features)
        # A frozen dataclass sets its own cleaned fields this way.
        if self.measure not in ("cosine", "cka"):
            raise InputError(f"FeatureAffinity: measure={self.measure!r} must be 'cosine' or 'cka'.")
        object.__setattr__(self, "matrix", _clean_matrix(self.matrix, features))
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "tables", check_tables(self.tables, features))
        object.__setattr__(self, "pooling_factors", check_pooling_factors(self.pooling_factors, features))

    @property
    def num_features(self) -> int:
        """F."""
        return len(self.features)

    @classmethod
    def collect(
        cls,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        module_path: str | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        process_group: ProcessGroup | None = None,
    ) -> FeatureAffinity:
        """Measures the affinity on a trained model, plain or sharded, with its tables and mean numbers of ids.

        Args:
            model: a model with one or more TorchRec ``EmbeddingBagCollection`` anywhere inside, also sharded and
                wrapped in ``DistributedModelParallel``. It is run in eval mode without gradients and left as it was.
            batches: some thousands of samples, as batches; consumed one at a time.
            module_path: dotted path of the collection, or of a module that holds the wanted ones, as in the model
                before it was wrapped for distribution; default: all.
            forward: how to run a batch, ``forward(model, batch)``; default
                ``model(batch.dense_features, batch.sparse_features)``.
            process_group: the ranks that call this together, each with batches of its own; all of them get the
                affinity of all their samples, and stop when the first one runs out of batches. Required for a sharded
                model, whose ranks are all to be in it. Without a group only this process's samples count.

        Raises:
            InputError: TorchRec is absent, no collection or batch is found, the embeddings cannot be compared, the
                model is sharded and there is no group, or its embeddings never leave their towers. With a group,
                every rank raises what one of them found.
        """
        from dmt.partitioner.measure_affinity import collect_affinity

        return collect_affinity(model, batches, module_path=module_path, forward=forward, process_group=process_group)

    def permuted(self, order: Sequence[str]) -> FeatureAffinity:
        """Returns this affinity with its features in another order.

        Raises:
            InputError: ``order`` is not a permutation of the features.
        """
        check_features(order)
        position = {name: i for i, name in enumerate(self.features)}
        ordered = set(order)
        missing = [name for name in self.features if name not in ordered]
        unknown = [name for name in order if name not in position]
        if missing or unknown:
            raise InputError(
                f"The order has {len(order)} features and the affinity {self.num_features}: missing {missing[:5]}, "
                f"unknown {unknown[:5]}.{did_you_mean(unknown[0], self.features) if unknown else ''} Name each once."
            )
        index = [position[name] for name in order]
        factors = None if self.pooling_factors is None else tuple(self.pooling_factors[i] for i in index)
        return replace(self, matrix=self.matrix[np.ix_(index, index)], features=tuple(order), pooling_factors=factors)

    def to_summary(self) -> dict[str, Any]:
        """A few numbers for `TowerPlan.affinity`; the values are those of the pairs of different features.

        The digest identifies matrix and names, so that a plan can be traced to the affinity it was made from.
        """
        # Row by row and piece by piece: copies of a large matrix would not fit beside it.
        rows = [self.matrix[i, i + 1 :] for i in range(self.num_features - 1)]
        num_pairs = sum(map(len, rows))
        digest = hashlib.sha256("\0".join(self.features).encode())
        digest.update(np.ascontiguousarray(self.matrix).data)
        return {
            "num_features": self.num_features,
            "num_samples": self.num_samples,
            "mean": math.fsum(float(row.sum()) for row in rows) / num_pairs if rows else None,
            "min": min(float(row.min()) for row in rows) if rows else None,
            "max": max(float(row.max()) for row in rows) if rows else None,
            "digest": digest.hexdigest()[:16],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the affinity as a numpy ``.npz`` file; an existing file is replaced in one step.

        Raises:
            InputError: the file cannot be written.
        """
        arrays: dict[str, Any] = {
            "format": np.int64(FORMAT_VERSION),
            "matrix": self.matrix,
            "features": np.array(self.features, dtype=np.str_),
            "num_samples": np.array(-1 if self.num_samples is None else self.num_samples, dtype=np.int64),
            "measure": np.array(self.measure),
            **tables_to_arrays(self.tables, self.pooling_factors),
        }
        write_arrays(path, arrays, what="affinity")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureAffinity:
        """Reads what `save` wrote, or any ``.npz`` file with the arrays ``matrix`` and ``features``.

        Nothing is unpickled, so a file from elsewhere cannot run code.

        Raises:
            InputError: the file is absent, damaged, not such a file, of another format version, or its contents are
                refused.
        """
        arrays = read_arrays(path, what="affinity", forms=FORMS, main="matrix")
        samples, measure = int(arrays.get("num_samples", -1)), str(arrays.get("measure", "cosine"))
        try:
            return cls(
                matrix=arrays["matrix"],
                features=tuple(arrays["features"].tolist()),
                num_samples=None if samples < 0 else samples,
                measure=cast(Any, measure),
                tables=tables_from_arrays(arrays),
                pooling_factors=tuple(arrays["pooling_factors"].tolist()) if "pooling_factors" in arrays else None,
            )
        except InputError as error:
            raise InputError(f"Affinity file {path}: {error}") from error


def check_features(features: Sequence[str], owner: str = "FeatureAffinity") -> None:
    """Raises `InputError` unless there are names, each a text and given once; ``owner`` begins the message."""
    if not features:
        raise InputError(f"{owner}: features is empty; give at least one feature.")
    nameless = [name for name in features if not isinstance(name, str) or not name]
    if nameless:
        raise InputError(f"{owner}: feature {nameless[0]!r} is no name; give texts that are not empty.")
    doubled = [(name, count) for name, count in Counter(features).items() if count > 1]
    if doubled:
        name, count = doubled[0]
        raise InputError(f"{owner}: feature {name!r} is given {count} times; names must be unique.")


def _clean_matrix(matrix: ArrayLike, features: Sequence[str]) -> NDArray[np.float64]:
    """Checks an affinity matrix [F, F]; returns a read-only float64 copy, exactly symmetric and within 0..1.

    The pair of features that breaks a rule most is named in the `InputError`.
    """
    try:
        given = np.asarray(matrix)
        if given.dtype.kind == "O":
            given = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"FeatureAffinity: matrix is not an array of numbers ({error}).") from error
    if given.dtype.kind not in "fiub":
        # Conversion would drop the imaginary parts of complex numbers.
        raise InputError(
            f"FeatureAffinity: matrix is not an array of numbers but of {given.dtype}. Give real numbers, 0..1."
        )
    size = len(features)
    if given.shape != (size, size):
        raise InputError(
            f"FeatureAffinity: matrix has shape {list(given.shape)} for {size} features; it must be [{size}, {size}]."
        )
    given = given.astype(np.float64)
    # In this order: infinities are found before the matrix is compared with its mirror image.
    rules = (
        (lambda: np.where(np.isfinite(given), 0.0, np.inf), "must be finite", "Check the embeddings for NaN."),
        (lambda: np.abs(given - 0.5) - 0.5, "must lie within 0..1", "Give absolute cosines of embeddings of length 1."),
        (lambda: np.abs(given - given.T), "must equal its mirror image", "Give a symmetric matrix."),
    )
    for fault_of, broken, remedy in rules:
        fault = fault_of()
        row, column = divmod(int(np.argmax(fault)), size)
        if fault[row, column] > ROUNDING:
            raise InputError(
                f"FeatureAffinity: the affinity of {features[row]!r} with {features[column]!r} is "
                f"{given[row, column]:g} (mirrored: {given[column, row]:g}); it {broken}. {remedy}"
            )
    cleaned = np.clip((given + given.T) / 2, 0.0, 1.0)
    cleaned.flags.writeable = False
    return cleaned


def check_tables(
    tables: Sequence[Any], features: Sequence[str], *, where: str = "FeatureAffinity"
) -> tuple[TableSpec, ...]:
    """Raises `InputError` unless the tables, if any are given, are those of the features; ``where`` begins its message.

    Returns:
        The tables (TorchRec ``EmbeddingBagConfig`` or `TableSpec`) as `TableSpec`.
    """
    specs = table_specs(tables)
    if not specs:
        return ()
    of_tables, measured = dict.fromkeys(feature_names(specs)), dict.fromkeys(features)
    for place, names, other, known in (
        ("tables", of_tables, "affinity", measured),
        ("affinity", measured, "tables", of_tables),
    ):
        strangers = [name for name in names if name not in known]
        if strangers:
            raise InputError(
                f"{where}: feature {strangers[0]!r} is in the {place} but not in the {other} ({len(of_tables)} "
                f"features in the tables, {len(measured)} in the affinity).{did_you_mean(strangers[0], known)} Both "
                "must be of one model."
            )
    return specs


def check_pooling_factors(
    factors: Sequence[float] | None, features: Sequence[str], owner: str = "FeatureAffinity"
) -> tuple[float, ...] | None:
    """Returns mean numbers of ids, one of each feature, as floats; raises `InputError` where they are none."""
    if factors is None:
        return None
    try:
        numbers = tuple(float(factor) for factor in factors)
    except (TypeError, ValueError) as error:
        raise InputError(f"{owner}: pooling_factors is not a list of numbers ({error}).") from error
    if len(numbers) != len(features):
        raise InputError(
            f"{owner}: there are {len(numbers)} pooling_factors for {len(features)} features; give one for each."
        )
    for name, number in zip(features, numbers, strict=True):
        if not 0 <= number < float("inf"):
            raise InputError(
                f"{owner}: the pooling factor of feature {name!r} is {number:g}; it is the mean number of ids "
                "per sample, finite and not negative."
            )
    return numbers


def read_arrays(path: str | os.PathLike[str], *, what: str, forms: Forms, main: str) -> dict[str, NDArray[Any]]:
    """Reads the arrays of a file that has ``features`` and the matrix ``main`` at least, in the given forms.

    ``what`` is measured: "affinity" or "interactions".

    Raises:
        InputError: the file is absent, damaged, of another format version or not of this form.
    """
    where = f"{what.capitalize()} file {path}"
    try:
        # Opened here, because numpy leaves a broken archive open.
        with open_file(path) as file:
            archive = np.load(file, allow_pickle=False)
            # A plain .npy array comes back without names.
            names = getattr(archive, "files", ())
            unpacked = sum(entry.file_size for entry in archive.zip.infolist()) if names else 0
            if unpacked > max(_MOST_UNPACKED, 2 * os.fstat(file.fileno()).st_size):
                raise OSError(f"it unpacks to {human_bytes(unpacked)}; write such a matrix uncompressed")
            arrays = {name: archive[name] for name in names}
    except Exception as error:  # What a damaged archive makes numpy, zipfile and zlib raise has no common class.
        # Numpy's advice on what is no archive at all is to allow pickles: untrue and unsafe here.
        reason = "it holds no plain arrays" if "pickle" in str(error) else error
        raise InputError(
            f"{where}: cannot be read ({reason}). Expected what Feature{what.capitalize()}.save wrote."
        ) from error
    for name, (num_dims, kinds, words) in forms.items():
        if name in arrays and (arrays[name].ndim != num_dims or arrays[name].dtype.kind not in kinds):
            found = f"{arrays[name].dtype} of shape {list(arrays[name].shape)}"
            raise InputError(
                f"{where}: array {name!r} is {found}; it must be {words}. Write it so, or collect the {what} again."
            )
    version = int(arrays.get("format", np.int64(FORMAT_VERSION)))
    if version != FORMAT_VERSION:
        raise InputError(
            f"{where} has format {version}; this version reads format {FORMAT_VERSION}. Collect the {what} again."
        )
    absent = [name for name in (main, "features") if name not in arrays]
    if absent:
        raise InputError(f"{where} has no array {absent[0]!r}; it needs {main!r} [F, F] and 'features' [F].")
    return arrays


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Any], *, what: str) -> None:
    """Writes arrays as an ``.npz`` file in one step; raises `InputError` where it cannot be written."""
    # Through a file object: given a name, numpy would append ".npz" to it. Uncompressed: the last digits of a mean are
    # noise, and packing 128 MB of them takes seconds and saves next to nothing.
    with write_or_raise(path, f"{what.capitalize()} file") as scratch, scratch.open("wb") as file:
        np.savez(file, **arrays)


def tables_to_arrays(tables: Sequence[TableSpec], pooling_factors: Sequence[float] | None) -> dict[str, NDArray[Any]]:
    """Converts tables and mean numbers of ids to arrays, as far as they are there."""
    factors = {} if pooling_factors is None else {"pooling_factors": np.array(pooling_factors, dtype=np.float64)}
    if not tables:
        return factors
    columns: tuple[list[Any], ...] = (
        [table.name for table in tables],
        [table.num_embeddings for table in tables],
        [table.embedding_dim for table in tables],
        [len(table.feature_names) for table in tables],
        feature_names(tables),
    )
    return factors | {name: np.array(column) for name, column in zip(_TABLE_ARRAYS, columns, strict=True)}


def tables_from_arrays(arrays: Mapping[str, NDArray[Any]]) -> tuple[TableSpec, ...]:
    """Reads the tables that `tables_to_arrays` wrote, if any."""
    absent = [name for name in _TABLE_ARRAYS if name not in arrays]
    if len(absent) == len(_TABLE_ARRAYS):
        return ()
    if absent:
        raise InputError(f"array {absent[0]!r} is absent; tables need all of {', '.join(_TABLE_ARRAYS)}.")
    names, rows, dims, sizes, features = (arrays[name].tolist() for name in _TABLE_ARRAYS)
    if not len(names) == len(rows) == len(dims) == len(sizes) or sum(sizes) != len(features):
        raise InputError(
            f"the arrays of its tables do not fit together: {len(names)} names, {len(rows)} rows, {len(dims)} dims, "
            f"{len(sizes)} sizes with the sum {sum(sizes)}, {len(features)} features."
        )
    if sizes and min(sizes) < 1:
        raise InputError(f"table {names[sizes.index(min(sizes))]!r} has {min(sizes)} features; it needs one at least.")
    rest = iter(features)
    return tuple(
        TableSpec(name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=tuple(islice(rest, size)))
        for name, num_rows, dim, size in zip(names, rows, dims, sizes, strict=True)
    )
