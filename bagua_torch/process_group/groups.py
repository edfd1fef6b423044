"""Communicators over the ranks of PyTorch's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist

from bagua_comm import ArrayError, Communicator, UnsupportedError
from bagua_comm.execution.lane import Lane


class GroupComms:
    """A communicator for each process group over which a model is sharded. Collective.

    Args:
        comm: A communicator over all ranks of all groups.
        groups: The process groups of this rank, in an order in which all ranks list theirs.
        owner: Who communicates, for errors.

    Raises:
        UnsupportedError: A group has ranks that are not those of `comm`. Raised on all ranks.
    """

    def __init__(self, comm: Communicator, groups: Sequence[dist.ProcessGroup], owner: str) -> None:
        mine = dist.get_rank(), [tuple(dist.get_process_group_ranks(group)) for group in groups]
        rows: list[tuple[int, list[tuple[int, ...]]]] = comm.allgather_object(mine)
        place = {rank: index for index, (rank, _) in enumerate(rows)}
        check_ranks(rows, place, owner)
        self._by_ranks: dict[tuple[int, ...], Communicator] = {}
        self._by_name: dict[str, Communicator] = {}
        columns = dict.fromkeys(zip(*(ranks for _, ranks in rows), strict=True))
        for column in columns:
            ranks = column[comm.rank]
            derived = comm.split(min(place[rank] for rank in ranks), ranks.index(mine[0]))
            self._by_ranks[ranks] = derived

    def of(self, group: dist.ProcessGroup) -> Communicator:
        """Return the communicator of the ranks of a process group.

        Raises:
            ArrayError: The model was not sharded over it when this was made.
        """
        found = self._by_name.get(group.group_name)
        if found is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            found = self._by_ranks.get(ranks)
            if found is None:
                raise ArrayError(
                    f"bagua_torch.fsdp: PyTorch communicates over ranks {list(ranks)}, over which the model was "
                    "not sharded when attach() was called; call it after set_reshard_after_forward and the like"
                )
            self._by_name[group.group_name] = found
        return found

    def lane_of(self, comm: Communicator) -> Lane[Communicator] | None:
        """Return the lane on which the calls of a communicator run; None if they run at once."""
        return None

    def all(self) -> list[Communicator]:
        """Return all communicators."""
        return [*dict.fromkeys(self._by_ranks.values())]

    def close(self) -> None:
        """Close them. Collective."""
        for comm in self.all():
            comm.close()


class LaneComms(GroupComms):
    """The same groups as others, each with a communicator whose calls run on a lane of its own. Collective.

    Close it before the others.
    """

    def __init__(self, others: GroupComms) -> None:
        self._by_ranks, self._by_name = dict(others._by_ranks), {}
        self._lanes: dict[Communicator, Lane[Communicator]] = {}
        for ranks, comm in others._by_ranks.items():
            if comm.size > 1:
                lane = comm.lane()
                self._by_ranks[ranks] = lane.comm
                self._lanes[lane.comm] = lane

    def lane_of(self, comm: Communicator) -> Lane[Communicator] | None:
        """See `GroupComms.lane_of`."""
        return self._lanes.get(comm)

    @property
    def lanes(self) -> list[Lane[Communicator]]:
        """All of them."""
        return list(self._lanes.values())

    def wait(self) -> None:
        """Wait for all tasks of the lanes, and raise the first error among them."""
        for lane in self._lanes.values():
            lane.wait()

    def leave(self, error: BaseException) -> None:
        """End the lanes after an error, without waiting for other ranks."""
        for lane in self._lanes.values():
            lane.__exit__(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Close the lanes, after their tasks. Collective."""
        with ExitStack() as ends:
            for lane in self._lanes.values():
                ends.callback(lane.close)


def check_ranks(
    rows: Sequence[tuple[int, list[tuple[int, ...]]]], place: dict[int, int], owner: str = ""
) -> None:
    """Raise unless all process groups consist of the ranks of a communicator.

    Args:
        rows: By rank of the communicator: its rank in torch.distributed, and the ranks of each of its groups.
        place: The rank in the communicator, by that in torch.distributed.
        owner: Who communicates.

    Raises:
        UnsupportedError: They do not.
    """
    if len(place) < len(rows) or len({len(groups) for _, groups in rows}) > 1:
        ranks = [rank for rank, _ in rows]
        raise UnsupportedError(
            f"{owner}: the ranks of comm have ranks {ranks} in torch.distributed, expected "
            "different ones, sharded alike"
        )
    for _, groups in rows:
        for index, group in enumerate(groups):
            if any(rank not in place or rows[place[rank]][1][index] != group for rank in group):
                raise UnsupportedError(
                    f"{owner}: the model is sharded over ranks {list(group)} of "
                    f"torch.distributed, but comm has ranks {sorted(place)}; give a comm with all ranks of the "
                    "mesh, as bagua_torch.connect() makes it"
                )
