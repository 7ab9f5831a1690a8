"""Features as points in a plane whose distances follow their affinities: stress minimisation with Adam.

Legend: F points, n dims (the paper's n, well below the embedding dim).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = ["Coordinates", "distances", "embed_distances"]

STEPS_PER_CHECK = 25
NUM_DECAYS = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Coordinates:
    """Points found by `embed_distances`."""

    points: NDArray[np.float64]
    """[F, n] coordinates, with their mean at the origin."""
    stress: float
    """Sum over pairs of (distance of the points - wanted distance)^2."""
    normalized_stress: float
    """``sqrt(stress / sum of squared wanted distances)`` (Kruskal's stress-1): 0 is perfect, above 0.2 is poor."""


def distances(matrix: NDArray[np.float64], strategy: str) -> NDArray[np.float64]:
    """D = f(I) of the DMT paper (section 3.3): 1 - I for ``"coherent"``, I for ``"diverse"``; the diagonal is zero.

    Example:
        >>> distances(np.array([[1.0, 0.75], [0.75, 1.0]]), "coherent").tolist()
        [[0.0, 0.25], [0.25, 0.0]]
    """
    assert strategy in ("coherent", "diverse"), f"TowerPartitioner checks the strategy, got {strategy!r}"
    distance = 1.0 - matrix if strategy == "coherent" else matrix.copy()
    np.fill_diagonal(distance, 0.0)
    return distance


def embed_distances(
    distance: NDArray[np.float64], *, dims: int = 2, seed: int = 0, num_starts: int = 8, max_steps: int = 2000
) -> Coordinates:
    """Points whose pairwise Euclidean distances come as close as they can to given ones.

    Minimises ``sum_{j<i} (||X_i - X_j|| - D_ij)^2``, the unnumbered objective of the DMT paper's section 3.3, with Adam
    from several starts, and returns the best. Each start is run until halving the step size no longer helps.

    The starts are views of one configuration, the classical scaling of D in all its dimensions: the first looks along
    the principal axes, the others along random directions. A start of independent random points would strand single
    points on the wrong side of a group, which gradient steps cannot lift over it in a plane; in these starts points
    that are near each other in D start near each other.

    The result depends on the order of the points only by rounding and through the random numbers of the starts:
    callers who want a permutation to permute the answer sort the points first (`TowerPartitioner` does, by name).

    Args:
        distance: [F, F] symmetric, not negative, zero diagonal.
        dims: n, at least 1.
        seed: of the random directions.
        num_starts: how many starts.
        max_steps: limit on the Adam steps of one start.

    Example:
        >>> found = embed_distances(np.array([[0.0, 3.0, 5.0], [3.0, 0.0, 4.0], [5.0, 4.0, 0.0]]))
        >>> found.points.shape, found.stress < 1e-9
        ((3, 2), True)
    """
    import torch

    scale = float(distance.max())
    if scale == 0.0:
        # One point, or all in one place: nothing to move, and nothing to divide by.
        return Coordinates(points=np.zeros((len(distance), dims)), stress=0.0, normalized_stress=0.0)
    target = torch.from_numpy(distance / scale)
    generator = torch.Generator().manual_seed(seed)
    axes = _classical_scaling(target)
    best_points, best_stress = torch.empty(0), float("inf")
    for number in range(num_starts):
        points, stress = _minimise(_start(axes, dims, number, generator), target, max_steps)
        # A start must be better by more than rounding, so that ties fall the same way everywhere.
        if stress < best_stress * (1.0 - 1e-9):
            best_points, best_stress = points, stress
    centred = (best_points - best_points.mean(dim=0)) * scale
    wanted = float(target.square().sum()) / 2
    return Coordinates(
        points=centred.numpy(), stress=best_stress * scale**2, normalized_stress=float(np.sqrt(best_stress / wanted))
    )


def _classical_scaling(target: Tensor) -> Tensor:
    """Torgerson's scaling of D, [F, at most F]: exact if D is Euclidean, else its closest real part."""
    import torch

    centred = target.square()
    centred = centred - centred.mean(dim=0) - centred.mean(dim=1, keepdim=True) + centred.mean()
    eigenvalues, vectors = torch.linalg.eigh(-centred / 2)
    keep = eigenvalues > 1e-9 * eigenvalues[-1].clamp_min(1e-300)
    return (vectors[:, keep] * eigenvalues[keep].sqrt()).flip(1)


def _start(axes: Tensor, dims: int, number: int, generator: Generator) -> Tensor:
    """View ``number`` of the full configuration, [F, dims]: the principal axes first, then random directions."""
    import torch

    size, rank = axes.shape
    if number == 0:
        points = torch.zeros(size, dims, dtype=axes.dtype)
        shown = min(dims, rank)
        points[:, :shown] = axes[:, :shown]
    else:
        directions = torch.randn(rank, dims, dtype=axes.dtype, generator=generator)
        points = axes @ (directions / directions.norm(dim=0))
    # Points that coincide get equal gradients and could never part, whatever D wants.
    return points + 0.01 * torch.randn(size, dims, dtype=axes.dtype, generator=generator)


def _stress_and_gradient(points: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """The stress and its gradient [F, dims], in closed form: half the memory of autograd, and finite at distance 0."""
    import torch

    actual = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    error = actual - target
    # Coincident points have no direction to part in; the subgradient 0 is as good as any.
    pull = torch.where(actual > 0, error / torch.where(actual > 0, actual, 1.0), 0.0)
    gradient = 2.0 * (pull.sum(dim=1, keepdim=True) * points - pull @ points)
    return float(error.square().sum()) / 2, gradient


def _minimise(points: Tensor, target: Tensor, max_steps: int) -> tuple[Tensor, float]:
    """Adam from one start; the step size halves whenever a stretch of steps brings less than one part in 10,000."""
    import torch

    optimizer = torch.optim.Adam([points], lr=0.05)
    best_points, best_stress = points.clone(), float("inf")
    last_check, decays = float("inf"), 0
    for step in range(max_steps):
        stress, points.grad = _stress_and_gradient(points, target)
        if stress < best_stress:
            best_points, best_stress = points.clone(), stress
        if step % STEPS_PER_CHECK == STEPS_PER_CHECK - 1:
            if best_stress > last_check * (1.0 - 1e-4):
                decays += 1
                optimizer.param_groups[0]["lr"] /= 2
            if decays > NUM_DECAYS or best_stress == 0.0:
                break
            last_check = best_stress
        optimizer.step()
    return best_points, best_stress
