"""Formats of the exchange between towers: error bounds from the format, bytes of each direction, and wrong use.

Bounds: FP16 has 11 significant bits, BF16 8, so rounding to nearest errs by at most 2^-11 and 2^-8 of the number
(FP16 below 2^-14: half its smallest step, 2^-25).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from dmt import TrafficMeter
from dmt.sharding.schemes import SCHEMES, why_not
from dmt.sptt.peer_exchange import PeerExchange, codecs_of
from dmt.sptt.precision import ExchangePrecision
from tests.parity import make_tables
from tests.ranks import on_ranks


def bound(name: str, numbers: Tensor) -> Tensor:
    """The largest error that a format allows each of the numbers."""
    magnitude = numbers.abs()
    if name == "fp16":
        return magnitude * 2**-11 + 2**-25
    if name == "bf16":
        return magnitude * 2**-8
    return torch.zeros_like(numbers)


def round_trip(codec: Any, numbers: Tensor) -> Tensor:
    return codec.decode(codec.encode(numbers))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("magnitude", [1e4, 1.0, 1e-3, 1e-6, 1e-9])
def test_codecs_keep_their_bound_in_both_directions(name: Any, magnitude: float) -> None:
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * magnitude
    codecs = codecs_of(ExchangePrecision(forward=name, backward=name))
    both = (codecs.forward, codecs.backward)
    for codec in both[:1] if (name, magnitude) == ("fp16", 1e4) else both:  # gradients above 16 arrive as 16
        assert ((round_trip(codec, numbers) - numbers).abs() <= bound(name, numbers)).all()


def test_gradients_keep_their_digits_in_fp16() -> None:
    """At 1e-7 TorchRec's own FP16 errs by 17 %, with its backward_loss_scale too: it divides while still in FP16."""
    codec = codecs_of(ExchangePrecision(backward="fp16")).backward
    gradients = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-7
    assert (round_trip(codec, gradients) - gradients).norm() <= 1e-3 * gradients.norm()
    numbers = torch.tensor([1.0, -0.5, 3.0, 2.0**-20, 15.0])
    assert torch.equal(round_trip(codec, numbers), numbers), "the scale is undone exactly"


def test_large_numbers_are_clamped_in_fp16_only() -> None:
    numbers = torch.tensor([1e6, -1e6, 65504.0, 65600.0])
    clamped = torch.tensor([65504.0, -65504.0, 65504.0, 65504.0])
    fp16, bf16 = (codecs_of(ExchangePrecision(forward=name, backward=name)) for name in ("fp16", "bf16"))
    assert torch.equal(round_trip(fp16.forward, numbers), clamped)
    assert torch.equal(round_trip(fp16.backward, numbers), clamped / 4096)
    assert ((round_trip(bf16.forward, numbers) - numbers).abs() <= bound("bf16", numbers)).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_never_arrives_as_a_number(name: Any, fault: float) -> None:
    numbers = torch.linspace(0, 1, 96)
    numbers[49] = fault
    codecs = codecs_of(ExchangePrecision(forward=name, backward=name))
    for codec in (codecs.forward, codecs.backward):
        assert round_trip(codec, numbers).isnan().nonzero().tolist() == [[49]]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_codecs_take_and_give_the_dtype_of_the_outputs(name: Any) -> None:
    """FBGEMM's give FP32, assert on 16-bit input (FP32 codec) or fail on it (BF16 codec, FP16 input)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        numbers = torch.linspace(-1, 1, 32).to(dtype)
        codecs = codecs_of(ExchangePrecision(forward=name, backward=name), dtype)
        assert (codecs is None) == (dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[name])
        for codec in () if codecs is None else (codecs.forward, codecs.backward):
            assert round_trip(codec, numbers).dtype == dtype
    assert codecs_of(ExchangePrecision()) is None


BYTES: dict[tuple[Any, Any, torch.dtype], tuple[int, int]] = {
    ("fp32", "fp32", torch.float32): (4, 4),
    ("fp16", "fp32", torch.float32): (2, 4),
    ("fp32", "bf16", torch.float32): (4, 2),
    ("bf16", "fp16", torch.float32): (2, 2),
    ("fp32", "fp32", torch.bfloat16): (2, 2),
    ("fp16", "fp32", torch.bfloat16): (2, 2),
}
"""Bytes of a number, forward and backward."""


@on_ranks(2)
def test_bytes_shrink_in_the_direction_chosen_and_nowhere_else(rank: int) -> None:
    sizes, widths, group = (64, 64), (16, 48), dist.group.WORLD
    for (forward, backward, dtype), expected in BYTES.items():
        outputs = torch.randint(-8, 9, (128, widths[rank])).to(dtype).requires_grad_()  # exact in every format
        precision = ExchangePrecision(forward=forward, backward=backward)
        peers = PeerExchange(group, widths, dtype=outputs.dtype, precision=precision)
        with TrafficMeter(host_of=lambda r: r) as sent:
            columns = peers(outputs, sizes).wait()
        with TrafficMeter(host_of=lambda r: r) as returned:
            columns.sum().backward()
        assert torch.equal(columns.split(widths, dim=1)[rank], outputs.split(sizes)[rank])
        assert torch.equal(outputs.grad, torch.full_like(outputs, 1 / 2))  # the mean over two towers
        numbers = 64 * 16 + 64 * 48  # each of two ranks sends 64 rows of its tower to the other
        found = (sent.total(group).across, returned.total(group).across)
        assert found == tuple(numbers * size for size in expected), (forward, backward, dtype)


def test_table_formats_that_train_wrongly_are_refused() -> None:
    table = make_tables([8])[0]
    for kind, why in ((DataType.FP16, "its weights are FP16"), (DataType.BF16, "its data_type is 'BF16'")):
        table.data_type = kind
        reasons = {scheme: why_not(table, scheme) for scheme in SCHEMES}
        refused = [scheme for scheme, reason in reasons.items() if reason]
        assert refused == (["data_parallel"] if kind == DataType.FP16 else list(SCHEMES))
        assert all(reasons[scheme].startswith(why) for scheme in refused)
