"""One process's part in an elastic training: its snapshots of the state, and its engines."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from ..bootstrap.job import Job
from ..checkpoint.engines import keep_engine, take_engine
from ..checkpoint.trees import Packed, Slab
from ..comm import Communicator
from ..comm.outcomes import on_all_ranks, text_of
from ..engine import Engine
from ..errors import ArrayError, UnsupportedError
from ..flight import FlightRecorder
from ..live import writer as live
from .roles import buddies
from .snapshot import parts
from .snapshot.commit import Committed, commit
from .snapshot.restore import INITIAL, Restore, Sources
from .snapshot.shards import interval_of, redistribute
from .snapshot.slot import checksum
from .snapshot.snapshots import Buffer, OwnParts, Snapshot, remove_slots, snapshots_in
from .state import State, check_names, internals_of

_NUMBERED = "object "
"""How the names of objects begin that have a number; users give identifiers."""


class Session:
    """One process's part in one training.

    Args:
        state: The state of the training.
        number: The number of this process.
        job: The job. Snapshots are files in its folder; without one, they are in memory of this process.
    """

    def __init__(self, state: State, number: int, job: Job | None = None) -> None:
        self._state = state
        self._parts: dict[str, parts.Part] = internals_of(state).parts
        self._job = job or Job()
        checksum(np.zeros(1))  # loads the kernel now: after a death, all would wait for a spare that loads it
        folder = self._job.folder
        own = OwnParts(folder, number)
        self._buffers = [Buffer(name, folder, number, own) for name in "ab"]
        self._folder, self._number = folder, number
        self._newest: Buffer | None = None
        self._comm: Communicator | None = None
        self._buddies: list[int] = []
        self._run = ""
        self._version = INITIAL
        self._engines: list[Engine] = []
        """The engines made since training was entered, in order."""
        self._kept: list[dict[str, object] | None] = []
        """The states of engines in the last commit, in the same order."""
        self._registered: dict[str, parts.Part] = {}
        """The objects that were registered since training was entered."""
        self._waiting: dict[str, object] = {}
        """The trees of those that the last commit has, and that have not been registered since."""
        self._flights: list[FlightRecorder] = []
        """Flight recorders whose records are written once training resumes."""

    # Snapshots --------------------------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """All snapshots that this process can read, its own first, then those of other processes of this host.

        Call it before this process reports its snapshots in a rendezvous: no process writes until all have
        reported. The reported snapshots stay valid after that, since the first commit of the others writes the
        other buffer, and `OwnParts` after all trainers have been restored.
        """
        near = [] if self._folder is None else snapshots_in(self._folder, except_of=self._number)
        return [*(each for buffer in self._buffers for each in buffer.snapshots()), *near]

    def hold_initial(self, run: str) -> str | None:
        """Commit the present state as `INITIAL`, for all processes; returns an error message if that fails."""
        local = self._buffers[0].local
        try:
            packed = self._packed()
            pending = self._buffers[0].write(packed, len(packed.leaves))
            header = pending.header(run, 0, 1, (), texts_differ=False)
            local.finish(INITIAL, header, pending.size)
        except Exception as exc:  # the other processes wait for this one
            return text_of(exc)
        local.commit()
        return None

    def restore(
        self,
        everyone: Communicator,
        sources: Sources,
        snapshots: Sequence[Snapshot],
        trainers: Sequence[int],
        hosts: Sequence[Hashable],
    ) -> None:
        """Give the state of a commit to the next trainers.

        Collective among all living processes.

        Args:
            everyone: All living processes.
            sources: The commit.
            snapshots: The snapshots that this process has reported; a second read might find them half written.
            trainers: The ranks in `everyone` of the next trainers, by their next ranks.
            hosts: The hosts of all living processes.
        """
        for buffer in self._buffers:  # first: the ranks that have committed it may die while it is restored
            buffer.confirm(sources.version, sources.run)
        content = Restore(everyone, sources, snapshots, trainers, hosts).run()
        wanted = sources.version, sources.run
        held = ((each.info, buffer) for buffer in self._buffers for each in buffer.snapshots())
        self._newest = next((buffer for info, buffer in held if (info.version, info.run) == wanted), None)
        if content is None:
            return
        if sources.version == INITIAL and self._newest is not None:
            return  # it is the initial state of this process itself
        tree = content.tree()
        given, found = ", ".join(sorted(self._parts)), ", ".join(sorted(tree["parts"]))
        if given != found:
            raise ArrayError(
                f"elastic.run: the state has the parts {given}, but the commit that is left in memory has "
                f"{found}: start another program as another job"
            )
        loaded = [
            (part, tree["parts"][name])
            for name, part in self._parts.items()
            if sources.version != INITIAL or not part.is_own
        ]
        conflicts = parts.conflicts_of(pair for part, saved in loaded for pair in part.memory(saved))
        for part, saved in loaded:
            part.load(saved, conflicts)
        self._kept, self._waiting = tree["engines"], tree["registered"]

    # Training ---------------------------------------------------------------------------------------

    def enter(
        self, comm: Communicator, hosts: Sequence[Hashable], run: str, version: int, living: Collection[int]
    ) -> None:
        """Commit the restored state on the present ranks, before training is entered.

        After that nobody needs the snapshots of processes that have died, and they are removed.

        Collective.

        Args:
            comm: The ranks.
            hosts: Their hosts.
            run: Identifies this run of training, the same on all ranks. A process that is only believed to be
                dead may still write the next commit of the previous run, which has the same number as that of
                this run.
            version: A number larger than those of all commits so far.
            living: The numbers of all living processes.
        """
        self._comm, self._buddies, self._engines = comm, buddies(hosts), []
        self._run, self._version = run, version - 1
        self._commit()
        if self._folder is not None:
            remove_slots(self._folder, except_of=living)
        comm.engine_registry = self

    def already_broadcast(self, *things: object) -> bool:
        """Whether all of these objects are parts of the state, and thus restored on every rank."""
        kept = [part.value for part in self._parts.values()]
        return all(any(thing is each for each in kept) for thing in things)

    def register(self, engine: Engine) -> None:
        """Commit an engine from now on, and restore its state of the last commit. Collective."""
        number = len(self._engines)
        self._engines.append(engine)
        saved = self._kept[number] if number < len(self._kept) else None
        if saved is not None:
            problem = take_engine(engine, saved)
            if problem is not None:
                engine.begin_anew()
                if self._comm is not None and self._comm.rank == 0:
                    text = f"elastic.run: engine {number} starts with a new state: {problem}"
                    warnings.warn(text, RuntimeWarning, stacklevel=4)

    def keep(self, value: object) -> None:
        """Commit an object from now on, and restore it, as `register_parts`, under its number. Collective."""
        names = (f"{_NUMBERED}{number}" for number in itertools.count())
        self.register_parts({next(name for name in names if name not in self._registered): value})

    def drop(self, value: object) -> None:
        """Commit an object of `keep` no longer: one that is made in its place gets its number."""
        self._registered = {name: part for name, part in self._registered.items() if part.value is not value}

    def register_parts(self, given: Mapping[str, object]) -> None:
        """Commit objects of the function from now on, and restore them from the last commit. Collective."""
        comm, call = self._comm, "State.register"
        assert comm is not None
        made: dict[str, parts.Part] = {}
        pairs: list[tuple[Slab, Slab]] = []

        def prepare() -> list[str]:
            check_names(given)
            row = []
            for name, value in given.items():
                if name in self._parts or name in self._registered:
                    raise ArrayError(f"{name!r} is a part of the state already; give it another name")
                made[name] = parts.Part(name, value)
                found = made[name].targets(self._waiting.get(name))
                pairs.extend(found)
                row += [name, *made[name].sharded, *(f"{saved.path}, {saved.whole}" for saved, _ in found)]
            return row

        rows = on_all_ranks(comm, call, prepare, ArrayError)
        if any(row != rows[0] for row in rows):
            first = next(each for each in zip_longest(*rows, fillvalue="nothing") if len({*each}) > 1)
            raise ArrayError(f"{call}: ranks give different objects, by rank: {'; '.join(first)}")
        saved, now = [each for each, _ in pairs], [interval_of(each) for _, each in pairs]
        slabs = iter(redistribute(comm, saved, [[(each, None)] for each in saved], now))

        def load() -> None:
            for name, part in made.items():
                if name in self._waiting:
                    part.load(part.with_shards(self._waiting[name], slabs))

        on_all_ranks(comm, call, load, ArrayError)
        self._registered |= made
        for name in made:
            self._waiting.pop(name, None)

    def commit(self) -> None:
        """Commit the state and the engines. Collective."""
        began_ns = time.perf_counter_ns()
        comm = self._comm
        assert comm is not None
        for name in [name for name in self._waiting if name.startswith(_NUMBERED)]:
            del self._waiting[name]  # nobody has made it again: a later one is another object
        live.note("committing")
        try:
            done = self._commit()
        finally:  # the program may catch an error, and go on
            live.note("training")
        ended_ns = time.perf_counter_ns()
        detail: dict[str, object] = {"commit": self._version, "bytes": done.nbytes, "sent_bytes": done.sent_bytes}
        comm.tracer.add("commit", began_ns, ended_ns, detail)
        internals_of(self._state).commits.add(done.nbytes, done.sent_bytes, (ended_ns - began_ns) / 1e6)
        self.note_recovery()

    def defer_records(self, comm: Communicator) -> None:
        """Let `write_records` write the records of the flight recorder of `comm` about calls that fail."""
        comm.flight.later = True
        self._flights.append(comm.flight)

    def write_records(self) -> None:
        """Write the deferred records, once training has resumed or ended."""
        for flight in self._flights:
            flight.settle()
        self._flights = [] if self._comm is None else [self._comm.flight]

    def note_recovery(self) -> None:
        """Note, the first time after a change, that training has resumed, and how long that took."""
        internals = internals_of(self._state)
        change = internals.history[-1] if internals.history else None
        if change is not None and change.recovery_s is None and self._comm is not None:
            seconds = time.monotonic() - internals.noticed_s
            change = internals.history[-1] = replace(change, recovery_s=seconds)
            facts = {"meeting": change.number, "seconds": seconds, "commit": change.commit}
            self._job.record("recovery", ranks=len(change.after), **facts)
            end_ns = time.perf_counter_ns()
            begin_ns = end_ns - int(seconds * 1e9)
            self._comm.tracer.add("recovery", begin_ns, end_ns, {"meeting": change.number, "change": str(change)})
        self.write_records()

    def _commit(self) -> Committed:
        assert self._comm is not None
        buffer = self._buffers[0] if self._newest is not self._buffers[0] else self._buffers[1]
        done = commit(
            self._comm, buffer, self._packed, run=self._run, version=self._version + 1, buddies=self._buddies
        )
        self._version, self._newest = self._version + 1, buffer
        self._job.committed(self._version)
        return done

    def _packed(self) -> Packed:
        engines = [None if engine.closed else keep_engine(engine) for engine in self._engines]
        engines += self._kept[len(engines) :]
        named = {}
        for name, part in (self._parts | self._registered).items():
            try:
                named[name] = part.tree()
            except Exception as exc:
                raise ArrayError(f"{name} cannot be kept: {type(exc).__name__}: {exc}") from exc
        missing = [name for name in self._waiting if not name.startswith(_NUMBERED)]
        if missing and any(not name.startswith(_NUMBERED) for name in self._registered):
            raise ArrayError(
                f"State.register has not restored {', '.join(missing)} of the commit before; register it "
                "again in this function, as it was then"
            )
        registered = self._waiting | {name: named.pop(name) for name in self._registered}
        packed = parts.packed(
            {"parts": named, "engines": engines, "registered": dict(sorted(registered.items()))}
        )
        wrong = [slab.path for slab in packed.slabs if slab.path.startswith("tree['parts']")]
        if wrong:
            raise UnsupportedError(
                f"{wrong[0]} is sharded, and must be sharded anew on other ranks: "
                "make the model and its optimizer in the function that elastic.run calls, and give them to "
                "State.register(...) there"
            )
        return packed

    # The end ----------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Abort the engines after training was left by an error, without waiting for other ranks."""
        for engine in self._engines:
            engine.abort()
        self._forget_ranks()

    def close(self) -> None:
        """Free all snapshots."""
        for buffer in self._buffers:
            buffer.close()
        self._forget_ranks()

    def _forget_ranks(self) -> None:
        if self._comm is not None:
            self._comm.engine_registry = None
        self._engines, self._registered, self._comm = [], {}, None
