"""The private names that `dmt/_torchrec.py` leans on still exist; fails first when TorchRec moves them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import textwrap

import pytest
import torch

from dmt._torchrec import settings_on_parameters

PRIVATE_NAMES = {
    "torchrec.distributed.embedding_types.ShardedEmbeddingModule": "_input_dists _lookups _output_dists",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_load_state_dict _dmp_wrapped_module",
    "torch.distributed": "_remote_device",
    "torch.distributed.ProcessGroup": "_get_backend _device_types",
    "torch._C._distributed_c10d.Backend.Options": "_timeout",
    "torch.ops.aten": "_assert_async",
    "torch.utils": "_pytree",
    "torch.autograd.Variable": "_execution_engine",
    "torch._C": "_current_graph_task_id",
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
