"""Formats of the exchange between towers: error bounds from the format, each direction alone, bytes, and wrong use.

Bounds: FP16 has 11 significant bits, BF16 8, so rounding to nearest errs by at most 2^-11 and 2^-8 of the number
(FP16 below 2^-14: half its smallest step, 2^-25).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dmt import InputError, TrafficMeter
from dmt.sharding.schemes import SCHEMES, why_not
from dmt.sptt.peer_exchange import PeerExchange
from dmt.sptt.precision import EXCHANGE_FORMATS, ExchangePrecision
from tests.parity import make_tables
from tests.ranks import run_ranks


def bound(name: str, numbers: Tensor, *, scale: float = 1.0) -> Tensor:
    """The largest error that a format allows each of the numbers."""
    magnitude = numbers.abs()
    if name == "fp16":
        return magnitude * 2**-11 + 2**-25 / scale
    if name == "bf16":
        return magnitude * 2**-8
    return torch.zeros_like(numbers)


def round_trip(codec: Any, numbers: Tensor) -> Tensor:
    return codec.decode(codec.encode(numbers))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("magnitude", [1e4, 1.0, 1e-3, 1e-6, 1e-9])
def test_codecs_keep_their_bound_in_both_directions(name: Any, magnitude: float) -> None:
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * magnitude
    codecs = ExchangePrecision(forward=name, backward=name).codecs()
    both = (codecs.forward, codecs.backward)
    for codec in both[:1] if (name, magnitude) == ("fp16", 1e4) else both:  # gradients above 16 arrive as 16
        assert ((round_trip(codec, numbers) - numbers).abs() <= bound(name, numbers)).all()


@pytest.mark.parametrize(("name", "worst"), [("fp16", 1e-3), ("bf16", 4e-3)])
def test_gradients_of_a_mean_loss_survive(name: Any, worst: float) -> None:
    """At 1e-7 TorchRec's own FP16 errs by 17 %, with its backward_loss_scale too: it divides while still in FP16."""
    gradients = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-7
    ours = ExchangePrecision(backward=name).codecs().backward
    assert (round_trip(ours, gradients) - gradients).norm() <= worst * gradients.norm()


def test_the_scale_is_undone_exactly() -> None:
    numbers = torch.tensor([1.0, -0.5, 3.0, 2.0**-20, 15.0])
    codec = ExchangePrecision(backward="fp16").codecs().backward
    assert torch.equal(round_trip(codec, numbers), numbers)
    # the stated end of the range: larger gradients arrive as 16
    assert round_trip(codec, torch.tensor([100.0])).item() == 65504 / 4096


def test_large_numbers_are_clamped_in_fp16_only() -> None:
    numbers = torch.tensor([1e6, -1e6, 65504.0, 65600.0])
    fp16 = ExchangePrecision(forward="fp16").codecs().forward
    assert round_trip(fp16, numbers).tolist() == [65504.0, -65504.0, 65504.0, 65504.0]
    bf16 = ExchangePrecision(forward="bf16").codecs().forward
    assert ((round_trip(bf16, numbers) - numbers).abs() <= bound("bf16", numbers)).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_what_is_not_finite_never_arrives_as_a_number(name: Any, fault: float, place: int) -> None:
    numbers = torch.linspace(0, 1, 96)
    numbers[32 + place] = fault
    codecs = ExchangePrecision(forward=name, backward=name).codecs()
    for codec in (codecs.forward, codecs.backward):
        got = round_trip(codec, numbers)
        assert got[32 + place].isnan()
        assert int(got.isnan().sum()) == 1


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_codecs_take_and_give_the_dtype_of_the_outputs(name: Any, dtype: torch.dtype) -> None:
    """FBGEMM's give FP32, assert on 16-bit input (FP32 codec) or fail on it (BF16 codec, FP16 input)."""
    numbers = torch.linspace(-1, 1, 32).to(dtype)
    codecs = ExchangePrecision(forward=name, backward=name).codecs(dtype)
    if codecs is None:
        assert {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype] == name
        return
    for codec in (codecs.forward, codecs.backward):
        assert round_trip(codec, numbers).dtype == dtype


def test_choices_that_change_nothing_need_no_codec() -> None:
    assert ExchangePrecision().codecs() is None
    assert ExchangePrecision(forward="bf16").codecs(torch.bfloat16) is None


@pytest.mark.parametrize(("wrong", "message"), [
    ({"forward": "f16"}, r"forward='f16' is unknown; use one of .* Did you mean 'fp16'"),
    ({"backward": "float32"}, "backward='float32' is unknown"),
], ids=str)  # fmt: skip
def test_wrong_choices_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExchangePrecision(**wrong)


def exchange(
    group: Any, precision: ExchangePrecision | None, outputs: Tensor, weights: Tensor, sizes: Any, widths: Any
) -> tuple[Tensor, Tensor]:
    """What arrives, and the gradient of the outputs when the loss is the sum of what arrives times ``weights``."""
    outputs = outputs.clone().requires_grad_()
    peers = PeerExchange(group, widths, dtype=outputs.dtype, precision=precision)
    columns = peers(outputs, sizes).wait()
    (columns * weights).sum().backward()
    return columns.detach(), outputs.grad


