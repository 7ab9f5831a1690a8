"""The dense parts of DLRM and DCN in plain PyTorch: no TorchRec, so they can be counted anywhere.

Parameter names and arithmetic are those of ``torchrec.modules.mlp``, ``torchrec.modules.crossnet`` and
``torchrec.models.dlrm``, so the state dict of each part loads into its TorchRec counterpart and back. Unlike those,
every part may be built on the meta device: ``DistributedModelParallel`` then calls ``reset_parameters`` and fills
buffers with zeros, of which there are none. Sizes that are not positive whole numbers are refused with `InputError`.

Legend: B samples, F vectors (features, or the outputs of towers), D their dimension, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmt.errors import InputError

__all__ = [
    "CrossInteraction",
    "DenseArch",
    "DotInteraction",
    "LowRankCrossNet",
    "MLP",
    "ModelOptions",
    "OverArch",
    "Perceptron",
    "check_layer_sizes",
    "check_size",
    "check_sizes",
    "strict_upper",
]

Device = torch.device | str | None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of a model's two MLPs, and where the model is built.

    Raises:
        InputError: a layer size is not a positive whole number, or ``over_arch_layer_sizes`` is empty.
    """

    dense_arch_layer_sizes: tuple[int, ...] = (512, 256)
    """Hidden sizes of the bottom MLP. The model appends the last size itself: N, or D with towers."""
    over_arch_layer_sizes: tuple[int, ...] | None = None
    """Sizes of the top MLP with its output, 1 for one logit. ``None``: the paper's sizes for the model."""
    device: torch.device | str | None = None
    """Device of the parameters. ``None`` follows PyTorch's own ``with torch.device(...)``."""

    def __post_init__(self) -> None:
        # A list is what a configuration file gives; a tuple keeps the frozen dataclass immutable.
        object.__setattr__(self, "dense_arch_layer_sizes", tuple(self.dense_arch_layer_sizes))
        check_layer_sizes("ModelOptions.dense_arch_layer_sizes", self.dense_arch_layer_sizes)
        if self.over_arch_layer_sizes is not None:
            object.__setattr__(self, "over_arch_layer_sizes", tuple(self.over_arch_layer_sizes))
            check_layer_sizes("ModelOptions.over_arch_layer_sizes", self.over_arch_layer_sizes, at_least=1)


class Perceptron(nn.Module):
    """One linear layer and a ReLU: [B, I] -> [B, O], float32."""

    def __init__(self, in_features: int, out_features: int, *, device: Device = None) -> None:
        super().__init__()
        self._linear = nn.Linear(in_features, out_features, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """[B, I] -> [B, O]."""
        return torch.relu(self._linear(features))


class MLP(nn.Module):
    """Linear layers, each followed by a ReLU, the last one too: [B, I] -> [B, O], float32.

    ``layer_sizes`` are the outputs of each layer, O the last; without any, the input is passed on.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], *, device: Device = None) -> None:
        super().__init__()
        check_size("MLP: in_features", in_features)
        check_layer_sizes("MLP: layer_sizes", layer_sizes)
        sizes = [in_features, *layer_sizes]
        self.out_features = sizes[-1]
        self._mlp = nn.Sequential(*(Perceptron(i, o, device=device) for i, o in itertools.pairwise(sizes)))

    def forward(self, features: Tensor) -> Tensor:
        """[B, I] -> [B, O]."""
        return self._mlp(features)


class DenseArch(nn.Module):
    """Bottom MLP: dense features [B, I] -> one vector [B, D] beside the embeddings (DLRM, arXiv 1906.00091)."""

    def __init__(self, in_features: int, layer_sizes: Sequence[int], *, device: Device = None) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, device=device)

    def forward(self, dense_features: Tensor) -> Tensor:
        """[B, I] -> [B, D]."""
        return self.model(dense_features)


class OverArch(nn.Module):
    """Top MLP: interactions [B, I] -> logits [B, O], O usually 1; the last layer is linear.

    ``layer_sizes`` are the outputs of each layer, O the last. Raises `InputError` if there is no layer.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], *, device: Device = None) -> None:
        super().__init__()
        check_layer_sizes("OverArch: layer_sizes", layer_sizes, at_least=1)
        hidden = MLP(in_features, layer_sizes[:-1], device=device)
        self.model = nn.Sequential(hidden, nn.Linear(hidden.out_features, layer_sizes[-1], device=device))

    def forward(self, interactions: Tensor) -> Tensor:
        """[B, I] -> [B, O]."""
        return self.model(interactions)


