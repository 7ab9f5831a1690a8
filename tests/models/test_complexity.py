"""The paper's Tables 3 to 5 on the meta device (pure arithmetic, no TorchRec), then counting of built models."""

from __future__ import annotations

import functools
import itertools

import pytest

from dmt.errors import InputError
from dmt.models import DCN, DLRM, DMTDCN, DMTDLRM, ModelOptions
from dmt.models.complexity import (
    MetaTables,
    MetaTowers,
    count_complexity,
    count_on_meta,
    criteo_1tb_tables,
    paper_complexity,
)
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan

# (arch, towers, settings, MFLOPs per sample, parameters in G, compression ratio). MFLOPs and parameters as printed in
# Tables 3, 4 and 5; ratios as in Table 5, and |F| N / sum O_t where the paper prints none.
PAPER = [
    ("dlrm", None, {}, 14.74, 22.78, 1.0),
    ("dcn", None, {}, 96.22, 22.79, 1.0),
    ("dlrm", 2, {}, 8.95, 22.78, 2.0),
    ("dlrm", 4, {}, 8.95, 22.78, 2.0),
    ("dlrm", 8, {}, 8.95, 22.78, 2.0),
    ("dlrm", 16, {"tower_dim": 128, "c": 0, "p": 1}, 8.75, 22.78, 26 / 16),
    ("dlrm", 26, {}, 8.95, 22.78, 2.0),
    ("dlrm", 8, {"tower_dim": 64}, 8.95, 22.78, 2.0),
    ("dlrm", 8, {"tower_dim": 32}, 7.93, 22.78, 4.0),
    ("dlrm", 8, {"tower_dim": 16}, 7.41, 22.78, 8.0),
    ("dlrm", 8, {"tower_dim": 8}, 7.16, 22.78, 16.0),
    ("dcn", 2, {"tower_dim": 128}, 43.71, 22.81, 13.0),
    ("dcn", 4, {"tower_dim": 128}, 50.01, 22.79, 6.5),
    ("dcn", 8, {"tower_dim": 128}, 62.60, 22.81, 3.25),
    ("dcn", 16, {"tower_dim": 128}, 87.19, 22.79, 26 / 16),
]
# Here the second decimal of the parameters differs from the paper's: 22.784 and 22.787 G against 22.81 (0.11 and
# 0.10 %). We found no reading of Listing 2 that gives 22.81 with 2 and 8 towers but 22.79 with 4 and 16.
PARAMETERS_OFF = {("dcn", 2), ("dcn", 8)}


@pytest.mark.parametrize(("arch", "num_towers", "settings", "mflops", "giga_parameters", "ratio"), PAPER)
def test_the_papers_numbers(arch, num_towers, settings, mflops, giga_parameters, ratio):
    counted = paper_complexity(arch, num_towers, **settings)
    assert counted.mflops_per_sample == pytest.approx(mflops, rel=2e-3)
    if (arch, num_towers) in PARAMETERS_OFF:
        assert counted.parameters / 1e9 == pytest.approx(giga_parameters, rel=2e-3)
    else:
        assert round(counted.parameters / 1e9, 2) == giga_parameters
    assert counted.compression_ratio == ratio


def test_multiply_accumulates_of_the_flat_dlrm_by_hand():
    # 6 FLOPs for each weight of the linear layers and each of the 27 x 27 x 128 products of the pairwise dot, less
    # the input gradient of the first layer: 2 FLOPs for each of its weights.
    linear = 13 * 512 + 512 * 256 + 256 * 128 + 479 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    expected = 6 * (linear + 27 * 27 * 128) - 2 * 13 * 512
    assert paper_complexity("dlrm").mflops_per_sample == expected / 1e6


def test_parameters_of_dmt_dcn_by_hand():
    # The tables hide the dense part in the paper's Giga, so it is held to the unit here: 2 towers of 13 features.
    def linear(*sizes):
        return sum(i * o + o for i, o in itertools.pairwise(sizes))

    def cross(features, layers):
        return layers * (2 * 512 * features + features)

    towers = 2 * (cross(13 * 128, layers=1) + linear(13 * 128, 128))
    dense = linear(13, 512, 256, 128) + cross(3 * 128, layers=3) + linear(3 * 128, 1024, 1024, 512, 256, 1)
    tables = sum(table.num_embeddings for table in criteo_1tb_tables()) * 128
    assert paper_complexity("dcn", 2).parameters == tables + towers + dense


@pytest.mark.parametrize("arch", ["dlrm", "dcn"])
@pytest.mark.parametrize("towers", [False, True])
def test_the_meta_count_is_that_of_the_real_model(arch, towers, tables, plan, dense_features, sparse_features):
    sizes = {"dense_arch_layer_sizes": (16,), "over_arch_layer_sizes": (16, 1)}
    builders = {
        ("dlrm", False): DLRM,
        ("dlrm", True): functools.partial(DMTDLRM, tower_plan=plan),
        ("dcn", False): DCN,
        ("dcn", True): functools.partial(DMTDCN, tower_plan=plan),
    }
    make = functools.partial(builders[arch, towers], tables=tables, dense_in_features=13)
    stand_in = MetaTowers if towers else MetaTables
    meta = count_on_meta(make(options=ModelOptions(**sizes, device="meta"), make_sparse_arch=stand_in), 13)
    assert count_complexity(make(options=ModelOptions(**sizes)), dense_features, sparse_features) == meta


def test_counting_leaves_gradients_alone(tables, dense_features, sparse_features):
    model = DLRM(tables=tables, dense_in_features=13)
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    count_complexity(model, dense_features, sparse_features)
    assert fired == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_towers_of_different_embedding_dims():
    tables = [
        TableSpec(name=f"t{i}", num_embeddings=9, embedding_dim=dim, feature_names=(f"f{i}",))
        for i, dim in enumerate((32, 32, 16))
    ]
    plan = TowerPlan.from_lists([["f0", "f1"], ["f2"]])
    options = ModelOptions(device="meta")
    settings = {"tables": tables, "tower_plan": plan, "tower_dim": 8, "options": options}
    model = DMTDLRM(**settings, dense_in_features=3, make_sparse_arch=MetaTowers)
    assert count_on_meta(model, 3).compression_ratio == 80 / 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "dlmr"}, "arch='dlmr' is unknown; use 'dlrm' or 'dcn'. Did you mean 'dlrm'"),
        ({"arch": "dlrm", "tower_dim": 64}, "tower_dim=64, c=1, p=0: only models with towers have"),
        ({"arch": "dlrm", "p": 1}, "p=1: only models with towers"),
        ({"arch": "dcn", "num_towers": 4, "p": 1}, "c=1, p=1: .* only DLRM with towers has c and p"),
        ({"arch": "dlrm", "num_towers": 27}, "num_towers=27 must be 1 to the number of .*, 26"),
        ({"arch": "dlrm", "num_towers": 2, "tower_dim": 0}, "tower_dim=0 is invalid; use an integer of at least 1"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(InputError, match=message):
        paper_complexity(**arguments)
