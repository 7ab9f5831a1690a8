"""Measuring `FeatureAffinity` on a trained model: hooks on its embedding collections, one streaming sum.

Legend: F features, N embedding dim, B samples of a batch.

What is computed is I = abs(mean over samples of R R^T) (arXiv 2403.00877, section 3.3), where R is the [F, N] matrix
of one sample's pooled embeddings, each scaled to length 1. **Absent features**: the embedding of an empty bag is zero
and stays zero, and its sample still counts in the mean. A pair that seldom occurs together therefore has a low
affinity, and I(i, i) is the share of samples in which feature i is present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError, nearest
from dmt.partitioner.affinity import FeatureAffinity

__all__ = ["AffinitySum", "collect_affinity"]

# Float64 elements of normalised embeddings held at a time (128 MiB): a batch is worked through in blocks of samples.
BLOCK_ELEMENTS = 2**24


class AffinitySum:
    """The running sum of R R^T over samples, in float64.

    The sum and the count are all there is to it, so the sums of several processes add up to that of their data.

    Example:
        >>> total = AffinitySum(["a", "b"])
        >>> total.add(torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [-5.0, 0.0]]]))
        >>> total.result().matrix.tolist()
        [[1.0, 0.5], [0.5, 1.0]]
    """

    def __init__(self, features: Sequence[str]) -> None:
        self.features = tuple(features)
        self.sum_FF = torch.zeros(len(self.features), len(self.features), dtype=torch.float64)
        self.num_samples = 0

    def add(self, embeddings_BFN: Tensor) -> None:
        """Adds the samples of a batch.

        Args:
            embeddings_BFN: [B, F, N] pooled embeddings of any floating dtype and device, features in our order.
        """
        num_samples, num_features, dim = embeddings_BFN.shape
        for block_BFN in embeddings_BFN.split(max(1, BLOCK_ELEMENTS // (num_features * dim))):
            unit_BFN = _normalise(block_BFN.double())
            unit_FX = unit_BFN.transpose(0, 1).reshape(num_features, -1)
            self.sum_FF += (unit_FX @ unit_FX.T).cpu()
        self.num_samples += num_samples

    def result(self) -> FeatureAffinity:
        """The affinity of all samples so far, of which there must be one at least."""
        mean = (self.sum_FF / self.num_samples).abs()
        return FeatureAffinity(matrix=mean.numpy(), features=self.features, num_samples=self.num_samples)


def collect_affinity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    module_path: str | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> FeatureAffinity:
    """The body of `FeatureAffinity.collect`, where the arguments are described.

    Needs memory for one batch of embeddings and the [F, F] sum, however many batches there are. The features of
    several collections (for instance of the towers of an ``EmbeddingTowerCollection``) are gathered within one forward.
    """
    collections = _find_collections(model, module_path)
    run = forward or _run_batch
    total: AffinitySum | None = None
    with _evaluating(model), _captured_outputs(collections) as outputs, torch.no_grad():
        for index, batch in enumerate(batches):
            outputs.clear()
            run(model, batch)
            embeddings = _by_feature(outputs, collections, index)
            if total is None:
                total = AffinitySum(tuple(embeddings))
            total.add(_stacked(embeddings, total.features, index))
    if total is None or total.num_samples == 0:
        raise InputError("FeatureAffinity.collect: batches gave no sample; give at least one batch of data.")
    return total.result()


def _normalise(embeddings: Tensor) -> Tensor:
    # Dividing by the largest element first keeps the norm of tiny and huge vectors from under- or overflowing.
    largest = embeddings.abs().amax(dim=-1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(norm > 0, norm, 1.0)


def _run_batch(model: nn.Module, batch: Any) -> Any:
    if not (hasattr(batch, "dense_features") and hasattr(batch, "sparse_features")):
        raise InputError(
            f"FeatureAffinity.collect: a batch is a {type(batch).__name__} without dense_features and sparse_features; "
            "say how to run it, for instance forward=lambda model, batch: model(batch)."
        )
    return model(batch.dense_features, batch.sparse_features)


def _find_collections(model: nn.Module, module_path: str | None) -> dict[str, nn.Module]:
    """The embedding collections at or below ``module_path``, by path."""
    try:
        from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
    except ImportError as error:
        raise InputError(
            f"FeatureAffinity.collect needs TorchRec, which cannot be imported here ({error}). Collect where it is "
            "installed and .save() the affinity; `dmt doctor` says what is missing."
        ) from error
    found = {path: part for path, part in model.named_modules() if isinstance(part, EmbeddingBagCollectionInterface)}
    if not found:
        raise InputError(
            f"FeatureAffinity.collect: {type(model).__name__} holds no EmbeddingBagCollection. Give the model that "
            "looks up the embeddings, or build FeatureAffinity(matrix=..., features=...) yourself."
        )
    if not module_path:
        return found
    wanted = {path: part for path, part in found.items() if path == module_path or path.startswith(f"{module_path}.")}
    if not wanted:
        raise InputError(
            f"FeatureAffinity.collect: there is no EmbeddingBagCollection at module_path={module_path!r}."
            f"{nearest(module_path, found)} The model has them at {', '.join(map(repr, list(found)[:5]))}."
        )
    return wanted


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    # Module by module: a user may have frozen only some parts in eval mode.
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def _captured_outputs(collections: Mapping[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """Yields a dictionary into which each collection's output falls, by path."""
    outputs: dict[str, Any] = {}

    def hook_for(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if path in outputs:
                raise InputError(
                    f"FeatureAffinity.collect: EmbeddingBagCollection {path!r} ran twice in one forward, so its "
                    "features have two embeddings per sample. Give forward= that runs it once."
                )
            outputs[path] = output

        return hook

    handles = [part.register_forward_hook(hook_for(path)) for path, part in collections.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _by_feature(outputs: Mapping[str, Any], collections: Mapping[str, nn.Module], batch: int) -> dict[str, Tensor]:
    """The [B, N] embedding of each feature, read from the collections' KeyedTensors by key."""
    embeddings: dict[str, Tensor] = {}
    home: dict[str, str] = {}
    for path in collections:
        if path not in outputs:
            continue
        output = outputs[path]
        if not hasattr(output, "to_dict"):
            raise InputError(
                f"FeatureAffinity.collect: {path!r} returned a {type(output).__name__}, not a KeyedTensor. Give the "
                "plain single-process model."
            )
        for feature, embedding in output.to_dict().items():
            if feature in home:
                raise InputError(
                    f"FeatureAffinity.collect: feature {feature!r} is looked up by {home[feature]!r} and by {path!r}; "
                    "choose one with module_path."
                )
            home[feature] = path
            embeddings[feature] = embedding
    if not embeddings:
        raise InputError(
            f"FeatureAffinity.collect: the forward of batch {batch} ran no EmbeddingBagCollection (waiting for "
            f"{', '.join(map(repr, list(collections)[:5]))}). Check forward= and module_path."
        )
    return embeddings


def _stacked(embeddings: Mapping[str, Tensor], features: Sequence[str], batch: int) -> Tensor:
    """[B, F, N] in the order of ``features``, after checking that the embeddings can be compared."""
    changed = sorted(set(embeddings) ^ set(features))
    if changed:
        raise InputError(
            f"FeatureAffinity.collect: feature {changed[0]!r} is not in every batch (see batch {batch}); every forward "
            "must look up the same features."
        )
    first = features[0]
    for feature in features:
        # Cosines exist only between vectors of one length, and pairs only within one sample.
        if embeddings[feature].shape != embeddings[first].shape:
            raise InputError(
                f"FeatureAffinity.collect: batch {batch} has embeddings [samples, dim] {list(embeddings[first].shape)} "
                f"for feature {first!r} but {list(embeddings[feature].shape)} for {feature!r}; all must agree. "
                "Train the flat model for partitioning with one embedding_dim."
            )
    stacked = torch.stack([embeddings[feature] for feature in features], dim=1)
    finite = stacked.isfinite().all(dim=2).all(dim=0)
    if not bool(finite.all()):
        feature = features[int((~finite).nonzero()[0])]
        raise InputError(
            f"FeatureAffinity.collect: the embedding of feature {feature!r} is not finite in batch {batch}. "
            "Check the trained table for NaN or infinity."
        )
    return stacked