class DotInteraction(nn.Module):
    """DLRM's interaction: the dense vector and the dot products of all pairs of the F + 1 vectors.

    All (F + 1)^2 products are computed by one batched matrix product, then the strict upper triangle is taken; the
    paper's MFLOPs (Table 3) count the full product. ``num_vectors`` is F without the dense vector, ``dim`` D.
    """

    def __init__(self, *, num_vectors: int, dim: int) -> None:
        super().__init__()
        check_sizes("DotInteraction", num_vectors=num_vectors, dim=dim)
        self.out_features = dim + num_vectors * (num_vectors + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Dense [B, D] and sparse [B, F, D] -> [B, D + F (F + 1) / 2]; pairs in row-major order, dense vector first."""
        vectors = torch.cat((dense.unsqueeze(1), sparse), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense, strict_upper(products)), dim=1)


def strict_upper(products: Tensor) -> Tensor:
    """Takes the entries above the diagonal, row by row: [B, M, M] -> [B, M (M - 1) / 2]."""
    # The indices are made here and not kept in a buffer: DistributedModelParallel overwrites buffers of a model built
    # on the meta device with zeros, and nothing would fail.
    size = products.shape[1]
    rows, columns = torch.triu_indices(size, size, offset=1, device=products.device)
    # Not products[:, rows, columns], which PyTorch computes entry by entry: nine times as long on a CPU.
    return products.flatten(1).index_select(1, rows * size + columns)


# The train pipeline traces the model with torch.fx, which cannot trace triu_indices: it needs real sizes.
torch.fx.wrap("strict_upper")


class _Kernels(nn.ParameterList):
    """Xavier-normal matrices or zero biases that, unlike a plain ``ParameterList``, can be drawn again in place."""

    def __init__(self, count: int, shape: tuple[int, ...], *, device: Device) -> None:
        super().__init__([nn.Parameter(torch.empty(shape, device=device)) for _ in range(count)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all values again; `DistributedModelParallel` calls this after building on the meta device."""
        for kernel in self:
            if kernel.is_meta:  # no values to draw, for which PyTorch takes a millisecond
                continue
            if kernel.dim() == 2:
                nn.init.xavier_normal_(kernel)
            else:
                nn.init.zeros_(kernel)


class LowRankCrossNet(nn.Module):
    """Low-rank cross layers of DCN v2 (arXiv 2008.13535, section 3): x' = x0 * (W V x + b) + x.

    V is [rank, I] and W [I, rank]; TorchRec calls the rank ``low_rank``.
    """

    def __init__(self, in_features: int, *, num_layers: int, rank: int, device: Device = None) -> None:
        super().__init__()
        check_sizes("LowRankCrossNet", in_features=in_features, num_layers=num_layers, rank=rank)
        self.num_layers = num_layers
        self.W_kernels = _Kernels(num_layers, (in_features, rank), device=device)
        self.V_kernels = _Kernels(num_layers, (rank, in_features), device=device)
        self.bias = _Kernels(num_layers, (in_features,), device=device)

    def forward(self, features: Tensor) -> Tensor:
        """[B, I] -> [B, I]."""
        crossed = features
        for layer in range(self.num_layers):
            projected = functional.linear(crossed, self.V_kernels[layer])
            crossed = features * (functional.linear(projected, self.W_kernels[layer]) + self.bias[layer]) + crossed
        return crossed


class CrossInteraction(nn.Module):
    """DCN's interaction: `LowRankCrossNet` over the dense vector and all sparse vectors side by side.

    ``num_vectors`` is F without the dense vector, ``dim`` D.
    """

    def __init__(self, *, num_vectors: int, dim: int, num_layers: int, rank: int, device: Device = None) -> None:
        super().__init__()
        check_sizes("CrossInteraction", num_vectors=num_vectors, dim=dim)
        self.out_features = (num_vectors + 1) * dim
        self.crossnet = LowRankCrossNet(self.out_features, num_layers=num_layers, rank=rank, device=device)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Dense [B, D] and sparse [B, F, D] -> [B, (F + 1) D]."""
        return self.crossnet(torch.cat((dense, sparse.flatten(1)), dim=1))


def check_size(name: str, value: int, *, minimum: int = 1) -> None:
    """Raises `InputError` unless ``value`` is a whole number of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InputError(f"{name}={value!r} must be a whole number of at least {minimum}.")


def check_sizes(owner: str, **sizes: int) -> None:
    """Raises `InputError` unless all sizes of a module of class ``owner`` are positive whole numbers."""
    for name, size in sizes.items():
        check_size(f"{owner}: {name}", size)


def check_layer_sizes(name: str, sizes: Sequence[int], *, at_least: int = 0) -> None:
    """Raises `InputError` unless ``sizes`` are positive whole numbers, at least ``at_least`` of them."""
    if len(sizes) < at_least:
        raise InputError(f"{name}={tuple(sizes)!r} needs at least {at_least} layer size.")
    for i, size in enumerate(sizes):
        check_size(f"{name}[{i}]", size)
