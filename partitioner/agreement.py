"""`Agreement`: keeps ranks together that each work on their own data, so that none waits for one that has stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmt.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Agreement"]


class Agreement:
    """Small exchanges in which every rank says how it is doing, before a collective that all must take part in.

    Every exchange has one form, whatever it is for. A rank that has failed says so in the next one it would take part
    in, and that meets whichever exchange the others are in: all of them then raise.

    Args:
        group: the ranks; None is this process alone, for which nothing is exchanged.

    Raises:
        InputError: this rank is not in the group.

    Example:
        >>> Agreement(None).share("a batch", True)
        [True]
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is not None:
            from torch.distributed import ProcessGroup, get_process_group_ranks

            # torch hands out a number in place of a group that the rank is not in.
            if not isinstance(group, ProcessGroup):
                raise InputError(
                    f"process_group={group!r} is no group of this rank; call this on the ranks of the group only."
                )
            self._ranks = get_process_group_ranks(group)
        else:
            self._ranks = [0]
        self._group = group
        self._settled = False

    @property
    def settled(self) -> bool:
        """Whether all ranks know of a failure already: what is raised then needs no further exchange."""
        return self._settled

    def share(self, stage: str, value: Any, error: Exception | None = None) -> list[Any]:
        """Tells all ranks this one's value, or that it failed; returns everyone's values by group rank.

        Args:
            stage: what the exchange is for, in words that fit "this rank is at ...".
            value: something small that can be pickled.
            error: what this rank failed with; raised after the others have been told.

        Raises:
            InputError: another rank failed, or the ranks are at different stages.
        """
        if self._group is None:
            if error is not None:
                self._settled = True
                raise error
            return [value]
        from dmt.collectives import gather_objects

        records = gather_objects((stage, value, _words(error)), self._group)
        ranks = list(zip(self._ranks, records, strict=True))
        failed = [(rank, words) for rank, (_, _, words) in ranks if words is not None]
        elsewhere = [(rank, other) for rank, (other, _, _) in ranks if other != records[0][0]]
        self._settled = bool(failed or elsewhere)
        if error is not None:
            raise error
        if failed:
            raise InputError(f"Rank {failed[0][0]} failed: {failed[0][1]}")
        if elsewhere:
            raise InputError(
                f"Rank {elsewhere[0][0]} is at {elsewhere[0][1]} while rank {self._ranks[0]} is at {records[0][0]}. "
                "Every rank must run the same model on batches of the same features."
            )
        return [value for _, value, _ in records]

    def ranks_that_differ(self, values: list[Any]) -> list[int]:
        """Global ranks whose value is another than the first rank's.

        Example:
            >>> Agreement(None).ranks_that_differ([("a", "b")])
            []
        """
        return [rank for rank, value in zip(self._ranks, values, strict=True) if value != values[0]]


def _words(error: Exception | None) -> str | None:
    if error is None or isinstance(error, InputError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"
