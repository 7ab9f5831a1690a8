"""`PlainTraining`: the training that a sharded job must equal, in one process, on unsharded modules.

Tables take FBGEMM's fused optimizers, written out. With M replicas (2D sparse parallelism, Zhang et al. 2025, section
3.2, Algorithm 1) there are M modules, each with the gradients of its replica's batches: dense parts and data-parallel
tables take the mean gradient; the other tables train alone with moments divided by c (line 6), and every N steps their
weights and states are averaged (lines 9 and 10).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.sharding.optimizers import FUSED_DEFAULTS, MomentScale, moment_scale_of, optimizer_name
from dmt.testing.state import TableLayout

__all__ = ["PlainTable", "PlainTraining", "is_table", "table_name"]

_NUM_STATES = {"rowwise_adagrad": 1, "adagrad": 1, "adam": 2, "sgd": 0}
_TABLE = re.compile(r"(^|\.)embedding_bags\.")


def is_table(name: str) -> bool:
    """Returns whether a parameter of this name is an embedding table."""
    return _TABLE.search(name) is not None


def table_name(name: str) -> str:
    """Returns the table's own name from its parameter's.

    Example:
        >>> table_name("model.sparse_arch.embedding_bags.t_ad.weight")
        't_ad'
    """
    return name.split(".")[-2]


class PlainTraining:
    """Trains the unsharded modules of all replicas as their sharded ranks must.

    The caller leaves in each module the gradient of the mean over the replica's ranks of their local mean losses, then
    calls `step`.

    Args:
        modules: the module of each replica (one without replicas), with equal weights; trained in place.
        fused_params: FBGEMM's settings of the tables' optimizer, as the sharder has them: row-wise AdaGrad (state: the
            sum over steps of the mean over a shard's columns of g^2), AdaGrad, Adam or SGD.
        make_optimizer: makes the optimizer of a module's trainable dense parameters, by name; None leaves them alone.
        layout: `dmt.testing.state.table_layout` of the sharded model.
        moment_scale: c, as the sharder has it.
        interval: N, steps between averaging.
        optimizer_state: ``"delayed"`` averages states as they were one averaging ago and keeps what each replica added
            since, as `dmt.ReplicaSync` does.
        has_half_tables: whether weights of tables are rounded to FP16 after each update.

    Raises:
        InputError: ``moment_scale`` breaks Scaling Rule 1, or the optimizer is unknown or has no moments.

    Example:
        Two replicas look up different rows; each moves by lr g / sqrt(mean of g^2 / 2), and the mean is half of that.

        >>> tables = [nn.Embedding.from_pretrained(torch.zeros(3, 2), freeze=False) for _ in range(2)]
        >>> modules = [nn.ModuleDict({"embedding_bags": nn.ModuleDict({"t": table})}) for table in tables]
        >>> fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 1.0}
        >>> training = PlainTraining(modules, fused_params=fused)
        >>> for row, table in enumerate(tables):
        ...     table(torch.tensor([row])).sum().backward()
        >>> training.step()
        >>> tables[1].weight.data
        tensor([[-0.7071, -0.7071],
                [-0.7071, -0.7071],
                [ 0.0000,  0.0000]])
        >>> training.tables[0]["embedding_bags.t.weight"].states[0][0].T
        tensor([[0.5000, 0.5000, 0.0000]])
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        fused_params: Mapping[str, Any],
        make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
        layout: TableLayout | None = None,
        moment_scale: MomentScale = "num_replicas",
        interval: int = 1,
        optimizer_state: Literal["now", "delayed"] = "now",
        has_half_tables: bool = False,
    ) -> None:
        layout = layout or TableLayout()
        settings = {**FUSED_DEFAULTS, **fused_params}
        scale = moment_scale_of(moment_scale, settings, len(modules))
        self.modules = list(modules)
        self.learning_rate: float = settings["learning_rate"]
        """Learning rate of the tables; may change between steps."""
        self.dense_optimizers: list[torch.optim.Optimizer] = []
        """Optimizer of each replica's dense parts."""
        self.tables: list[dict[str, PlainTable]] = []
        """Tables of each replica, by parameter name."""
        self._interval, self._is_delayed, self._steps = interval, optimizer_state == "delayed", 0
        self._has_half_tables = has_half_tables
        self._snapshots: dict[tuple[str, int, int], list[Tensor]] = {}
        for module in modules:
            parameters = dict(module.named_parameters())
            dense = {name: p for name, p in parameters.items() if not is_table(name) and p.requires_grad}
            if make_optimizer is not None and dense:
                self.dense_optimizers.append(make_optimizer(dense))
            tables = {}
            for name, weight in parameters.items():
                if is_table(name):
                    widths = layout.column_widths.get(table_name(name), [weight.shape[1]])
                    own_scale = 1.0 if table_name(name) in layout.data_parallel else scale
                    tables[name] = PlainTable(weight, widths, settings, own_scale)
            self.tables.append(tables)
        self._averaged = [name for name in self.tables[0] if table_name(name) not in layout.data_parallel]

    def average_gradients(self) -> None:
        """Gives all replicas the mean gradients of dense parts and data-parallel tables."""
        of_replicas = [dict(module.named_parameters()) for module in self.modules]
        for name in of_replicas[0]:
            if name not in self._averaged:
                gradients = [parameters[name].grad for parameters in of_replicas]
                _set_to_mean([gradient for gradient in gradients if gradient is not None])

    @torch.no_grad()
    def step(self) -> None:
        """Takes a training step with the modules' gradients; averages replicas in every N-th."""
        self.average_gradients()
        for optimizer in self.dense_optimizers:
            optimizer.step()
        for tables in self.tables:
            for name, table in tables.items():
                assert table.weight.grad is not None, f"{name} got no gradient"
                table.step(self.learning_rate)
        self._round_tables()
        self._steps += 1
        if self._steps % self._interval == 0:
            self._sync(is_delayed=self._is_delayed)

    def sync(self) -> None:
        """Averages weights and states now, as ``ReplicaSync.sync()`` does at the end of training."""
        self._sync(is_delayed=False)

    @torch.no_grad()
    def _sync(self, *, is_delayed: bool) -> None:
        if len(self.modules) == 1:
            return
        for name in self._averaged:
            tables = [tables[name] for tables in self.tables]
            _set_to_mean([table.weight for table in tables])  # line 9
            for shard, states in enumerate(tables[0].states):
                for kind in range(len(states)):
                    key, own = (name, shard, kind), [table.states[shard][kind] for table in tables]
                    if not is_delayed:
                        _set_to_mean(own)  # line 10
                        continue
                    if (before := self._snapshots.get(key)) is not None:
                        mean = torch.stack(before).mean(dim=0)
                        for state, old in zip(own, before, strict=True):
                            state += mean - old
                    self._snapshots[key] = [state.clone() for state in own]
        if not is_delayed:
            self._snapshots = {}
        self._round_tables()

    def _round_tables(self) -> None:
        if self._has_half_tables:
            for tables in self.tables:
                for table in tables.values():
                    table.weight.copy_(table.weight.half())


