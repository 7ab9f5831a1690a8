"""`TowerState`: names, state and optimizers of a rank's tables and tower modules; and the live tensors of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dmt._torchrec import PipelinedModule
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.sptt.group_sharded import GroupSharded
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.rows import RowEncoder

__all__ = ["TableTensor", "TowerState", "checksum", "table_tensors"]

_CHUNK = 2**16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TowerState(PipelinedModule, FusedOptimizerModule):
    """Parameters, state and optimizers of a rank's part of a sharded module, under the unsharded module's names."""

    def __init__(self, unsharded_type: type[nn.Module], mesh: TowerMesh) -> None:
        super().__init__()
        self._unsharded_module_type, self.mesh = unsharded_type, mesh
        self.local_parts = nn.ModuleList()
        """This rank's tables and tower modules, each under the names that they have in the unsharded module."""
        self.before_lookup: Callable[[Any, bool], None] | None = None
        """Called before each lookup with the ids of the batch and whether this is a training pass. `dmt.ReplicaSync`
        and `dmt.HotRows` set it."""
        self.after_lookup: Callable[[list[Any]], None] | None = None
        """Called after each lookup with the embeddings of each collection. `dmt.ReplicaSync` sets it."""
        # Replicas that nothing averages would drift apart without an error, so only `dmt.ReplicaSync` allows lookups.
        if self.mesh.topology.num_replicas > 1:
            self.before_lookup = self._refuse_lookup
        self.after_states_loaded: Callable[[], None] = self.read_again
        """Called after states of the tables' optimizers were loaded; with replicas, `dmt.ReplicaSync` sets it."""
        self.hot: Any = None
        """Copies of hot rows, `dmt.hot_rows.copies.HotCopies`, which train instead of the rows of their tables."""
        self.encoder: RowEncoder | None = None
        """Sends rows instead of samples; when it changes, batches in flight are sent again."""
        self.replicas_drifted = False
        """True while replicas may differ (`dmt.replicas.sync.drifted`). `dmt.ReplicaSync` sets it."""
        self.elsewhere: tuple[str, ...] = ()
        """Beginnings of the keys of other mesh towers, which a state of the unsharded module holds too."""

    @property
    def collections(self) -> list[Any]:
        """The sharded collections of this rank."""
        return [part for part in self.local_parts.modules() if isinstance(part, GroupSharded)]

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns this rank's tables (data-parallel ones whole, others as sharded tensors) and tower modules."""
        self.write_back()
        self.flush()  # and empties caches, whose rows would overwrite what is loaded into these tensors in place
        for part in self.local_parts:
            destination = part.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's tables and tower modules by the keys of `state_dict`; returns missing and unexpected keys.

        Raises:
            RuntimeError: ``strict`` is True, and keys are missing or unknown.
            InputError: a tensor has the wrong shape (TorchRec would load the first rows of a longer table), or
                ``assign`` is True, which sharded tables do not support.
        """
        if assign:
            raise InputError("load_state_dict(assign=True) cannot replace the memory of sharded tables; drop assign.")
        # Brings tables up to date first, so that those that the given state leaves out keep what hot rows have learned.
        for key, value in self.state_dict().items():
            ours, theirs = (  # ShardedTensor.shape would warn
                tuple(tensor.metadata().size if isinstance(tensor, ShardedTensor) else getattr(tensor, "shape", ()))
                for tensor in (value, state_dict.get(key, value))
            )
            if ours != theirs:
                raise InputError(
                    f"load_state_dict: {key!r} has shape {theirs}, but {ours} in the model. Load a state of this model."
                )
        loaded = [part.load_state_dict(state_dict, strict=False) for part in self.local_parts]
        missing = [key for of_part in loaded for key in of_part.missing_keys]
        unknown = sorted(set.intersection(*(set(of_part.unexpected_keys) for of_part in loaded)))
        unknown = [key for key in unknown if not key.startswith(self.elsewhere)]
        if strict and (missing or unknown):
            raise RuntimeError(
                f"The state does not fit the model. Missing keys: {shorten(missing, ', ') or 'none'}. Unknown keys: "
                f"{shorten(unknown, ', ') or 'none'}. Load a state of this model."
            )
        self.read_again()
        return loaded[0]._replace(missing_keys=missing, unexpected_keys=unknown)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        raise InputError(
            f"load_state_dict was called on a module that holds the sharded {prefix!r}, where it loads neither tables "
            "nor tower modules. Call it on the DistributedModelParallel."
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters under the unsharded module's names."""
        self.write_back()
        for part in self.local_parts:
            yield from part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers under the unsharded module's names."""
        for part in self.local_parts:
            yield from part.named_buffers(*args, **kwargs)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names of parameters that DMP's data parallelism must ignore: those of tables and tower modules."""
        yield from (name for part in self.local_parts for name, _ in part.named_parameters(prefix))

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The unsharded module type."""
        return self._unsharded_module_type

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizers, which update in the backward pass."""
        # Tower modules are left out: they are dense parts, and the user's optimizer trains them.
        named = (pair for part in self.local_parts for pair in part.named_modules())
        return _TowerOptimizer([(n, part.fused_optimizer) for n, part in named if isinstance(part, GroupSharded)], self)

    def flush(self) -> None:
        """Writes rows that are cached on an accelerator back to their tables, and empties the cache."""
        for collection in self.collections:
            collection.flush()

    def write_back(self) -> None:
        """Writes the copies of hot rows back to their tables, before the tables' tensors are returned."""
        if self.hot is not None:
            self.hot.write_back()

    def read_again(self) -> None:
        """Marks the copies of hot rows as outdated after tables were loaded; their next use reads the tables again."""
        if self.hot is not None:
            self.hot.read_again()

    def _refuse_lookup(self, ids: Any, is_training_pass: bool) -> None:
        raise InputError(
            f"num_replicas={self.mesh.topology.num_replicas}, but nothing keeps the replicas equal: they would drift "
            "apart. Make a dmt.ReplicaSync(model, mesh) after loading weights, and call its step() after every "
            "training step."
        )


