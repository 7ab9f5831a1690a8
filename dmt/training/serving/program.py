"""Turns a model into a plain PyTorch program: `ServedModel` replaces its tables, `make_program` exports it.

The program takes tensors, and loads and runs without TorchRec, this library and, unless the model itself calls its
operators, FBGEMM. Dense parts and tower modules are traced as they are; only TorchRec's collections are replaced.

Legend: B samples, D dense columns, n ids of a feature in all samples, R rows and N columns of a table.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from dmt._torchrec import assert_in_graph
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.plan.split_across_towers import shard_names
from dmt.sptt.group_sharded import table_configs, table_weights
from dmt.training.factory import checked_logits

__all__ = ["TABLE_BITS", "ServedModel", "ServedTables", "StoredTables", "make_program", "quantize_rows", "restore_rows"]

logger = logging.getLogger(__name__)

StoredTables = Literal["fp32", "int8", "int4"]
TABLE_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Bits per number of a quantized table, by format."""
_ROWS = 2**16  # rows quantized at a time: tables are too large for a copy in FP32


def quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantizes each row of a table linearly, between the smallest and the largest number of the row.

    Args:
        weight: [R, N], any float.
        bits: 8, or 4, which packs two numbers into a byte and needs an even N.

    Returns:
        The codes, uint8 [R, N * bits / 8]; and the step and smallest number of each row, float32 [R, 2]. Apart from
        FP32 rounding, no number is off by more than half a step of its row.

    Example:
        >>> codes, scales = quantize_rows(torch.tensor([[0.0, 0.5, 1.0, 3.0]]), bits=4)
        >>> codes.shape, restore_rows(codes, scales).tolist()
        (torch.Size([1, 2]), [[0.0, 0.4000000059604645, 1.0, 3.0]])
    """
    codes, scales = [], []
    for rows in weight.detach().split(_ROWS):
        rows = rows.float()
        least = rows.amin(dim=1, keepdim=True)
        step = (rows.amax(dim=1, keepdim=True) - least) / (2**bits - 1)
        numbers = ((rows - least) / step.where(step > 0, 1)).round().to(torch.uint8)
        codes.append(numbers if bits == 8 else numbers[:, 0::2] | numbers[:, 1::2] << 4)
        scales.append(torch.cat([step, least], dim=1))
    return torch.cat(codes), torch.cat(scales)


def restore_rows(codes: Tensor, scales: Tensor, *, bits: int = 4) -> Tensor:
    """Restores rows, float32 [n, N], from codes, uint8 [n, N * bits / 8], and scales, float32 [n, 2]."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    return codes.float() * scales[:, :1] + scales[:, 1:]


