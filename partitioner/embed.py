"""Features as points in a plane whose distances follow their affinities: stress minimisation with Adam.

Legend: F points, n dims (the paper's n, well below the embedding dim), K configurations that are moved side by side
(the starts of a search). No operation mixes two configurations of a [K, F, n] tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Adam",
    "Coordinates",
    "StressFunction",
    "converge",
    "descend",
    "distances",
    "embed_distances",
    "exact_stress",
]

# Adam steps of a start with its lifted dimension, and then without; of a later try likewise.
FIRST_RUN = (100, 80)
LATER_RUN = (120, 80)
# Extent of the lifted dimension at the beginning of a later try, as a share of that of the points.
LIFTED_EXTENTS = (0.3, 0.1, 1.0)
RATE = 0.05
# Above this number of points, only the best start is run until it converges.
ONE_FINALIST_ABOVE = 256
# Above this number, starts are few and get more tries.
MORE_TRIES_ABOVE = 128
# Above this number, only the leading axes of the classical scaling are found.
FULL_SCALING_UP_TO = 1000
# Elements of a block of rows: the passes over it stay in a core's cache.
BLOCK_ELEMENTS = 1 << 15
# Weight of a lifted dimension's squares at the end of `descend`, as a share of the curvature F of the stress.
SQUEEZE = 0.5
STEPS_PER_CHECK = 20
NUM_HALVINGS = 8
CONVERGED = 1e-5


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
    """D = f(I) of the DMT paper (section 3.3): 1 - I for ``"coherent"``, I for ``"diverse"``; the diagonal is zero."""
    assert strategy in ("coherent", "diverse"), f"TowerPartitioner checks the strategy, got {strategy!r}"
    distance = 1.0 - matrix if strategy == "coherent" else matrix.copy()
    np.fill_diagonal(distance, 0.0)
    return distance


def embed_distances(
    distance: NDArray[np.float64],
    *,
    dims: int = 2,
    seed: int = 0,
    num_starts: int | None = None,
    max_steps: int = 2500,
) -> Coordinates:
    """Finds points whose pairwise Euclidean distances come as close as they can to given ones.

    Minimises ``sum_{j<i} (||X_i - X_j|| - D_ij)^2``, the unnumbered objective of the DMT paper's section 3.3, with Adam
    from several starts, and returns the best.

    In a plane, points get in each other's way: one on the wrong side of a group cannot be moved through it by gradient
    steps, whatever their size. So every descent begins with one lifted dimension more than wanted, which is then
    squeezed flat (`descend`). A start is a view of the classical scaling of D: the first along the principal axes, the
    others along random directions. Each start is then lifted at random and squeezed again a few times, and keeps the
    better result. The best of all are run until Adam converges (`converge`).

    Args:
        distance: [F, F] symmetric, not negative, zero diagonal.
        dims: n, at least 1.
        seed: of the random numbers, at least 0.
        num_starts: number of starts; by default 2500 / F, at most 32 and at least 1.
        max_steps: limit on the Adam steps of one start, with those until it converges; the first 180 are always taken.

    Example:
        >>> found = embed_distances(np.array([[0.0, 3.0, 5.0], [3.0, 0.0, 4.0], [5.0, 4.0, 0.0]]))
        >>> found.points.shape, found.stress < 1e-7
        ((3, 2), True)
    """
    import torch

    size, scale = len(distance), float(distance.max())
    if scale == 0.0:
        # One point, or all in one place: nothing to move, and nothing to divide by.
        return Coordinates(points=np.zeros((size, dims)), stress=0.0, normalized_stress=0.0)
    target = torch.from_numpy(distance / scale)
    if num_starts is None:
        num_starts = max(1, min(32, 2500 // size))
    generators = [np.random.default_rng((seed, number)) for number in range(num_starts)]
    with _one_thread():
        found, num_steps = _search(target, dims, generators, max_steps)
        points, stress = converge(found, StressFunction(target), max_steps=max_steps - num_steps)
        best = points[int(stress.argmin())]
        best_stress = exact_stress(best, target)
    wanted = float(np.square(distance / scale).sum()) / 2
    return Coordinates(
        points=((best - best.mean(dim=0)) * scale).numpy(),
        stress=best_stress * scale**2,
        normalized_stress=float(np.sqrt(best_stress / wanted)),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps the order of sums, and so the towers, independent of the number of threads torch has."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _search(target: Tensor, dims: int, generators: list[np.random.Generator], max_steps: int) -> tuple[Tensor, int]:
    """The most promising configurations, [at most K, F, n], and the number of Adam steps taken from each start."""
    import torch

    size = len(target)
    function = StressFunction(target)

    def run(points: Tensor, steps: tuple[int, int]) -> Tensor:
        flat = descend(points, function, rates=[RATE] * steps[0], num_lifted=1)
        # Down to a fiftieth, so that the stress of two runs can be compared.
        cooling = [RATE * 0.02 ** (number / steps[1]) for number in range(steps[1])]
        return descend(flat, function, rates=cooling)

    points = run(_starts(_classical_scaling(target, dims + 1), dims + 1, generators), FIRST_RUN)
    stress, _ = function(points)
    num_steps = sum(FIRST_RUN)
    num_tries = 2 if size > FULL_SCALING_UP_TO else 9 if size > MORE_TRIES_ABOVE else 5
    for number in range(num_tries):
        if num_steps + 2 * sum(LATER_RUN) > max_steps:
            break
        extent = LIFTED_EXTENTS[number % len(LIFTED_EXTENTS)] * points.std(dim=(1, 2), keepdim=True)
        other = run(torch.cat([points, extent * _normal(generators, size, 1)], dim=2), LATER_RUN)
        num_steps += sum(LATER_RUN)
        other_stress, _ = function(other)
        # Better by more than rounding, so that ties fall the same way everywhere.
        better = other_stress < stress * (1.0 - 1e-6)
        points = torch.where(better[:, None, None], other, points)
        stress = torch.where(better, other_stress, stress)
    if size > ONE_FINALIST_ABOVE:
        return points[stress.argmin()][None], num_steps
    # Convergence may still change the order of those this close.
    return points[stress <= stress.min() * 1.001], num_steps


def _normal(generators: list[np.random.Generator], *shape: int) -> Tensor:
    """Standard normal numbers, [K, *shape] float64, one generator for each start."""
    import torch

    return torch.from_numpy(np.stack([generator.standard_normal(shape) for generator in generators]))


def _starts(axes: Tensor, dims: int, generators: list[np.random.Generator]) -> Tensor:
    """Views of the classical scaling, [K, F, dims]: along the principal axes first, then along random directions."""
    size, rank = axes.shape
    directions = _normal(generators, rank, dims)
    points = axes @ (directions / directions.norm(dim=1, keepdim=True))
    points[0] = 0.0
    points[0, :, :rank] = axes[:, :dims]
    # Points that coincide get equal gradients and could never part, whatever D wants.
    return points + 0.01 * _normal(generators, size, dims)


def _classical_scaling(target: Tensor, dims: int) -> Tensor:
    """Torgerson's scaling of D, [F, at most F]: exact if D is Euclidean, else its closest real part.

    Above 1,000 points only its 16 leading axes (more if ``dims`` needs them), which are all that one start looks at.
    """
    import torch

    # Half the negated squares, centred: both signs and the factor at once, in place.
    centred = target.square().mul_(-0.5)
    means = centred.mean(dim=0)
    centred.sub_(means).sub_(means[:, None]).add_(means.mean())
    if len(target) <= FULL_SCALING_UP_TO:
        eigenvalues, vectors = torch.linalg.eigh(centred)
        eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)
    else:
        first = np.random.default_rng(0).standard_normal((len(target), max(16, dims)))
        eigenvalues, vectors = torch.lobpcg(centred, X=torch.from_numpy(first), niter=30, tol=1e-4)
    keep = eigenvalues > 1e-9 * eigenvalues[0].clamp_min(1e-300)
    return vectors[:, keep] * eigenvalues[keep].sqrt()


class StressFunction:
    """``sum_{j<i} (||X_i - X_j|| - D_ij)^2`` of K configurations, and its gradient (DMT paper, section 3.3).

    With w_ij = D_ij / ||X_i - X_j||, the gradient at point i is ``2 (F X_i - sum_j w_ij (X_i - X_j))`` for centred X,
    and the stress needs no more than the same sums. So one pass over the F^2 pairs, a block of rows at a time, gives
    both; autograd would keep several [F, F] tensors. Coincident points have the gradient 0.

    Args:
        target: D, [F, F] floating, symmetric with a zero diagonal. Points must have its dtype.
    """

    def __init__(self, target: Tensor) -> None:
        import torch

        self.num_points = len(target)
        self._target = target
        self._shortest = torch.finfo(target.dtype).eps
        self._sum_of_squares = float(target.flatten().dot(target.flatten())) / 2

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(stress, [K]; gradient, [K, F, n]) at ``points``, [K, F, n]."""
        import torch

        num_starts, size, _ = points.shape
        points = points - points.mean(dim=1, keepdim=True)
        points_nKF = points.permute(2, 0, 1).contiguous()
        attraction_nKF = torch.empty_like(points_nKF)  # sum_j w_ij (X_i - X_j)
        block = max(1, BLOCK_ELEMENTS // (num_starts * size))
        for first in range(0, size, block):
            rows = slice(first, first + block)
            difference = points_nKF[:, :, rows, None] - points_nKF[:, :, None]
            weight = difference.square().sum(dim=0).clamp_min_(self._shortest).rsqrt_().mul_(self._target[rows])
            attraction_nKF[:, :, rows] = difference.mul_(weight).sum(dim=3)
        attraction = attraction_nKF.permute(1, 2, 0)
        half_gradient = size * points - attraction
        # sum d^2 = F sum |X|^2 and sum d D = sum X . attraction, both over pairs.
        stress = (points * (half_gradient - attraction)).sum(dim=(1, 2)) + self._sum_of_squares
        return stress.clamp_min_(0.0), 2.0 * half_gradient


class Adam:
    """Adam (Kingma and Ba, 2015) for one tensor, with a step size that is given at every step.

    ``torch.optim.Adam`` does the same in twice the time on tensors this small, and its import takes seconds.
    """

    # A memory of 100 steps for the squares: runs are a few hundred steps long.
    DECAY, DECAY_OF_SQUARES = 0.9, 0.99

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean: Tensor | float = 0.0
        self._square: Tensor | float = 0.0

    def step(self, points: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The points after one step; those given are left as they are."""
        self._num_steps += 1
        self._mean = self.DECAY * self._mean + (1.0 - self.DECAY) * gradient
        self._square = self.DECAY_OF_SQUARES * self._square + (1.0 - self.DECAY_OF_SQUARES) * gradient.square()
        root = (self._square / (1.0 - self.DECAY_OF_SQUARES**self._num_steps)).sqrt_().clamp_min_(1e-12)
        return points.addcdiv(self._mean, root, value=-rate / (1.0 - self.DECAY**self._num_steps))


def descend(
    points: Tensor,
    function: StressFunction,
    *,
    rates: Sequence[float],
    num_lifted: int = 0,
) -> Tensor:
    """Takes one Adam step per entry of ``rates``, in all dims of ``points``; the last ``num_lifted`` are squeezed out.

    A penalty on the squares of the lifted dimensions, which grows from step to step, flattens the configuration until
    they can be cut off.

    ``points`` are [K, F, n + num_lifted], those returned [K, F, n].
    """
    adam, dims = Adam(), points.shape[2] - num_lifted
    for number, rate in enumerate(rates, start=1):
        _, gradient = function(points)
        if num_lifted:
            weight = 2.0 * function.num_points * SQUEEZE * number / len(rates)
            gradient[:, :, dims:].add_(points[:, :, dims:], alpha=weight)
        points = adam.step(points, gradient, rate)
    return points[:, :, :dims].contiguous()


def converge(points: Tensor, function: StressFunction, *, max_steps: int) -> tuple[Tensor, Tensor]:
    """Runs Adam until it has converged: (the best points seen, [K, F, n]; their stress, [K]).

    The step size halves whenever 20 steps lower no configuration's stress by more than one part in 100,000. The points
    have converged when they still do not after eight halvings, with a step of 2e-5 of the largest distance.
    """
    import torch

    adam, rate, num_halvings = Adam(), 0.005, 0
    best_points, best = points, function(points)[0]
    last = best
    for number in range(1, max_steps + 1):
        stress, gradient = function(points)
        better = stress < best
        best_points = torch.where(better[:, None, None], points, best_points)
        best = torch.minimum(stress, best)
        if number % STEPS_PER_CHECK == 0:
            if not bool((best < last * (1.0 - CONVERGED)).any()):
                num_halvings += 1
                rate /= 2
            if num_halvings > NUM_HALVINGS:
                break
            last = best
        points = adam.step(points, gradient, rate)
    return best_points, best


def exact_stress(points: Tensor, target: Tensor) -> float:
    """Stress of one configuration [F, n], from the distances themselves.

    `StressFunction` takes the difference of large sums, which is precise enough for a search but not for a report.
    """
    import torch

    actual = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return float(actual.sub_(target).square_().sum()) / 2
