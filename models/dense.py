"""The dense parts of DLRM and DCN in plain PyTorch: no TorchRec, so they can be counted anywhere.

Parameter names and arithmetic are those of ``torchrec.modules.mlp``, ``torchrec.modules.crossnet`` and
``torchrec.models.dlrm``, so the state dict of each part loads into its TorchRec counterpart and back. Unlike those,
every part may be built on the meta device: ``DistributedModelParallel`` then calls ``reset_parameters`` and fills
buffers with zeros, of which there are none. Sizes that are not positive whole numbers are refused with `InputError`.

Legend: B samples, F vectors (features, or the outputs of towers), D their dimension, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmt.errors import InputError

__all__ = [
    "CrossInteraction",
    "DenseArch",
    "Device",
    "DotInteraction",
    "LowRankCrossNet",
    "MLP",
    "ModelOptions",
    "OverArch",
    "check_sizes",
    "strict_upper",
]

Device = torch.device | str | None
"""Where parameters are made; None follows PyTorch's own ``with torch.device(...)``."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of a model's two MLPs, and where the model is built."""

    dense_arch_layer_sizes: tuple[int, ...] = (512, 256)
    """Hidden sizes of the bottom MLP. The model appends the last size itself: N, or D with towers."""
    over_arch_layer_sizes: tuple[int, ...] | None = None
    """Sizes of the top MLP with its output, 1 for one logit. ``None`` or none at all: the paper's."""
    device: Device = None
    """Device of the parameters. ``None`` follows PyTorch's own ``with torch.device(...)``."""


class MLP(nn.Module):
    """Linear layers, each followed by a ReLU, the last one too: [B, I] -> [B, O], float32.

    ``layer_sizes`` are the outputs of each layer, O the last; without any, the input is passed on.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], *, device: Device = None) -> None:
        super().__init__()
        check_sizes("MLP", in_features=in_features, layer_sizes=layer_sizes)
        sizes = [in_features, *layer_sizes]
        self.out_features = sizes[-1]
        layers = (nn.Linear(*pair, device=device) for pair in itertools.pairwise(sizes))
        self._mlp = nn.Sequential(*(nn.Sequential(OrderedDict(_linear=layer, relu=nn.ReLU())) for layer in layers))

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
        if not layer_sizes:
            raise InputError("OverArch: layer_sizes is empty; give at least the number of logits.")
        check_sizes("OverArch", layer_sizes=layer_sizes)
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


def check_sizes(owner: str, *, minimum: int = 1, **sizes: int | Sequence[int]) -> None:
    """Raises `InputError` unless all sizes of a module of class ``owner`` are whole numbers of at least ``minimum``."""
    for name, given in sizes.items():
        values = given if isinstance(given, Sequence) else [given]
        for i, size in enumerate(values):
            if not isinstance(size, int) or isinstance(size, bool) or size < minimum:
                place = f"{name}[{i}]" if values is given else name
                raise InputError(f"{owner}: {place}={size!r} must be a whole number of at least {minimum}.")
