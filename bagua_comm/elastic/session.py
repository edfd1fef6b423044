"""What `elastic.run` does with a state: the copies of this process, the engines, and how both come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..bootstrap.job import Job
from ..checkpoint.engines import keep_engine, take_engine
from ..checkpoint.trees import Packed
from ..comm import Communicator
from ..engine import Engine
from ..errors import ArrayError, BaguaError, CommAborted
from ..flight import FlightRecorder
from .roles import buddies
from .snapshot import parts
from .snapshot.commit import commit
from .snapshot.restore import Sources, restore
from .snapshot.slot import checksum
from .snapshot.snapshots import Copy, Layout, Side, left_in
from .state import State

_log = logging.getLogger(__name__)

FIRST = 0
"""The number of what rank 0 had at the start, before anything was committed."""


class RanksChange(CommAborted):
    """Processes wait to be let in. All ranks raise it in the same commit, and meet."""


class Session:
    """One process's part in one training.

    Args:
        state: What it keeps.
        number: The number of this process.
        job: What it belongs to. Copies lie in files in its folder; without one, in memory of this process.
        more_wait: Whether processes wait to be let in.
    """

    def __init__(
        self, state: State, number: int, job: Job | None = None, more_wait: Callable[[], bool] | None = None
    ) -> None:
        self._state, self._more_wait = state, more_wait
        self._parts: dict[str, parts.Part] = state.__dict__["_parts"]
        self._job = job or Job()
        checksum(np.zeros(1))  # loads the kernel: after a death all would wait for a spare that does it
        folder = self._job.folder
        self._sides = [Side(name, folder, number) for name in "ab"]
        self._folder, self._number = folder, number
        self._newest: Side | None = None
        self._comm: Communicator | None = None
        self._buddies: list[int] = []
        self._run = ""
        self._version = FIRST
        self._engines: list[Engine] = []
        """Those that were made since training was entered, in order."""
        self._kept: list[Any] = []
        """What the last commit kept of engines, in the same order."""
        self._flights: list[FlightRecorder] = []
        """Those whose records are written once training goes on."""

    # Copies -----------------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """All copies that this process can read: also those of other processes of this host.

        Call it before this process says at a meeting what it holds: until all have said it, nobody writes. From
        then on the copies that were told are safe: the first commit that others make writes another side.
        """
        near = [] if self._folder is None else left_in(self._folder, besides=self._number)
        return [*near, *(copy for side in self._sides for copy in side.copies())]

    def offer_first(self, run: str) -> str | None:
        """Hold what this process has now as the commit `FIRST`, which everybody gets; returns why it cannot."""
        try:
            packed = self._packed()
            draft = self._sides[0].write(packed, Layout.of(packed))
            header = draft.header(run, 0, 1, (), texts_differ=False)
            self._sides[0].own.finish(FIRST, header, draft.size)
        except Exception as exc:  # the other processes wait for this one
            return str(exc) if isinstance(exc, BaguaError) else f"{type(exc).__name__}: {exc}"
        self._sides[0].own.commit()
        return None

    def restore(
        self,
        everyone: Communicator,
        sources: Sources,
        copies: Sequence[Copy],
        members: Sequence[int],
        hosts: Sequence[Hashable],
    ) -> None:
        """Bring the state of a commit to those who train next. Collective among all living processes.

        Args:
            everyone: All living processes.
            sources: The commit.
            copies: Those of which this process told the others; read again, they may be half written.
            members: Their places among all, by rank.
            hosts: The hosts of all.
        """
        for side in self._sides:  # first: those who have committed it may die while it is restored
            side.confirm(sources.version, sources.run)
        content = restore(everyone, sources, copies, members, hosts)
        self._newest = next((side for side in self._sides if self._holds(side, sources)), None)
        if content is None:
            return
        is_mine = sources.version == FIRST and everyone.rank in sources.whole
        if is_mine:
            self._kept = []
            return
        tree = content.tree()
        mine, left = ", ".join(sorted(self._parts)), ", ".join(sorted(tree["parts"]))
        if mine != left:
            raise ArrayError(
                f"elastic.run: the state has the parts {mine}, but the commit that is left in memory has {left}: "
                "start another program as another job"
            )
        for name, part in self._parts.items():
            if sources.version != FIRST or not part.is_own:
                part.load(tree["parts"][name])
        self._kept = tree["engines"]

    def _holds(self, side: Side, sources: Sources) -> bool:
        return any(
            copy.version == sources.version and copy.header["run"] == sources.run for copy in side.copies()
        )

    # Training ---------------------------------------------------------------------------------------

    def enter(self, comm: Communicator, hosts: Sequence[Hashable], run: str, version: int) -> None:
        """Training is about to be entered: commit what was restored, under the ranks there are now. Collective.

        Args:
            comm: The ranks.
            hosts: Their hosts.
            run: A new name, under which these ranks commit; the same on all of them. A process that was taken for
                dead may still write the next commit of the run before, which has the same number as theirs.
            version: A number beyond those of all commits so far.
        """
        self._comm, self._buddies, self._engines = comm, buddies(hosts), []
        self._run, self._version = run, version - 1
        self._commit(flag=False)
        comm.engine_registry = self

    def already_broadcast(self, *things: object) -> bool:
        """Whether the state has all of these objects, so that every rank has what it should have of them."""
        kept = [part.value for part in self._parts.values()]
        return all(any(thing is each for each in kept) for thing in things)

    def register(self, engine: Engine) -> None:
        """Keep an engine from now on, and bring back what the last commit kept of it. Collective."""
        number = len(self._engines)
        self._engines.append(engine)
        saved = self._kept[number] if number < len(self._kept) else None
        if saved is not None:
            problem = take_engine(engine, saved)
            if problem is not None:
                _log.warning("engine %d begins anew: %s", number, problem)

    def commit(self) -> None:
        """Commit the state and the engines. Collective.

        Raises:
            RanksChange: Processes wait to be let in; on all ranks, after the commit.
        """
        began_ns = time.perf_counter_ns()
        state, comm = self._state.__dict__, self._comm
        assert comm is not None
        done = self._commit(flag=self._more_wait is not None and self._more_wait())
        ended_ns = time.perf_counter_ns()
        detail = {"commit": self._version, "bytes": done.nbytes, "sent_bytes": done.sent_bytes}
        comm.tracer.add("commit", began_ns, ended_ns, detail)
        state["_commits"].add(done.nbytes, done.sent_bytes, (ended_ns - began_ns) / 1e6)
        self.note_recovery()
        if done.flag:
            raise RanksChange("other processes wait to be let in")

    def record_later(self, comm: Communicator) -> None:
        """Have `settle` write what the flight recorder of `comm` holds when a call fails."""
        comm.flight.later = True
        self._flights.append(comm.flight)

    def settle(self) -> None:
        """Write the records that were put off: training goes on, or it has ended."""
        for flight in self._flights:
            flight.settle()
        self._flights = [] if self._comm is None else [self._comm.flight]

    def note_recovery(self) -> None:
        """Training goes on: note how long that took, if it is news."""
        now_s = time.time()
        change = self._state.__dict__["_history"].recovered(now_s)
        if change is not None and self._comm is not None:
            facts = {"meeting": change.number, "seconds": change.recovery_s, "commit": change.commit}
            self._job.record("recovery", ranks=len(change.after), **facts)
            end_ns = time.perf_counter_ns()
            begin_ns = end_ns - int(change.recovery_s * 1e9)
            self._comm.tracer.add("recovery", begin_ns, end_ns, {"meeting": change.number, "change": str(change)})
        self.settle()

    def _commit(self, *, flag: bool) -> Any:
        assert self._comm is not None
        side = self._sides[0] if self._newest is not self._sides[0] else self._sides[1]
        done = commit(
            self._comm,
            side,
            self._packed,
            run=self._run,
            version=self._version + 1,
            buddies=self._buddies,
            flag=flag,
        )
        self._version, self._newest = self._version + 1, side
        self._job.committed(self._version)
        return done

    def _packed(self) -> Packed:
        engines = [None if engine.closed else keep_engine(engine) for engine in self._engines]
        engines += self._kept[len(engines) :]
        named = {}
        for name, part in self._parts.items():
            try:
                named[name] = part.tree()
            except Exception as exc:
                raise ArrayError(f"{name} cannot be kept: {type(exc).__name__}: {exc}") from exc
        return parts.packed({"parts": named, "engines": engines})

    # The end ----------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Training was left by an error: give up the engines, without waiting for anybody."""
        if self._comm is not None:
            self._comm.engine_registry = None
        for engine in self._engines:
            engine.abort()
        self._engines, self._comm = [], None

    def close(self) -> None:
        """Let go of all copies."""
        for side in self._sides:
            side.close()
        if self._comm is not None:
            self._comm.engine_registry = None
        self._engines, self._comm = [], None
