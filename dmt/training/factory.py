"""The user's own model in the trainer: ``model.factory = "package.module:function"``.

The function takes any of these keyword arguments and returns the unsharded model, which is called as
``model(dense_features, sparse_features) -> logits [B, 1]``:

- ``tables``: a list with TorchRec's ``EmbeddingBagConfig`` of each table, whose ``pooling`` the function may change. A
  tower with sequences (``data.sequences``) has one ``EmbeddingCollection``, so its tables are ``EmbeddingConfig``;
- ``num_dense``: number of dense columns;
- ``options``: the section ``[model.options]`` of the config, as a dict;
- ``towers``: the `TowerPlan` of a model in towers; None for a flat model;
- ``device``: device of the parameters, such as the meta device; pass it to TorchRec's collections.

Every process calls the function several times: each call must build the same model anew.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTowerCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dmt._torchrec import fused_settings, move, tables_on_meta
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.models.complexity import MetaTables, meta_batch, tower_modules
from dmt.models.sparse import embedding_bag_configs
from dmt.plan.tables import TableSpec, is_sequence, table_specs
from dmt.plan.towers import TowerPlan
from dmt.sptt.group_sharded import table_configs
from dmt.testing.plain import is_table
from dmt.training.data.batch import ClickBatch
from dmt.training.device import current_device
from dmt.training.functions import call_named, load_function
from dmt.training.job import Job

__all__ = [
    "check_outputs",
    "check_samples",
    "checked_logits",
    "make_model",
    "probability_warning",
    "with_own_values",
    "without_tables",
]


def make_model(job: Job, device: str | None = None) -> nn.Module:
    """Builds the model of a job by its factory on ``device`` (None: the CPU), and checks its tables and towers.

    Raises:
        InputError: the factory cannot be loaded or called, or its model does not fit the job; on the meta device, also
            if the trainer cannot train one of its layers.
    """
    config, towers = job.config.model, job.towers if job.config.model.has_towers else None
    assert config.factory is not None, "the job has a factory"
    place = config.chosen
    if towers is None and job.column_splits:
        raise InputError(
            f"{place} makes a flat model, but the tower plan {job.config.towers.plan} cuts the table of feature "
            f"{next(iter(job.column_splits))!r} into column shards. Give a plan without shards."
        )
    sequences = [name for table in job.tables for name, _ in table.sequences]
    if sequences and towers is None:
        raise InputError(
            f"{place} makes a flat model, but data.sequences has {sequences[0]!r}: your own model can have sequences "
            "only in towers. Set model.in_towers=true, or leave data.sequences out."
        )
    make = load_function("model.factory", config.factory)
    given = {
        "tables": embedding_bag_configs(job.split_tables),
        "num_dense": job.num_dense,
        "options": dict(config.options),
        "towers": towers,
        "device": torch.device(device or "cpu"),
    }
    with torch.device(device or "cpu"), _errors_named(f"{place} raised"):
        model = call_named(place, make, given)
    if not isinstance(model, nn.Module):
        raise InputError(f"{place} returned a {type(model).__name__}, not a torch.nn.Module. Return the model.")
    by_tower = _checked_tables(place, model, job)
    if towers is not None:
        _check_towers(place, model, towers, job.split_tables, by_tower)
    if device == "meta":
        _check_layers(place, model, job.topology.world_size)
    return model


def with_own_values(job: Job) -> nn.Module:
    """Returns a factory's model on this rank's device, with the initial values that the factory gave it.

    Its tables are on the meta device instead: sharding initializes them. Seeds torch's generator with ``train.seed``.

    Raises:
        InputError: see `make_model`.
    """
    torch.manual_seed(job.config.train.seed)
    with tables_on_meta():
        model = make_model(job)
    move(model, current_device(job.device_type))
    return model


def check_outputs(job: Job, model: nn.Module) -> None:
    """Runs a factory's model once on the meta device, and checks its output and the outputs of its tower modules.

    ``model`` must be on the meta device; it is not changed.

    Raises:
        InputError: the model fails, it does not return logits [B, 1] or [B], or a tower module does not return
            [B, ``out_features``].
    """
    place = job.config.model.chosen
    model = without_tables(copy.deepcopy(model))

    def check_tower(module: Any, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] != module.out_features:
            raise InputError(
                f"{place}: tower module {type(module).__name__} says out_features={module.out_features}, but returned "
                f"{_described(output)}. It must return [samples, out_features]."
            )

    for module in tower_modules(model):
        module.register_forward_hook(check_tower)
    dense_features, ids = meta_batch(job.num_dense)
    # A plain tensor of ids replaces the KeyedJaggedTensor; only the stand-ins of the tables can read it.
    with torch.no_grad(), _errors_named(f"{place}: the model fails on a batch (only tables may read sparse_features):"):
        output = model(dense_features, ids)
    checked_logits(place, output, len(ids))


def checked_logits(place: str, output: Any, num_samples: int) -> Tensor:
    """Returns a model's output if it has one logit per sample: a tensor [B, 1] or [B], where B is ``num_samples``.

    Raises `InputError` if the output has another shape or is not a tensor; the message begins with ``place``.
    """
    if isinstance(output, Tensor) and list(output.shape) in ([num_samples, 1], [num_samples]):
        return output
    raise InputError(
        f"{place} returned {_described(output)} for {num_samples} samples; return logits [samples, 1] or [samples]."
    )


def check_samples(job: Job, model: nn.Module, batch: ClickBatch) -> Tensor:
    """Returns the logits [B] of a batch if its two halves give the same; ``model`` must be in evaluation mode.

    Raises `InputError` if a sample's logit depends on the other samples of its batch.
    """
    dense, ids = batch.dense_features, batch.sparse_features
    samples, lengths = torch.arange(len(dense)), ids.lengths().view(-1, len(dense))
    owners = samples.expand_as(lengths).flatten().repeat_interleave(ids.lengths())
    outputs = []
    for part in (samples, *samples.chunk(2)):
        values = ids.values()[torch.isin(owners, part)]
        given = KeyedJaggedTensor(ids.keys(), values, lengths=lengths[:, part].flatten(), stride=len(part))
        with torch.no_grad():
            outputs.append(model(dense[part], given).reshape(-1))
    difference = float((torch.cat(outputs[1:]) - outputs[0]).abs().max())
    # Kernels may sum in another order if the batch size differs.
    if difference > 1e-4 * max(1.0, float(outputs[0].abs().max())):
        raise InputError(
            f"{job.config.model.chosen}: a sample's logit depends on the other samples of its batch: "
            f"halving the batch changes it by {difference:.1e}. Compute it from the sample alone, or use your own loop."
        )
    return outputs[0]


def probability_warning(factory: str, low: float, high: float) -> str:
    """Returns a warning if the outputs of a batch, ``low`` to ``high``, are all in [0, 1]; else "".

    Example:
        >>> probability_warning("my_models:deepfm", -0.2, 0.4)
        ''
    """
    if not 0 <= low <= high <= 1:
        return ""
    return (
        f"model.factory={factory!r}: all outputs of a batch lie between {low:.3f} and {high:.3f}, as "
        "probabilities do. The model must return logits: if it ends in a sigmoid, remove it, or it learns far worse."
    )


def _described(output: Any) -> str:
    return f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Turns an exception in the user's code into an `InputError` that says where it was raised."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
        place = f"({frame.filename}, line {frame.lineno})"
        raise InputError(f"{what} {type(error).__name__}: {error} {place}. Correct the model's code.") from error


def _checked_tables(place: str, model: nn.Module, job: Job) -> list[tuple[TableSpec, ...]]:
    """Returns a model's tables by tower; raises `InputError` unless its sparse modules and tables fit the job."""
    has_towers, outside = job.config.model.has_towers, () if job.towers is None else job.towers.outside
    wanted: list[type[nn.Module]] = [EmbeddingTowerCollection if has_towers else EmbeddingBagCollection]
    beside = ""
    if has_towers and outside:
        wanted.append(EmbeddingBagCollection)
        beside = f", one EmbeddingBagCollection of the features outside towers ({shorten(outside, ', ')})"
    parts = sorted(_sparse_parts(model), key=lambda part: not isinstance(part, EmbeddingTowerCollection))
    if [type(part) for part in parts] != wanted:
        found = ", ".join(type(part).__name__ for part in parts) or "none"
        raise InputError(
            f"{place}: with model.in_towers={str(has_towers).lower()} the model needs one {wanted[0].__name__}{beside} "
            f"and no other module with tables, but has {found}. Build it that way (docs/training.md; tables of one "
            "collection may differ in width), or change model.in_towers."
        )
    kinds = EmbeddingBagCollection | EmbeddingCollection
    collections = [part for sparse in parts for part in sparse.modules() if isinstance(part, kinds)]
    if any(isinstance(part, EmbeddingBagCollection) and part.is_weighted() for part in collections):
        raise InputError(
            f"{place}: an EmbeddingBagCollection has is_weighted=True, but the trainer's rows have no weights. "
            "Leave is_weighted out, or use your own loop."
        )
    by_tower = [table_specs(table_configs(part)) for part in collections]
    tables = {table.name: table for tables in by_tower for table in tables}
    given = {table.name: table for table in job.split_tables}
    for name in {**given, **tables}:
        if given.get(name) != tables.get(name) or is_sequence(given[name]) != is_sequence(tables[name]):
            raise InputError(
                f"{place}: the model's table {name!r} is {tables.get(name, 'absent')}, but the argument `tables` has "
                f"{given.get(name, 'no such table')}. Use the entries of `tables` unchanged; an "
                "EmbeddingCollection takes an EmbeddingConfig with these fields. Rows and features come from [data], "
                "columns from model.embedding_dim and model.embedding_dims."
            )
    return by_tower


