"""`TrainingConfig`: all settings of a run, from TOML and ``key=value`` overrides; refuses settings that conflict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from dmt.errors import InputError, did_you_mean
from dmt.files import explain, parse, read_file
from dmt.plan.topology import TowerTopology
from dmt.sharding.optimizers import check_moment_scale
from dmt.sharding.schemes import SCHEMES, Kernel, Scheme
from dmt.sptt.options import refusals
from dmt.sptt.precision import ExchangeFormat, ExchangePrecision
from dmt.training.data.config import OF_READING, DataConfig, Float, Int, PathText, Section

__all__ = [
    "KEYS_OF_TOWERS",
    "HotRowsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ReplicasConfig",
    "ShardingConfig",
    "TopologyConfig",
    "TowersConfig",
    "TrainConfig",
    "TrainingConfig",
    "load_config",
    "shipped_configs",
    "to_override",
    "to_toml",
]

KEYS_OF_TOWERS = ("sharding.tables", "sharding.unique", "towers.outside", "train.micro_batches")
"""Keys that only the tower dataflow supports."""

Layer = Annotated[Int, Field(ge=1, le=2**20)]


class ModelConfig(Section):
    """The model and its sizes."""

    arch: Literal["dlrm", "dcn", "dmt-dlrm", "dmt-dcn", "dmt-dlrm-products"] = "dmt-dlrm"
    """Flat (``dlrm``, ``dcn``) or multi-tower (``dmt-``). ``dmt-dlrm-products`` adds inner products of a tower's
    features to its ``p`` outputs; it needs ``p`` of at least 1."""
    factory: str | None = None
    """``package.module:function`` that builds your own model ([Training](training.md#your-own-model)). Of this
    section, only ``in_towers``, ``options``, ``embedding_dim`` and ``embedding_dims`` apply."""
    in_towers: bool = False
    """The factory's model has an ``EmbeddingTowerCollection``; false: the model is flat."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings passed to the factory."""
    embedding_dim: Int = Field(default=128, ge=4, le=65_536, multiple_of=4)
    """N, columns of every table; a multiple of 4."""
    embedding_dims: dict[str, Annotated[Int, Field(ge=4, le=65_536, multiple_of=4)]] = Field(default_factory=dict)
    """Columns of individual tables, by feature or pattern, as in ``sharding.tables``."""
    dense_arch: tuple[Layer, ...] = (512, 256)
    """Hidden layers of the bottom MLP."""
    over_arch: tuple[Layer, ...] | None = None
    """Layers of the over arch, ending in 1; by default the paper's."""
    tower_dim: Int | None = Field(default=None, ge=1, le=65_536)
    """D, dimension of a tower's outputs; by default half of ``embedding_dim``: a compression ratio of 2 with DLRM's ``c
    = 1`` and ``p = 0``."""
    c: Int = Field(default=1, ge=0, le=65_536)
    """Outputs of dimension D per feature (DLRM in towers)."""
    p: Int = Field(default=0, ge=0, le=65_536)
    """Outputs of dimension D per tower (DLRM in towers)."""
    cross_layers: Int = Field(default=3, ge=1, le=1000)
    """Cross layers of the interaction (``dcn``, ``dmt-dcn``)."""
    cross_rank: Int = Field(default=512, ge=1, le=65_536)
    """Rank of a cross layer (``dcn``, ``dmt-dcn``)."""

    @property
    def has_towers(self) -> bool:
        """True for a multi-tower model."""
        return self.in_towers if self.factory is not None else self.arch.startswith("dmt-")

    @property
    def output_dim(self) -> int:
        """D: ``tower_dim``, or its default."""
        return self.tower_dim or self.embedding_dim // 2

    @property
    def outside_dim(self) -> int | None:
        """Columns of tables outside towers: D if they interact as vectors, None if any number is allowed."""
        return self.output_dim if self.factory is None and self.arch.startswith("dmt-dlrm") else None

    @property
    def name(self) -> str:
        """The arch, or the factory of a user's model."""
        return self.factory or self.arch

    @property
    def chosen(self) -> str:
        """The setting that names the model, for messages."""
        return f"model.arch={self.arch!r}" if self.factory is None else f"model.factory={self.factory!r}"


class TopologyConfig(Section):
    """The mesh: R replicas x T towers x L ranks. Their product must be the world size."""

    num_towers: Int = Field(default=1, ge=1, le=65_536)
    """T; a tower is usually one host."""
    ranks_per_tower: Int = Field(default=1, ge=1, le=8192)
    """L, ranks of a tower in one replica."""
    num_replicas: Int = Field(default=1, ge=1, le=65_536)
    """R, copies of all tables, each trained on its share of the samples."""
    replica_placement: Literal["inter_host", "intra_host"] = "inter_host"
    """``inter_host``: a replica is a block of neighboring ranks; ``intra_host``: the replicas of a shard are
    neighbors."""
    ranks_per_host: Int | None = Field(default=None, ge=1, le=8192)
    """Ranks on one machine: those of one or more towers, or an equal part of one tower. If not set, each tower is a
    host (with ``intra_host``, together with its replicas)."""

    def build(self) -> TowerTopology:
        """Returns the topology of these sizes."""
        return TowerTopology(**self.model_dump())


class TowersConfig(Section):
    """The tower plan: which features form which tower."""

    plan: PathText = "strided"
    """Path of a ``towers.json``; ``strided``: table i in tower i mod T; or ``balanced``: towers and hosts send about
    the same number of bytes, within ``memory_gib`` (for flat models, whose results no plan changes)."""
    outside: Literal["none", "auto"] | tuple[str, ...] = "none"
    """Features whose tables every rank holds ([Towers](towers.md#tables-on-every-rank)), added to those of the plan;
    ``auto``: if the plan has none, the features for which this saves bytes between hosts. In ``dmt-dlrm*`` their tables
    have ``tower_dim`` columns unless ``embedding_dims`` names them."""

    @field_validator("outside", mode="before")
    @classmethod
    def _check_outside(cls, value: object) -> object:
        is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
        if not is_list and value not in ("none", "auto"):
            example = value if isinstance(value, str) else "hour"
            raise InputError(f"{value!r:.100} is neither 'none' nor 'auto'. List the features, such as [\"{example}\"]")
        return value


class ShardingConfig(Section):
    """Sharding of the embedding tables, and their exchange.

    ``tables`` and ``unique`` are for the tower dataflow (``sptt``) only. In a flat run ``cluster`` only adds a
    prediction to ``result.json``.
    """

    dataflow: Literal["auto", "flat", "sptt"] = "auto"
    """``flat``: TorchRec's global exchange; ``sptt``: over towers. Flat models can take either (``auto``: ``flat``),
    multi-tower models only ``sptt``."""
    scheme: Literal["auto", "table_wise", "row_wise", "column_wise", "data_parallel", "planner"] = "auto"
    """The scheme of every table that supports it; ``auto``: the planner chooses for each table (``dmt plan`` shows
    why). In flat runs TorchRec's planner chooses: ``auto`` allows it ``table_wise`` and ``column_wise``, ``planner``
    (flat runs only) all four."""
    tables: dict[str, Literal[Scheme, Kernel]] = Field(default_factory=dict)
    """The scheme of individual tables, or the [kernel](sharding.md#tables-larger-than-the-devices), by name or pattern:
    ``"t_ad*" = "row_wise"``; an exact name wins, then the first pattern that matches."""
    memory_gib: Float | None = Field(default=None, gt=0, le=1e6)
    """GiB per rank for tables, optimizer state, and the embeddings of a step with their gradients; a plan that needs
    more is refused."""
    pooling_factors: dict[str, Annotated[Float, Field(gt=0, le=1e9)]] = Field(default_factory=dict)
    """Mean number of ids per sample, by feature or pattern, for planner and ``dmt what-if``; by default the counts of
    ``dmt prepare``, else 1."""
    cluster: PathText | None = None
    """Rates of lookups and links, for the planner and for the prediction in ``result.json``: a file that ``dmt
    bench-comms`` wrote, ``v100``, ``a100`` or ``h100``."""
    unique: bool = False
    """Send each distinct input in a rank's batch only once: per feature, or with tower modules per tower."""
    forward_precision: ExchangeFormat = "fp32"
    """Number format of embeddings or tower outputs sent between towers (flat: between all ranks)."""
    backward_precision: ExchangeFormat = "fp32"
    """Number format of the gradients that are sent back ([Precision](precision.md))."""
    table_precision: Literal["fp32", "fp16"] = "fp32"
    """Number format of table weights; data-parallel tables must be ``fp32``."""

    @property
    def precision(self) -> ExchangePrecision:
        """The formats of the exchange between towers; in the flat dataflow, of all exchanges."""
        return ExchangePrecision(forward=self.forward_precision, backward=self.backward_precision)

    @property
    def rank_memory(self) -> int | None:
        """``memory_gib`` in bytes; None: no limit."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    @property
    def is_off_device(self) -> bool:
        """Whether ``tables`` puts weights outside the device's memory."""
        return not {"fused", *SCHEMES}.issuperset(self.tables.values())


class ReplicasConfig(Section):
    """Averaging of the tables' replicas (2D sparse parallelism); with one, only ``moment_scale`` has an effect."""

    sync_every: Int = Field(default=1, ge=1)
    """N: average weights and optimizer states every N steps."""
    optimizer_state: Literal["now", "delayed"] = "now"
    """``now``: states are averaged with weights; ``delayed``: while the next N steps train, and adopted after them."""
    moment_scale: Float | Literal["num_replicas"] = "num_replicas"
    """c, in (0, R]: the divisor of AdaGrad's moments ([Replicas](replicas.md#the-moment-scale))."""


class HotRowsConfig(Section):
    """Copies of the most frequently read rows on every rank of a flat model in the tower dataflow (OPER)."""

    extra_memory: Float = Field(default=0.0, ge=0, le=1)
    """Limit on the weights in a rank's copies, as a share of those of all tables; gradients take as much again. 0: no
    copies. Only rows that save bytes between hosts are copied."""
    refresh_every: Int = Field(default=1000, ge=1)
    """Choose the rows again every N steps; the first choice is after 100 steps at the latest."""


class OptimizerConfig(Section):
    """Optimizers of tables, tower modules and the dense parts."""

    sparse: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "rowwise_adagrad"
    """Optimizer of the tables, fused into their backward pass."""
    sparse_lr: Float = Field(default=0.05, gt=0, le=1e6)
    """Learning rate of the tables."""
    dense: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """Optimizer of tower modules and other dense parts."""
    dense_lr: Float = Field(default=1e-3, gt=0, le=1e6)
    """Learning rate of tower modules and other dense parts."""
    warmup_steps: Int = Field(default=100, ge=0)
    """Steps over which both rates rise linearly to their full value."""


class TrainConfig(Section):
    """The training loop."""

    batch_size: Int = Field(default=1024, ge=1, le=2**24)
    """B, rows per rank and step, also in evaluation."""
    epochs: Int = Field(default=1, ge=1)
    """Passes over the training rows."""
    max_steps: Int | None = Field(default=None, ge=1)
    """Stop after this many steps in total."""
    eval_every: Int | None = Field(default=None, ge=1)
    """Evaluate every N steps, and at the end; by default only at the end."""
    log_every: Int = Field(default=50, ge=1)
    """Record the training loss every N steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``cuda``: a GPU for each rank ([Status](status.md#gpus)); ``auto``: ``cuda`` if torch sees one and FBGEMM's CUDA
    build is installed."""
    prefetch_ids: bool = True
    """Exchange the ids of the next batch while this one computes, with the same results."""
    micro_batches: Int = Field(default=1, ge=1, le=1024)
    """K, the parts into which a batch is split: while the dense part computes one, tower outputs or gradients of the
    others are in flight. Tower dataflow only."""
    dense_reduce: Literal["ring", "hierarchical", "hierarchical_bf16"] = "ring"
    """How dense gradients are averaged: ``ring``: DDP's all-reduce; ``hierarchical``: inside each host, then between
    hosts (``hierarchical_bf16``: in BF16 between hosts)."""
    seed: Int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights and of dropout."""
    output_dir: PathText = "runs/latest"
    """Folder of all output."""
    save_every: Int = Field(default=1000, ge=1)
    """Save every N steps, and at the end; with replicas, N is rounded up to a multiple of ``replicas.sync_every``."""
    keep_checkpoints: Int = Field(default=3, ge=1)
    """Number of checkpoints to keep."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in memory."""
    resume: PathText = "auto"
    """Where to start if ``output_dir`` has no checkpoint: ``auto``: from scratch; another run's folder: from its
    weights and optimizer states."""


class TrainingConfig(Section):
    """All settings of a run, by section.

    Example:
        >>> config = TrainingConfig(topology={"num_towers": 2, "ranks_per_tower": 2})
        >>> config.topology.build().world_size, config.dataflow
        (4, 'sptt')
    """

    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    topology: TopologyConfig = TopologyConfig()
    """The mesh."""
    towers: TowersConfig = TowersConfig()
    """The tower plan."""
    sharding: ShardingConfig = ShardingConfig()
    """Sharding of the tables."""
    replicas: ReplicasConfig = ReplicasConfig()
    """Averaging of replicas."""
    hot_rows: HotRowsConfig = HotRowsConfig()
    """Copies of hot rows."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizers."""
    train: TrainConfig = TrainConfig()
    """The loop."""

    @property
    def dataflow(self) -> Literal["flat", "sptt"]:
        """The embedding exchange of the run: ``sharding.dataflow``, with ``auto`` resolved."""
        if self.sharding.dataflow == "auto":
            return "sptt" if self.model.has_towers else "flat"
        return self.sharding.dataflow

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        check_moment_scale(self.replicas.moment_scale, self.topology.num_replicas)
        for is_wrong, message in (*_refusals_within_sections(self), *_refusals_across_sections(self)):
            if is_wrong:
                raise InputError(message)
        return self


def _refusals_within_sections(config: TrainingConfig) -> list[tuple[object, str]]:
    """Returns pairs of (condition, message) for settings of one section; a condition that holds refuses the config."""
    model = config.model
    return [
        (
            model.factory is None and model.arch == "dmt-dlrm-products" and model.p == 0,
            "model.p=0, but model.arch='dmt-dlrm-products' needs at least 1: its p outputs per tower carry the inner "
            "products. Set model.p=1, and model.c=0 for the highest compression.",
        ),
        (
            model.over_arch is not None and model.over_arch[-1:] != (1,),
            f"model.over_arch={list(model.over_arch or ())} must end in 1, the logit. Append 1.",
        ),
        (
            model.factory is None and (model.in_towers or model.options),
            f"model.in_towers={model.in_towers} and model.options={model.options} are settings of your own model, but "
            "model.factory is not set. Set it, or leave them out.",
        ),
    ]


def _refusals_across_sections(config: TrainingConfig) -> list[tuple[object, str]]:
    """Returns pairs like those of `_refusals_within_sections`, for settings of different sections."""
    model, sharding, train, hot = config.model, config.sharding, config.train, config.hot_rows
    is_flat, replicas, places = config.dataflow == "flat", config.topology.num_replicas, config.topology.build()
    refused_pairs = refusals(hot_rows=hot.extra_memory > 0, num_replicas=replicas, has_towers=model.has_towers)
    sync_every = config.replicas.sync_every
    return [
        (
            model.has_towers and is_flat,
            f"sharding.dataflow='flat' cannot train a multi-tower model, but {model.chosen} is one. Use 'sptt' or "
            "'auto', or a flat model.",
        ),
        # TorchRec would ignore them without a warning.
        *(
            (
                is_flat and value != getattr(type(getattr(config, section))(), key),
                f"{section}.{key}={value!r} needs the tower dataflow, but this run is flat. Set "
                f"sharding.dataflow='sptt', or leave {section}.{key} out.",
            )
            for section, key in (name.split(".") for name in KEYS_OF_TOWERS)
            for value in (getattr(getattr(config, section), key),)
        ),
        (
            sharding.scheme == "planner" and not is_flat,
            "sharding.scheme='planner' is TorchRec's planner, for sharding.dataflow='flat', but this run has the tower "
            "dataflow. Use 'auto'.",
        ),
        *((True, message) for message in refused_pairs),
        (
            train.dense_reduce != "ring" and places.num_hosts == 1,
            f"train.dense_reduce={train.dense_reduce!r} reduces inside each host and then between hosts, but topology "
            f"has one host of {places.host_size} ranks. Set topology.ranks_per_host to the number of ranks on one "
            "machine (by default, each tower is a host, also in flat runs), or leave dense_reduce out.",
        ),
        (
            replicas > 1 and train.eval_every and train.eval_every % sync_every,
            f"train.eval_every={train.eval_every} is not a multiple of replicas.sync_every={sync_every}: between "
            "averagings the replicas' tables differ, so no single model can be evaluated. Set it to such a multiple.",
        ),
        (
            hot.extra_memory > 0 and (is_flat or sharding.table_precision != "fp32"),
            f"hot_rows.extra_memory={hot.extra_memory} needs sharding.dataflow='sptt' and "
            f"sharding.table_precision='fp32', but this run has {config.dataflow!r} and {sharding.table_precision!r}. "
            "Set both, or leave hot_rows out.",
        ),
        (
            sharding.is_off_device and (replicas > 1 or hot.extra_memory > 0),
            "sharding.tables puts tables outside the device's memory, but this run has replicas or hot rows, which "
            "read whole tables on it. Leave the kernels out of sharding.tables, or leave out replicas and hot rows.",
        ),
    ]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Reads a TOML file, applies ``section.key=value`` overrides, and validates the result.

    Args:
        path: the file, or the bare name of a shipped config such as ``"demo"``.
        overrides: e.g. ``["train.batch_size=512", "model.arch=dlrm"]``; values are TOML, bare words are strings. With
            ``data.prepared``, the file's settings of raw data are dropped.

    Raises:
        InputError: the file is absent or not TOML, an override is malformed, a key is unknown (the nearest valid one is
            suggested), a value has the wrong type or range, or settings contradict each other.
    """
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    _replace_by_prepared(values, overrides)
    try:
        return TrainingConfig.model_validate(values)
    except ValidationError as error:
        for unknown in error.errors():
            if unknown["type"] == "extra_forbidden":
                raise _unknown_key(unknown["loc"]) from error
        raise InputError(f"Config {path}: {explain(error)}") from error


def to_override(key: str, text: object) -> str:
    r"""Returns the override that sets a key to any text, or to a path.

    Example:
        >>> print(to_override("towers.plan", 'the "best" towers.json'))
        towers.plan="the \"best\" towers.json"
    """
    return f"{key}={tomli_w.dumps({'value': str(text)}).removeprefix('value = ').rstrip()}"


def to_toml(config: BaseModel) -> str:
    """Returns a config as TOML that `load_config` reads again; unset optional values are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def shipped_configs() -> list[str]:
    """Returns the names of the configs that come with the package."""
    return sorted(path.stem for path in (Path(__file__).parent / "configs").glob("*.toml"))


def _read(path: str | Path) -> dict[str, Any]:
    file = Path(path)
    if not file.exists() and str(path) in shipped_configs():
        file = Path(__file__).parent / "configs" / f"{path}.toml"
    return read_file(file, "TOML", place=f"Config {path}", remedy=f"Give a TOML file or one of {shipped_configs()}.")


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    place = f"Override {override!r}"
    if not equals or not key.strip():
        raise InputError(f"{place} is not of the form section.key=value, e.g. train.batch_size=512.")
    try:
        parsed = parse(f"value = {text}", "TOML", place=place, remedy="Correct the TOML value, or put text in quotes.")
    except InputError:
        if text.lstrip().startswith(('"', "'", "[", "{")):
            raise
        # A bare word: model.arch=dlrm
        parsed = parse(to_override("value", text.strip()), "TOML", place=place, remedy="Give text in UTF-8.")
    *sections, last = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"{place}: {section!r} is a value, not a section. Leave out the part of the key after it.")
    values[last] = parsed["value"]


def _replace_by_prepared(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Drops the file's settings of the raw data if an override names the folder that was prepared from them."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    section = values.get("data")
    if "data.prepared" not in keys or not isinstance(section, dict) or not isinstance(section["prepared"], str):
        return
    for key in [key for key in section if key not in OF_READING and f"data.{key}" not in keys]:
        del section[key]


def _unknown_key(place: Sequence[int | str]) -> InputError:
    """Returns the error for a key that its section does not have."""
    *path, key = map(str, place)
    keys = list(_keys(TrainingConfig))
    known = list(dict.fromkeys(valid[len(path)] for valid in keys if valid[: len(path)] == tuple(path)))
    elsewhere = [".".join(valid) for valid in keys if valid[-1] == key]
    hint = f" Did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(key, known)
    return InputError(f"Config key {'.'.join((*path, key))!r} is unknown.{hint} Valid here: {', '.join(known)}.")


def _keys(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields every key of a section as its path from the top of the config."""
    for key, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, (*path, key))
        else:
            yield (*path, key)
