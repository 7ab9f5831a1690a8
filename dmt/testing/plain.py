"""`PlainTraining`: trains unsharded modules in one process, as a sharded job must train them.

FBGEMM's fused optimizers of the tables are written out here. With M replicas (2D sparse parallelism, Zhang et al. 2025,
section 3.2, Algorithm 1) there are M modules, each with the gradients of its replica's batches: dense parts and
data-parallel tables take the mean gradient; the other tables train separately with moments divided by c (line 6), and
every N steps their weights and states are averaged (lines 9 and 10).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.errors import InputError
from dmt.sharding.optimizers import FBGEMM_NAMES, FUSED_DEFAULTS, MomentScale, moment_scale_of, optimizer_name

__all__ = ["PlainTable", "PlainTraining", "is_table", "table_name"]

_NUM_STATES = {"rowwise_adagrad": 1, "adagrad": 1, "adam": 2, "sgd": 0}


def is_table(name: str) -> bool:
    """Returns whether a parameter of this name is an embedding table."""
    # Tables of sequences only in towers: elsewhere a dense module may have such a name.
    return re.search(r"(^|\.)embedding_bags\.|\.embedding\.embeddings\.", name) is not None


def table_name(name: str) -> str:
    """Returns the name of a table from its parameter's name: ``t_ad`` for ``model.embedding_bags.t_ad.weight``."""
    return name.split(".")[-2]


class PlainTraining:
    """Trains the unsharded modules of all replicas as sharded training must train them.

    Before each `step`, run a backward pass of each module, on the mean of the losses of its replica's ranks. Weights on
    which ``apply_optimizer_in_backward`` was called train in that pass, with columns uncut, and are not averaged.

    Args:
        modules: the module of each replica (one module without replicas), with equal weights; trained in place.
        fused_params: FBGEMM's settings of the tables' optimizer, as the sharder has them: row-wise AdaGrad (its state
            sums the squared gradient's mean over a shard's columns), AdaGrad, Adam or SGD; weight decay is ignored.
        make_optimizer: makes an optimizer from a module's trainable dense parameters by name; None: they do not train.
        layout: `dmt.testing.state.table_layout` of the sharded model; None: tables are not cut into columns.
        moment_scale: c, as the sharder has it.
        interval: N, steps from one average of the replicas to the next.
        optimizer_state: ``"now"`` or ``"delayed"``: which states are averaged, as in `dmt.ReplicaSync`.
        has_half_tables: True to round the weights of tables to FP16 after each update.

    Raises:
        InputError: ``moment_scale`` is out of range, or the optimizer is unsupported or has no moments to scale.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        fused_params: Mapping[str, Any],
        make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
        layout: Mapping[str, Sequence[int]] | None = None,
        moment_scale: MomentScale = "num_replicas",
        interval: int = 1,
        optimizer_state: Literal["now", "delayed"] = "now",
        has_half_tables: bool = False,
    ) -> None:
        settings = {**FUSED_DEFAULTS, **fused_params}
        scale = moment_scale_of(moment_scale, settings, len(modules))
        self.modules = list(modules)
        self.learning_rate: float = settings["learning_rate"]
        """Learning rate of the tables; may change between steps."""
        self.dense_optimizers: list[torch.optim.Optimizer] = []
        """Optimizer of each replica's dense parts; empty without ``make_optimizer``."""
        self.tables: list[dict[str, PlainTable]] = []
        """Tables of each replica, by parameter name."""
        self._interval, self._is_delayed, self._steps = interval, optimizer_state == "delayed", 0
        self._has_half_tables = has_half_tables
        self._snapshots: dict[tuple[str, int], list[Tensor]] = {}
        for module in modules:
            parameters = dict(in_backward_optimizer_filter(module.named_parameters()))
            sequences = [part for part in module.modules() if isinstance(part, EmbeddingCollection)]
            of_sequences = {weight for part in sequences for weight in part.parameters()}
            tables = {name: p for name, p in parameters.items() if is_table(name) or p in of_sequences}
            dense = {name: p for name, p in parameters.items() if name not in tables and p.requires_grad}
            if make_optimizer is not None and dense:
                self.dense_optimizers.append(make_optimizer(dense))
            widths = {name: (layout or {}).get(table_name(name), [tables[name].shape[1]]) for name in tables}
            self.tables.append({name: PlainTable(tables[name], widths[name], settings, scale) for name in tables})
        self._all_tables = [table for tables in self.tables for table in tables.values()]
        self._averaged = [name for name, table in self.tables[0].items() if table.is_averaged]

    def average_gradients(self) -> None:
        """Gives all replicas the mean gradients of dense parts and data-parallel tables; ``None`` counts as zeros."""
        of_replicas = [dict(module.named_parameters()) for module in self.modules]
        for name in of_replicas[0]:
            copies = [parameters[name] for parameters in of_replicas]
            if name not in self._averaged and any(copy.grad is not None for copy in copies):
                gradients = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
                _set_to_mean(gradients)
                for copy, gradient in zip(copies, gradients, strict=True):
                    copy.grad = gradient

    @torch.no_grad()
    def step(self) -> None:
        """Takes a training step by `average_gradients`, which are not zeroed; averages replicas in every N-th step."""
        self.average_gradients()
        for optimizer in self.dense_optimizers:
            optimizer.step()
        for table in self._all_tables:
            table.step(self.learning_rate)
        self._round_tables()
        self._steps += 1
        if self._steps % self._interval == 0:
            self.sync(is_delayed=self._is_delayed)

    @torch.no_grad()
    def sync(self, *, is_delayed: bool = False) -> None:
        """Averages as ``ReplicaSync.sync()`` does; with ``is_delayed``, the states as ``"delayed"`` does in `step`."""
        for name in self._averaged:
            tables = [tables[name] for tables in self.tables]
            _set_to_mean([table.weight for table in tables])  # line 9
            for kind, states in enumerate(zip(*(table.states for table in tables), strict=True)):
                if not is_delayed:
                    _set_to_mean(states)  # line 10
                    continue
                if (before := self._snapshots.get((name, kind))) is not None:
                    mean = torch.stack(before).mean(dim=0)
                    for state, old in zip(states, before, strict=True):
                        state += mean - old
                self._snapshots[name, kind] = [state.clone() for state in states]
        if not is_delayed:
            self._snapshots = {}
        self._round_tables()

    def _round_tables(self) -> None:
        for table in self._all_tables if self._has_half_tables else ():
            table.weight.copy_(table.weight.half())


