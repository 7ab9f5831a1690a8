"""Our models and their dense parts against TorchRec's, with its state dict loaded: equal to the last bit."""

from __future__ import annotations

import re

import torch
from torchrec.models import dlrm as torchrec_dlrm

from dmt.models import DCN, DLRM, ModelOptions
from dmt.models.dense import DotInteraction, LowRankCrossNet, mlp


def our_name(name):
    """TorchRec wraps its MLPs: `...model._mlp.1._linear.weight` is layer 2 here, after a ReLU, except the last."""
    name = name.replace(".embedding_bag_collection", "")
    name = re.sub(r"\.model(\.0)?\._mlp\.(\d+)\._linear", lambda found: f".{2 * int(found[2])}", name)
    return name.replace("over_arch.model.1", "over_arch.4").replace(".crossnet", "")


def test_models_equal_torchrecs(tables, dense_features, sparse_features):
    """Outputs and all gradients."""
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    options = ModelOptions(dense_arch_layer_sizes=(16,), over_arch_layer_sizes=(12, 16, 1))
    common = {"dense_in_features": 13, "dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [12, 16, 1]}
    for ours, theirs in (
        (
            DLRM(tables=tables, dense_in_features=13, options=options),
            torchrec_dlrm.DLRM(EmbeddingBagCollection(tables=tables), **common),
        ),
        (
            DCN(tables=tables, dense_in_features=13, num_cross_layers=2, cross_rank=3, options=options),
            torchrec_dlrm.DLRM_DCN(
                EmbeddingBagCollection(tables=tables), **common, dcn_num_layers=2, dcn_low_rank_dim=3
            ),
        ),
    ):
        weights = {our_name(name): weight for name, weight in theirs.named_parameters()}
        with torch.no_grad():
            for name, weight in weights.items():
                if "bias" in name:  # zero at first in cross layers, which would hide a mistake
                    weight.normal_()
        ours.load_state_dict(weights)
        outputs = [model(dense_features, sparse_features) for model in (ours, theirs)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        for name, weight in ours.named_parameters():
            torch.testing.assert_close(weight.grad, weights[name].grad, rtol=0, atol=0, msg=name)


def test_a_part_built_on_meta_initializes_like_one_built_on_the_cpu():
    """What DistributedModelParallel does to a model on the meta device: allocate, then reset_parameters()."""

    def materialize(module):
        own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        assert not list(module.buffers(recurse=False)), "a buffer would be overwritten with zeros"
        for name in own:
            setattr(module, name, torch.nn.Parameter(torch.full_like(getattr(module, name), torch.nan, device="cpu")))
        if own:
            module.reset_parameters()

    def build(device):
        return torch.nn.ModuleList(
            [
                LowRankCrossNet(16, num_layers=2, rank=3, device=device),
                DotInteraction(num_vectors=3, dim=4),
                mlp(4, [3, 1], device=device),
            ]
        )

    torch.manual_seed(0)
    meta = build("meta").apply(materialize)
    real = build("cpu")
    for (name, drawn), (_, expected) in zip(meta.named_parameters(), real.named_parameters(), strict=True):
        assert drawn.isfinite().all(), name
        assert bool(drawn.any()) == bool(expected.any()), f"{name}: zero in one, drawn in the other"
