"""`ServedModel` before it is traced: formats of tables, cut tables, names, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from dmt.errors import InputError
from dmt.plan.towers import TowerPlan
from dmt.training.serving.program import ServedModel, make_program, quantize_rows, restore_rows
from dmt.training.serving.score import tensors_of
from tests.training.small import plain, small, source


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_off_by_half_a_step_at_most(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 12, generator=generator) * torch.logspace(-30, 6, 200).unsqueeze(1)
    weight[3], weight[4], weight[5, :] = 0.0, 1e-7, torch.arange(12.0)
    codes, scales = quantize_rows(weight, bits)
    assert codes.shape == (200, 12 * bits // 8)
    step = (weight.amax(1) - weight.amin(1)) / (2**bits - 1)
    error = (restore_rows(codes, scales, bits=bits) - weight).abs().amax(1)
    assert bool((error <= 0.51 * step + 1e-6 * weight.abs().amax(1)).all())
    assert float(error[3]) == 0.0
    # The rounding is used: a row of 16 equal steps is not off at all, a random one is.
    assert float(error[100]) > 0.1 * float(step[100])


@pytest.mark.parametrize(("stored", "most"), [("fp32", 0.0), ("int8", 3e-2), ("int4", 0.5)])
@pytest.mark.parametrize(("arch", "trained"), [("dlrm", "fp32"), ("dmt-dcn", "fp32"), ("dmt-dlrm-products", "fp16")])
def test_logits_are_near_those_of_the_model(arch: str, trained: str, stored: Any, most: float) -> None:
    torch.manual_seed(0)
    config = small(arch, model={"p": 1}, synthetic={"num_multi_hot": 3}, sharding={"table_precision": trained})
    data, model = source(config), plain(config).model.eval()
    batch = next(data.batches("eval", rank=0, world_size=1, batch_size=32))
    with torch.no_grad():
        wanted = model(batch.dense_features, batch.sparse_features).squeeze(1)
        found = ServedModel(model, data.columns.feature_names, stored=stored)(*tensors_of(batch))
    difference = float((found - wanted).abs().max())
    assert difference <= most * float(wanted.std())
    assert stored == "fp32" or difference > 0.0


def test_column_shards_are_looked_up_with_the_ids_of_their_feature(tmp_path: Path) -> None:
    torch.manual_seed(0)
    towers = [["C1[0:4]", "C2", "C3"], ["C1[4:8]", "C4", "C5", "C6"]]
    TowerPlan.from_lists(towers, column_splits={"C1": (4, 4)}).save(tmp_path / "towers.json")
    config = small("dlrm", "sptt", towers={"plan": str(tmp_path / "towers.json")})
    data, model = source(config), plain(config).model.eval()
    batch = next(data.batches("eval", rank=0, world_size=1, batch_size=32))
    dense, ids, lengths = tensors_of(batch)
    cuts = {"C1": (4, 4)}
    with torch.no_grad():
        wanted = model(batch.dense_features, batch.split_columns(cuts).sparse_features).squeeze(1)
        found = ServedModel(model, data.columns.feature_names, splits=cuts)(dense, ids, lengths)
    assert torch.equal(found, wanted)


class Clicks(nn.Module):
    """A model of one's own: a shared table, mean pooling, another width, names that are no identifiers."""

    def __init__(self, **bags: Any) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name="t_ad", num_embeddings=2000, embedding_dim=128, feature_names=["ad", "last ad"]),
            EmbeddingBagConfig(
                name="t_user",
                num_embeddings=20,
                embedding_dim=8,
                feature_names=["user.country"],
                pooling=PoolingType.MEAN,
            ),
        ]
        self.tables = EmbeddingBagCollection(tables=tables, **bags)
        self.over = nn.Linear(2 * 128 + 8 + 2, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.tables(ids)
        return self.over(torch.cat([dense, found["last ad"], found["ad"], found["user.country"]], dim=1))


FEATURES = ["ad", "last ad", "user.country"]


def test_a_model_of_ones_own_is_exported_and_int8_is_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Clicks().eval()
    lengths = {name: torch.tensor([2, 0, 1, 3]) for name in FEATURES}
    ids = {name: torch.tensor([4, 3, 19, 0, 7, 7]) for name in FEATURES}
    dense = torch.randn(4, 2)
    batch = KeyedJaggedTensor(keys=FEATURES, values=torch.cat([*ids.values()]), lengths=torch.cat([*lengths.values()]))
    served = ServedModel(model, FEATURES)
    with torch.no_grad():
        assert torch.equal(served(dense, ids, lengths), model(dense, batch).squeeze(1))
        program = make_program(ServedModel(model, FEATURES, stored="int8"), num_dense=2, features=FEATURES)
        difference = (program.module()(dense, ids, lengths) - model(dense, batch).squeeze(1)).abs().max()
    assert 0.0 < float(difference) < 1e-2
    torch.export.save(program, tmp_path / "model.pt2")
    weights = sum(table.weight.nbytes for table in model.tables.embedding_bags.values())
    # The program's text and the dense layers take 100 kB whatever the tables' size.
    assert (tmp_path / "model.pt2").stat().st_size - 150_000 < 0.27 * weights


class Branching(Clicks):
    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        logits = super().forward(dense, ids)
        return logits if bool(dense.sum() > 0) else -logits


class Sequences(Clicks):
    def __init__(self) -> None:
        super().__init__()
        self.words = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["word"])]
        )


def test_what_cannot_be_exported_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot export Branching .*without branches on the data"):
        make_program(ServedModel(Branching(), FEATURES), num_dense=2, features=FEATURES)
    with pytest.raises(InputError, match="module 'words' has tables that cannot be exported: only EmbeddingBag"):
        ServedModel(Sequences(), FEATURES)
    with pytest.raises(InputError, match="'t_ad' has weighted bags"):
        ServedModel(Clicks(is_weighted=True), FEATURES)
