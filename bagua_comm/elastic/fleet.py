"""The processes of an elastic job: the contract between `elastic.run` and whatever starts and watches them.

A fleet detects that a process has died, brings the living processes together in a rendezvous, and connects some
of them by a communicator. It does not decide who trains, nor does it restore any state: `loop` does.

Every process has a number, which it keeps for as long as it lives. Its rank in a communicator may change. A
process that a launcher starts in the place of a dead one gets a new number.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..comm import Communicator
from ..errors import ArrayError, CommError
from ..system.processes import ProcessId, this_host


@dataclass(frozen=True)
class Process:
    """A process of the job."""

    number: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.number} (on {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class ProcessInfo(ProcessId):
    """The identity of a process of a job: its host, its process id and its start time."""

    host: str
    """Identifies the host; see `processes.this_host`."""
    name: str
    """The name of the host."""
    agent: int | None = None
    """Process id of the launcher's agent, if it kills this process when another one of its processes dies."""

    @classmethod
    def of_this(cls, agent: int | None = None) -> ProcessInfo:
        """Describe this process."""
        return cls(**vars(ProcessId.mine()), host=this_host(), name=socket.gethostname(), agent=agent)

    def process(self, number: int) -> Process:
        """The process under its number."""
        return Process(number, self.name, self.pid)


@dataclass(frozen=True)
class Death:
    """A process that has died, and how that was detected."""

    process: Process
    reason: str
    """For example "died", or "did not answer for 30 s, and was killed"."""

    def __str__(self) -> str:
        return f"{self.process} {self.reason}"


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous, the same on all processes that took part."""

    number: int
    """Its round: the number of rendezvous of the job so far, this one included."""
    alive: tuple[Process, ...]
    """All living processes, by number: trainers, spares, and processes that have joined."""
    dead: tuple[Death, ...]
    """The deaths since the previous rendezvous."""


class Fleet(ABC):
    """This process and its connection to the other processes of the job."""

    me: int
    """The number of this process."""
    wanted: int
    """How many processes train, while enough are alive; the others are spares."""
    timeout_s: float
    """Seconds that a process may stay away from a rendezvous before it is fenced: killed, and counted as dead."""
    folder: Path | None = None
    """Where snapshots that outlive the processes are stored on each host, if the job has no folder."""

    @abstractmethod
    def rendezvous(self, cause: CommError | None = None) -> Rendezvous:
        """Wait until all living processes have joined, and agree with them on who is alive.

        Collective among all living processes, spares included. The first rendezvous starts the job. A call makes
        the other processes join: their calls in communicators of this fleet raise `CommError`, and `stand_by`
        returns. Pending operations in those communicators are aborted.

        Args:
            cause: The error that brought this process here; None at the start.

        Raises:
            RankFailed: This process has been fenced, or the rendezvous cannot be completed.
            CommAborted: The program has failed on another process; see `fail`.
        """

    @abstractmethod
    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """Make a communicator of the processes with these numbers, in this order.

        Collective among `members`, after a rendezvous and before any other call, in the same order on all
        members. If a member dies meanwhile, this raises `CommError`, or a later call of the communicator does.
        Closing the communicator waits for no other process.

        Args:
            members: The numbers of the processes, by rank.
            control: Whether it only serves to agree and restore before training: host arrays alone, without the
                memory that makes large reductions fast. It may be ready much sooner.
        """

    def failure(self, comm: Communicator) -> CommError | None:
        """The error of a death, or of a rendezvous, that this process has noticed; None if there is none.

        Args:
            comm: The communicator of training, which this fleet has made.
        """
        return comm.host.poll_failures(())

    def _check_members(self, members: Sequence[int], alive: Collection[int]) -> list[int]:
        """Return `members` in a list; raise `ArrayError` unless they are of `alive`, and this process is one."""
        numbers = list(members)
        if len(set(numbers)) < len(numbers) or self.me not in numbers or not set(numbers) <= set(alive):
            raise ArrayError(
                f"connect: members are {numbers}, expected different ones of {list(alive)}, process {self.me} "
                "among them"
            )
        return numbers

    @abstractmethod
    def stand_by(self, training: Collection[int]) -> bool:
        """Wait as a spare; returns True when there is a rendezvous to join, False when the job has ended.

        The death of a trainer triggers a rendezvous. Other deaths are reported at the next one.

        Args:
            training: The numbers of the processes that train.
        """

    def fail(self, reason: str) -> None:  # noqa: B027 - not every fleet needs it
        """Report that the program has failed on this process: the rendezvous of the others raises `CommAborted`.

        Waits for no other process. Does nothing where the launcher ends the other processes anyway.

        Args:
            reason: The error, as text.
        """

    @abstractmethod
    def end(self) -> None:
        """Report that the job has succeeded: spares return, and no process waits for another one any more.

        Called by all trainers, in any order.
        """
