"""Attention over sequences of embeddings: a target attends to its history (DIN, arXiv 1706.06978, section 4.3).

An ``EmbeddingCollection`` returns a TorchRec ``JaggedTensor`` for each feature: [B] lengths and [sum of lengths, N]
values. `DINTowerModule` is the tower module of one target and one history. `PooledBySequence` pools sequences to
vectors [B, N], so that DLRM and DCN, flat and in towers, can take sequences (``data.sequences``).

Legend: B samples, J items of all histories, N embedding dimension, D the tower dimension.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.models.dense import Device, check_sizes, mlp
from dmt.plan.tables import feature_names

__all__ = ["DINTowerModule", "PooledBySequence", "SequenceTowerModule", "TargetAttention"]


class _Items(NamedTuple):
    """The embeddings of a feature's ids."""

    values_JN: Tensor
    sample_J: Tensor
    """The sample of each item, int64."""
    num_samples: int

    def sum(self) -> Tensor:
        """Sums the embeddings of each sample, in the order of its ids: [B, N]."""
        zeros = self.values_JN.new_zeros(self.num_samples, self.values_JN.shape[1])
        return zeros.index_add(0, self.sample_J, self.values_JN)


class TargetAttention(nn.Module):
    """Pools the items of a history with weights that depend on the target.

    An MLP scores each target t and item h from [t, h, t - h, t * h], each N wide. The weights of the items are the
    softmax of the scores over the history; a bias in the last layer would not change it, so there is none. A sample
    without a history gets zeros. DIN itself has no softmax, so that long histories weigh more.

    Args:
        embedding_dim: N.
        hidden: width of the MLP's hidden layer.
        device: device of the parameters.
    """

    def __init__(self, embedding_dim: int, *, hidden: int = 36, device: Device = None) -> None:
        super().__init__()
        hidden_layers = mlp(4 * embedding_dim, (hidden,), device=device)
        self.score = nn.Sequential(*hidden_layers, nn.Linear(hidden, 1, bias=False, device=device))

    def forward(self, target_BN: Tensor, items: _Items) -> Tensor:
        """Target [B, N] and the items of its history -> [B, N], float32."""
        items_JN, sample_J, num_samples = items
        score: Any = self.score
        first, activation, last = score
        of_target, of_item, of_difference, of_product = first.weight.chunk(4, dim=1)
        # The first layer is linear, so the target's part is computed once per sample, without 4 N numbers per item.
        hidden_BH = nn.functional.linear(target_BN, of_target + of_difference, first.bias)
        products_JN = target_BN.index_select(0, sample_J) * items_JN
        hidden_JH = nn.functional.linear(items_JN, of_item - of_difference)
        hidden_JH = hidden_JH + nn.functional.linear(products_JN, of_product) + hidden_BH.index_select(0, sample_J)
        weights_J = _softmax_by_sample(last(activation(hidden_JH)).squeeze(1), sample_J, num_samples)
        return torch.zeros_like(target_BN).index_add(0, sample_J, weights_J.unsqueeze(1) * items_JN)


class DINTowerModule(nn.Module):
    """Tower module in which a target attends to its history: projects the target and the pooled history to D numbers.

    A projection of both alone would lose how near the target is to its history. So their elementwise product is
    projected too, and D weights times their inner product are added. If D = 2 N, nothing is projected: the weighted
    inner product is added to target and pooled history, side by side. The tower has one table, which both share.

    Args:
        target: feature with one id per sample. As in a bag, a sample without an id has a target of zeros, and several
            ids are summed.
        history: feature with any number of ids per sample, or none.
        embedding_dim: N.
        tower_dim: D, the numbers per sample that cross hosts, however long the history is.
        hidden: width of the hidden layer of the attention's MLP (`TargetAttention`).
        device: device of the parameters.

    Raises `InputError` for a size below 1.
    """

    def __init__(
        self, target: str, history: str, *, embedding_dim: int, tower_dim: int, hidden: int = 36, device: Device = None
    ) -> None:
        super().__init__()
        check_sizes("DINTowerModule", embedding_dim=embedding_dim, tower_dim=tower_dim, hidden=hidden)
        self.features, self.in_features, self.out_features = (target, history), 2 * embedding_dim, tower_dim
        self.attention = TargetAttention(embedding_dim, hidden=hidden, device=device)
        is_whole = tower_dim == 2 * embedding_dim
        self.project = None if is_whole else nn.Linear(3 * embedding_dim, tower_dim, device=device)
        self.product = nn.Linear(1, tower_dim, bias=False, device=device)

    def forward(self, embeddings: Mapping[str, Any]) -> Tensor:
        """``JaggedTensor`` by feature, [B] lengths and [sum of lengths, N] float32 values -> [B, D] float32.

        Raises:
            InputError: a feature arrives as pooled embeddings.
        """
        target, history = (_items(embeddings, name, "DINTowerModule") for name in self.features)
        # Does not check lengths: only the ranks of this tower would raise, and all others would wait for them.
        target_BN = target.sum()
        history_BN = self.attention(target_BN, history)
        products_BN = target_BN * history_BN
        product_BD = self.product(products_BN.sum(dim=1, keepdim=True))
        if self.project is None:
            return torch.cat([target_BN, history_BN], dim=1) + product_BD
        return self.project(torch.cat([target_BN, history_BN, products_BN], dim=1)) + product_BD


