"""The four models in one process: order of features, towers against the flat model, gradients, tracing, errors."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx, nn
from torchrec.modules.embedding_configs import PoolingType

from dmt.errors import InputError
from dmt.models import (
    DCN,
    DLRM,
    DMTDCN,
    DMTDLRM,
    DCNTowerModule,
    DLRMTowerModule,
    ModelOptions,
    PassThroughTowerModule,
    flat_sparse_arch,
    tower_sparse_arch,
)
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from tests.models.conftest import make_tables

OPTIONS = ModelOptions(dense_arch_layer_sizes=(16,), over_arch_layer_sizes=(16, 1))
BUILDERS = {
    "DLRM": lambda tables, plan, options=OPTIONS: DLRM(tables=tables, dense_in_features=13, options=options),
    "DCN": lambda tables, plan, options=OPTIONS: DCN(
        tables=tables, dense_in_features=13, cross_rank=4, options=options
    ),
    "DMTDLRM": lambda tables, plan, options=OPTIONS: DMTDLRM(
        tables=tables, tower_plan=plan, dense_in_features=13, tower_dim=4, c=2, p=1, options=options
    ),
    "DMTDCN": lambda tables, plan, options=OPTIONS: DMTDCN(
        tables=tables, tower_plan=plan, dense_in_features=13, tower_dim=4, cross_rank=4, options=options
    ),
}


OUTSIDE = TowerPlan.from_lists([["f3"], ["f1"]], outside=("f2", "f0"))


@pytest.fixture(params=BUILDERS)
def build(request):
    return BUILDERS[request.param]


@pytest.mark.parametrize("name", ["DLRM", "DCN"])
def test_flat_models_read_the_tables_by_name(name, tables, plan, dense_features, sparse_features):
    """After sharding the KeyedTensor's keys come in another order; played here by a shuffled collection."""
    model = BUILDERS[name](tables, plan)
    expected = model(dense_features, sparse_features)
    shuffled = flat_sparse_arch([tables[i] for i in (2, 0, 3, 1)])
    shuffled.load_state_dict(model.sparse_arch.state_dict())
    model.sparse_arch = shuffled
    assert model.sparse_arch(sparse_features).keys() == ["f2", "f0", "f3", "f1"]
    assert torch.equal(model(dense_features, sparse_features), expected)


def test_a_logit_per_sample_moves_every_parameter(build, tables, plan, dense_features, sparse_features):
    model = build(tables, plan)
    logits = model(dense_features, sparse_features)
    assert (logits.shape, logits.dtype, len(logits.unique())) == ((5, 1), torch.float32, 5)
    logits.square().sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_train_pipeline_can_trace_the_model(build, tables, plan):
    """TrainPipelineSparseDist traces with the sparse arch as a leaf and needs the bare input as its argument."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, name):
            return name == "sparse_arch" or super().is_leaf_module(module, name)

    graph = Tracer().trace(build(tables, plan))
    (call,) = [node for node in graph.nodes if node.op == "call_module" and node.target == "sparse_arch"]
    assert [(node.op, node.target) for node in call.args] == [("placeholder", "sparse_features")]
    assert not call.kwargs


def test_everything_can_be_built_on_meta(build, tables, plan):
    model = build(tables, plan, ModelOptions(device="meta"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model.over_arch[-1], nn.Linear), "logits may be negative"


def _copy_flat_weights(flat, towered):
    """Tables and dense parts by name: the towers differ only in where a table's name begins."""
    state = {name.rpartition("embedding_bags.")[2]: weight for name, weight in flat.state_dict().items()}
    names = towered.state_dict()
    towered.load_state_dict({name: state[name.rpartition("embedding_bags.")[2]] for name in names})


TABLE_ORDER = TowerPlan.from_lists([["f0", "f1"], ["f2"], ["f3"]])


@pytest.mark.parametrize("order", [TABLE_ORDER, TowerPlan.from_lists([["f0"], ["f1"]], outside=("f2", "f3"))])
def test_dmt_dlrm_without_compression_is_the_flat_dlrm(order, tables, dense_features, sparse_features):
    """c=1, p=0 and D=N skip every projection, so nothing is left but the flat model: equal to the last bit."""
    flat = BUILDERS["DLRM"](tables, None)
    towered = DMTDLRM(tables=tables, tower_plan=order, dense_in_features=13, tower_dim=8, c=1, p=0, options=OPTIONS)
    _copy_flat_weights(flat, towered)
    assert torch.equal(towered(dense_features, sparse_features), flat(dense_features, sparse_features))


