"""`IdSkew`: the popularity of a Criteo feature's ids as four numbers, from which ids are drawn.

All but the number of ids were fitted to the 8,000 rows of Criteo's public sample (by a script in commit ac02f63).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["CRITEO_KAGGLE_ROWS", "IDS_FILE", "IdSkew", "criteo_skews"]

IDS_FILE = Path(__file__).with_name("criteo_ids.json")
CRITEO_KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Number of distinct values in each of the 26 categorical columns of Criteo-Kaggle, in column order."""


@dataclass(frozen=True, kw_only=True)
class IdSkew:
    """Popularity of a feature's ids: the first has a separate share, the others follow a power law with a shift.

    The share of the k-th of the others (k = 0, 1, ...) is proportional to the integral of (x + shift)^-exponent over
    [k, k + 1], the continuous Zipf-Mandelbrot law. Its inverse is known, so draws need no table of shares.
    """

    rows: int
    """Number of ids, at least 2."""
    first: float
    """Share of the most frequent id."""
    exponent: float
    """Exponent of the power law; not 1."""
    shift: float
    """Shift of the ranks, above 0: the larger it is, the more ids are about as frequent as the second."""

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """Returns the popularity ranks of ``size`` drawn ids, int64 [size]; the most frequent id has rank 0."""
        first, even = torch.rand(2, size, generator=generator, dtype=torch.float64)
        low, high = self._powers([0.0, self.rows - 1.0])
        place = (low + even * (high - low)) ** (1 / (1 - self.exponent)) - self.shift
        others = 1 + place.long().clamp(0, self.rows - 2)
        return torch.where(first < self.first, 0, others)

    def shares(self, edges: np.ndarray) -> np.ndarray:
        """Returns the total share of the others with k from each edge to the next, float64 [len(edges) - 1]."""
        low, high = self._powers([0.0, self.rows - 1.0])
        return (1 - self.first) * np.diff(self._powers(edges)) / (high - low)

    def _powers(self, places: np.ndarray | list[float]) -> np.ndarray:
        return (np.asarray(places, dtype=np.float64) + self.shift) ** (1 - self.exponent)


@cache
def criteo_skews() -> tuple[IdSkew, ...]:
    """Returns the fitted popularity of the ids of each of the 26 features, in the order of the columns."""
    fitted = json.loads(IDS_FILE.read_text())["features"]
    return tuple(
        IdSkew(rows=rows, first=one["first"], exponent=one["exponent"], shift=one["shift"])
        for rows, one in zip(CRITEO_KAGGLE_ROWS, fitted, strict=True)
    )