class PooledBySequence(nn.Module):
    """Pools every feature of ``tables`` to [B, N]: sequences by their target's attention, other features by a sum.

    Args:
        tables: `dmt.plan.tables.TableSpec`; ``sequences`` pairs each sequence with its target.
        device: device of the parameters.

    Example:
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from dmt.plan.tables import TableSpec
        >>> names = ("item", "history")
        >>> table = TableSpec(
        ...     name="t", num_embeddings=9, embedding_dim=4, feature_names=names, sequences=(("history", "item"),)
        ... )
        >>> item = JaggedTensor(torch.ones(2, 4), lengths=torch.tensor([1, 1]))
        >>> history = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([0, 3]))
        >>> PooledBySequence([table])({"item": item, "history": history})["history"].detach().round().tolist()
        [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(self, tables: Sequence[Any], *, device: Device = None) -> None:
        super().__init__()
        self.features = tuple(feature_names(tables))
        pairs = [(table, pair) for table in tables for pair in getattr(table, "sequences", ())]
        dims = {sequence: table.embedding_dim for table, (sequence, _) in pairs}
        self._targets = dict(pair for _, pair in pairs)
        self.attentions = nn.ModuleList(TargetAttention(dims[name], device=device) for name in self._targets)

    def forward(self, embeddings: Mapping[str, Any]) -> dict[str, Tensor]:
        """``JaggedTensor`` by feature, [B] lengths and [sum of lengths, N] values -> [B, N] of each feature."""
        items = {name: _items(embeddings, name, "data.sequences") for name in self.features}
        pooled = {name: of_feature.sum() for name, of_feature in items.items() if name not in self._targets}
        for attention, (name, target) in zip(self.attentions, self._targets.items(), strict=True):
            pooled[name] = attention(pooled[target], items[name])
        return pooled


class SequenceTowerModule(nn.Sequential):
    """Tower module over an ``EmbeddingCollection``: pools, then runs a tower module of pooled embeddings.

    ``JaggedTensor`` by feature, [B] lengths and [sum of lengths, N] values -> [B, O_t].

    Args:
        pooling: `PooledBySequence` of the tower's tables.
        module: tower module that reads pooled embeddings [B, N] by feature.
    """

    def __init__(self, pooling: PooledBySequence, module: Any) -> None:
        super().__init__(OrderedDict(pooling=pooling, module=module))
        self.features, self.in_features, self.out_features = module.features, module.in_features, module.out_features


def _items(embeddings: Mapping[str, Any], name: str, owner: str) -> _Items:
    """Returns the items of feature ``name``; raises `InputError` if they arrive pooled."""
    sequence = embeddings[name]
    if isinstance(sequence, Tensor):
        raise InputError(
            f"{owner}: feature {name!r} arrives as pooled embeddings {list(sequence.shape)}, but attention needs the "
            "embedding of each id. Look it up in an EmbeddingCollection."
        )
    values, lengths = sequence.values(), sequence.lengths()
    # Not len(), which export would turn into a constant.
    num_samples, num_items = lengths.shape[0], values.shape[0]
    samples = torch.arange(num_samples, device=lengths.device)
    # Without output_size, the CPU would have to wait for a GPU.
    return _Items(values, samples.repeat_interleave(lengths, output_size=num_items), num_samples)


def _softmax_by_sample(scores_J: Tensor, sample_J: Tensor, num_samples: int) -> Tensor:
    """Returns the softmax over the items of each sample, [J]; ``sample_J`` is the sample of each item."""
    # Subtracting a constant from all scores of a sample changes neither the softmax nor its gradient.
    largest_B = scores_J.detach().new_full((num_samples,), -torch.inf)
    largest_B = largest_B.scatter_reduce(0, sample_J, scores_J.detach(), "amax")
    powers_J = (scores_J - largest_B.index_select(0, sample_J)).exp()
    total_B = torch.zeros_like(largest_B).index_add(0, sample_J, powers_J)
    return powers_J / total_B.index_select(0, sample_J)
