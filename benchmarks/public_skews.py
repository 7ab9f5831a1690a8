"""Skews of Avazu and Criteo-Terabyte for `benchmarks.oper_tables`, from published numbers; none of their rows is here.

Rows of tables. Avazu: distinct values of the 40,428,967 training rows, as public analyses and a TorchRec loader print
them (`NUM_EMBEDDINGS_PER_FEATURE`, 9,445,823 rows without the anonymous columns); OPER has 8.9 million in 20 columns of
the 21 that there are, which are not named: C1, with 7 values, is left out here. Terabyte: the column sizes that DLRM,
HugeCTR and OneFlow print for its 24 days, where the five largest are cut to what gives OPER's 242.5 million rows.

Popularity. Avazu: the most frequent values with their numbers of rows, as public analyses of the training file print
them, and a last value that was met once; exponent and shift of `IdSkew` are fitted to both. Terabyte, and the columns
of Avazu whose counts are not published: the law of the column of Criteo-Kaggle, which is a sample of the same traffic,
that has the next place in size (Terabyte) or the nearest number of values (Avazu). That is borrowed, not measured.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.steps.criteo_ids import IdSkew, criteo_skews

__all__ = ["avazu_skews", "terabyte_skews"]

_AVAZU_ROWS = 40_428_967
# Column -> values, and the rows of its most frequent values; () where those are not published.
AVAZU: dict[str, tuple[int, tuple[int, ...]]] = {
    "banner_pos": (7, (29_109_590, 11_247_282, 43_577, 13_001, 7_704, 5_778, 2_035)),
    "site_id": (4_737, (14_596_137, 6_486_150, 2_637_747, 963_745, 913_325, 771_360, 765_891, 461_311, 369_099)),
    "site_domain": (7_745, (15_131_739, 6_486_150, 3_325_008, 1_290_165, 996_816, 855_686, 765_891, 375_891)),
    "site_category": (26, (16_537_234, 12_657_073, 7_377_208, 3_050_306, 252_451, 160_985, 136_463, 104_754, 42_090)),
    "app_id": (8_552, (25_832_830, 1_555_283, 1_129_016, 759_098, 757_812, 615_635)),
    "app_domain": (559, (27_237_087, 5_240_885, 1_881_838, 1_129_228, 759_125, 713_924)),
    "app_category": (36, (26_165_592, 9_561_058, 1_731_545, 1_467_257, 1_141_673)),
    "device_id": (2_686_408, (33_358_308, 21_356, 19_667, 13_712, 9_654, 4_187, 4_101)),
    "device_ip": (6_729_486, (208_701, 135_322, 88_499, 87_844, 86_996, 85_802, 85_382)),
    "device_model": (8_251, (2_455_470, 1_424_546, 1_405_169, 767_961, 742_913, 652_751)),
    "device_type": (5, (37_304_667, 2_220_812, 774_272, 129_185, 31)),
    "device_conn_type": (4, (34_886_838, 3_317_443, 2_181_796, 42_890)),
    "C14": (2_626, ()),
    "C15": (8, (37_708_959, 2_337_294, 298_794, 74_533, 3_069, 2_560, 2_137, 1_621)),
    "C16": (9, (38_136_554, 1_806_334, 298_794, 103_365, 74_533, 3_069, 2_560, 2_137, 1_621)),
    "C17": (435, ()),
    "C18": (4, ()),
    "C19": (68, ()),
    "C20": (172, ()),
    "C21": (60, ()),
}
_TERABYTE = (
    *(227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36),
)
_TERABYTE_CUT = 49_380_000
"""Rows of a table at most: with it they are 242.5 million together, as in OPER's Table 1."""


def avazu_skews() -> list[IdSkew]:
    """The skews of 20 columns of Avazu."""
    known = criteo_skews()
    skews = []
    for rows, counts in AVAZU.values():
        if counts:
            skews.append(_fitted(rows, counts))
        else:
            nearest = min(known, key=lambda skew: abs(np.log(skew.rows / rows)))
            skews.append(replace(nearest, rows=rows))
    return skews


def terabyte_skews() -> list[IdSkew]:
    """The skews of the 26 columns of Criteo-Terabyte, the largest table with the law of Kaggle's largest."""
    laws = sorted(criteo_skews(), key=lambda skew: -skew.rows)
    sizes = sorted(_TERABYTE, reverse=True)
    return [replace(law, rows=min(rows, _TERABYTE_CUT)) for law, rows in zip(laws, sizes, strict=True)]


def _fitted(rows: int, counts: tuple[int, ...]) -> IdSkew:
    """The skew whose most frequent values have these counts, and the last one a single row.

    Weights: the counts as much together as the last value, so that many known values do not drown it.
    """
    skew = IdSkew(rows=rows, first=counts[0] / _AVAZU_ROWS, exponent=1.5, shift=1.0)
    others = min(len(counts), rows) - 1
    wanted = np.log(counts[1:])
    has_tail = rows > len(counts)

    def off(law: np.ndarray) -> np.ndarray:
        one = replace(skew, exponent=float(law[0]), shift=float(np.exp(law[1])))
        edges = np.concatenate([np.arange(others + 1.0), [rows - 2.0, rows - 1.0]])
        shares = np.log(np.maximum(one.shares(edges), 1e-300) * _AVAZU_ROWS)
        tail = [shares[-1]] if has_tail else []
        return np.concatenate([(shares[:others] - wanted) / np.sqrt(others), tail])

    starts = [(exponent, shift) for exponent in (0.7, 1.3, 2.0, 4.0) for shift in (-1.0, 1.0, 3.0)]
    fits = [least_squares(off, start, bounds=([0.1, -5.0], [12.0, 10.0])) for start in starts]
    best = min(fits, key=lambda fit: fit.cost).x
    return replace(skew, exponent=float(best[0]), shift=float(np.exp(best[1])))
