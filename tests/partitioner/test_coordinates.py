"""Stress minimisation on its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dmt.partitioner.embed import Adam, StressFunction, converge, distances, embed_distances, exact_stress
from tests.partitioner.planted import planted_affinity


def _pairwise(points):
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


@pytest.mark.parametrize(("dims", "size"), [(1, 5), (2, 12), (3, 20)])
def test_distances_of_real_points_are_reproduced(dims, size):
    wanted = _pairwise(np.random.default_rng(dims).normal(size=(size, dims)))
    found = embed_distances(wanted, dims=dims)
    assert found.points.shape == (size, dims)
    # Adam ends with a step size of 0.05 / 2^7 and a relative improvement below 1e-4; distances are about 1.
    np.testing.assert_allclose(_pairwise(found.points), wanted, rtol=0, atol=1e-3)
    assert found.normalized_stress < 1e-3


def test_the_reported_stress_is_that_of_the_points():
    affinity, _ = planted_affinity(20, 4, seed=1)
    wanted = distances(affinity.matrix, "coherent")
    found = embed_distances(wanted)
    lower = np.tril_indices(20, k=-1)
    stress = ((_pairwise(found.points) - wanted)[lower] ** 2).sum()
    assert found.stress == pytest.approx(stress, rel=1e-10)
    assert found.normalized_stress == pytest.approx(np.sqrt(stress / (wanted[lower] ** 2).sum()), rel=1e-10)
    np.testing.assert_allclose(found.points.mean(axis=0), 0, atol=1e-12)


def _random_target(size, generator):
    target = torch.rand(size, size, dtype=torch.float64, generator=generator)
    return (target + target.T).fill_diagonal_(0)


def _stress_by_pairs(points, target):
    rows, columns = torch.tril_indices(len(target), len(target), offset=-1)
    return ((points[rows] - points[columns]).norm(dim=1) - target[rows, columns]).square().sum()


# 700 points in 3 starts are worked through in blocks of 15 rows, of which the last is smaller.
@pytest.mark.parametrize(("size", "dims"), [(7, 2), (7, 1), (700, 3)])
def test_the_gradient_is_that_of_autograd(size, dims):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, size, dims, dtype=torch.float64, generator=generator, requires_grad=True)
    target = _random_target(size, generator)
    expected = torch.stack([_stress_by_pairs(start, target) for start in points])
    expected.sum().backward()
    stress, gradient = StressFunction(target)(points.detach())
    torch.testing.assert_close(stress, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, points.grad, rtol=1e-12, atol=1e-10)
    assert exact_stress(points.detach()[1], target) == pytest.approx(expected[1].item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_coinciding_points_is_finite(dtype):
    stress, gradient = StressFunction(1.0 - torch.eye(3, dtype=dtype))(torch.zeros(1, 3, 2, dtype=dtype))
    assert stress.tolist() == [3.0]
    assert gradient.isfinite().all()


def test_adam_is_that_of_torch():
    points = torch.tensor([3.0, -0.5, 1e-3], dtype=torch.float64)
    reference = points.clone()
    optimizer = torch.optim.Adam([reference], lr=0.05, betas=(Adam.DECAY, Adam.DECAY_OF_SQUARES), eps=1e-20)
    adam = Adam()
    for _ in range(30):
        reference.grad = reference**3 + reference
        optimizer.step()
        points = adam.step(points, points**3 + points, 0.05)
    torch.testing.assert_close(points, reference, rtol=1e-12, atol=1e-15)


def test_the_last_run_ends_at_a_minimum():
    wanted = distances(planted_affinity(20, 4, seed=1)[0].matrix, "coherent")
    found = embed_distances(wanted)
    target = torch.from_numpy(wanted)
    again, stress = converge(torch.from_numpy(found.points)[None], StressFunction(target), max_steps=2000)
    assert float(stress) > found.stress * (1 - 1e-5)
    assert (again - again.mean(dim=1, keepdim=True) - torch.from_numpy(found.points)).abs().max() < 1e-2


@pytest.mark.parametrize("size", [2, 3, 10])
def test_equal_distances_spread_the_points(size):
    found = embed_distances(1.0 - np.eye(size))
    assert np.isfinite(found.points).all()
    assert _pairwise(found.points)[np.triu_indices(size, k=1)].min() > 0.1


@pytest.mark.parametrize("size", [1, 4])
def test_zero_distances_give_one_place(size):
    found = embed_distances(np.zeros((size, size)), dims=3)
    np.testing.assert_array_equal(found.points, np.zeros((size, 3)))
    assert (found.stress, found.normalized_stress) == (0.0, 0.0)


def test_the_scale_of_the_distances_only_scales_the_points():
    affinity, _ = planted_affinity(12, 3, seed=2)
    wanted = distances(affinity.matrix, "diverse")
    # A power of two, so that no rounding differs; an absolute step size would fail here.
    small, large = embed_distances(wanted / 1024), embed_distances(wanted)
    np.testing.assert_array_equal(small.points * 1024, large.points)


def test_the_seed_decides_and_the_global_generator_does_not():
    wanted = distances(planted_affinity(15, 3, seed=3)[0].matrix, "coherent")
    torch.manual_seed(1)
    first = embed_distances(wanted, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    np.testing.assert_array_equal(embed_distances(wanted, seed=5).points, first.points)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was not used"


def test_more_starts_never_raise_the_stress():
    wanted = distances(planted_affinity(20, 5, seed=4, noise=0.3)[0].matrix, "coherent")
    stresses = [embed_distances(wanted, num_starts=n).stress for n in (1, 4, 8)]
    assert stresses == sorted(stresses, reverse=True)


# Where it was higher before the lifted dimension: groups in a plane and in space, low rank, a line.
@pytest.mark.parametrize(
    ("size", "groups", "seed", "noise", "strategy", "dims"),
    [
        (26, 8, 0, 0.1, "coherent", 2),
        (26, 8, 1, 0.1, "diverse", 2),
        (40, 12, 2, 0.2, "coherent", 3),
        (17, 4, 3, 0.3, "coherent", 1),
        (8, 2, 4, 0.1, "coherent", 2),
    ],
)
def test_the_stress_is_no_higher_than_that_of_scikit_learn(size, groups, seed, noise, strategy, dims):
    from sklearn.manifold import smacof

    wanted = distances(planted_affinity(size, groups, seed=seed, noise=noise)[0].matrix, strategy)
    _, stress = smacof(
        wanted, n_components=dims, n_init=8, random_state=0, max_iter=500, eps=1e-7, normalized_stress=False
    )
    # Where both find the same minimum, each stops within its own tolerance of it.
    assert embed_distances(wanted, dims=dims).stress <= stress * (1 + 1e-4)


def test_points_get_through_a_group_that_is_in_their_way():
    # On a line from the wrong order: no gradient step can exchange neighbours, so one start must search by itself.
    wanted = _pairwise(np.random.default_rng(0).permutation(12).astype(float)[:, None])
    assert embed_distances(wanted, dims=1, num_starts=1).normalized_stress < 1e-3


def test_search_of_larger_matrices():
    affinity, groups = planted_affinity(300, 6, seed=0, noise=0.05)
    wanted = distances(affinity.matrix, "coherent")
    found = embed_distances(wanted, num_starts=1, max_steps=400)
    lower = np.tril_indices(300, k=-1)
    assert found.points.dtype == np.float64
    assert found.stress == pytest.approx(((_pairwise(found.points) - wanted)[lower] ** 2).sum(), rel=1e-10)
    group = np.array([groups[name] for name in affinity.features])
    centres = np.stack([found.points[group == g].mean(axis=0) for g in range(6)])
    nearest = np.linalg.norm(found.points[:, None] - centres, axis=2).argmin(axis=1)
    assert (nearest == group).all()


def test_the_leading_axes_are_enough_for_the_largest_matrices(monkeypatch):
    wanted = _pairwise(np.random.default_rng(0).normal(size=(60, 2)))
    monkeypatch.setattr("dmt.partitioner.embed.FULL_SCALING_UP_TO", 50)
    np.testing.assert_allclose(_pairwise(embed_distances(wanted, num_starts=1).points), wanted, rtol=0, atol=1e-3)


def test_more_dims_than_points():
    found = embed_distances(np.array([[0.0, 2.0], [2.0, 0.0]]), dims=4)
    assert found.points.shape == (2, 4)
    assert found.stress < 1e-6
