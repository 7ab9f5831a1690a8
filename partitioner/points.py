"""Places features as points in a plane by their affinities, and groups the points (DMT paper, section 3.3).

Legend: F points, T groups. As in the paper, the points have n = 2 dimensions.
"""

from __future__ import annotations

import numpy as np

from dmt.partitioner.search import Floats, Labels

__all__ = ["distances", "embed_distances", "group_points"]

# Limit of SMACOF iterations. More would lower the stress by about 1 %, and the local search corrects the towers anyway.
MAX_ITERATIONS = 50
# Points are scaled to this extent, because k-means-constrained rounds distances to 1/1000 before it assigns points.
EXTENT = 1000.0


def distances(matrix: Floats, strategy: str) -> Floats:
    """Returns distances D = f(I) [F, F] (DMT, section 3.3): 1 - I if coherent, I if diverse, 0 on the diagonal."""
    distance = 1.0 - matrix if strategy == "coherent" else matrix.copy()
    np.fill_diagonal(distance, 0.0)
    return distance


def embed_distances(distance: Floats, *, seed: int) -> tuple[Floats, float, float]:
    """Finds points in the plane whose Euclidean distances approximate the wanted ones, D.

    Minimizes the stress ``sum_{j<i} (||X_i - X_j|| - D_ij)^2``, the objective in the DMT paper's section 3.3, by
    scikit-learn's SMACOF, started from classical scaling. ``distance`` is D: [F, F], symmetric, 0 on the diagonal.

    Returns:
        [F, 2] float64 points with their mean at the origin, the stress, and the sum over pairs of D_ij^2.

    Example:
        >>> triangle = np.array([[0.0, 3.0, 5.0], [3.0, 0.0, 4.0], [5.0, 4.0, 0.0]])
        >>> points, stress, wanted = embed_distances(triangle, seed=0)
        >>> points.shape, stress < 1e-4, wanted
        ((3, 2), True, 50.0)
    """
    from scipy.spatial.distance import pdist, squareform

    wanted = squareform(distance, checks=False)
    if not wanted.any():  # one point, or all in one place
        return np.zeros((len(distance), 2)), 0.0, 0.0
    # Imported here, because scikit-learn takes half a second to load.
    from sklearn.manifold import MDS

    scale = float(wanted.max())
    solver = MDS(2, metric="precomputed", n_init=1, max_iter=MAX_ITERATIONS, init="random", normalized_stress=False)
    points = solver.fit_transform(distance / scale, init=_classical_scaling(distance / scale, seed)) * scale
    points -= points.mean(axis=0)
    return points, float(np.square(pdist(points) - wanted).sum()), float(np.square(wanted).sum())


def _classical_scaling(distance: Floats, seed: int) -> Floats:
    """Returns Torgerson's classical scaling of D, [F, 2], plus noise; an axis with a negative eigenvalue is 0.

    Without noise, SMACOF could not separate points that coincide.
    """
    from scipy.linalg import eigh

    size = len(distance)
    centered = np.square(distance) * -0.5
    centered -= centered.mean(axis=0)
    centered -= centered.mean(axis=1, keepdims=True)
    # For some matrices the default driver returns no eigenvalues.
    values, vectors = eigh(centered, subset_by_index=[size - 2, size - 1], driver="evx")
    points = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1]
    return points + 0.01 * np.random.default_rng(seed).standard_normal((size, 2))


def group_points(points: Floats, num_groups: int, *, sizes: tuple[int, int], seed: int) -> Labels:
    """Groups points [F, n] by constrained K-means (Bradley, Bennett and Demiriz, 2000), as in the paper.

    ``sizes`` are the least and the most points of a group. Returns the group of each point, [F] int64 from 0.
    """
    if num_groups in (1, len(points)):
        return np.arange(len(points), dtype=np.int64) % num_groups
    # Imported here, because it loads OR-tools, which takes longer than the rest of this package.
    from k_means_constrained import KMeansConstrained

    extent = float(np.ptp(points, axis=0).max())
    scaled = points * (EXTENT / extent) if extent > 0 else points
    solver = KMeansConstrained(num_groups, size_min=sizes[0], size_max=sizes[1], n_init=1, random_state=seed)
    return solver.fit(scaled).labels_.astype(np.int64)
