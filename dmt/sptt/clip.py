"""`clip_grad_norm`: gradient clipping by the norm over all towers, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import sum_over_ranks
from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.towers import ShardedTowerCollection

__all__ = ["clip_grad_norm"]


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients so that their norm over the dense part and *all* towers is ``max_norm`` at most; collective.

    ``torch.nn.utils.clip_grad_norm_`` over ``model.parameters()`` gives every tower another norm, since a rank has its
    own tower's parameters only, and copies of the dense part drift apart. Here every tower counts once, as in the
    unsharded module. Call it on every rank after the backward pass and before the optimizer's step.

    Tables are not part of it: their fused optimizers have updated them in the backward pass.

    Args:
        model: the sharded model; without towers, the norm is that of its dense part.
        max_norm: largest norm that gradients keep, above 0.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        InputError: ``max_norm`` is not above 0, or the model's towers are on several meshes.

    Example::

        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
    """
    if not max_norm > 0:
        raise InputError(f"clip_grad_norm: max_norm={max_norm!r} must be above 0.")
    collections = [part for part in model.modules() if isinstance(part, ShardedTowerCollection)]
    if len({id(part.mesh) for part in collections}) > 1:
        raise InputError(
            "clip_grad_norm: the model has towers on several meshes, so that no group of ranks holds each once. "
            "Give all its tower collections one TowerMesh."
        )
    of_towers = {id(parameter) for part in collections for parameter in part.interactions.parameters()}
    trained = [p for _, p in in_backward_optimizer_filter(model.named_parameters()) if p.grad is not None]
    device = next((p.device for p in trained), torch.device("cpu"))
    dense = _square((p for p in trained if id(p) not in of_towers), device)
    total = dense
    if collections:
        # The peers of a rank hold one copy of each tower.
        mesh: TowerMesh = collections[0].mesh
        own = _square((p for p in trained if id(p) in of_towers), device)
        total = dense + sum_over_ranks(own.to(dense), mesh.peer_group)
    norm = total.sqrt()
    clip_grads_with_norm_(trained, max_norm, norm)
    return norm


def _square(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Returns the square of the norm of gradients, float64, so that what ranks add up hardly rounds."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return get_total_norm(gradients).double().square()