SHAPES = {
    "even": ((32, 32), (16, 16)),
    "uneven, odd": ((5, 3, 7), (3, 5, 9)),
    "no samples on a peer": ((4, 0, 6), (8, 4, 8)),
    "one column": ((5, 2), (1, 1)),
    "wide and narrow": ((33, 1), (96, 2)),
}


def bounds_on_rank(rank: int, shape: str, dtype: torch.dtype) -> int:
    sizes, widths = SHAPES[shape]
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    outputs = (torch.randn(sum(sizes), widths[rank], generator=generator) * 10.0 ** (rank - 1)).to(dtype)
    weights = (torch.randn(sizes[rank], sum(widths), generator=generator) * 1e-5).to(dtype)
    plain, plain_grad = exchange(group, None, outputs, weights, sizes, widths)
    # 16-bit outputs are rounded to their own dtype as well, gradients once more when they are divided by T.
    again = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    tiny = 2**-24 if dtype == torch.float16 else 0.0
    checked = 0
    for forward, backward in itertools.product(EXCHANGE_FORMATS, EXCHANGE_FORMATS):
        precision = ExchangePrecision(forward=forward, backward=backward)
        columns, grad = exchange(group, precision, outputs, weights, sizes, widths)
        assert columns.dtype == grad.dtype == dtype
        assert columns.shape == plain.shape
        for got, expected in zip(columns.split(widths, 1), plain.split(widths, 1), strict=True):
            allowed = bound(forward, expected.float())
            limit = (1 + again) * allowed + again * expected.float().abs() + tiny
            error = (got.float() - expected.float()).abs()
            assert (error <= limit).all(), (forward, error.max())
            checked += got.numel()
        if forward == "fp32":
            assert torch.equal(columns, plain)
        towers, scale = len(widths), precision.backward_scale
        for got, expected in zip(grad.split(sizes), plain_grad.split(sizes), strict=True):
            # The codec sees the gradient before the division by the number of towers.
            allowed = bound(backward, expected.float() * towers, scale=scale) / towers
            limit = (1 + again) * allowed + again * expected.float().abs() + tiny
            error = (got.float() - expected.float()).abs()
            assert (error <= limit).all(), (backward, error.max())
        if backward == "fp32":
            assert torch.equal(grad, plain_grad)
    return checked


@pytest.mark.ranks
@pytest.mark.parametrize("shape", SHAPES)
def test_each_direction_errs_by_its_own_format_only(shape: str) -> None:
    for checked in run_ranks(bounds_on_rank, len(SHAPES[shape][0]), shape, torch.float32):
        assert checked > 0 or 0 in SHAPES[shape][0]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_outputs_keep_their_dtype(dtype: torch.dtype) -> None:
    run_ranks(bounds_on_rank, 3, "uneven, odd", dtype)


def bytes_on_rank(rank: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    sizes, widths, group = (64, 64), (16, 48), dist.group.WORLD
    found = {}
    choices = [
        *itertools.product(EXCHANGE_FORMATS, EXCHANGE_FORMATS, ["float32"]),
        ("fp32", "fp32", "bfloat16"),
        ("fp16", "fp32", "bfloat16"),
    ]
    for forward, backward, dtype in choices:
        outputs = torch.randn(128, widths[rank]).to(getattr(torch, dtype)).requires_grad_()
        precision = ExchangePrecision(forward=forward, backward=backward)
        peers = PeerExchange(group, widths, dtype=outputs.dtype, precision=precision)
        measured = []
        for phase in ("forward", "backward"):
            meter = TrafficMeter(host_of=lambda r: r)
            with meter:
                if phase == "forward":
                    columns = peers(outputs, sizes).wait()
                else:
                    columns.sum().backward()
            total = meter.total(group)
            assert total.inside == 0
            measured.append(total.across)
        found[forward, backward, dtype] = tuple(measured)
    return found


@pytest.mark.ranks
def test_bytes_shrink_in_the_direction_chosen_and_nowhere_else() -> None:
    found = run_ranks(bytes_on_rank, 2)[0]
    numbers = 64 * 16 + 64 * 48  # each of two ranks sends 64 rows of its tower to the other
    per_number = {"fp32": 4, "fp16": 2, "bf16": 2}
    for (forward, backward, dtype), measured in found.items():
        size = {**per_number, "fp32": 4 if dtype == "float32" else 2}
        assert measured == (numbers * size[forward], numbers * size[backward])


STEPS, RATE = 20, 0.5


def test_table_formats_that_train_wrongly_are_refused() -> None:
    from torchrec.modules.embedding_configs import DataType

    table = make_tables([8])[0]
    for scheme in SCHEMES:
        table.data_type = DataType.FP32
        assert why_not(table, scheme) == ""
        table.data_type = DataType.FP16
        refused = "its weights are FP16, and gradients of data-parallel tables would be too"
        assert why_not(table, scheme) == (refused if scheme == "data_parallel" else "")
        for other in (DataType.BF16, DataType.INT8):
            table.data_type = other
            assert why_not(table, scheme) == f"its data_type is '{other.value}'; tables train in FP32 or FP16"