class ServedTables(nn.Module):
    """The tables of a TorchRec ``EmbeddingBagCollection`` or ``EmbeddingCollection``, read by PyTorch's operators.

    With ``stored="fp32"``, weights are unchanged (FP16 tables stay FP16), and results equal the collection's bitwise.

    Args:
        tables: the collection.
        stored: ``"int8"`` or ``"int4"`` quantizes each row; bags are pooled in FP32.

    Raises:
        InputError: bags are weighted, lookups also return ids (``need_indices``), or INT4 rows have an odd width.
    """

    def __init__(self, tables: EmbeddingBagCollection | EmbeddingCollection, *, stored: StoredTables = "fp32") -> None:
        super().__init__()
        configs, weights = table_configs(tables), table_weights(tables)
        self._is_sequence = isinstance(tables, EmbeddingCollection)
        holder = f"The {type(tables).__name__} that holds table {configs[0].name!r}"
        if isinstance(tables, EmbeddingCollection):
            if tables.need_indices():
                raise InputError(f"{holder} has need_indices=True. Build it with need_indices=False for exports.")
        elif tables.is_weighted():
            raise InputError(f"{holder} has is_weighted=True. Build it with is_weighted=False for exports.")
        self._bits = None if stored == "fp32" else TABLE_BITS[stored]
        names = get_embedding_names_by_table(configs)
        self._outputs = [name for of_table in names for name in of_table]
        modes = ["mean" if getattr(config, "pooling", None) is PoolingType.MEAN else "sum" for config in configs]
        self._lookups = [(config.feature_names, mode) for config, mode in zip(configs, modes, strict=True)]
        self._widths = [config.embedding_dim for config in configs for _ in config.feature_names]
        for number, config in enumerate(configs):
            weight = weights[config.name].detach()
            if self._bits is None:
                self.register_buffer(f"weight_{number}", weight)
                continue
            if self._bits == 4 and weight.shape[1] % 2:
                raise InputError(
                    f"Table {config.name!r} has {weight.shape[1]} columns, but int4 packs two numbers into a byte. Use "
                    "int8, or an even number of columns."
                )
            codes, scales = quantize_rows(weight, self._bits)
            self.register_buffer(f"weight_{number}", codes)
            self.register_buffer(f"scales_{number}", scales)

    def forward(self, features: Mapping[str, JaggedTensor]) -> Any:
        """Returns the float32 embeddings of ``features``, the ids of B samples by feature.

        For bags, a ``KeyedTensor`` [B, sum of N]; for sequences, a dict from embedding name to ``JaggedTensor`` with
        values [n, N].
        """
        lookups = [
            (number, features[name], mode) for number, (names, mode) in enumerate(self._lookups) for name in names
        ]
        if self._is_sequence:
            sequences = [
                JaggedTensor(self._rows(number, ids.values()), lengths=ids.lengths()) for number, ids, _ in lookups
            ]
            return dict(zip(self._outputs, sequences, strict=True))
        pooled = [self._look_up(number, ids.values(), ids.offsets(), mode) for number, ids, mode in lookups]
        return KeyedTensor(keys=self._outputs, length_per_key=self._widths, values=torch.cat(pooled, dim=1))

    def _rows(self, number: int, ids: Tensor) -> Tensor:
        # Not index_select(), which a compiled program lets read row -1 as the last one.
        rows = functional.embedding(ids, self.get_buffer(f"weight_{number}"))
        if self._bits is None:
            return rows.float()
        return restore_rows(rows, functional.embedding(ids, self.get_buffer(f"scales_{number}")), bits=self._bits)

    def _look_up(self, number: int, ids: Tensor, offsets: Tensor, mode: str) -> Tensor:
        weight = self.get_buffer(f"weight_{number}")
        if self._bits is not None:
            weight = self._rows(number, ids)
            ids = torch.arange(ids.shape[0], device=ids.device)
        return functional.embedding_bag(ids, weight, offsets, mode=mode, include_last_offset=True).float()


class _Ids(dict[str, JaggedTensor]):
    """Ids by feature; stands in for a ``KeyedJaggedTensor`` in the traced model."""

    def to_dict(self) -> dict[str, JaggedTensor]:
        return dict(self)