def _check_towers(
    place: str, model: nn.Module, towers: TowerPlan, given: Sequence[TableSpec], by_tower: Sequence[Sequence[TableSpec]]
) -> None:
    """Raises `InputError` unless the tower modules have sizes, and each tower the tables that the plan gives it."""
    for module in tower_modules(model):
        sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise InputError(
                f"{place}: tower module {type(module).__name__} has in_features and out_features {sizes}. Set both to "
                "positive integers: how many values per sample enter and leave the module."
            )
    lists, last_tower = towers.tables_by_tower(given), ""
    if towers.outside:
        lists.append(towers.outside_tables(given))
        last_tower = " The collection outside towers counts as the last tower."
    planned = [{table.name for table in tables} for tables in lists]
    held = [{table.name for table in tables} for tables in by_tower]
    for number, (actual, expected) in enumerate(zip_longest(held, planned, fillvalue={"no table"})):
        if actual != expected:
            raise InputError(
                f"{place}: tower {number} of the model has {shorten(sorted(actual), ', ')}, but the tower plan gives "
                f"it {shorten(sorted(expected), ', ')}.{last_tower} Build tower i from towers.tables_by_tower(tables)"
                "[i], and the collection outside towers from towers.outside_tables(tables)."
            )


def _check_layers(place: str, model: nn.Module, world_size: int) -> None:
    """Raises `InputError` for a model on the meta device that would compute something different once sharded.

    Batch normalization would depend on which rank has which samples; a frozen table would be trained; each tower would
    train a shared parameter separately. Lazy layers have no size to shard or count.
    """
    for path, part in model.named_modules():
        if isinstance(part, _BatchNorm) and world_size > 1:
            raise InputError(
                f"{place}: {type(part).__name__} {path!r} is batch normalization, which the trainer supports "
                "on one rank only. Use torch.nn.LayerNorm."
            )
    modules = {id(module) for module in tower_modules(model)}
    paths = [path for path, part in model.named_modules() if id(part) in modules]
    owners: dict[int, tuple[str, str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            raise InputError(f"{place}: {name!r} has no size yet. Replace lazy modules, such as torch.nn.LazyLinear.")
        # TorchRec would train a frozen table anyway, and warm-up sets the rate of every table's optimizer.
        if is_table(name) and (not parameter.requires_grad or fused_settings(parameter, None)):
            raise InputError(
                f"{place}: {name!r} has requires_grad=False or its own optimizer, but the trainer trains every table "
                "as [optimizer] says. Set neither, or use your own loop."
            )
        owner = next((path for path in paths if name.startswith(f"{path}.")), None)
        first, first_owner = owners.setdefault(id(parameter), (name, owner))
        if first_owner != owner:
            raise InputError(
                f"{place}: {first!r} and {name!r} are one parameter, but the ranks of a tower train its module "
                "separately from other towers and from the dense part. Give each module its own parameter."
            )


def _sparse_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost TorchRec modules with tables, in the order of the model."""
    if isinstance(model, EmbeddingBagCollection | EmbeddingCollection | EmbeddingTowerCollection):
        return [model]
    return [part for child in model.children() for part in _sparse_parts(child)]


def without_tables(model: nn.Module, lengths: Mapping[str, float] | None = None) -> nn.Module:
    """Replaces a model's tables in place by stand-ins without data, for counting its cost, and returns the model.

    ``lengths``: mean length of a sequence by feature, 1 for a feature without an entry.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, EmbeddingBagCollection):
                setattr(parent, name, _MetaCollection(child.embedding_bag_configs(), "meta"))
            elif isinstance(child, EmbeddingCollection):
                setattr(parent, name, _MetaSequences(child.embedding_configs(), lengths or {}))
    return model


class _MetaCollection(MetaTables):
    """`MetaTables` that return a ``KeyedTensor``, which a user's model may need."""

    def forward(self, ids: Tensor) -> Any:
        """Returns a ``KeyedTensor`` [B, columns of all features] for ids [B], of which only the size matters."""
        embeddings = super().forward(ids)
        return KeyedTensor.from_tensor_list(list(embeddings), list(embeddings.values()))


class _MetaSequences(MetaTables):
    """Stands in for an ``EmbeddingCollection``; sequences have the mean length of their feature, 1 by default."""

    def __init__(self, tables: Sequence[Any], lengths: Mapping[str, float]) -> None:
        super().__init__(tables, "meta")
        self._lengths = lengths

    def forward(self, ids: Tensor) -> Any:
        """Returns a dict with one ``JaggedTensor`` of B samples per feature; only the length of ``ids`` [B] matters."""
        return {
            feature: JaggedTensor(
                table[:1, :1].expand(round(len(ids) * self._lengths.get(feature, 1.0)), table.shape[1]), lengths=ids
            )
            for table, features in zip(self._tables, self._features, strict=True)
            for feature in features
        }