class PlainTable:
    """A table of one replica, ``weight`` [rows, columns] FP32, with FBGEMM's optimizer; ``moment_scale`` is c.

    ``widths`` are the numbers of columns of its shards from left to right; empty for a data-parallel table.
    """

    def __init__(
        self, weight: nn.Parameter, widths: Sequence[int], settings: Mapping[str, Any], moment_scale: float
    ) -> None:
        self.weight = weight
        self.is_averaged = len(widths) > 0
        """True if replicas average its weights, False if they average its gradients."""
        self.widths = list(widths) or [weight.shape[1]]
        self._settings, self._scale, self._steps = settings, moment_scale if widths else 1.0, 0
        self._optimizer = optimizer_name(settings)
        if self._optimizer is None:
            refused = f"the plain reference does not support optimizer={settings['optimizer']}"
            raise InputError(f"fused_params: {refused}. Use one of {list(FBGEMM_NAMES.values())}.")
        columns = len(self.widths) if self._optimizer == "rowwise_adagrad" else weight.shape[1]
        self.states = [weight.new_zeros(len(weight), columns) for _ in range(_NUM_STATES[self._optimizer])]
        """FBGEMM's ``momentum1`` (Adam: also ``momentum2``): [rows, columns], or [rows, column shards] if row-wise."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates the weights with their gradient; ``None`` counts as zeros, as if no sample had read the table."""
        self._steps += 1
        if self.weight.grad is not None:
            self.weight.sub_(learning_rate * self._direction(self.weight.grad))

    def _direction(self, gradient: Tensor) -> Tensor:
        if self._optimizer == "sgd":
            return gradient
        if self._optimizer == "adam":
            return self._adam(gradient, *self.states)
        (moment,) = self.states
        square = gradient.square()
        if self._optimizer == "rowwise_adagrad":
            square = torch.stack([part.mean(dim=1) for part in square.split(self.widths, dim=1)], dim=1)
        moment += square  # line 5
        root = (moment / self._scale).sqrt() + self._settings["eps"]
        if self._optimizer == "rowwise_adagrad":
            root = torch.cat([root[:, i : i + 1].expand(-1, n) for i, n in enumerate(self.widths)], dim=1)
        return gradient / root  # line 6

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
