"""`SPTTEmbeddingBagCollectionSharder`: the tower dataflow for a flat model, with no change to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.errors import InputError
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan
from dmt.sharding.optimizers import MomentScale, TableOptimizer, check_moment_scale
from dmt.sharding.schemes import IdRoute
from dmt.sptt.checks import check_agreement
from dmt.sptt.dataflow import Piece, SPTTModule, model_parallel_tables, shard_in_tower
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.precision import ExchangePrecision
from dmt.sptt.results import LazyKeyedTensor
from dmt.sptt.sharder import Exchange

__all__ = ["SPTTEmbeddingBagCollectionSharder", "ShardedSPTTEmbeddingBagCollection"]


class SPTTEmbeddingBagCollectionSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):
    """Gives any plain ``EmbeddingBagCollection`` the SPTT dataflow (DMT section 3.1); pass-through towers.

    The result is bitwise the unsharded module's ``KeyedTensor``: same keys, same order, same values. Tables get fresh
    weights from their ``init_fn``: load weights after constructing DMP.

    Args:
        mesh: the groups of this job.
        plan: which features go to which tower; as many towers as the mesh has.
        fused_params: of FBGEMM's fused optimizer.
        qcomm_codecs_registry: TorchRec's quantised communication, for the exchanges inside a tower.
        id_route: how ids travel: ``"peer"`` or ``"global"`` (`dmt.sptt.input_dist`); the result is the same.
        peer_precision: number formats of the exchange of outputs between towers; None sends as is.
        moment_scale: factor c of AdaGrad's moments with replicas, in (0, R] (`dmt.sharding.optimizers`); by default their
            number. Settings in ``fused_params`` stay the user's: learning rate and epsilon are scaled for the kernel.

    Raises:
        InputError: the plan has another number of towers than the mesh, or ``id_route`` is unknown.

    Example::

        sharders = [SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.load("towers.json"))]
        plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    def __init__(
        self,
        mesh: TowerMesh,
        plan: TowerPlan,
        *,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        id_route: IdRoute = "peer",
        peer_precision: ExchangePrecision | None = None,
        moment_scale: MomentScale = "num_replicas",
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        check_moment_scale(moment_scale, mesh.topology.num_replicas)
        if plan.num_towers != mesh.topology.num_towers:
            raise InputError(
                f"The tower plan has {plan.num_towers} towers but the topology num_towers={mesh.topology.num_towers}. "
                "Make them equal."
            )
        self.mesh = mesh
        self.plan = plan
        self.exchange = Exchange(id_route=id_route, precision=peer_precision or ExchangePrecision())
        self.optimizer = TableOptimizer(fused_params=fused_params, moment_scale=moment_scale)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedSPTTEmbeddingBagCollection:
        """Called by DMP; ``env`` is ignored, the mesh says where things go."""
        check_agreement(self, module, params)
        return ShardedSPTTEmbeddingBagCollection(
            module,
            params,
            mesh=self.mesh,
            tables_by_tower=self.tables_by_tower(module),
            optimizer=self.optimizer,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            exchange=self.exchange,
        )

    def tables_by_tower(self, module: EmbeddingBagCollection) -> list[list[Any]]:
        """The table configs that each mesh tower holds, after checking the plan against them."""
        return self.plan.tables_by_tower(module.embedding_bag_configs())

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """The table weights, by table name."""
        return {name.split(".")[0]: p for name, p in module.embedding_bags.named_parameters()}

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """What this sharder shards."""
        return EmbeddingBagCollection


class ShardedSPTTEmbeddingBagCollection(SPTTModule):
    """The tables of one mesh tower on one of its ranks; made by `SPTTEmbeddingBagCollectionSharder`.

    State is keyed as in the unsharded collection, ``embedding_bags.<table>.weight``.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        sharding: Mapping[str, ParameterSharding],
        *,
        mesh: TowerMesh,
        exchange: Exchange,
        tables_by_tower: list[list[Any]],
        optimizer: TableOptimizer,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._keys = feature_names(module.embedding_bag_configs())
        super().__init__(
            mesh=mesh,
            tables_by_tower=tables_by_tower,
            is_weighted=module.is_weighted(),
            exchange=exchange,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )
        self.embedding = shard_in_tower(
            _sub_collection(module, tables_by_tower[mesh.tower]),
            sharding,
            mesh,
            optimizer=optimizer,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )
        self.sharded_tables = model_parallel_tables(sharding)
        self.build_input_dist([self.embedding])

    def tower_output(self, embeddings: Sequence[KeyedTensor], num_samples: int) -> tuple[Tensor, list[Piece]]:
        """This tower's embeddings side by side, as its ranks hold them: [samples, sum of N over its features]."""
        arrived = embeddings[0]
        return arrived.values(), list(zip(arrived.keys(), arrived.length_per_key(), strict=True))

    def result(self, columns: Tensor, pieces: Sequence[Piece]) -> KeyedTensor:
        """The ``KeyedTensor`` of the unsharded collection."""
        return LazyKeyedTensor(KeyedTensor([key for key, _ in pieces], [n for _, n in pieces], columns), self._keys)

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Tables as sharded tensors, of this rank's tower."""
        self.wait_for_replicas()
        return self.embedding.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's tables."""
        self.wait_for_replicas()
        return self.embedding.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Parameters under the unsharded collection's names."""
        yield from self.embedding.named_parameters(prefix, recurse)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Buffers under the unsharded collection's names."""
        yield from self.embedding.named_buffers(prefix, recurse)

    def sharded_parameter_names(self, prefix: str = "") -> Any:
        """The table weights, which DMP's data parallel must leave alone."""
        yield from self.embedding.sharded_parameter_names(prefix)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizers, which update in the backward pass."""
        return self.embedding.fused_optimizer

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """What this module was before sharding."""
        return EmbeddingBagCollection


def _sub_collection(module: EmbeddingBagCollection, tables: list[Any]) -> EmbeddingBagCollection:
    """The collection restricted to some tables, sharing their parameters.

    The parameters must be the same objects: ``apply_optimizer_in_backward`` leaves each table's optimizer as an
    attribute on them, and new ones would train with the default optimizer without a word.
    """
    part = EmbeddingBagCollection(tables=tables, device=torch.device("meta"), is_weighted=module.is_weighted())
    for table in tables:
        part.embedding_bags[table.name] = module.embedding_bags[table.name]
    return part
