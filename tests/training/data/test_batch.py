"""`ClickBatch` as TorchRec's pipelines use it, and the check of ids."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.training.data.batch import ClickBatch, check_ids


def batch_of(values, lengths, keys=("a", "b")):
    size = len(lengths) // len(keys)
    kjt = KeyedJaggedTensor(keys=list(keys), values=torch.tensor(values), lengths=torch.tensor(lengths))
    return ClickBatch(torch.rand(size, 3), kjt, torch.zeros(size), torch.ones(size))


def tables(a=10, b=10):
    return [
        TableSpec(name=f"t_{f}", num_embeddings=n, embedding_dim=4, feature_names=(f,)) for f, n in (("a", a), ("b", b))
    ]


def test_moving_keeps_everything():
    batch = batch_of([1, 2, 3], [1, 0, 1, 1])
    assert isinstance(batch, Pipelineable)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert {t.device.type for t in (moved.dense_features, moved.labels, moved.weights)} == {"meta"}
    assert moved.sparse_features.values().device.type == "meta"
    back = batch.to(torch.device("cpu"))
    assert back.sparse_features.lengths().tolist() == [1, 0, 1, 1]
    assert torch.equal(back.dense_features, batch.dense_features)


def test_stream_and_pinning_reach_every_tensor(monkeypatch):
    # On a machine without a GPU neither can be done, so the calls are counted.
    calls = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: calls.append(("stream", t.shape)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t, *a, **k: calls.append(("pin", t.shape)) or t)
    batch = batch_of([1, 2, 3], [1, 0, 1, 1])
    batch.record_stream(None)
    assert len([c for c in calls if c[0] == "stream"]) >= 5
    assert torch.equal(batch.pin_memory().labels, batch.labels)
    assert len([c for c in calls if c[0] == "pin"]) >= 5


def test_ids_within_their_tables_pass():
    check_ids(batch_of([9, 0, 4], [1, 0, 1, 1]).sparse_features, tables(10, 5))


@pytest.mark.parametrize(
    ("values", "lengths", "text"),
    [
        ([1, 2, 9, 10], [1, 1, 0, 2], r"Feature 'b': id 10 is outside the table t_b of 10 rows \(row 1 of the batch"),
        ([1, -1, 2], [0, 2, 1, 0], r"Feature 'a': id -1 is outside the table t_a of 10 rows \(row 1 of the batch"),
    ],
)
def test_ids_outside_their_tables(values, lengths, text):
    with pytest.raises(InputError, match=text):
        check_ids(batch_of(values, lengths).sparse_features, tables())


def test_a_table_without_its_feature():
    kjt = batch_of([1, 2], [1, 1], keys=("a", "b_1")).sparse_features
    with pytest.raises(InputError, match=r"Feature 'b' of table t_b is not in the batch \(2 features\)"):
        check_ids(kjt, tables())
