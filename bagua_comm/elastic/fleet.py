"""The processes of an elastic job: who lives, who trains, and who stands by.

A fleet knows how processes notice that one of them is gone, how those that are left meet, and how they become a
communicator. What they do with it is not its business: `loop` chooses who trains, and brings the state back.

Every process has a number, which it keeps for as long as it lives; ranks are places in a communicator, and
change. A process that is started in the place of another one gets a number of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..comm import Communicator
from ..errors import CommError


@dataclass(frozen=True)
class Process:
    """A process of the job."""

    number: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.number} (on {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Death:
    """A process that is gone, and how that was found."""

    process: Process
    reason: str
    """For example "died", or "did not answer for 30 s, and was killed"."""

    def __str__(self) -> str:
        return f"{self.process} {self.reason}"


@dataclass(frozen=True)
class Meeting:
    """What all living processes agree on when they meet; the same on all of them."""

    number: int
    """How many meetings there were, this one included."""
    alive: tuple[Process, ...]
    """Who is here, by number; those that train, those that stand by, and newcomers."""
    dead: tuple[Death, ...]
    """Who has died since the meeting before."""


class Fleet(ABC):
    """This process, and its way to the others."""

    recruits: bool = False
    """Whether `recruit` can start processes in the place of dead ones."""
    me: int
    """The number of this process."""
    wanted: int
    """How many processes train while there are as many; the others stand by."""
    timeout_s: float
    """How long a process may stay away from a meeting before it is fenced: killed, and counted as dead."""
    folder: Path | None = None
    """Where copies lie that outlive the processes, on each host, if the job has no folder; None for nowhere."""

    @abstractmethod
    def meet(self, cause: CommError | None = None) -> Meeting:
        """Return when all living processes are here. The first meeting is the start of the job.

        Collective among all living processes, those that stand by included. Calling it makes the others come:
        their calls in communicators of this fleet raise `CommError`, and `stand_by` returns. What is under way in
        those communicators is given up.

        Args:
            cause: The error that brought this process here; None at the start.

        Raises:
            RankFailed: This process has been fenced, or the meeting cannot be held.
            CommAborted: The program has failed on another process; see `fail`.
        """

    @abstractmethod
    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """A communicator of the processes with these numbers, in this order; they alone call this.

        Collective among `members`, directly after a meeting, in the same order on all of them. The death of a
        member in the middle of it is a `CommError`, also in every later call of the communicator, and its close
        waits for nobody.

        Args:
            members: The numbers of the processes, by rank.
            control: Whether it is for what a meeting has to say and bring, before anybody trains: host arrays
                alone, without what makes large reductions fast. It may be ready much sooner.
        """

    @abstractmethod
    def stand_by(self, training: Collection[int]) -> bool:
        """Wait without training; True when a meeting is to be held, False when the job has ended.

        A death calls a meeting if it is that of a process that trains. Who else has died is told at the next one.

        Args:
            training: The numbers of the processes that train.
        """

    @abstractmethod
    def recruit(self, count: int) -> None:
        """Start so many processes in the place of dead ones, in the background; a later meeting has them.

        Only one process calls this after a meeting: the first of `Meeting.alive`.

        Raises:
            UnsupportedError: This fleet cannot start processes.
        """

    @abstractmethod
    def recruits_wait(self) -> bool:
        """Whether processes that were recruited wait to be let in at a meeting. Any process may ask, at once."""

    def fail(self, reason: str) -> None:  # noqa: B027 - there may be nobody to tell
        """The program has failed on this process: the others learn of it, and their meeting raises `CommAborted`.

        Waits for nobody. Where another launcher ends the others, nothing needs to be done.

        Args:
            reason: The error, in words.
        """

    @abstractmethod
    def end(self) -> None:
        """The job has ended well: those that stand by learn of it, and nobody waits for anybody any more.

        Called by all processes that trained, in any order.
        """