class ServedModel(nn.Module):
    """A click model, ``model(dense_features, sparse_features)`` -> [B, 1] or [B], wrapped to take plain tensors.

    Args:
        model: the unsharded model with its weights; it is copied, except for tables that are not quantized.
        features: names of the features that the program takes.
        stored: number format of the tables.
        splits: widths of column shards, by feature (`dmt.plan.towers.TowerPlan.column_splits`).

    Raises:
        InputError: the model has tables that cannot be exported.
    """

    def __init__(
        self,
        model: nn.Module,
        features: Sequence[str],
        *,
        stored: StoredTables = "fp32",
        splits: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self._shards = {name: shard_names(name, widths) for name, widths in (splits or {}).items()}
        # deepcopy takes the memo's entries in place of copies, so tables are never copied.
        memo: dict[int, Any] = {}
        for name, part in model.named_modules():
            if not isinstance(part, EmbeddingBagCollection | EmbeddingCollection):
                continue
            if type(part) not in (EmbeddingBagCollection, EmbeddingCollection):
                raise InputError(
                    f"The module {name!r} is a {type(part).__name__}, whose tables cannot be exported. Use "
                    "EmbeddingBagCollection or EmbeddingCollection itself, not a subclass."
                )
            memo[id(part)] = ServedTables(part, stored=stored)
        self.model = copy.deepcopy(model, memo).eval()

    def forward(self, dense: Tensor, ids: dict[str, Tensor], lengths: dict[str, Tensor]) -> Tensor:
        """Scores samples.

        Args:
            dense: [B, D] float32, transformed as in training.
            ids: by feature, the ids of all samples one after another, int64 [n].
            lengths: by feature, the number of ids of each sample, int64 [B].

        Returns:
            Logits, float32 [B].

        Raises:
            InputError: the model returned anything but one logit for each sample.
            RuntimeError: ``lengths`` are negative or do not add up to the numbers of ``ids``.
        """
        bags = _Ids()
        # All features at once: for a few samples, time depends on the number of operators.
        stacked = torch.stack([lengths[name] for name in self.features])
        all_offsets = functional.pad(stacked.cumsum(1), (1, 0))
        # With wrong offsets, embedding_bag would read memory outside the batch.
        assert_in_graph((stacked >= 0).all(), "lengths: a length is negative")
        for name, offsets in zip(self.features, all_offsets.unbind(), strict=True):
            assert_in_graph(offsets[-1] == ids[name].shape[0], f"lengths[{name!r}] do not add up to len(ids[{name!r}])")
            for key in self._shards.get(name, [name]):
                bags[key] = JaggedTensor(values=ids[name], lengths=lengths[name], offsets=offsets)
        # Without the check, an output [B, 2] would be flattened to 2 B logits.
        return checked_logits(type(self.model).__name__, self.model(dense, bags), dense.shape[0]).reshape(-1)


def make_program(model: ServedModel, *, num_dense: int, targets: Collection[str] = ()) -> torch.export.ExportedProgram:
    """Exports a model for any number of samples, at least 1, and any number of ids per feature, 0 included.

    The program checks its input: names, shapes, that lengths add up, that ids are rows of their tables. Warns if the
    model calls operators of FBGEMM, which then must be imported where the program is loaded.

    Args:
        model: the model, on the CPU.
        num_dense: D, the number of dense columns.
        targets: features with as many ids as samples, so that the model may read their ids as [B].

    Raises:
        InputError: the model does not return a tensor [B, 1] or [B], a feature has a quotation mark in its name, or
            PyTorch cannot export the model, for the reason given.
    """
    if quoted := [name for name in model.features if "'" in name or '"' in name]:
        # PyTorch writes the names into Python code, unescaped.
        raise InputError(f"Feature {quoted[0]!r}: PyTorch cannot export names with quotation marks. Rename the column.")
    samples = 3
    # A different number of ids for each feature, so that the tracer assumes no two to be equal.
    counts = {name: samples if name in targets else samples + 2 + i for i, name in enumerate(model.features)}
    ids = {name: torch.zeros(count, dtype=torch.int64) for name, count in counts.items()}
    lengths = {name: torch.tensor([1, 1, count - 2]) for name, count in counts.items()}
    batch = torch.export.Dim("batch", min=1)
    dims: tuple[Any, ...] = (
        {0: batch},
        {
            name: {0: batch if name in targets else torch.export.Dim(f"ids_{number}", min=0)}
            for number, name in enumerate(model.features)
        },
        {name: {0: batch} for name in model.features},
    )
    inputs = (torch.zeros(samples, num_dense), ids, lengths)
    try:
        with torch.no_grad():
            model(*inputs)  # an error then shows numbers, not the tracer's symbols
            program = torch.export.export(model, inputs, dynamic_shapes=dims, strict=False)
    except InputError:
        raise
    except Exception as error:  # the user's module can make the tracer raise anything
        reason = shorten([line.strip() for line in str(error).splitlines() if line.strip()][:3], " ")
        raise InputError(
            f"PyTorch cannot export {type(model.model).__name__} ({type(error).__name__}: {reason}). Write its forward "
            "without branches on the data or on the number of samples, and read ids by key."
        ) from error
    if calls := sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("fbgemm.")}):
        logger.warning(
            "%s calls %s: import fbgemm_gpu where you load the program, or write its forward with PyTorch's operators.",
            type(model.model).__name__,
            ", ".join(calls),
        )
    return program
