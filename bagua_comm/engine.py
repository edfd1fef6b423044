"""The engine: runs an algorithm over buckets, on a lane, in step with training.

Buckets leave in plan order on every rank, whatever order they became ready in, so that the ranks' calls
always match. The engine owns a duplicate of the communicator and the lane that uses it.

On device arrays everything here is in the order of CuPy's current stream: what the caller enqueued before `ready`
is in the bucket that leaves, and what it enqueues after `at(BACKWARD)` finds the average there.
"""

from __future__ import annotations

import difflib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from . import arrays
from .algorithms.base import (
    Algorithm,
    Payload,
    Point,
    check_algorithm_argument,
    check_dtype,
    phase_of,
    phases_of,
)
from .algorithms.state import (
    check_movable,
    check_names,
    check_state,
    checksum,
    load_state,
    own_of,
    save_state,
)
from .arrays import Array
from .bucket import Bucket, Plan, make_buckets
from .codecs.base import codecs_in
from .comm import Communicator
from .errors import ArrayError, CommMismatch, shown
from .lane import Lane, StreamLane, ThreadLane
from .trace import Counter, Tracer

__all__ = ["Engine", "Lane", "StreamLane", "ThreadLane"]

Storage: TypeAlias = Sequence[Array] | Mapping[Payload, Sequence[Array]]
"""Memory of the buckets: one flat array for each; by payload, where an algorithm exchanges both in turn."""

T = TypeVar("T")


