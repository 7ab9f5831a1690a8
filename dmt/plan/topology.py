"""`TowerTopology`: replica, tower and local index of every rank. Pure arithmetic.

Legend: R replicas, T towers, L ranks per tower; R * T * L ranks in the job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmt.errors import InputError

__all__ = ["TowerTopology"]


@dataclass(frozen=True, kw_only=True)
class TowerTopology:
    """The mesh of a job: R replicas x T towers x L ranks per tower.

    Sizes are arguments; nothing is read from the environment. Thus one machine can simulate two hosts, a tower may span
    several hosts, and several towers may share a host.

    The group methods return lists of *global* ranks, ascending, in an order that is the same on every rank.

    Raises:
        InputError: a size is not a positive integer, ``replica_placement`` is unknown, or hosts do not fit the towers.

    Example:
        The walk-through of the DMT paper (arXiv 2403.00877, section 3.1.1): 4 ranks on 2 hosts.

        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> topology.tower_groups(), topology.peer_groups()
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """

    num_towers: int
    """T: towers of one replica. A tower is usually one host."""
    ranks_per_tower: int
    """L: ranks that share the tables of one tower over fast links."""
    num_replicas: int = 1
    """R: copies of the whole model-parallel part (2D sparse parallelism)."""
    replica_placement: Literal["inter_host", "intra_host"] = "inter_host"
    """``"inter_host"``: a replica is a contiguous block of ranks. ``"intra_host"``: the replicas of one
    shard are neighboring ranks."""
    ranks_per_host: int | None = None
    """Number of ranks on a host. They are neighbors, and hold whole towers or an equal part of one tower. None: a host
    holds one tower, with all its replicas if ``replica_placement`` is ``"intra_host"``."""

    def __post_init__(self) -> None:
        for field in ("num_towers", "ranks_per_tower", "num_replicas", "ranks_per_host"):
            value = getattr(self, field)
            is_left_out = field == "ranks_per_host" and value is None
            if not is_left_out and (type(value) is not int or value < 1):
                raise InputError(f"TowerTopology: {field}={value!r} must be a whole number of at least 1.")
        if self.replica_placement not in ("inter_host", "intra_host"):
            raise InputError(
                f"TowerTopology: replica_placement={self.replica_placement!r} is unknown; "
                "use 'inter_host' or 'intra_host'."
            )
        size, tower = self.host_size, self._ranks_of_tower
        if self.world_size % size or (size % tower and tower % size):
            raise InputError(
                f"TowerTopology: ranks_per_host={size} must divide the {self.world_size} ranks of the job, and be a "
                f"multiple or a divisor of the {tower} ranks that hold a tower: a host holds whole towers, or a tower "
                "spans whole hosts. Give the number of ranks per machine, or change the size of the towers."
            )

    @property
    def host_size(self) -> int:
        """Number of ranks on a host: ``ranks_per_host``, or its default."""
        return self._ranks_of_tower if self.ranks_per_host is None else self.ranks_per_host

    @property
    def _ranks_of_tower(self) -> int:
        """Number of neighboring ranks that hold one tower: L, or R * L with ``"intra_host"`` replicas."""
        return self.ranks_per_tower * (self.num_replicas if self.replica_placement == "intra_host" else 1)

    @property
    def num_hosts(self) -> int:
        """H, the number of hosts in the job."""
        return self.world_size // self.host_size

    @property
    def world_size(self) -> int:
        """R * T * L, the number of ranks in the job."""
        return self.num_replicas * self.num_towers * self.ranks_per_tower

    @property
    def _ranks(self) -> NDArray[np.int64]:
        """Global ranks by replica, tower and local index: [R, T, L], int64."""
        sizes = self.num_towers, self.ranks_per_tower
        ranks = np.arange(self.world_size)
        if self.replica_placement == "inter_host":
            return ranks.reshape(self.num_replicas, *sizes)
        # Neighboring ranks share a host: the replicas of a shard are side by side, and average over fast links.
        return ranks.reshape(*sizes, self.num_replicas).transpose(2, 0, 1)

    def check_world_size(self, world_size: int) -> None:
        """Raises `InputError` unless the job has exactly R * T * L ranks."""
        if world_size != self.world_size:
            raise InputError(
                f"The topology has num_replicas * num_towers * ranks_per_tower = {self.num_replicas} * "
                f"{self.num_towers} * {self.ranks_per_tower} = {self.world_size} ranks, but the job was "
                f"started with WORLD_SIZE={world_size}. Change the topology or the number of ranks."
            )

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Returns replica, tower and local index of a global rank; raises `ValueError` if the job has no such rank."""
        ((replica, tower, local),) = np.argwhere(self._ranks == rank).tolist()
        return replica, tower, local

    def host(self, rank: int) -> int:
        """Returns the host index of a global rank; hosts are blocks of `host_size` neighboring ranks."""
        return rank // self.host_size

    @property
    def outside_towers(self) -> TowerTopology:
        """The topology of tables outside towers: one tower of one rank, with a replica on every rank of the job."""
        return TowerTopology(
            num_towers=1, ranks_per_tower=1, num_replicas=self.world_size, ranks_per_host=self.host_size
        )

    @property
    def one_replica(self) -> TowerTopology:
        """The topology of the ranks of one replica as a single tower, cut into hosts of equal numbers of ranks."""
        ranks = self.sharding_groups()[0]
        # With "intra_host" placement hosts may hold unequal parts of a replica; they are cut into equal ones.
        on_host = math.gcd(*Counter(map(self.host, ranks)).values())
        return TowerTopology(num_towers=1, ranks_per_tower=len(ranks), ranks_per_host=on_host)

    def on_all_replicas(self, values: ArrayLike) -> NDArray[np.float64]:
        """Repeats the values of one replica, [T * L, ...] by tower and local rank, for every replica.

        Returns float64 [R * T * L, ...], by global rank.
        """
        of_replica = np.asarray(values, dtype=np.float64)
        of_job = np.empty((self.world_size, *of_replica.shape[1:]))
        of_job[self.sharding_groups()] = of_replica
        return of_job

    def tower_groups(self) -> list[list[int]]:
        """Returns the ranks of each tower in each replica (fast links): R * T groups of L."""
        return self._groups(0, 1, 2, size=self.ranks_per_tower)

    def peer_groups(self) -> list[list[int]]:
        """Returns the ranks with equal local index, one per tower of a replica (slow links): R * L groups of T."""
        return self._groups(0, 2, 1, size=self.num_towers)

    def sharding_groups(self) -> list[list[int]]:
        """Returns the ranks over which each copy of the tables is split: R groups of T * L."""
        return self._groups(0, 1, 2, size=self.num_towers * self.ranks_per_tower)

    def replica_groups(self) -> list[list[int]]:
        """Returns the ranks that hold the same shard, one per replica: T * L groups of R."""
        return self._groups(1, 2, 0, size=self.num_replicas)

    def tower_module_groups(self) -> list[list[int]]:
        """Returns the ranks that hold a copy of one tower's dense module, in all replicas: T groups of R * L."""
        return self._groups(1, 0, 2, size=self.num_replicas * self.ranks_per_tower)

    def host_groups(self) -> list[list[int]]:
        """Returns the ranks of each host: H groups of `host_size`."""
        return [list(range(first, first + self.host_size)) for first in range(0, self.world_size, self.host_size)]

    def across_host_groups(self) -> list[list[int]]:
        """Returns the ranks at the same position on their hosts, one per host: `host_size` groups of H."""
        return [list(ranks) for ranks in zip(*self.host_groups(), strict=True)]

    def share_across_hosts(self, groups: list[list[int]]) -> float:
        """Returns the fraction of the pairs of ranks in the same group that span two hosts; 0 without pairs."""
        pairs = across = 0
        for group in groups:
            on_host = Counter(self.host(rank) for rank in group)
            pairs += len(group) * (len(group) - 1)
            # Pairs on one host do not cross, nor does a rank paired with itself.
            across += len(group) ** 2 - sum(number**2 for number in on_host.values())
        return across / pairs if pairs else 0.0

    def ring_share_across_hosts(self, groups: Sequence[Sequence[int]]) -> float:
        """Returns the fraction of ring links that cross hosts; a ring goes through each group's ranks in host order.

        Example:
            >>> topology = TowerTopology(num_towers=1, ranks_per_tower=4, ranks_per_host=2)
            >>> topology.ring_share_across_hosts([[0, 1, 2, 3]])  # 1 to 2 and 3 to 0
            0.5
        """
        hosts = [len({self.host(rank) for rank in group}) for group in groups]
        return sum(number for number in hosts if number > 1) / max(sum(map(len, groups)), 1)

    def _groups(self, *axes: int, size: int) -> list[list[int]]:
        """Returns the ranks, in the order of these mesh axes, cut into groups of ``size``; each group is sorted."""
        groups: list[list[int]] = np.sort(self._ranks.transpose(axes).reshape(-1, size)).tolist()
        return groups
