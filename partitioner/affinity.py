"""`FeatureAffinity`: how strongly each pair of features resembles each other in a trained model's embeddings.

Legend: F features, N embedding dim, B samples of a batch.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError, nearest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FORMAT_VERSION", "FeatureAffinity"]

FORMAT_VERSION = 1
# A matrix that went through 32-bit floats or a text file is still accepted; a wrong one is off by far more.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureAffinity:
    """The interaction matrix I of the DMT paper (arXiv 2403.00877, section 3.3), with the features' names.

    I(i, j) = abs(mean over samples of F_i . F_j) for embeddings F of length 1: 0 where two features have nothing in
    common, 1 where they always point the same (or always the opposite) way.

    `collect` measures it on a trained model. A matrix from elsewhere can be given directly; it is checked, made
    exactly symmetric, and kept read-only as float64. The diagonal is free (it is below 1 for a feature that is
    sometimes absent) and never used for partitioning.

    Raises:
        InputError: the matrix is not [F, F], finite, symmetric and within 0..1 (each up to rounding), or the names
            are empty, repeated or of another number. The pair of features at fault is named.

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

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            raise InputError(f"FeatureAffinity: features={self.features!r} is one string; give a list of names.")
        features = tuple(str(name) for name in self.features)
        _check_names(features)
        try:
            matrix = np.asarray(self.matrix).astype(np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"FeatureAffinity: matrix is not an array of numbers ({error}).") from error
        _check_matrix(matrix, features)
        matrix = np.clip((matrix + matrix.T) / 2, 0.0, 1.0)
        matrix.flags.writeable = False
        # A frozen dataclass sets its own cleaned fields this way.
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "features", features)

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
    ) -> FeatureAffinity:
        """Measures the affinity on a trained single-process model; see `dmt.partitioner.collection`.

        Args:
            model: a model with one or more TorchRec ``EmbeddingBagCollection`` anywhere inside. It is run in eval
                mode without gradients and left as it was.
            batches: some thousands of samples, as batches; consumed one at a time.
            module_path: dotted path of the collection, or of a module that holds the wanted ones; default: all.
            forward: how to run a batch, ``forward(model, batch)``; default
                ``model(batch.dense_features, batch.sparse_features)``.

        Raises:
            InputError: TorchRec is absent, no collection or batch is found, or the embeddings cannot be compared.

        Example:
            >>> import torch
            >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
            >>> pair = ["buyer", "seller"]
            >>> ids = KeyedJaggedTensor(pair, torch.tensor([0, 3, 0, 3]), lengths=torch.tensor([1, 1, 1, 1]))
            >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=pair)
            >>> model = EmbeddingBagCollection(tables=[table])
            >>> affinity = FeatureAffinity.collect(model, [ids], forward=lambda model, batch: model(batch))
            >>> affinity.num_samples, affinity.matrix.round(6).tolist()
            (2, [[1.0, 1.0], [1.0, 1.0]])
        """
        from dmt.partitioner.collection import collect_affinity

        return collect_affinity(model, batches, module_path=module_path, forward=forward)

    def permuted(self, order: Sequence[str]) -> FeatureAffinity:
        """The same affinity with its features in another order.

        Raises:
            InputError: ``order`` is not a permutation of the features.
        """
        _check_names(order)
        position = {name: i for i, name in enumerate(self.features)}
        ordered = set(order)
        missing = [name for name in self.features if name not in ordered]
        unknown = [name for name in order if name not in position]
        if missing or unknown:
            raise InputError(
                f"The order has {len(order)} features and the affinity {self.num_features}: missing {missing[:5]}, "
                f"unknown {unknown[:5]}.{nearest(unknown[0], self.features) if unknown else ''} Name each one once."
            )
        index = [position[name] for name in order]
        return FeatureAffinity(
            matrix=self.matrix[np.ix_(index, index)], features=tuple(order), num_samples=self.num_samples
        )

    def to_summary(self) -> dict[str, Any]:
        """A few numbers for `TowerPlan.affinity`; the values are those of the pairs of different features.

        The digest identifies matrix and names, so that a plan can be traced to the affinity it was made from.
        """
        pairs = self.matrix[np.triu_indices(self.num_features, k=1)]
        digest = hashlib.sha256("\0".join(self.features).encode() + self.matrix.tobytes()).hexdigest()
        return {
            "num_features": self.num_features,
            "num_samples": self.num_samples,
            "mean": float(pairs.mean()) if pairs.size else None,
            "min": float(pairs.min()) if pairs.size else None,
            "max": float(pairs.max()) if pairs.size else None,
            "digest": digest[:16],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the affinity as a numpy ``.npz`` file; an existing file is replaced in one step."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        # Through a file object: given a name, numpy would append ".npz" to it.
        with scratch.open("wb") as file:
            np.savez_compressed(
                file,
                format=np.int64(FORMAT_VERSION),
                matrix=self.matrix,
                features=np.array(self.features, dtype=np.str_),
                num_samples=np.int64(-1 if self.num_samples is None else self.num_samples),
            )
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureAffinity:
        """Reads what `save` wrote, or any ``.npz`` file with the arrays ``matrix`` and ``features``.

        Nothing is unpickled, so a file from elsewhere cannot run code.

        Raises:
            InputError: the file is absent, not such a file, of another format version, or its matrix is refused.
        """
        where = f"Affinity file {path}"
        try:
            # Opened here, because numpy leaves a broken archive open.
            with Path(path).open("rb") as file:
                archive = np.load(file, allow_pickle=False)
                # A plain .npy array comes back without names.
                arrays = {name: archive[name] for name in getattr(archive, "files", ())}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{where}: cannot be read ({error}). Expected what FeatureAffinity.save wrote.") from error
        version = int(arrays.get("format", np.int64(FORMAT_VERSION)))
        if version != FORMAT_VERSION:
            raise InputError(f"{where} has format {version}; this version reads format {FORMAT_VERSION}. Collect anew.")
        absent = [name for name in ("matrix", "features") if name not in arrays]
        if absent:
            raise InputError(f"{where} has no array {absent[0]!r}; it needs 'matrix' [F, F] and 'features' [F].")
        samples = int(arrays.get("num_samples", np.int64(-1)))
        try:
            return cls(
                matrix=arrays["matrix"],
                features=tuple(np.atleast_1d(arrays["features"]).tolist()),
                num_samples=None if samples < 0 else samples,
            )
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


def _check_names(features: Sequence[str]) -> None:
    if not features:
        raise InputError("FeatureAffinity: features is empty; give at least one feature.")
    doubled = [name for name, count in Counter(features).items() if count > 1]
    if doubled:
        raise InputError(
            f"FeatureAffinity: feature {doubled[0]!r} is given {Counter(features)[doubled[0]]} times; "
            "names must be unique."
        )


def _check_matrix(matrix: NDArray[np.float64], features: tuple[str, ...]) -> None:
    """Raises `InputError` naming the worst pair of features that breaks a rule."""
    size = len(features)
    if matrix.shape != (size, size):
        raise InputError(
            f"FeatureAffinity: matrix has shape {list(matrix.shape)} for {size} features; it must be [{size}, {size}]."
        )
    # One after the other: infinities must be out before the matrix is compared with its mirror image.
    for rule, fault_of, remedy in (
        ("must be finite", lambda m: np.where(np.isfinite(m), 0.0, np.inf), "Check the embeddings for NaN."),
        ("must lie within 0..1", lambda m: np.abs(m - 0.5) - 0.5, "Give absolute cosines of embeddings of length 1."),
        ("must equal its mirror image", lambda m: np.abs(m - m.T), "Give a symmetric matrix."),
    ):
        fault = fault_of(matrix)
        row, column = np.unravel_index(int(np.argmax(fault)), matrix.shape)
        if fault[row, column] > ROUNDING:
            raise InputError(
                f"FeatureAffinity: the affinity of {features[row]!r} with {features[column]!r} is "
                f"{matrix[row, column]:g} (mirrored: {matrix[column, row]:g}); it {rule}. {remedy}"
            )