class _TowerOptimizer(CombinedOptimizer):
    """Optimizers of a tower's tables; hot rows are written back before ``params`` and ``state`` are returned.

    They are not written back before ``param_groups``, which schedules read in every step.
    """

    def __init__(self, optimizers: list[Any], owner: TowerState) -> None:
        self._owner = owner
        super().__init__(optimizers)

    @property
    def params(self) -> Mapping[str, Any]:
        """The tables' weights, by name."""
        self._owner.write_back()
        return super().params

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The tables' optimizer states, by weight."""
        self._owner.write_back()
        return super().state

    def post_load_state_dict(self) -> None:
        """Tells the owners of hot rows and of averages in flight; TorchRec calls it once it has loaded states."""
        super().post_load_state_dict()
        self._owner.after_states_loaded()


@dataclass(frozen=True, kw_only=True)
class TableTensor:
    """A tensor that the fused optimizer of a table updates."""

    name: str
    """Name, such as ``t_ad.weight`` or ``t_ad.momentum1``."""
    table: str
    """Name of the table, with the prefix of its module."""
    part: str
    """``weight``, or the name of the optimizer state, such as ``momentum1``."""
    tensor: Tensor
    """Live tensor that the kernels read and write, not a copy: [rows, columns], or [rows] of row-wise state."""
    is_replicated: bool
    """True if each replica trains its own copy; False for data-parallel tables, whose gradients are averaged."""
    offsets: tuple[int, ...]
    """First row and first column of this shard; of 1-D state, its first entry among those of all column shards."""


def table_tensors(module: TowerState, prefix: str = "") -> list[TableTensor]:
    """Returns the floating-point weights and states of this rank's tables; their names begin with ``prefix``."""
    return [tensor for collection in module.collections for tensor in _collection_tensors(collection, prefix)]


def _collection_tensors(collection: Any, prefix: str) -> Iterator[TableTensor]:
    optimizer = collection.fused_optimizer
    states_by_weight = optimizer.state  # read once: it is put together anew for each reader
    for key, weight in optimizer.params.items():
        table = prefix + key.split(".")[-2]
        states = {prefix + name: value for name, value in states_by_weight.get(weight, {}).items()}
        for name, value in {f"{table}.weight": weight, **states}.items():
            is_sharded = isinstance(value, ShardedTensor)
            shards = (
                [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
                if is_sharded
                else [(value, (0,) * value.dim())]
            )
            # At most one shard of a table is on this rank. Counts of updates, integers, are left out.
            for tensor, offsets in shards:
                if tensor.is_floating_point():
                    yield TableTensor(
                        name=name,
                        table=table,
                        part=name.removeprefix(f"{table}."),
                        tensor=tensor.detach(),
                        is_replicated=is_sharded,
                        offsets=offsets,
                    )


def checksum(tensor: Tensor) -> int:
    """Returns a checksum, a signed 64-bit integer, of the bits of a tensor and their positions.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0)), checksum(-a) == checksum(a)
        (True, False, False)
    """
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Each position has a different odd weight: a change of a single number is never lost modulo a power of two.
    weights = 2 * torch.arange(min(_CHUNK, bits.numel()), dtype=torch.int64, device=tensor.device) + 1
    for number, chunk in enumerate(bits.split(_CHUNK)):
        total = total + (chunk.to(torch.int64) * (weights[: chunk.numel()] + 2 * _CHUNK * number)).sum()
    return int(total)
