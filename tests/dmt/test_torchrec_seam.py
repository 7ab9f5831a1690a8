"""The private names that `dmt/_torchrec.py` relies on still exist; fails first when TorchRec moves them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import textwrap
from itertools import product
from typing import Any

import pytest
import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm

from dmt._torchrec import settings_on_parameters
from dmt.plan.tables import TableSpec
from dmt.sharding.optimizers import kernel_obstacle

PRIVATE_NAMES = {
    "torchrec.distributed.embedding_types.ShardedEmbeddingModule": "_input_dists _lookups _output_dists",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_load_state_dict _dmp_wrapped_module",
    "torch.distributed": "_remote_device",
    "torch.distributed.ProcessGroup": "_get_backend _device_types",
    "torch._C._distributed_c10d.Backend.Options": "_timeout",
    "torch.ops.aten": "_assert_async",
    "torch.utils": "_pytree",
    "torch.autograd.Variable": "_execution_engine",
    "torch._C": "_current_graph_task_id _is_fwd_grad_enabled",
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection": (
        "_embedding_shardings _sharding_types _lookups _input_dists _output_dists _embedding_names _embedding_dims "
        "_pre_load_state_dict_hook _has_mean_pooling_callback"
    ),
    "torchrec.distributed.embedding.ShardedEmbeddingCollection": (
        "_lookups _pre_load_state_dict_hook _model_parallel_name_to_sharded_tensor"
    ),
    "torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup": "_emb_modules",
    "torchrec.distributed.embedding_lookup.GroupedPooledEmbeddingsLookup": "_emb_modules",
    "torchrec.distributed.sharding.dp_sharding.BaseDpEmbeddingSharding": "_grouped_embedding_configs",
    "torchrec.distributed.sharding.rw_sharding.BaseRwEmbeddingSharding": "_grouped_embedding_configs",
    "torchrec.distributed.sharding.tw_sharding.BaseTwEmbeddingSharding": "_grouped_embedding_configs",
    "torchrec.optim.optimizers.in_backward_optimizer_filter": "_in_backward_optimizers",
    "torchrec.distributed.embeddingbag": "_optimizer_classes _optimizer_kwargs",
}


def resolve(path: str) -> object:
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def attributes(found: object) -> set[str]:
    """Attributes that a class or module reads or sets anywhere, by a dot or by ``getattr`` and its kin."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    dotted = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [argument for call in calls if call.func.id.endswith("attr") for argument in call.args[1:2]]
    return dotted | {argument.value for argument in named if isinstance(argument, ast.Constant)}


@pytest.mark.parametrize("owner", PRIVATE_NAMES)
def test_private_names_are_where_we_expect_them(owner: str) -> None:
    found = resolve(owner)
    for name in PRIVATE_NAMES[owner].split():
        assert hasattr(found, name) or name in attributes(found), (
            f"{owner}.{name} is gone in torchrec {importlib.metadata.version('torchrec')}, torch {torch.__version__}; "
            "dmt/_torchrec.py was written for TorchRec 1.8.0 and 1.9.2."
        )


def test_the_pipeline_still_asks_for_our_attributes() -> None:
    from torchrec.distributed.train_pipeline import utils

    read = attributes(utils)
    for name in ("_has_uninitialized_input_dist", "_input_dists", "_dist"):
        assert name in read, f"TorchRec's pipeline no longer reads {name}; see dmt/_torchrec.py PipelinedModule"


def test_settings_leave_other_attributes_of_a_parameter_alone() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    parameters[0]._optimizer_kwargs = [{"lr": 1.0}]
    with settings_on_parameters([(parameter, {"lr": 2.0}) for parameter in parameters]):
        assert [parameter._optimizer_kwargs for parameter in parameters] == [[{"lr": 2.0}]] * 2
        parameters[0].placed = "by TorchRec, meanwhile"
    assert vars(parameters[0]) == {"_optimizer_kwargs": [{"lr": 1.0}], "placed": "by TorchRec, meanwhile"}
    assert vars(parameters[1]) == {}


MODES, COUNTED = fbgemm.WeightDecayMode, fbgemm.CounterWeightDecayMode
COUNTS = fbgemm.CounterBasedRegularizationDefinition(counter_weight_decay_mode=COUNTED.L2)
CLIPS = fbgemm.CowClipDefinition(counter_weight_decay_mode=COUNTED.ADAGRADW, lower_bound=1.0)
DECAYS: list[dict[str, Any]] = [
    *({"weight_decay_mode": mode} for mode in (MODES.NONE, MODES.L2, MODES.DECOUPLE)),
    {"weight_decay_mode": MODES.COUNTER, "counter_based_regularization": COUNTS},
    {"weight_decay_mode": MODES.COWCLIP, "cowclip_regularization": CLIPS},
]


@pytest.mark.parametrize(("features", "number"), [*product(("a", "ab"), ("FP32", "FP16"))])
def test_what_is_refused_on_a_cpu_is_what_fbgemm_ignores_there(features: str, number: Any) -> None:
    adagrad = {"optimizer": fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD}
    table = TableSpec(name="t", num_embeddings=2, embedding_dim=4, feature_names=tuple(features), data_type=number)

    def trained(**settings: Any) -> torch.Tensor:
        place = [(2, 4, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)]
        settings |= {"weights_precision": fbgemm.SparseType[number], "feature_table_map": [0] * len(features)}
        kernel = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(place, device=torch.device("cpu"), **adagrad, **settings)
        (weights,) = kernel.split_embedding_weights()
        weights.copy_(torch.arange(8).view(2, 4))
        for _ in range(2):
            kernel(torch.tensor([1] * len(features)), torch.arange(len(features) + 1)).sum().backward()
        return weights

    for way, asked in product(DECAYS, ({"weight_decay": 0.5}, {"max_norm": 0.1})):
        is_ignored = torch.equal(trained(**way), trained(**way, **asked))
        assert is_ignored == bool(kernel_obstacle({**adagrad, **way, **asked}, cpu_table=table)), (way, asked)
