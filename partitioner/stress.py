"""The stress of points, its gradient in cache-sized blocks, and the two ways `embed_distances` descends with Adam.

Legend: F points, n dims, K configurations that are moved side by side (the starts of a search). A configuration is one
[F, n] slice of a [K, F, n] tensor; no operation here mixes two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Adam", "StressFunction", "descend", "exact_stress", "settle"]

# Elements of a block of rows. Torch splits operations of more than 32,768 elements over its threads; below, the passes
# stay in a core's cache, the sums do not depend on the number of threads, and no thread waits for another.
BLOCK_ELEMENTS = 1 << 15
# Weight of a spare dimension's squares at the end of `descend`, as a share of the curvature F of the stress.
SQUEEZE = 0.5
STEPS_PER_CHECK = 20
NUM_HALVINGS = 8
SETTLED = 1e-5


class StressFunction:
    """``sum_{j<i} (||X_i - X_j|| - D_ij)^2`` of K configurations, and its gradient (DMT paper, section 3.3).

    With w_ij = D_ij / ||X_i - X_j||, the gradient at point i is ``2 (F X_i - sum_j w_ij (X_i - X_j))`` for centred X,
    and the stress needs no more than the same sums. So one pass over the F^2 pairs does both, a block of rows at a
    time, and no [F, F] tensor is written. Autograd would keep several of them.

    Distances below the square root of the rounding unit count as that long, so that coincident points have a finite
    gradient (towards nothing: the subgradient 0 is as good as any).

    Args:
        target: D, [F, F] float32 or float64, symmetric with a zero diagonal. Points must have its dtype.

    Example:
        >>> import torch
        >>> function = StressFunction(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
        >>> stress, gradient = function(torch.tensor([[[0.0], [1.0]]]))
        >>> stress.tolist(), gradient.tolist()
        ([1.0], [[[2.0], [-2.0]]])
    """

    def __init__(self, target: Tensor) -> None:
        import torch

        self.num_points = len(target)
        self._target = target
        self._shortest = torch.finfo(target.dtype).eps
        # Row by row in float64: a float32 sum over 16 million pairs would lose the digits that tell two starts apart.
        self._sum_of_squares = float(sum(float(row.double().square().sum()) for row in target)) / 2

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(stress, [K] float64; gradient, [K, F, n]) at ``points``, [K, F, n]."""
        import torch

        num_starts, size, dims = points.shape
        points = points - points.mean(dim=1, keepdim=True)
        across = points.transpose(1, 2).contiguous()
        # sum_j w_ij (X_i - X_j), [K, F, n]; not by a matrix product and not with sqrt, which start threads on any size.
        attraction = torch.empty_like(points)
        block = max(1, min(size, BLOCK_ELEMENTS // (num_starts * size)))
        scratch = points.new_empty(dims + 1, num_starts * block * size)
        for first in range(0, size, block):
            rows = slice(first, min(size, first + block))
            here = points[:, rows]
            shape = (num_starts, here.shape[1], size)
            weight, *difference = (part[: here.shape[1] * num_starts * size].view(shape) for part in scratch)
            for axis in range(dims):
                torch.sub(here[:, :, axis : axis + 1], across[:, axis : axis + 1], out=difference[axis])
            torch.mul(difference[0], difference[0], out=weight)
            for axis in range(1, dims):
                weight.addcmul_(difference[axis], difference[axis])
            weight.clamp_min_(self._shortest).pow_(-0.5).mul_(self._target[rows])
            for axis in range(dims):
                attraction[:, rows, axis] = difference[axis].mul_(weight).sum(dim=2)
        spread = size * points - attraction
        # sum d^2 = F sum |X|^2 and sum d D = sum X . attraction, both over pairs.
        stress = (points * (spread - attraction)).double().sum(dim=(1, 2)) + self._sum_of_squares
        return stress.clamp_min_(0.0), 2.0 * spread


class Adam:
    """Adam (Kingma and Ba, 2015) for one tensor, with a step size that is given anew at every step.

    ``torch.optim.Adam`` does the same in twice the time on tensors this small, and its import takes seconds.

    Example:
        >>> import torch
        >>> adam, points = Adam(), torch.tensor([3.0])
        >>> for _ in range(2):
        ...     points = adam.step(points, gradient=2 * points, rate=0.5)
        >>> [round(x, 3) for x in points.tolist()]
        [2.004]
    """

    # A memory of 100 steps for the squares: runs are a few hundred steps long.
    DECAY, DECAY_OF_SQUARES = 0.9, 0.99

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean: Tensor | None = None
        self._square: Tensor | None = None

    def step(self, points: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The points after one step; those given are left as they are."""
        import torch

        if self._mean is None or self._square is None:
            self._mean, self._square = torch.zeros_like(points), torch.zeros_like(points)
        self._num_steps += 1
        self._mean.lerp_(gradient, 1.0 - self.DECAY)
        self._square.mul_(self.DECAY_OF_SQUARES).addcmul_(gradient, gradient, value=1.0 - self.DECAY_OF_SQUARES)
        # Not by sqrt and a division: torch.sqrt starts threads for as few as 2,048 elements.
        inverse = (self._square / (1.0 - self.DECAY_OF_SQUARES**self._num_steps)).clamp_min_(1e-24).pow_(-0.5)
        return points.addcmul(self._mean, inverse, value=-rate / (1.0 - self.DECAY**self._num_steps))


def descend(
    points: Tensor,
    function: StressFunction,
    *,
    rates: Sequence[float],
    num_spare: int = 0,
    on_step: Callable[[], None] | None = None,
) -> Tensor:
    """One Adam step per entry of ``rates``, in all dims of ``points``; the last ``num_spare`` are squeezed out.

    A spare dimension lets a point pass by others that stand in its way in the plane. A penalty on its squares, which
    grows from step to step, flattens the configuration until the spare dimension can be cut off.

    Args:
        points: [K, F, n + num_spare].
        function: of the wanted distances.
        rates: step sizes, as shares of the largest wanted distance if that is 1.
        num_spare: dims to squeeze out.
        on_step: called after each step.

    Returns:
        [K, F, n].

    Example:
        >>> import torch
        >>> function = StressFunction(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> descend(torch.zeros(3, 2, 2), function, rates=[0.1], num_spare=1).shape
        torch.Size([3, 2, 1])
    """
    adam, dims = Adam(), points.shape[2] - num_spare
    for number, rate in enumerate(rates, start=1):
        _, gradient = function(points)
        if num_spare:
            weight = 2.0 * function.num_points * SQUEEZE * number / len(rates)
            gradient[:, :, dims:].add_(points[:, :, dims:], alpha=weight)
        points = adam.step(points, gradient, rate)
        if on_step is not None:
            on_step()
    return points[:, :, :dims].contiguous()


def settle(
    points: Tensor, function: StressFunction, *, max_steps: int, on_step: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Adam until it has converged: (the best points seen, [K, F, n]; their stress, [K] float64).

    The step size halves whenever 20 steps lower no configuration's stress by more than one part in 100,000. The points
    have converged when they still do not after eight halvings, with a step of 2e-5 of the largest distance.

    Example:
        >>> import torch
        >>> function = StressFunction(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
        >>> _, stress = settle(torch.tensor([[[0.0], [0.9]]], dtype=torch.float64), function, max_steps=500)
        >>> bool(stress < 1e-8)
        True
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
            if not bool((best < last * (1.0 - SETTLED)).any()):
                num_halvings += 1
                rate /= 2
            if num_halvings > NUM_HALVINGS:
                break
            last = best
        points = adam.step(points, gradient, rate)
        if on_step is not None:
            on_step()
    return best_points, best


def exact_stress(points: Tensor, target: Tensor) -> float:
    """The stress of one configuration [F, n], from the distances themselves in float64 and in blocks of rows.

    `StressFunction` takes the difference of large sums, which is what a search needs and not what a report should say.

    Example:
        >>> import torch
        >>> exact_stress(torch.tensor([[0.0], [3.0]]), torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
        1.0
    """
    import torch

    points = points.double()
    block = max(1, BLOCK_ELEMENTS // len(points))
    total = 0.0
    for first in range(0, len(points), block):
        rows = slice(first, first + block)
        actual = torch.cdist(points[rows], points, compute_mode="donot_use_mm_for_euclid_dist")
        total += float((actual - target[rows]).square_().sum())
    return total / 2