def test_a_flat_model_pools_sequences_beside_bags(sparse_features):
    """TorchRec's own configuration of a bag stays as it is."""
    items = TableSpec(
        name="t_items", num_embeddings=20, embedding_dim=8, feature_names=("f3", "f1"), sequences=(("f1", "f3"),)
    )
    arch = flat_sparse_arch([make_tables(3, pooling=PoolingType.MEAN)[2], items])
    nn.init.zeros_(arch.pooling.attentions[0].score[-1].weight)  # the items of a history weigh the same
    found = arch(sparse_features).to_dict()
    bag, item = arch.bags.embedding_bags["t2"].weight, arch.embedding.embeddings["t_items"].weight
    for name, weight, mode in (("f1", item, "mean"), ("f2", bag, "mean"), ("f3", item, "sum")):
        ids = sparse_features[name]
        expected = nn.functional.embedding_bag(ids.values(), weight, ids.offsets(), mode=mode, include_last_offset=True)
        torch.testing.assert_close(found[name], expected, msg=name)


def _spec(name, feature, dim=8):
    return TableSpec(name=name, num_embeddings=4, embedding_dim=dim, feature_names=(feature,))


MIXED = [_spec("t0", "f0"), _spec("t1", "f1", 16)]


class OddTower(DLRMTowerModule):
    """One output too many for vectors of ``tower_dim``."""

    def __init__(self, features, **sizes):
        super().__init__(features, **sizes)
        self.out_features += 1


class OddModel(DMTDLRM):
    tower_module = OddTower


def towers_of(*modules):
    return lambda: tower_sparse_arch(MIXED[:1], TowerPlan.from_lists([["f0"]]), modules)


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (
            lambda: DLRM(tables=MIXED, dense_in_features=13),
            "DLRM needs .* got embedding_dim=8 of table 't0' and embedding_dim=16 of table 't1'",
        ),
        (lambda: DCN(tables=[], dense_in_features=13), "DCN needs tables with equal embedding_dim, but got no table"),
        (
            lambda: DMTDLRM(tables=MIXED, tower_plan=TowerPlan.from_lists([["f0", "f1"]]), dense_in_features=13),
            "tower 'tower_0' needs tables with equal embedding_dim, but got embedding_dim=8 of table 't0'",
        ),
        (lambda: DLRM(tables=MIXED[:1], dense_in_features=0), "in_features=0 is invalid"),
        (
            lambda: DLRM(tables=[_spec("t0", "f0"), _spec("t0", "f1")], dense_in_features=13),
            "Table 't0' occurs 2 times",
        ),
        (
            lambda: OddModel(tables=MIXED[:1], tower_plan=TowerPlan.from_lists([["f0"]]), dense_in_features=13),
            "OddTower of tower 'tower_0' has out_features=65, but the model reads vectors of tower_dim=64",
        ),
        (
            lambda: BUILDERS["DMTDLRM"](make_tables(), OUTSIDE),
            "Table 't0' outside towers has embedding_dim=8, but .* tower_dim=4",
        ),
        (towers_of(), "0 tower modules for 1 towers"),
        (towers_of(nn.Linear(1, 1)), r"tower module Linear of tower 'tower_0' has features=\[\]"),
        (
            towers_of(PassThroughTowerModule(["f1"], embedding_dims=[8])),
            r"of tower 'tower_0' has features=\['f1'\], but the plan gives that tower \['f0'\]",
        ),
    ],
)
def test_tables_plans_and_towers_that_do_not_fit_are_refused(build_it, message):
    with pytest.raises(InputError, match=message):
        build_it()


@pytest.mark.parametrize("name", ["DMTDLRM", "DMTDCN"])
def test_features_outside_towers_interact_as_they_are(name, dense_features, sparse_features):
    model = BUILDERS[name](make_tables(dim=4), OUTSIDE)
    logits = model(dense_features, sparse_features)
    logits.square().sum().backward()
    assert [key for key, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    assert list(model.outside_arch.embedding_bags) == ["t0", "t2"]
    # Of c=2 and p=1 three vectors a tower, and of DCN one; then those of the two features, and the dense one.
    towers = model.sparse_arch(sparse_features)
    beside = model.outside_arch(sparse_features)
    vectors = torch.cat([towers, beside["f2"], beside["f0"]], dim=1)
    dense = model.dense_arch(dense_features)
    if name == "DMTDLRM":
        crossed = model.inter_arch(dense, vectors.reshape(5, 8, 4))
    else:
        crossed = model.inter_arch(torch.cat([dense, vectors], dim=1))
    assert torch.equal(model.over_arch(crossed), logits)


def test_tables_outside_towers_may_have_any_width_in_dmt_dcn(tables):
    assert BUILDERS["DMTDCN"](tables, OUTSIDE).over_arch[0].in_features == (2 + 1) * 4 + 2 * 8


def test_dmt_dcn_takes_the_towers_that_listing_2_prints(tables, plan, dense_features, sparse_features):
    class Printed(DMTDCN):
        tower_module = functools.partial(DCNTowerModule, per_feature=True)

    model = Printed(tables=tables, tower_plan=plan, dense_in_features=13, tower_dim=4, cross_rank=4, options=OPTIONS)
    assert model.over_arch[0].in_features == (4 + 1) * 4
    assert model(dense_features, sparse_features).shape == (5, 1)
