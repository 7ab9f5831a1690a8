"""`IdSkew`: how unevenly the ids of Criteo's features are spread, as four numbers of each, and draws from that.

Fitted to the 8,000 rows of Criteo's public sample (by a script of commit ac02f63); none of its ids is kept.
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
"""Distinct values of the 26 categorical columns of Criteo-Kaggle, in column order."""


@dataclass(frozen=True, kw_only=True)
class IdSkew:
    """Popularity of a feature's ids: the first has a share of its own, the others follow a power law with a shift.

    The k-th of the others (k = 0, 1, ...) has the share of the density (x + shift)^-exponent between k and k + 1, the
    continuous form of Zipf and Mandelbrot's law, whose inverse is known: it is drawn from without a table of shares.
    """

    rows: int
    """Ids that exist, at least 2."""
    first: float
    """Share of the most frequent id."""
    exponent: float
    """Exponent of the power law, not 1."""
    shift: float
    """Shift of the ranks, positive: the larger, the more ids are about as frequent as the second."""

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """[size] int64: places of ids in the order of their popularity, 0 for the most frequent."""
        first, even = torch.rand(2, size, generator=generator, dtype=torch.float64)
        low, high = self._powers([0.0, self.rows - 1.0])
        place = (low + even * (high - low)) ** (1 / (1 - self.exponent)) - self.shift
        others = 1 + place.long().clamp(0, self.rows - 2)
        return torch.where(first < self.first, 0, others)

    def shares(self, edges: np.ndarray) -> np.ndarray:
        """Shares of the others with k from each edge to the next, together; [len(edges) - 1] float64."""
        low, high = self._powers([0.0, self.rows - 1.0])
        return (1 - self.first) * np.diff(self._powers(edges)) / (high - low)

    def _powers(self, places: np.ndarray | list[float]) -> np.ndarray:
        return (np.asarray(places, dtype=np.float64) + self.shift) ** (1 - self.exponent)


@cache
def criteo_skews() -> tuple[IdSkew, ...]:
    """The fitted skew of the 26 features, in column order."""
    fitted = json.loads(IDS_FILE.read_text())["features"]
    return tuple(
        IdSkew(rows=rows, first=one["first"], exponent=one["exponent"], shift=one["shift"])
        for rows, one in zip(CRITEO_KAGGLE_ROWS, fitted, strict=True)
    )