class Engine:
    """Exchanges the buckets of a plan by an algorithm.

    Collective. All ranks give the same plan and algorithm; they are compared. Call `ready` when a tensor
    is complete, and `at` when training reaches a point (`FORWARD`, `BACKWARD`, `STEP`), on every rank in every
    step. Close it, or use it as a context manager.

    Args:
        comm: The ranks. The engine works on a duplicate of it.
        algorithm: What to exchange, when and how.
        plan: Which tensors travel together.
        storage: The memory of the buckets, gradients or weights as the algorithm's `payload` says: one flat
            array each. For an algorithm that exchanges both in turn, {"grad": [...], "weight": [...]}. The
            engine keeps views of it.
        tracer: Where spans go; the communicator's by default.

    Raises:
        ArrayError: `storage` does not fit the plan or the algorithm.
        CommMismatch: The ranks' plans or algorithms differ.
        UnsupportedError: The algorithm cannot exchange the dtype of a tensor; it is named.
    """

    def __init__(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        plan: Plan,
        storage: Storage,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        check_algorithm_argument("Engine", "algorithm", algorithm)
        check_fit(algorithm, plan, comm.size)
        self.algorithm, self.plan = algorithm, plan
        self._buckets = self._over(plan, storage)
        self._training = ""
        """Random, and the same on all ranks: states that were saved together are known by it."""
        self._compare(comm)
        self._tracer = tracer or comm.tracer
        self._lane = comm.lane(self._lane_kind(comm))
        self._lane.tracer = self._tracer
        self._comm: Communicator = self._lane.comm
        self.counter = Counter()
        """What was exchanged so far: payload and wire bytes of this rank."""
        self.step = 0
        """How many training steps have ended."""
        self.commits = 0
        """How often the buckets were written back to."""
        self._stopped = self._closed = False
        self._prepare_codecs()
        self._begin_phase(began=0)

    @property
    def phase(self) -> Algorithm:
        """What the algorithm is in this step; it changes at FORWARD."""
        return self._phase

    @property
    def payload(self) -> Payload:
        """What is exchanged in this step: "grad" or "weight"."""
        return self._phase.payload

    def ready(self, name: str) -> None:
        """Say that a tensor's values are complete in this step.

        A bucket whose tensors all are complete leaves as soon as all buckets before it have left.

        Raises:
            ArrayError: There is no such tensor, or it was complete already.
        """
        waiting = self._waiting_for.get(name)
        if waiting is None:
            close = difflib.get_close_matches(name, self._waiting_for)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ArrayError(f"ready: there is no tensor {name!r}{hint}")
        if self._window.opens is not Point.GRADIENT:
            return
        if name not in waiting:
            raise ArrayError(f"ready: {name!r} was complete already in this step")
        waiting.discard(name)
        self._submit_complete()

    def at(self, point: Point) -> None:
        """Say that training has reached a point: open and close what opens and closes there.

        Collective. At `BACKWARD`, tensors that did not become ready are sent as zeros: no rank waits
        for ever for one that another rank does not use. Ranks of an algorithm whose window is always open
        don't wait for each other here.

        Raises:
            CommError: An exchange failed.
        """
        if not isinstance(point, Point):
            raise ArrayError(f"at: point is {point!r}, expected a Point")
        if point is Point.FORWARD and phase_of(self.algorithm, self.step) != self._phase:
            self._finish()
            self._begin_phase(began=self.step)
        window = self._window
        if window.closes is Point.NEVER:
            if point is Point.STEP:
                self._turn()
        else:
            if point is Point.BACKWARD and window.opens is Point.GRADIENT:
                self._complete_with_zeros()
            if point is window.closes:
                self._close_window()
            if point is window.opens and point is not Point.GRADIENT and not self._left:
                for bucket in self.buckets:
                    self._submit(bucket)
        if point is Point.STEP:
            self.step += 1

    def settle(self) -> None:
        """Wait for what is exchanged between two steps, and write it back: before weights are read or saved."""
        if self._window.closes is Point.FORWARD:
            self._close_window()

    def flush(self) -> None:
        """Wait for everything that was submitted; raises the first error among it."""
        with self._tracer.span("wait for exchanges"):
            self._lane.wait()

    def stop(self) -> None:
        """Finish what is under way, and exchange nothing until `resume`; stopping twice does nothing.

        Collective: returns when all ranks have stopped. Where the window is always open, rounds go on until
        then, and the last one leaves all ranks with the same weights, up to rounding.
        """
        if not self._stopped:
            self._finish()
            self._stopped = True

    def resume(self) -> None:
        """Go on after `stop`.

        Collective.
        """
        self._stopped = False

    def replan(
        self, plan: Plan, storage: Storage | None = None, *, algorithm: Algorithm | None = None
    ) -> list[Array] | dict[Payload, list[Array]]:
        """Go on with another plan for the same tensors; their values and the algorithm's state move along.

        Collective. Call it between steps.

        Args:
            plan: The new plan.
            storage: Memory for it; if None, new arrays of the library of the old ones.
            algorithm: The same with other settings, another average or codec say; it goes on counting steps.

        Returns:
            The memory now used: one flat array per bucket, by payload if there are two of them.

        Raises:
            ArrayError: The plan has other tensors, the algorithm is another one, or `storage` or the state does
                not fit.
            CommMismatch: The ranks' plans or algorithms differ.
            UnsupportedError: The algorithm cannot exchange the dtype of a tensor; it is named.
        """
        algorithm = self.algorithm if algorithm is None else algorithm
        check_algorithm_argument("replan", "algorithm", algorithm)
        if _kinds(algorithm) != _kinds(self.algorithm):
            raise ArrayError(f"replan: {algorithm} is another algorithm than {self.algorithm}")
        check_fit(algorithm, plan, self._comm.size)
        self._finish()
        specs = {tensor for bucket in self.plan.buckets for tensor in bucket.tensors}
        if specs != {tensor for bucket in plan.buckets for tensor in bucket.tensors}:
            raise ArrayError("replan: the new plan has other tensors than the old one")
        saved = self._saved()
        check_movable(saved, plan.buckets)
        if storage is None:
            run = arrays.namespace(self.buckets[0].flat) if self.buckets else np
            storage = {
                payload: [run.zeros(spec.size, arrays.dtype_named(spec.dtype)) for spec in plan.buckets]
                for payload in self._buckets
            }
        old, self.plan, self._buckets = self._buckets, plan, self._over(plan, storage)
        self.algorithm = algorithm
        for payload, buckets in self._buckets.items():
            views = {name: view for bucket in old[payload] for name, view in bucket.views.items()}
            for bucket in buckets:
                for name, view in bucket.views.items():
                    view[...] = views[name]
        self._compare(self._comm)
        self._prepare_codecs()
        self._begin_phase(began=self._began)
        self._load(saved)
        flats = {payload: [bucket.flat for bucket in buckets] for payload, buckets in self._buckets.items()}
        return flats if len(flats) > 1 else flats[self.payload]

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm keeps between steps, on this rank: arrays and numbers by tensor name, copied.

        Call it between steps, and before the weights are copied: what was exchanged since the last step is
        written back to them first.
        """
        self.settle()
        if self._window.closes is not Point.NEVER:
            self.flush()
        tensors = self._saved()
        facts = _Facts(
            repr(self.algorithm), self.step, repr(self._phase), self._began, self._comm.rank, self._comm.size
        )
        digest = facts.digest(self._training, self._steps_alike(facts.step), tensors)
        return {
            **facts._asdict(),
            "digest": digest,
            "checksum": checksum(*facts, digest, saved=tensors),
            "tensors": tensors,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, also under another plan.

        Collective. All ranks load what was saved together, in one step of one training. Some algorithms keep
        arrays that are a rank's own: replicas of neighbours' weights (LowPrecisionDecentralized,
        LowPrecisionOnePeer) or residuals (ErrorFeedback). Then every rank loads what it saved itself, on as many
        ranks. The others keep nothing, or the same on all ranks: what any rank saved then loads on any rank, on
        any number of ranks.

        What is under way is finished, but not written back.

        Raises:
            ArrayError: On all ranks alike, and the engine stays as it was. A rank's state was saved with another
                algorithm, for other tensors, by an earlier version, or by another rank where that matters; it is
                damaged; or the ranks' states were not saved together.
        """
        # The lane must be idle before its communicator is used here. If the state is refused, what was
        # submitted is committed when its window closes.
        if self._window.closes is Point.NEVER:
            self._finish(commit=False)
        else:
            self.flush()
        rows = self._together(lambda: (self._facts_of(saved), saved["digest"], _new_token()))
        facts = rows[self._comm.rank][0]
        self._check_together(rows)
        phase = phase_of(self.algorithm, facts.step)
        goes_on = repr(phase) == facts.phase  # else the phase that was saved has ended
        states = [phase.init(bucket, self._comm) for bucket in self._buckets[phase.payload]]
        self._together(lambda: self._check_tensors(phase, states if goes_on else [], facts, saved))
        self._training, self.step = rows[0][2], facts.step
        self._begin_phase(began=facts.phase_began if goes_on else facts.step, states=states)
        if goes_on:
            self._load(saved["tensors"])

    def close(self) -> None:
        """Finish what is under way, and free the lane and its communicator; closing twice does nothing.

        Collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
        finally:
            self._lane.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    # Plan, phases, state ----------------------------------------------------------------------------

    def _over(self, plan: Plan, storage: Storage) -> dict[Payload, list[Bucket]]:
        """Buckets over `storage`, for every payload that the algorithm exchanges."""
        given = storage if isinstance(storage, Mapping) else {self.algorithm.payload: storage}
        needed = {phase.payload for phase in phases_of(self.algorithm)}
        if not needed <= set(given):
            wanted = " and ".join(map(repr, sorted(needed)))
            raise ArrayError(f"storage is for {', '.join(map(repr, given))}, but {self.algorithm} needs {wanted}")
        return {payload: make_buckets(plan, given[payload]) for payload in sorted(needed)}

    def _lane_kind(self, comm: Communicator) -> Literal["thread", "stream"]:
        """A stream, where exchanges only enqueue; rounds of an open window wait for all ranks, on the host."""
        rounds = any(phase.window.closes is Point.NEVER for phase in phases_of(self.algorithm))
        flats = [bucket.flat for buckets in self._buckets.values() for bucket in buckets]
        moved_by = [comm.carrier(flat, call="Engine", name="storage") for flat in flats]
        return "stream" if flats and not rounds and all(t.enqueues for t in moved_by) else "thread"

    def _prepare_codecs(self) -> None:
        """Load the kernels of codecs on a device now, while no lane works.

        CUDA loads a kernel when it is first launched, and may wait for all that the device is doing: also for a
        call of NCCL on the lane, whose peer's thread may be waiting to launch the same. Kernels of sums, of steps
        and of CuPy itself are loaded when they are met.
        """
        for phase in phases_of(self.algorithm):
            for flat in {bucket.flat.dtype: bucket.flat for bucket in self._buckets[phase.payload]}.values():
                for codec in set(codecs_in(phase)) if not isinstance(flat, np.ndarray) else ():
                    codec.prepare(flat)

    def _compare(self, comm: Communicator) -> None:
        mine = (self.plan.digest(), repr(self.algorithm))
        rows = comm.allgather_object((mine, _new_token()))
        self._training = rows[0][1]
        for rank, (other, _) in enumerate(rows):
            if other != mine:
                what = "plan" if other[0] != mine[0] else "algorithm"
                raise CommMismatch(
                    f"rank {comm.rank} and rank {rank} have different {what}s: "
                    + (f"{mine[1]} and {other[1]}" if what == "algorithm" else "the tensors differ")
                )

    def _facts_of(self, saved: object) -> _Facts:
        """What a state says of itself; raises unless that is possible, and of this engine's algorithm."""
        if not isinstance(saved, Mapping):
            raise ArrayError(f"the state is a {type(saved).__name__}, expected what Engine.state_dict gave")
        missing = [name for name in (*_Facts._fields, "digest", "checksum", "tensors") if name not in saved]
        if missing:
            raise ArrayError(
                f"the state has no {', '.join(map(repr, missing))}: it is damaged, or was saved by an earlier "
                "version; to go on without it, load the weights alone"
            )
        facts = _Facts(*(saved[name] for name in _Facts._fields))
        for name in ("algorithm", "phase", "digest", "checksum"):
            if not isinstance(saved[name], str):
                raise ArrayError(f"{name!r} is {shown(saved[name])}, expected a string")
        for name in ("step", "phase_began", "rank", "size"):
            least = 1 if name == "size" else 0
            if type(saved[name]) is not int or not least <= saved[name] < 2**63:
                raise ArrayError(f"{name!r} is {shown(saved[name])}, expected an integer of at least {least}")
        if facts.algorithm != repr(self.algorithm):
            raise ArrayError(f"saved with {facts.algorithm}, but the algorithm is {self.algorithm!r}")
        if facts.phase_began > facts.step or facts.rank >= facts.size:
            raise ArrayError(
                f"the state is of step {facts.step} in a phase that began in {facts.phase_began}, on rank "
                f"{facts.rank} of {facts.size}; expected a phase that began before, and a rank below the number"
            )
        wanted = repr(phase_of(self.algorithm, facts.phase_began))
        if facts.phase != wanted:
            raise ArrayError(f"'phase' is {facts.phase}, expected {wanted} from step {facts.phase_began} on")
        check_names([name for bucket in self.buckets for name in bucket.views], saved["tensors"])
        return facts

    def _steps_alike(self, step: int) -> bool:
        """Whether all ranks are in the same step; not where each trains at its own pace."""
        return phase_of(self.algorithm, step).window.closes is not Point.NEVER

    def _check_together(self, rows: Sequence[tuple[_Facts, str, str]]) -> None:
        """Raise, on all ranks alike, unless their states were saved together."""
        (first, digest, _), *_ = rows
        for rank, (theirs, their_digest, _) in enumerate(rows):
            names = ["size"]
            if self._steps_alike(first.step) or self._steps_alike(theirs.step):
                names += ["step", "phase", "phase_began"]
            for name in names:
                mine, other = getattr(first, name), getattr(theirs, name)
                if mine != other:
                    raise ArrayError(
                        f"load_state_dict: ranks have states that were not saved together: {name!r} is {mine} "
                        f"on rank 0 and {other} on rank {rank}"
                    )
            if digest != their_digest:
                raise ArrayError(
                    "load_state_dict: ranks have states that were not saved together: those of ranks 0 and "
                    f"{rank} are of step {theirs.step}, but of two trainings"
                )

    def _check_tensors(
        self, phase: Algorithm, states: Sequence[Any], facts: _Facts, saved: Mapping[str, Any]
    ) -> None:
        """Raise unless what was saved of the tensors can be loaded into `states`, those of `phase`."""
        tensors, mine = saved["tensors"], (self._comm.rank, self._comm.size)
        for bucket, state in zip(self._buckets[phase.payload], states, strict=False):
            own = own_of(bucket, state, tensors)
            if own and (facts.rank, facts.size) != mine:
                raise ArrayError(
                    f"the state was saved by rank {facts.rank} of {facts.size}, expected rank {mine[0]} of "
                    f"{mine[1]}: {phase} keeps {own[0]!r}, which is every rank's own"
                )
            check_state(bucket, state, tensors)
        if checksum(*facts, saved["digest"], saved=tensors) != saved["checksum"]:
            raise ArrayError("the state is damaged: a number, a shape or a name in it is not what was saved")

    def _together(self, check: Callable[[], T]) -> list[T]:
        """What `check` returns on every rank; what it raises on one is an ArrayError on all. Collective."""
        outcome: tuple[T | None, str | None] = (None, None)
        cause: Exception | None = None
        try:
            outcome = (check(), None)
        except ArrayError as exc:
            outcome, cause = (None, str(exc)), exc
        except Exception as exc:  # a rank that left here alone would be waited for
            outcome, cause = (None, f"the state cannot be read: {exc!r}"), exc
        outcomes = self._comm.allgather_object(outcome)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                raise ArrayError(f"load_state_dict: rank {rank}: {problem}") from cause
        return [value for value, _ in outcomes]

    def _begin_phase(self, began: int, states: list[Any] | None = None) -> None:
        """Set up what the algorithm became in step `began`, with new states unless some are given."""
        self._phase, self._began = phase_of(self.algorithm, began), began
        self._window = self._phase.window
        self.buckets = self._buckets[self._phase.payload]
        if states is None:
            states = [self._phase.init(bucket, self._comm) for bucket in self.buckets]
        self.states = states
        self._round: list[Future[Any]] = []
        self._round_began_s = float("-inf")
        self._open_window()

    def _saved(self) -> dict[str, dict[str, Any]]:
        saved: dict[str, dict[str, Any]] = {}
        for bucket, state in zip(self.buckets, self.states, strict=True):
            saved.update(save_state(bucket, state))
        return saved

    def _load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for bucket, state in zip(self.buckets, self.states, strict=True):
            load_state(bucket, state, saved)

    # Windows that open and close in every step ------------------------------------------------------

    def _open_window(self) -> None:
        self._waiting = [set(bucket.views) for bucket in self.buckets]
        self._waiting_for = {name: names for names in self._waiting for name in names}
        self._left: list[Bucket] = []

    def _close_window(self, *, commit: bool = True) -> None:
        if self._left:
            self.flush()
            if commit:
                self._commit()
            self._open_window()

    def _submit_complete(self) -> None:
        for bucket in self.buckets[len(self._left) :]:
            if self._waiting[bucket.index]:
                return
            self._submit(bucket)

    def _complete_with_zeros(self) -> None:
        for bucket, waiting in zip(self.buckets, self._waiting, strict=True):
            for name in waiting:
                bucket.views[name][...] = 0
            waiting.clear()
        self._submit_complete()

    # A window that is always open -------------------------------------------------------------------

    def _turn(self) -> None:
        """Commit the round that has ended, and begin the next if it is due."""
        if self._round:
            if not all(future.done() for future in self._round):
                return
            self._end_round()
        if not self._stopped and time.monotonic() - self._round_began_s >= self._window.interval_s:
            self._begin_round(stopping=False)

    def _begin_round(self, *, stopping: bool) -> None:
        self._round_began_s = time.monotonic()
        self._open_window()
        self._round = [self._lane.submit(self._agree, stopping)]
        self._round += [self._submit(bucket) for bucket in self.buckets]

    def _end_round(self, *, commit: bool = True) -> bool:
        """Wait for the round and commit it; whether all ranks were stopping when it began."""
        self.flush()
        if commit:
            self._commit()
        agreed, self._round = self._round[0].result(), []
        return bool(agreed)

    def _agree(self, stopping: bool) -> bool:
        """Whether all ranks are stopping. Collective."""
        return bool(self._comm.allreduce(np.array(stopping, np.uint8), op="min"))

    # Both -------------------------------------------------------------------------------------------

    def _finish(self, *, commit: bool = True) -> None:
        """End all that is under way on all ranks. Collective."""
        if self._window.closes is not Point.NEVER:
            self._close_window(commit=commit)
            return
        if self._stopped:
            return
        agreed = self._end_round(commit=commit) if self._round else False
        while not agreed:
            self._begin_round(stopping=True)
            agreed = self._end_round(commit=commit)

    def _submit(self, bucket: Bucket) -> Future[Any]:
        self._left.append(bucket)
        if self._stopped:
            return Future()
        state, bucket.step = self.states[bucket.index], self.step - self._began
        bucket.padding[...] = 0  # a block that held a NaN has left it there
        if hasattr(self._phase, "begin"):
            self._phase.begin(bucket, state)
        return self._lane.submit(self._exchange, self._phase, bucket, state)

    def _exchange(self, algorithm: Algorithm, bucket: Bucket, state: Any) -> None:
        before = self._comm.counters.total()
        calls, wire_bytes = before.calls, before.wire_bytes
        detail = {"bucket": bucket.index, "bytes": bucket.nbytes, "step": bucket.step}
        self._lane.note(**detail)
        with self._tracer.span("exchange", **detail):
            algorithm.exchange(bucket, self._comm, state)
        after = self._comm.counters.total()
        if after.calls > calls:
            self.counter.add(bucket.nbytes, after.wire_bytes - wire_bytes)

    def _commit(self) -> None:
        if hasattr(self._phase, "commit") and not self._stopped:
            for bucket in self._left:
                self._phase.commit(bucket, self.states[bucket.index])
            self.commits += 1


class _Facts(NamedTuple):
    """What a state says of itself."""

    algorithm: str
    step: int
    phase: str
    phase_began: int
    rank: int
    size: int

    def digest(self, training: str, steps_alike: bool, names: Iterable[str]) -> str:
        """A hash that is the same on all ranks that saved together, and on no others."""
        steps = (self.step, self.phase, self.phase_began) if steps_alike else ()
        together = (training, self.algorithm, self.size, steps, sorted(names))
        return hashlib.blake2b(repr(together).encode(), digest_size=16).hexdigest()


def _new_token() -> str:
    return secrets.token_hex(8)


def _kinds(algorithm: Algorithm) -> list[tuple[type, Payload]]:
    """What an algorithm is in the course of training, whatever its settings."""
    return [(type(phase), phase.payload) for phase in phases_of(algorithm)]


def check_fit(algorithm: Algorithm, plan: Plan, size: int) -> None:
    """Raise unless the algorithm can exchange the tensors of `plan` over `size` ranks.

    Raises:
        ArrayError: It cannot do with so many ranks.
        UnsupportedError: It cannot exchange the dtype of a tensor; it is named.
    """
    for bucket in plan.buckets:
        try:
            check_dtype(algorithm, bucket.dtype)
        except TypeError as exc:
            names = ", ".join(repr(tensor.name) for tensor in bucket.tensors[:3])
            raise type(exc)(f"tensor {names}: {exc}") from exc
    for phase in phases_of(algorithm):
        if hasattr(phase, "check_size"):
            phase.check_size(size)
