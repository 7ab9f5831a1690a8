"""`TowerMesh`: the process groups of a `TowerTopology`, made once, by every rank in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch.distributed as dist

from dmt.collectives import check_agreement
from dmt.errors import InputError, check_instance
from dmt.plan.topology import TowerTopology

__all__ = ["TowerMesh"]


class TowerMesh:
    """This rank's process groups; all code that communicates takes them as arguments.

    Creating groups is collective: every rank of the job must construct the same mesh at the same point, after
    ``torch.distributed.init_process_group`` and, with NCCL, ``torch.cuda.set_device``.

    Args:
        topology: sizes and placement; R * T * L must equal the world size.

    Attributes:
        topology: the topology, as it was passed.
        rank, replica, tower, local: the global rank of this process, and its coordinates.
        tower_group: L ranks of this tower in this replica (fast links).
        peer_group: T ranks with this local index in this replica (slow links).
        sharding_group: T * L ranks over which one copy of the tables is split.
        replica_group: R ranks that hold this rank's shard.
        tower_module_group: R * L ranks that hold a copy of this tower's dense module.
        global_group: all ranks.
        over_hosts: two groups, the ranks of this host and the ranks in this rank's position on every host. Gradients of
            tables outside towers are summed over the first, then the second. None, except on the `outside_towers` mesh.
        tags: ``next(mesh.tags)`` is the tag of a module's messages to its peers on the CPU, so that messages of
            different modules do not mix. Ranks that make their modules in the same order get equal tags.

    Raises:
        InputError: there is no default process group or its size is not R * T * L, or ``topology`` has the wrong
            type or differs between ranks.
    """

    def __init__(self, topology: TowerTopology) -> None:
        if not dist.is_initialized():
            raise InputError(
                "TowerMesh needs a default process group. Call torch.distributed.init_process_group(...) first, in a "
                "script that torchrun starts."
            )
        check_instance("topology", topology, TowerTopology)
        world = dist.group.WORLD
        assert world is not None, "the default group exists once torch.distributed is initialized"
        # Before any group is made: ranks that make different groups would wait for each other silently.
        check_agreement("TowerMesh", {"topology": topology}, world)
        topology.check_world_size(dist.get_world_size())
        self.topology = topology
        self.global_group = world
        self.rank = dist.get_rank()
        self.replica, self.tower, self.local = topology.coordinates(self.rank)
        self.tower_group = self.new_group(topology.tower_groups())
        self.peer_group = self.new_group(topology.peer_groups())
        self.sharding_group = self.new_group(topology.sharding_groups())
        self.replica_group = self.new_group(topology.replica_groups())
        self.tower_module_group = self.new_group(topology.tower_module_groups())
        self.tags: Iterator[int] = itertools.count(1)
        self.over_hosts: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._outside: TowerMesh | None = None

    def outside_towers(self) -> TowerMesh:
        """Returns the mesh of tables outside towers (`TowerTopology.outside_towers`); collective the first time.

        It has separate groups: on shared groups, ranks could start collectives of both meshes in different orders.
        """
        if self._outside is None:
            self._outside = TowerMesh(self.topology.outside_towers)
            inside, across = self.topology.host_groups(), self.topology.across_host_groups()
            self._outside.over_hosts = self.new_group(inside), self.new_group(across)
        return self._outside

    def new_group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Creates a group per list of global ranks, with the job's timeout; returns this rank's group. Collective."""
        # Imported here: planning on a laptop imports this file without TorchRec.
        from dmt._torchrec import group_timeout

        timeout = group_timeout(self.global_group)
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        assert mine is not None, f"rank {self.rank} is in none of the groups {groups}"
        # A group of one rank is created by that rank only: 128 towers of 8 ranks have 1,024 of them. Others are created
        # by all ranks: PyTorch names a group that only its members create by the number of groups of the process.
        if all(len(ranks) == 1 for ranks in groups):
            alone: dist.ProcessGroup = dist.new_group(mine, timeout=timeout, use_local_synchronization=True)
            return alone
        made = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
        return made[groups.index(mine)]
