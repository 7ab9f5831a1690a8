"""The dense parts of DLRM and DCN in plain PyTorch, without TorchRec.

They compute what ``torchrec.models.dlrm`` computes. Unlike TorchRec's, they may be built on the meta device:
``DistributedModelParallel`` then calls ``reset_parameters``. It also zeroes buffers, so these parts have none.

Legend: B samples, F vectors (features, or the outputs of towers), D their dimension, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmt.errors import InputError

__all__ = [
    "CROSS_RANK",
    "Device",
    "DotInteraction",
    "LowRankCrossNet",
    "ModelOptions",
    "check_sizes",
    "mlp",
    "strict_upper",
]

Device = torch.device | str | None
"""Device of new parameters; None means PyTorch's default device, as set by ``with torch.device(...)``."""

CROSS_RANK = 512
"""Rank of every cross layer of DCN and DMT-DCN in the DMT paper, including those in towers."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of a model's two MLPs, and the model's device."""

    dense_arch_layer_sizes: tuple[int, ...] = (512, 256)
    """Hidden sizes of the bottom MLP. The model appends the last size: N, or D with towers."""
    over_arch_layer_sizes: tuple[int, ...] | None = None
    """Sizes of the top MLP including its output, 1 for one logit. ``None`` or empty for the paper's sizes."""
    device: Device = None
    """Device of the parameters. ``None`` means PyTorch's default device, as set by ``with torch.device(...)``."""


def mlp(
    in_features: int, layer_sizes: Sequence[int], *, last_is_linear: bool = False, device: Device = None
) -> nn.Sequential:
    """Makes linear layers, each followed by a ReLU: [B, I] float32 -> [B, O] float32.

    ``layer_sizes`` are the numbers of outputs of the layers; the last is O. With ``last_is_linear``, as for logits, no
    ReLU follows the last layer. Raises `InputError` for a size below 1.
    """
    check_sizes("mlp", in_features=in_features, layer_sizes=layer_sizes)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([in_features, *layer_sizes]):
        layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_is_linear else layers))


class DotInteraction(nn.Module):
    """DLRM's interaction: the dense vector, then the dot products of all pairs of the F + 1 vectors.

    One batched matrix product computes all (F + 1)^2 products, of which the strict upper triangle is kept; the paper's
    MFLOPs (Table 3) count the full product. ``num_vectors`` is F, without the dense vector; ``dim`` is D.
    """

    def __init__(self, *, num_vectors: int, dim: int) -> None:
        super().__init__()
        self.out_features = dim + num_vectors * (num_vectors + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Dense [B, D] and sparse [B, F, D] -> [B, D + F (F + 1) / 2]: dense vector, then pairs in row-major order."""
        vectors = torch.cat((dense.unsqueeze(1), sparse), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense, strict_upper(products)), dim=1)


def strict_upper(products: Tensor) -> Tensor:
    """Returns the entries above the diagonal, row by row: [B, M, M] -> [B, M (M - 1) / 2]."""
    # Not kept in a buffer: DistributedModelParallel silently zeroes the buffers of a model built on the meta device.
    size = products.shape[1]
    rows, columns = torch.triu_indices(size, size, offset=1, device=products.device)
    # Not products[:, rows, columns], which PyTorch computes entry by entry: it takes nine times as long on a CPU.
    return products.flatten(1).index_select(1, rows * size + columns)


# The train pipeline traces the model with torch.fx, which cannot trace triu_indices, because that needs real sizes.
torch.fx.wrap("strict_upper")


class _Kernels(nn.ParameterList):
    """Xavier-normal matrices or zero biases that, unlike a ``ParameterList``'s, can be initialized again in place."""

    def __init__(self, count: int, shape: tuple[int, ...], *, device: Device) -> None:
        super().__init__([nn.Parameter(torch.empty(shape, device=device)) for _ in range(count)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all values again; ``DistributedModelParallel`` calls this on a model built on the meta device."""
        for kernel in self:
            if kernel.dim() == 2:
                nn.init.xavier_normal_(kernel)
            else:
                nn.init.zeros_(kernel)


class LowRankCrossNet(nn.Module):
    """Low-rank cross layers of DCN v2 (arXiv 2008.13535, section 3): x' = x0 * (W V x + b) + x, for the input x0.

    V is [rank, I], W [I, rank] and b [I]. ``rank`` is TorchRec's ``low_rank``. Raises `InputError` for a size below 1.
    """

    def __init__(self, in_features: int, *, num_layers: int, rank: int, device: Device = None) -> None:
        super().__init__()
        check_sizes("LowRankCrossNet", in_features=in_features, num_layers=num_layers, rank=rank)
        self.W_kernels = _Kernels(num_layers, (in_features, rank), device=device)
        self.V_kernels = _Kernels(num_layers, (rank, in_features), device=device)
        self.bias = _Kernels(num_layers, (in_features,), device=device)

    def forward(self, features: Tensor) -> Tensor:
        """[B, I] float32 -> [B, I] float32."""
        crossed = features
        for w, v, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            projected = functional.linear(crossed, v)
            crossed = features * (functional.linear(projected, w) + bias) + crossed
        return crossed


def check_sizes(owner: str, *, minimum: int = 1, **sizes: int | Sequence[int]) -> None:
    """Raises `InputError` unless all sizes, arguments of ``owner``, are integers of at least ``minimum``."""
    for name, given in sizes.items():
        values, rule = (given, "integers") if isinstance(given, Sequence) else ([given], "an integer")
        for size in values:
            if not isinstance(size, int) or isinstance(size, bool) or size < minimum:
                raise InputError(f"{owner}: {name}={given!r} is invalid; use {rule} of at least {minimum}.")
