"""Records where a training step would make a GPU wait for the host, or the host for a GPU, and what crosses ranks when.

On a CPU nothing waits, but the calls are the same: numbers that are read into Python, sizes that depend on numbers, and
tensors made from Python's numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result has a size that depends on numbers, or that return a number.
_DISPATCHED = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}
MADE = "made of numbers"
_READS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu"}


class Waits(TorchDispatchMode):
    """Counts, while it is active, what makes a GPU and its host wait for each other, and lists integer exchanges.

    Nothing is counted in the phase "optimizer", whose counts and rates live on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.exchanges: list[tuple[str, tuple[int, ...]]] = []
        """Phase and ranks of each all-to-all of integers, in order."""
        self.phase = "between"
        self._reads = _Reads(self)

    @property
    def reads(self) -> int:
        """How often numbers of a device are read into Python, or decide a size."""
        return self.found.total() - self.found[MADE]

    def __enter__(self) -> Waits:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def count(self, name: str) -> None:
        if self.phase != "optimizer":
            self.found[name] += 1

    def in_phase(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a phase of the step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return run

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        repeats = func.__name__ == "repeat_interleave.Tensor" and (kwargs or {}).get("output_size") is None
        if name in _DISPATCHED or masks or repeats:
            self.count(f"{name} by a mask" if masks else name)
        if name.startswith("alltoall_base") and not args[1].dtype.is_floating_point:
            group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            self.exchanges.append((self.phase, tuple(dist.get_process_group_ranks(group))))
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._waits.count(_READS[func])
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            self._waits.count(MADE)
        return func(*args, **(kwargs or {}))
