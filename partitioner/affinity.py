"""`FeatureAffinity`: how strongly each pair of features resembles each other in a trained model's embeddings.

Legend: F features, N embedding dim, B samples of a batch.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError, nearest
from dmt.partitioner.archive import FORMAT_VERSION, read_arrays, tables_from, tables_to, write_arrays
from dmt.partitioner.checks import check_names, check_pooling_factors, check_tables, clean_matrix
from dmt.tables import TableSpec

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

__all__ = ["FORMAT_VERSION", "FeatureAffinity"]


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureAffinity:
    """The interaction matrix I of the DMT paper (arXiv 2403.00877, section 3.3), with the features' names.

    I(i, j) = abs(mean over samples of F_i . F_j) for embeddings F of length 1: 0 where two features have nothing in
    common, 1 where they always point the same (or always the opposite) way.

    `collect` measures it on a trained model. A matrix from elsewhere can be given directly; it is checked, made
    exactly symmetric, and kept read-only as float64. The diagonal is free (it is below 1 for a feature that is
    sometimes absent) and never used for partitioning.

    With ``tables`` and ``pooling_factors`` it also carries what balancing towers by memory and by lookup work takes,
    so that an affinity collected once on the cluster can be partitioned anywhere, without TorchRec.

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
    tables: tuple[TableSpec, ...] = ()
    """The tables that the features look up, where known; TorchRec ``EmbeddingBagConfig`` may be given."""
    pooling_factors: tuple[float, ...] | None = None
    """Mean number of ids per sample of each feature, in the order of ``features``, where known."""

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            raise InputError(f"FeatureAffinity: features={self.features!r} is one string; give a list of names.")
        features = tuple(str(name) if isinstance(name, str) else name for name in self.features)
        check_names(features)
        # A frozen dataclass sets its own cleaned fields this way.
        object.__setattr__(self, "matrix", clean_matrix(self.matrix, features))
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
        """Measures the affinity on a trained model, plain or sharded; see `dmt.partitioner.collection`.

        The result carries the model's tables, and the mean number of ids per sample of each feature.

        Args:
            model: a model with one or more TorchRec ``EmbeddingBagCollection`` anywhere inside, also sharded and
                wrapped in ``DistributedModelParallel``. It is run in eval mode without gradients and left as it was.
            batches: some thousands of samples, as batches; consumed one at a time.
            module_path: dotted path of the collection, or of a module that holds the wanted ones, as in the model
                before it was wrapped for distribution; default: all.
            forward: how to run a batch, ``forward(model, batch)``; default
                ``model(batch.dense_features, batch.sparse_features)``.
            process_group: the ranks that call this together, each with batches of its own; all of them get the
                affinity of all their samples. Required for a sharded model, whose ranks are all to be in it. All
                ranks stop when the first one runs out of batches. Without a group only this process's samples count.

        Raises:
            InputError: TorchRec is absent, no collection or batch is found, the embeddings cannot be compared, the
                model is sharded and there is no group, or its embeddings never leave their towers. With a group,
                every rank raises what one of them found.

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

        return collect_affinity(model, batches, module_path=module_path, forward=forward, process_group=process_group)

    def permuted(self, order: Sequence[str]) -> FeatureAffinity:
        """The same affinity with its features in another order.

        Raises:
            InputError: ``order`` is not a permutation of the features.
        """
        check_names(order)
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
        arrays: dict[str, NDArray[Any]] = {
            "matrix": self.matrix,
            "features": np.array(self.features, dtype=np.str_),
            "num_samples": np.array(-1 if self.num_samples is None else self.num_samples, dtype=np.int64),
            **tables_to(self.tables),
        }
        if self.pooling_factors is not None:
            arrays["pooling_factors"] = np.array(self.pooling_factors, dtype=np.float64)
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureAffinity:
        """Reads what `save` wrote, or any ``.npz`` file with the arrays ``matrix`` and ``features``.

        Nothing is unpickled, so a file from elsewhere cannot run code.

        Raises:
            InputError: the file is absent, damaged, not such a file, of another format version, or its contents are
                refused.
        """
        arrays = read_arrays(path)
        samples = int(arrays.get("num_samples", -1))
        try:
            return cls(
                matrix=arrays["matrix"],
                features=tuple(arrays["features"].tolist()),
                num_samples=None if samples < 0 else samples,
                tables=tables_from(arrays),
                pooling_factors=tuple(arrays["pooling_factors"].tolist()) if "pooling_factors" in arrays else None,
            )
        except InputError as error:
            raise InputError(f"Affinity file {path}: {error}") from error
