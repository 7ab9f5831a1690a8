"""`SyntheticClicks`: a click log, drawn as it is read, with columns like Criteo's, Zipf ids and planted feature groups.

A row is drawn in three steps (n rows, F categorical features in G groups, D dense features):

1. Every group g has a hidden variable z_g ~ N(0, 1). Feature j of the group has t_j = sqrt(rho) z_g + sqrt(1 - rho) e_j
   with independent e_j ~ N(0, 1), so t_j ~ N(0, 1) and two features of one group have correlation rho.
2. The real line is cut into as many intervals as the feature has ids, in an order drawn once; the probability of each
   interval under N(0, 1) is the Zipf share of its id. The id is the interval that t_j falls in. Ids are thus exactly
   Zipf-distributed, yet the ids of a group's features are correlated. The score u_j of an id is the mean of t over its
   interval, which is all that the id reveals about t.
3. logit = intercept + signal * (standardized sum of: a main effect and the pairwise products of the u_j within each
   group, and effects of a few dense features) + noise. Features of different groups never interact.

A model can learn every u_j from the label alone, and embeddings of one group then vary together over the rows: the
affinity that DMT's Tower Partitioner reads (section 3.3) shows the groups. Warm the tables' learning rate up: otherwise
the first steps push all embeddings the same way, to learn the base rate, and that common part hides the groups.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from dmt.training.data.config import SyntheticConfig

__all__ = ["BLOCK_ROWS", "SyntheticClicks", "SyntheticRows", "synthetic_clicks"]

BLOCK_ROWS = 1024
"""Number of rows drawn together; small, so that a rank draws little more than its own rows."""

_SETUP, _TRAIN, _EVAL, _PROBE = range(4)  # independent random streams of one seed
_PROBE_ROWS = 32_768
_MAIN_WEIGHT = 0.5  # weight of a group's main effect; its products have weight 1
_ZIPF = 1.05  # exponent
_SIGNAL = 1.3  # standard deviation of the logit's predictable part
_NOISE = 0.3  # of its unpredictable part
_BASE_RATE = 0.25  # share of clicks
_MOST_IDS = 3  # of a bag


class SyntheticClicks:
    """Draws blocks of rows, each a function of (seed, split, block index); the constructor draws what all share.

    Args:
        config: sizes and seed.
        correlation: rho, the share of a feature's variance that comes from its group's hidden variable.

    Example:
        >>> clicks = SyntheticClicks(SyntheticConfig(num_features=6, num_groups=2, rows_per_table=50))
        >>> sorted(len(group) for group in clicks.planted_groups)
        [3, 3]
        >>> clicks.draw("train", 0).shape
        (1024, 20)
    """

    def __init__(self, config: SyntheticConfig, *, correlation: float = 0.9) -> None:
        self.config, self._correlation = config, correlation
        self.dense_names = tuple(f"I{i + 1}" for i in range(config.num_dense))
        self.feature_names = tuple(f"C{i + 1}" for i in range(config.num_features))
        self.multi_hot = frozenset(self.feature_names[config.num_features - config.num_multi_hot :])
        rng = np.random.default_rng([config.seed, _SETUP])
        # A random assignment: contiguous or strided features must not make good towers by accident.
        self._group = rng.permutation(np.arange(config.num_features) % config.num_groups)
        self._cuts, self._scores = zip(*(self._pieces(rng) for _ in self.feature_names), strict=True)
        self._main = rng.choice([-1.0, 1.0], size=config.num_groups)
        effects = rng.normal(size=config.num_dense)
        effects[4:] = 0.0  # few dense features matter; a model must learn to ignore the others
        self._dense_effects = 0.6 * effects / float(np.linalg.norm(effects))
        self._scale, self._intercept = 1.0, 0.0
        self._scale, self._intercept = self._calibration()

    @property
    def planted_groups(self) -> list[list[str]]:
        """Names of the features in each group."""
        return [
            [name for name, of in zip(self.feature_names, self._group, strict=True) if of == group]
            for group in range(self.config.num_groups)
        ]

    def draw(self, split: Literal["train", "eval"], block: int) -> pa.Table:
        """Draws the block with index ``block``, `BLOCK_ROWS` rows: label int8, dense float32, ids (or lists) int64."""
        rng = np.random.default_rng([self.config.seed, _TRAIN if split == "train" else _EVAL, block])
        return self._draw(rng, BLOCK_ROWS)[0]

    def _pieces(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draws the cuts of the real line, [rows - 1], and computes the mean of t in each interval, [rows]."""
        share = np.arange(1, self.config.rows_per_table + 1) ** -_ZIPF
        share = rng.permutation(share / share.sum())
        cuts = torch.special.ndtri(torch.from_numpy(np.cumsum(share)[:-1])).numpy()
        density = np.concatenate([[0.0], np.exp(-(cuts**2) / 2) / np.sqrt(2 * np.pi), [0.0]])
        return cuts, (density[:-1] - density[1:]) / share

    def _calibration(self) -> tuple[float, float]:
        """Fits the scale and intercept of the logit on a sample of rows."""
        rng = np.random.default_rng([self.config.seed, _PROBE, 0])
        _, logits = self._draw(rng, _PROBE_ROWS)
        spread = float(logits.std())
        scale = _SIGNAL / spread if spread else 0.0
        centered = logits * scale + _NOISE * rng.normal(size=_PROBE_ROWS)
        low, high = -50.0, 50.0
        for _ in range(50):  # bisection: the share of clicks grows with the intercept
            middle = (low + high) / 2
            clicks = torch.from_numpy(centered + middle).sigmoid().numpy().mean()
            low, high = (middle, high) if clicks < _BASE_RATE else (low, middle)
        return scale, low

    def _draw(self, rng: np.random.Generator, n: int) -> tuple[pa.Table, NDArray[np.float64]]:
        """Draws rows and their noise-free logits [n]."""
        config = self.config
        hidden = rng.normal(size=(config.num_groups, n))
        shared, private = np.sqrt(self._correlation), np.sqrt(1 - self._correlation)
        columns = dict[str, Any]()
        scores = np.empty((config.num_features, n))
        for j, (name, group) in enumerate(zip(self.feature_names, self._group, strict=True)):
            if name not in self.multi_hot:
                columns[name] = ids = self._cuts[j].searchsorted(shared * hidden[group] + private * rng.normal(size=n))
                scores[j] = self._scores[j][ids]
            else:
                lengths = rng.integers(0, _MOST_IDS + 1, size=n)
                row = np.repeat(np.arange(n), lengths)
                ids = self._cuts[j].searchsorted(shared * hidden[group][row] + private * rng.normal(size=len(row)))
                columns[name] = pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]), ids)
                scores[j] = np.bincount(row, self._scores[j][ids], minlength=n) / np.maximum(lengths, 1)
        # Counts like Criteo's: whole numbers with a long tail, near normal after log(1 + x).
        dense = np.log1p(np.floor(np.exp(1.5 + rng.normal(size=(n, config.num_dense)))).astype(np.float32))
        columns |= zip(self.dense_names, np.ascontiguousarray(dense.T), strict=True)
        logits = self._logits(scores, dense)
        chance = torch.from_numpy(logits + _NOISE * rng.normal(size=n)).sigmoid().numpy()
        columns["label"] = (rng.random(size=n) < chance).astype(np.int8)
        return pa.table(columns), logits

    def _logits(self, scores: NDArray[np.float64], dense: NDArray[np.float32]) -> NDArray[np.float64]:
        total = (dense - 1.7) @ self._dense_effects
        for group in range(self.config.num_groups):
            members = scores[self._group == group]
            sums, squares, count = members.sum(axis=0), (members**2).sum(axis=0), len(members)
            # Mean of u_i u_j over the pairs i < j of the group, by the identity of factorization machines.
            pairs = (sums**2 - squares) / max(count * (count - 1), 1)
            total += _MAIN_WEIGHT * self._main[group] * (sums / count) + pairs
        return self._intercept + self._scale * total


synthetic_clicks = lru_cache(maxsize=8)(SyntheticClicks)  # a job opens its data several times; calibration draws rows


class SyntheticRows:
    """The rows of a split, in blocks that are drawn when read; the last one may have rows past the split's end."""

    def __init__(self, clicks: SyntheticClicks, split: Literal["train", "eval"]) -> None:
        rows = clicks.config.num_rows if split == "train" else clicks.config.num_eval_rows
        self.sizes = np.minimum(rows - np.arange(0, rows, BLOCK_ROWS), BLOCK_ROWS)
        """Number of the split's rows in each block, int64 [number of blocks]."""
        self.read = partial(clicks.draw, split)
        """Draws a block by its index."""
