"""Our dense parts against TorchRec's, with the state dict of one loaded into the other: equal to the last bit."""

from __future__ import annotations

import pytest
import torch
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.crossnet import LowRankCrossNet as TorchRecCrossNet
from torchrec.modules.mlp import MLP as TorchRecMLP

from dmt.errors import InputError
from dmt.models import DCN, DLRM, ModelOptions
from dmt.models.dense import MLP, CrossInteraction, DenseArch, DotInteraction, LowRankCrossNet, OverArch


def assert_same(ours, theirs, *inputs):
    """Loads TorchRec's weights into ours (strictly) and compares outputs and all gradients bitwise."""
    ours.load_state_dict(theirs.state_dict())
    results = []
    for module in (ours, theirs):
        copies = [tensor.clone().requires_grad_() for tensor in inputs]
        output = module(*copies)
        output.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        results.append({"output": output, **gradients, **{f"input {i}": t.grad for i, t in enumerate(copies)}})
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=0, msg=name)


def cross_net(features, **sizes):
    theirs = TorchRecCrossNet(features, **sizes)
    with torch.no_grad():
        for bias in theirs.bias:  # zero at first, which would hide a mistake
            bias.normal_()
    return theirs


@pytest.mark.parametrize(
    ("ours", "theirs", "shapes"),
    [
        (lambda: MLP(6, [5, 4]), lambda: TorchRecMLP(6, [5, 4]), [(3, 6)]),
        (lambda: DenseArch(6, [5, 4]), lambda: torchrec_dlrm.DenseArch(6, [5, 4]), [(3, 6)]),
        (lambda: OverArch(6, [5, 4, 1]), lambda: torchrec_dlrm.OverArch(6, [5, 4, 1]), [(3, 6)]),
        (lambda: LowRankCrossNet(6, num_layers=3, rank=2), lambda: cross_net(6, num_layers=3, low_rank=2), [(3, 6)]),
        (
            lambda: CrossInteraction(num_vectors=2, dim=4, num_layers=2, rank=3),
            lambda: torchrec_dlrm.InteractionDCNArch(2, cross_net(12, num_layers=2, low_rank=3)),
            [(3, 4), (3, 2, 4)],
        ),
        *(
            (
                lambda number=number: DotInteraction(num_vectors=number, dim=4),
                lambda number=number: torchrec_dlrm.InteractionArch(number),
                [(3, 4), (3, number, 4)],
            )
            for number in (1, 2, 5)
        ),
    ],
)
def test_a_part_equals_torchrecs(ours, theirs, shapes):
    ours, inputs = ours(), [torch.randn(shape) for shape in shapes]
    assert_same(ours, theirs(), *inputs)
    assert getattr(ours, "out_features", None) in (None, ours(*inputs).shape[1])


def test_dot_interaction_by_hand():
    dense, sparse = torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]])
    # dense itself, then dense.f0 = 11, dense.f1 = 17, f0.f1 = 39
    assert DotInteraction(num_vectors=2, dim=2)(dense, sparse).tolist() == [[1, 2, 11, 17, 39]]


def test_whole_models_equal_torchrec(tables, dense_features, sparse_features):
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    options = ModelOptions(dense_arch_layer_sizes=(16,), over_arch_layer_sizes=(16, 1))
    common = {"dense_in_features": 13, "dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1]}
    bags = EmbeddingBagCollection(tables=tables)
    for ours, theirs in (
        (DLRM(tables=tables, dense_in_features=13, options=options), torchrec_dlrm.DLRM(bags, **common)),
        (
            DCN(tables=tables, dense_in_features=13, num_cross_layers=2, cross_rank=3, options=options),
            torchrec_dlrm.DLRM_DCN(bags, **common, dcn_num_layers=2, dcn_low_rank_dim=3),
        ),
    ):
        state = {name.replace(".embedding_bag_collection", ""): w for name, w in theirs.state_dict().items()}
        ours.load_state_dict(state)
        assert torch.equal(ours(dense_features, sparse_features), theirs(dense_features, sparse_features))


def test_a_part_built_on_meta_initialises_like_one_built_on_the_cpu():
    """What DistributedModelParallel does to a model on the meta device: allocate, then reset_parameters()."""

    def materialise(module):
        own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        assert not list(module.buffers(recurse=False)), "a buffer would be overwritten with zeros"
        for name in own:
            setattr(module, name, torch.nn.Parameter(torch.full_like(getattr(module, name), torch.nan, device="cpu")))
        if own:
            module.reset_parameters()

    def build(device):
        return torch.nn.ModuleList(
            [
                CrossInteraction(num_vectors=3, dim=4, num_layers=2, rank=3, device=device),
                DotInteraction(num_vectors=3, dim=4),
                DenseArch(4, [3], device=device),
                OverArch(4, [3, 1], device=device),
            ]
        )

    torch.manual_seed(0)
    meta = build("meta").apply(materialise)
    real = build("cpu")
    for (name, drawn), (_, expected) in zip(meta.named_parameters(), real.named_parameters(), strict=True):
        assert drawn.isfinite().all(), name
        assert bool(drawn.any()) == bool(expected.any()), f"{name}: zero in one, drawn in the other"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MLP(0, [4]), "MLP: in_features=0 must be a whole number of at least 1"),
        (lambda: MLP(4, [4, -1]), r"MLP: layer_sizes\[1\]=-1 must be a whole number"),
        (lambda: OverArch(4, []), "OverArch: layer_sizes is empty"),
        (lambda: DotInteraction(num_vectors=0, dim=4), "num_vectors=0 must be"),
        (lambda: CrossInteraction(num_vectors=1, dim=0, num_layers=1, rank=1), "CrossInteraction: dim=0 must be"),
        (lambda: LowRankCrossNet(4, num_layers=1, rank=0), "LowRankCrossNet: rank=0 must be"),
        (lambda: OverArch(4, [8, 2.5]), r"OverArch: layer_sizes\[1\]=2.5 must be a whole"),
    ],
)
def test_bad_sizes(build, message):
    with pytest.raises(InputError, match=message):
        build()