class PlainTable:
    """A table of one replica, [rows, columns] in column shards of some widths, with FBGEMM's optimizer; c its scale."""

    def __init__(
        self, weight: nn.Parameter, widths: Sequence[int], settings: Mapping[str, Any], moment_scale: float
    ) -> None:
        self.weight = weight
        self.widths = list(widths)
        self._settings, self._scale, self._steps = settings, moment_scale, 0
        self._optimizer = optimizer_name(settings)
        if self._optimizer is None:
            raise InputError(f"fused_params: optimizer={settings['optimizer']} is not one of {list(_NUM_STATES)}.")
        columns = [1 if self._optimizer == "rowwise_adagrad" else width for width in self.widths]
        self.states = [
            [torch.zeros(len(weight), width) for _ in range(_NUM_STATES[self._optimizer])] for width in columns
        ]
        """For each column shard FBGEMM's ``momentum1``, [rows, 1] (row-wise AdaGrad) or [rows, width], and
        ``momentum2`` (Adam)."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates the weights from their gradient."""
        assert self.weight.grad is not None, "step comes after a backward pass"
        self._steps += 1
        shards = zip(self.weight.split(self.widths, 1), self.weight.grad.split(self.widths, 1), strict=True)
        for states, (weight, gradient) in zip(self.states, shards, strict=True):
            weight -= learning_rate * self._direction(gradient, states)

    def _direction(self, gradient: Tensor, states: Sequence[Tensor]) -> Tensor:
        if self._optimizer == "sgd":
            return gradient
        if self._optimizer == "adam":
            return self._adam(gradient, *states)
        (moment,) = states
        square = gradient.square()
        moment += square.mean(dim=1, keepdim=True) if self._optimizer == "rowwise_adagrad" else square  # line 5
        return gradient / ((moment / self._scale).sqrt() + self._settings["eps"])  # line 6

    def _adam(self, gradient: Tensor, first: Tensor, second: Tensor) -> Tensor:
        beta1, beta2 = self._settings["beta1"], self._settings["beta2"]
        # FBGEMM visits only the rows of the batch: others keep weights and moments.
        rows = gradient.ne(0).any(dim=1)
        first[rows] = beta1 * first[rows] + (1 - beta1) * gradient[rows]
        second[rows] = beta2 * second[rows] + (1 - beta2) * gradient[rows].square()
        root = (second / (1 - beta2**self._steps)).sqrt() + self._settings["eps"]
        return torch.where(rows.unsqueeze(1), first / (1 - beta1**self._steps) / root, 0.0)


def _set_to_mean(tensors: Sequence[Tensor]) -> None:
    if len(tensors) > 1:
        mean = torch.stack([tensor.detach() for tensor in tensors]).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)
