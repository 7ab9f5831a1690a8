"""What a `FeatureAffinity` must be: names, matrix, tables and pooling factors, each with a clear refusal.

Legend: F features. A matrix of 4,000 features takes 128 MB, so it is checked in blocks of rows, without whole copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmt.errors import InputError, nearest
from dmt.tables import TableSpec, feature_names, table_specs

__all__ = ["check_names", "check_pooling_factors", "check_tables", "clean_matrix"]

# A matrix that went through 32-bit floats or a text file is still accepted; a wrong one is off by far more.
ROUNDING = 1e-5
# Rows that are looked at together: 4 MB of a matrix of 4,000 features.
BLOCK_ROWS = 128

# In this order: infinities must be out before the matrix is compared with its mirror image.
RULES = (
    ("must be finite", "Check the embeddings for NaN."),
    ("must lie within 0..1", "Give absolute cosines of embeddings of length 1."),
    ("must equal its mirror image", "Give a symmetric matrix."),
)


def check_names(features: Sequence[str]) -> None:
    """Checks that there are names and that none is repeated.

    Raises:
        InputError: they are not.

    Example:
        >>> check_names(["a", "b"])
    """
    if not features:
        raise InputError("FeatureAffinity: features is empty; give at least one feature.")
    nameless = [name for name in features if not isinstance(name, str) or not name]
    if nameless:
        raise InputError(f"FeatureAffinity: feature {nameless[0]!r} is no name; give texts that are not empty.")
    doubled = [(name, count) for name, count in Counter(features).items() if count > 1]
    if doubled:
        name, count = doubled[0]
        raise InputError(f"FeatureAffinity: feature {name!r} is given {count} times; names must be unique.")


def clean_matrix(matrix: ArrayLike, features: Sequence[str]) -> NDArray[np.float64]:
    """Checks an affinity matrix and makes it exactly symmetric and within 0..1.

    Args:
        matrix: [F, F] of any dtype of numbers.
        features: the F names, for messages.

    Returns:
        A read-only copy, float64.

    Raises:
        InputError: it is not [F, F], finite, symmetric and within 0..1 (each up to rounding); the pair of features
            that breaks a rule most is named.

    Example:
        >>> clean_matrix([[1.0, 0.25], [0.25, 1.0000001]], ["a", "b"]).tolist()
        [[1.0, 0.25], [0.25, 1.0]]
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
    cleaned = np.empty((size, size))
    # For each rule the largest fault so far, and where it is.
    worst = [(ROUNDING, 0, 0)] * len(RULES)
    for start in range(0, size, BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        block, mirrored = given[rows].astype(np.float64), given[:, rows].T.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinity minus infinity, which the first rule finds
            for rule, fault in enumerate(_faults(block, mirrored)):
                place = int(np.argmax(fault))
                if fault.flat[place] > worst[rule][0]:
                    worst[rule] = (float(fault.flat[place]), start + place // size, place % size)
            np.clip((block + mirrored) / 2, 0.0, 1.0, out=cleaned[rows])
    _refuse(given, worst, features)
    cleaned.flags.writeable = False
    return cleaned


def _faults(block: NDArray[np.float64], mirrored: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """For each rule by how much every element breaks it."""
    yield np.where(np.isfinite(block), 0.0, np.inf)
    yield np.abs(block - 0.5) - 0.5
    yield np.abs(block - mirrored)


def _refuse(given: NDArray[Any], worst: Sequence[tuple[float, int, int]], features: Sequence[str]) -> None:
    for (rule, remedy), (fault, row, column) in zip(RULES, worst, strict=True):
        if fault > ROUNDING:
            raise InputError(
                f"FeatureAffinity: the affinity of {features[row]!r} with {features[column]!r} is "
                f"{float(given[row, column]):g} (mirrored: {float(given[column, row]):g}); it {rule}. {remedy}"
            )


def check_tables(
    tables: Sequence[Any], features: Sequence[str], *, where: str = "FeatureAffinity"
) -> tuple[TableSpec, ...]:
    """Checks that the tables, if any are given, are those of the features: each is looked up in exactly one.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec`; may be empty.
        features: the F names of the affinity.
        where: beginning of the message.

    Raises:
        InputError: they are not; the feature is named.

    Example:
        >>> pair = TableSpec(name="t", num_embeddings=9, embedding_dim=4, feature_names=("a", "b"))
        >>> [table.name for table in check_tables([pair], ["b", "a"])]
        ['t']
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
                f"features in the tables, {len(measured)} in the affinity).{nearest(strangers[0], known)} Both must "
                "be of one model."
            )
    return specs


def check_pooling_factors(factors: Sequence[float] | None, features: Sequence[str]) -> tuple[float, ...] | None:
    """Checks the mean numbers of ids per sample.

    Args:
        factors: one for each feature, in their order; None if they are not known.
        features: the F names.

    Raises:
        InputError: their number is another, or one is negative or not finite.

    Example:
        >>> check_pooling_factors([1, 2.5], ["a", "b"])
        (1.0, 2.5)
    """
    if factors is None:
        return None
    try:
        numbers = tuple(float(factor) for factor in factors)
    except (TypeError, ValueError) as error:
        raise InputError(f"FeatureAffinity: pooling_factors is not a list of numbers ({error}).") from error
    if len(numbers) != len(features):
        raise InputError(
            f"FeatureAffinity: there are {len(numbers)} pooling_factors for {len(features)} features; give one for "
            "each."
        )
    for name, number in zip(features, numbers, strict=True):
        if not 0 <= number < float("inf"):
            raise InputError(
                f"FeatureAffinity: the pooling factor of feature {name!r} is {number:g}; it is the mean number of ids "
                "per sample, finite and not negative."
            )
    return numbers
