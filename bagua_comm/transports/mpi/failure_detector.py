"""Queries about the other ranks of a communicator: which are dead, which have left, and which are late.

Nothing here changes a communicator or sends a message. MPI knows of deaths if it can continue after them (ULFM);
notices report ranks that have left or have aborted a communicator.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from mpi4py import MPI

from ...errors import WHICH_CALLS, CommAborted, CommError, CommMismatch, CommTimeout, RankFailed
from ..counted_calls import CountedCalls
from ..notices import ABORTED, LEFT, Notice, aborted
from . import tuning
from .world import World


class FailureDetector:
    """The knowledge of one rank of a communicator about failures of the others.

    Args:
        comm: The communicator.
        calls: The calls of this rank.
        world: The world that the communicator belongs to.
        group: The name of its ranks.
        members: Their ranks in the world.
    """

    def __init__(
        self, comm: MPI.Comm, calls: CountedCalls, world: World, group: str, members: Sequence[int]
    ) -> None:
        self._comm, self._calls, self._world = comm, calls, world
        self._group, self._members = group, members
        self.who = f"rank {calls.rank} of {calls.size}"

    # MPI's knowledge of deaths ----------------------------------------------------------------------

    def failed_ranks(self) -> list[int]:
        """The ranks known to be dead."""
        return failed_ranks(self._comm)

    def await_failed_ranks(self) -> list[int]:
        """The ranks known to be dead, as soon as there are any, but no later than after `FAILED_RANKS_S`.

        Ranks that notice a death revoke the communicator; this may become known before the number of the dead
        rank. And if a rank dies in the middle of a collective, Open MPI sometimes gives an unspecific error.
        """
        until = time.monotonic() + tuning.FAILED_RANKS_S
        while not (dead := self.failed_ranks()) and time.monotonic() < until:
            MPI.COMM_SELF.Iprobe()  # MPI learns of deaths only in calls that look for messages
            time.sleep(0.01)
        return dead

    def is_revoked(self) -> bool:
        """Whether MPI knows that a rank has revoked the communicator."""
        try:
            return self._comm.Is_revoked()
        except (MPI.Exception, NotImplementedError):
            return False

    # Notices ----------------------------------------------------------------------------------------

    def notices_of(self, rank: int) -> list[tuple[Notice, float]]:
        """The notices of a rank so far, and when each arrived last."""
        return self._world.notices.from_rank(self._members[rank])

    def final_notices(self, rank: int) -> Iterator[tuple[Notice, float]]:
        """The notices by which `rank` takes no part in the call in progress, and when each arrived."""
        number = self._calls.completed[0] + 1
        for notice, arrived_s in self.notices_of(rank):
            if self._calls.in_collective:
                ends = notice.ends(self._group, number)
            else:
                ends = notice.kind == LEFT or self._group in notice.completed
            # After all ranks have left the world in order, they continue with groups of it.
            if ends and not (self._world.orderly and not notice.error):
                yield notice, arrived_s

    def any_rank_failed(self) -> bool:
        """Whether a rank has left because of an error, or has aborted this communicator."""
        return any(
            notice.error and (notice.kind == LEFT or self._group in notice.completed)
            for rank in self._calls.others()
            for notice, _ in self._world.notices.from_rank(rank)
        )

    def missing_ranks(self, awaited: Sequence[int]) -> list[int]:
        """The ranks among `awaited` that are not in the call in progress, as far as that can be known.

        Without shared memory this takes up to `ROLL_CALL_S`, and counts ranks that have not aborted the
        communicator.
        """
        if self._calls.has_begun(self._calls.rank) is not None:
            return [rank for rank in awaited if not self._calls.has_begun(rank)]
        # Ranks that wait as well receive the notice that this rank aborts, and send one themselves.
        until = time.monotonic() + min(tuning.ROLL_CALL_S, self._calls.timeout_s / 2)
        missing = list(awaited)
        while missing and time.monotonic() < until:
            self._world.notices.listen()
            missing = [
                rank for rank in missing if not any(self._group in n.completed for n, _ in self.notices_of(rank))
            ]
            time.sleep(0.001)
        return missing

    # Errors to raise --------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """A rank with its host and process, as far as they are known."""
        return f"rank {rank}{self._world.name(self._members[rank])}"

    def abort_of_group(self, groups: Collection[str]) -> CommError | None:
        """The error to raise if a rank has aborted one of `groups`; None if none has."""
        for rank in self._calls.others():
            for notice, _ in self.notices_of(rank):
                if notice.kind == ABORTED and not notice.completed.keys().isdisjoint(groups):
                    return aborted(f"{self.who}: {self.name(rank)}", notice.error, notice.reason)
        return None

    def departure(self, rank: int, notice: Notice) -> CommError:
        """The error to raise because `rank` takes no part in the call, by its `notice`."""
        if notice.error:
            doing = "left" if notice.kind == LEFT else f"aborted after {notice.error}"
            return CommAborted(f"{self.who}: {self.name(rank)} {doing}: {notice.reason}")
        return CommMismatch(
            f"{self.who} waits for {self.name(rank)}, which has left: its program ended, or it closed "
            "its communicator",
            left=rank,
        )

    def death(self, dead: Sequence[int]) -> RankFailed:
        """The error to raise because these ranks died; none if it is not known which."""
        names = ", ".join(self.name(rank) for rank in dead[: tuning.RANKS_NAMED])
        if len(dead) > tuning.RANKS_NAMED:
            names += f" and {len(dead) - tuning.RANKS_NAMED} more"
        what = f"{names} died" if dead else "another rank noticed that a rank died or is missing"
        return RankFailed(f"{self.who}: {what}", dead)

    def timeout(self, waited: str | None = None) -> CommTimeout:
        """The error to raise because a wait took too long: that of the call in progress, or one that `waited`."""
        return CommTimeout(f"{self.who} {waited or self._calls.waited()}")

    def timeout_of_peer(self, notice: Notice) -> CommTimeout:
        """The error to raise because a wait of another rank took too long, by its `notice`."""
        return CommTimeout(f"{notice.reason.partition(', rank ')[0]}, rank {self._calls.rank} with it")

    def timeout_with_names(self, error: CommTimeout, peers: Collection[int] | None) -> CommTimeout:
        """`error` with the names of the missing ranks among `peers`, or among all others if None."""
        awaited = [rank for rank in self._calls.others() if peers is None or rank in peers]
        missing = self.missing_ranks(awaited)
        for rank in missing:
            self._world.request_record(self._members[rank])
        present = [rank for rank in awaited if rank not in missing]
        texts = [f"{self.name(rank)}{self._calls.last_call_of(rank)}" for rank in missing[: tuning.RANKS_NAMED]]
        if len(missing) > tuning.RANKS_NAMED:
            texts.append(f"and {len(missing) - tuning.RANKS_NAMED} more")
        text = str(error)
        if missing:
            text += f"; missing: {'; '.join(texts)}"
        if present:
            text += f"; not missing: {_listed(present)}"
        return CommTimeout(text)

    def error_of_mpi(self, exc: MPI.Exception) -> CommError:
        """The error to raise because of an error of MPI; may wait to learn which rank has died."""
        code, text = exc.Get_error_class(), exc.Get_error_string()
        where = f"rank {self._calls.rank}"
        if code == MPI.ERR_TRUNCATE:
            return CommMismatch(f"{where}: a peer sent more than was expected ({text}); {WHICH_CALLS}")
        dead = self.await_failed_ranks()
        by_death = code in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        if dead or by_death or self.is_revoked():
            return self.death(dead)
        return CommError(f"{where}: MPI failed: {text}")


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """The ranks of a communicator that MPI knows to be dead."""
    try:
        dead = comm.Get_failed()
    except (MPI.Exception, NotImplementedError):
        return []  # this MPI ends the job when a rank dies
    return ranks_in(comm, dead)


def ranks_in(comm: MPI.Comm, members: MPI.Group) -> list[int]:
    """The ranks in a communicator of the members of an MPI group; frees the group."""
    everyone = comm.Get_group()
    try:
        return list(members.Translate_ranks(range(members.Get_size()), everyone))
    finally:
        everyone.Free()
        members.Free()


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[: tuning.RANKS_NAMED]))
    more = f" and {len(ranks) - tuning.RANKS_NAMED} more" if len(ranks) > tuning.RANKS_NAMED else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {text}{more}"
