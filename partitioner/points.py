"""Features as points in a plane whose distances follow their affinities, and the groups of points (DMT, section 3.3).

Legend: F points, T groups. The paper's n, the dimensions of the points, is 2, as in the paper.
"""

from __future__ import annotations

import numpy as np

from dmt.partitioner.search import Floats, Labels

__all__ = ["distances", "embed_distances", "group_points"]

# SMACOF iterations. More lower the stress by well under 1 %, and the search on the distances corrects the points.
MAX_ITERATIONS = 50
# k-means-constrained rounds distances to 1/1000 before it solves the assignment: points are scaled to this extent.
EXTENT = 1000.0


def distances(matrix: Floats, strategy: str) -> Floats:
    """D = f(I) of the DMT paper (section 3.3): 1 - I for ``"coherent"``, I for ``"diverse"``; the diagonal is zero."""
    assert strategy in ("coherent", "diverse"), f"TowerPartitioner checks the strategy, got {strategy!r}"
    distance = 1.0 - matrix if strategy == "coherent" else matrix.copy()
    np.fill_diagonal(distance, 0.0)
    return distance


def embed_distances(distance: Floats, *, seed: int) -> tuple[Floats, float, float]:
    """Finds points whose pairwise Euclidean distances come as close as they can to given ones.

    Minimises ``sum_{j<i} (||X_i - X_j|| - D_ij)^2``, the unnumbered objective of the DMT paper's section 3.3, with
    scikit-learn's SMACOF from the classical scaling. ``distance`` is [F, F], symmetric with a zero diagonal.

    Returns:
        [F, 2] points with their mean at the origin, that sum (the stress), and the sum over pairs of D_ij^2.

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
    # Imported here, as scikit-learn takes half a second to load.
    from sklearn.manifold import MDS

    scale = float(wanted.max())
    solver = MDS(2, metric="precomputed", n_init=1, max_iter=MAX_ITERATIONS, init="random", normalized_stress=False)
    points = solver.fit_transform(distance / scale, init=_classical_scaling(distance / scale, seed)) * scale
    points -= points.mean(axis=0)
    return points, float(np.square(pdist(points) - wanted).sum()), float(np.square(wanted).sum())


def _classical_scaling(distance: Floats, seed: int) -> Floats:
    """Torgerson's scaling, [F, 2]: exact if D is Euclidean; axes that are not real are 0.

    A little noise is added: points that coincide, or an axis of zeros, could never part.
    """
    from scipy.linalg import eigh

    size = len(distance)
    centred = np.square(distance) * -0.5
    centred -= centred.mean(axis=0)
    centred -= centred.mean(axis=1, keepdims=True)
    # The default driver returns no eigenvalue at all for some matrices.
    values, vectors = eigh(centred, subset_by_index=[size - 2, size - 1], driver="evx")
    points = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1]
    return points + 0.01 * np.random.default_rng(seed).standard_normal((size, 2))


def group_points(points: Floats, num_groups: int, *, sizes: tuple[int, int], seed: int) -> Labels:
    """Groups points by constrained K-means (Bradley, Bennett and Demiriz, 2000): the paper's method.

    ``points`` are [F, n], ``sizes`` the least and the most points of a group. Returns the [F] groups.
    """
    if num_groups in (1, len(points)):
        return np.arange(len(points), dtype=np.int64) % num_groups
    # Imported here: OR-tools, which solves the flow, takes longer to load than all the rest of this package.
    from k_means_constrained import KMeansConstrained

    extent = float(np.ptp(points, axis=0).max())
    scaled = points * (EXTENT / extent) if extent > 0 else points
    least, most = max(sizes[0], 0), min(sizes[1], len(points))
    solver = KMeansConstrained(num_groups, size_min=least, size_max=most, n_init=1, random_state=seed)
    return solver.fit(scaled).labels_.astype(np.int64)
