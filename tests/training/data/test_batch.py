"""`ClickBatch` as TorchRec's pipelines use it."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dmt.training.data.batch import ClickBatch


def batch_of(values, lengths, keys=("a", "b")):
    size = len(lengths) // len(keys)
    kjt = KeyedJaggedTensor(keys=list(keys), values=torch.tensor(values), lengths=torch.tensor(lengths))
    return ClickBatch(torch.rand(size, 3), kjt, torch.zeros(size), torch.ones(size))


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
