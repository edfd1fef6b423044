"""When exchanges begin and end.

    StepSchedule       in every step, in a window of it
    DelayedSchedule    in steps that the algorithm chooses; they outlive a number of steps
    RoundSchedule      in rounds beside training, for which no step waits

The engine reports to its schedule which tensors are ready and which points training has reached. The schedule
decides when buckets leave and when they are written back; `Exchanges` does both.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np

from ..algorithms.base import Point, Rounds, Window
from ..bucket import Bucket
from ..errors import ArrayError, CommMismatch, CommTimeout
from .exchanges import Exchanges

APART_ROUNDS = 100
"""How many rounds in which ranks have replaced their weights unlike each other pass without a warning."""

_LEFT_OUT = "; was engine.at(Point.BACKWARD) left out?"


class StepSchedule:
    """Exchanges in every step, in the window of the algorithm. Training waits for them when it closes."""

    def __init__(self, window: Window, exchanges: Exchanges) -> None:
        self._window, self._exchanges = window, exchanges
        self._left = 0
        """Number of buckets that have left in the open window or were held back."""
        self._waiting: list[set[str]] = [set() for _ in exchanges.buckets]
        self._waiting_for = {
            name: self._waiting[bucket.index] for bucket in exchanges.buckets for name in bucket.views
        }
        self._expect_all()

    def ready(self, name: str) -> None:
        """Report that a tensor is complete. Buckets leave in order, each when all its tensors are complete.

        Raises:
            ArrayError: The tensor was complete already.
        """
        if self._window.opens is not Point.GRADIENT:
            return
        waiting = self._waiting_for[name]
        if name not in waiting:
            raise ArrayError(f"ready: {name!r} was complete already in this step{_LEFT_OUT}")
        waiting.remove(name)
        if not waiting:
            self._send_complete()

    def ready_bucket(self, index: int) -> None:
        """Report that all tensors of a bucket are complete.

        Raises:
            ArrayError: A tensor was complete already.
        """
        if self._window.opens is not Point.GRADIENT:
            return
        waiting, bucket = self._waiting[index], self._exchanges.buckets[index]
        if len(waiting) != len(bucket.views):
            name = next(name for name in bucket.views if name not in waiting)
            raise ArrayError(f"ready_bucket: {name!r} was complete already in this step{_LEFT_OUT}")
        waiting.clear()
        self._send_complete()

    def at(self, point: Point) -> None:
        """Open or close the window if it does so at this point. Collective."""
        opens, closes = self._window.opens, self._window.closes
        if point is Point.BACKWARD and opens is Point.GRADIENT:
            self._complete_with_zeros()
        if point is closes:
            self._close()
        if point is opens and point is not Point.GRADIENT and not self._left:
            for bucket in self._exchanges.buckets:
                self._send(bucket)

    def settle(self) -> None:
        """Close the window if it is open between steps."""
        if self._window.closes is Point.FORWARD:
            try:
                self._close()
            except CommTimeout as exc:
                exc.args = (
                    f"{exc}; a rank that has left out its optimizer's step begins this exchange in its next "
                    "forward pass, or by engine.complete_step()",
                )
                raise

    def before_saving(self, *, phase_ends: bool) -> None:
        """Wait until no exchange changes the states."""
        self.settle()
        self._exchanges.wait()

    def before_loading(self) -> None:
        """Wait until the lane is idle. The window stays open, in case the state is refused."""
        self._exchanges.wait()

    def finish(self) -> None:
        """Close the window, if it is open."""
        self._close()

    def drop(self) -> None:
        """End the exchanges under way without their results. A window that stays open sends nothing more."""
        self._exchanges.drop()
        if self._left and self._window.closes is Point.FORWARD:
            self._left = 0
            self._expect_all()

    def stop(self) -> None:
        """Finish the exchanges under way. The window stays open: later buckets of it stay local."""
        self._end()

    def resume(self) -> None:
        """Send the buckets that were held back in the open window.

        If it opens at STEP, they wait for the next window: ranks may have made different numbers of steps, and
        the next exchange includes the changes of this one.
        """
        held = self._exchanges.pop_held()
        for bucket in held if self._window.opens is not Point.STEP else ():
            self._exchanges.send(bucket)

    def _expect_all(self) -> None:
        """Expect all tensors again."""
        for bucket in self._exchanges.buckets:
            self._waiting[bucket.index].update(bucket.views)

    def _send_complete(self) -> None:
        """Send the next buckets in the order of the plan, up to the first one that waits for a tensor."""
        for bucket in self._exchanges.buckets[self._left :]:
            if self._waiting[bucket.index]:
                return
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        self._left += 1
        self._exchanges.send(bucket)

    def _complete_with_zeros(self) -> None:
        missing = []
        for bucket, waiting in zip(self._exchanges.buckets, self._waiting, strict=True):
            missing += [name for name in bucket.views if name in waiting] if waiting else []
            for name in waiting:
                bucket.views[name][...] = 0
            waiting.clear()
        if missing:
            self._exchanges.warn_of_zeros(missing)
        self._send_complete()

    def _close(self) -> None:
        if self._left:
            self._end()
            self._left = 0
            self._expect_all()

    def _end(self) -> None:
        """Wait for the buckets that have left and write them back."""
        if self._exchanges.sent:
            self._exchanges.wait()
        self._exchanges.commit()


class DelayedSchedule:
    """Exchanges that outlive steps: each begins after an optimizer step, and ends a number of steps later.

    Training waits for an exchange in the step in which it ends, which is the same on all ranks, and in no step
    before. Buckets leave in the order of the plan; several may be under way.
    """

    def __init__(self, window: Window, exchanges: Exchanges) -> None:
        self._delay, self._exchanges = window.delay, exchanges
        self._under_way: dict[int, Future[object]] = {}
        """The exchanges that this rank has submitted and not written back, by the index of their bucket."""

    def ready(self, name: str) -> None:
        """Nothing: exchanges begin after the optimizer has stepped."""

    def ready_bucket(self, index: int) -> None:
        """Nothing: exchanges begin after the optimizer has stepped."""

    def at(self, point: Point) -> None:
        """At STEP, begin the exchanges that are due; at FORWARD, end those whose steps are over. Collective."""
        if point is Point.FORWARD:
            self.settle()
        elif point is Point.STEP:
            self.settle()
            for bucket in self._exchanges.buckets:
                self._step(bucket)

    def settle(self) -> None:
        """End the exchanges whose steps are over; the others continue while weights are read or saved."""
        self._end(most=1)

    def before_saving(self, *, phase_ends: bool) -> None:
        """Wait until no exchange changes the states. What is under way continues with the same steps to go.

        It ends if the phase does: a state of the next phase has no place for it.
        """
        if phase_ends:
            self.finish()
        self.settle()
        self._exchanges.wait()

    def before_loading(self) -> None:
        """Wait until the lane is idle. Nothing is written back, in case the state is refused."""
        self._exchanges.wait()

    def finish(self) -> None:
        """End all exchanges now. Collective."""
        self._end(most=self._delay + 1)

    def drop(self) -> None:
        """End all exchanges now, without their results."""
        self._exchanges.wait_for(list(self._under_way.values()))
        self._under_way.clear()
        for bucket in self._exchanges.buckets:
            self._exchanges.pending(bucket).end()

    def stop(self) -> None:
        """End all exchanges now. Collective."""
        self.finish()

    def resume(self) -> None:
        """Nothing: the next exchange begins at STEP."""

    def _step(self, bucket: Bucket) -> None:
        self._exchanges.pending(bucket).count()
        future = self._exchanges.send_if_due(bucket, self._delay)
        if future is not None:
            self._under_way[bucket.index] = future

    def _end(self, *, most: int) -> None:
        """Wait for the exchanges with at most `most` steps to go, see `Pending`, and write them back."""
        ending = [b for b in self._exchanges.buckets if 0 < self._exchanges.pending(b).steps <= most]
        if not ending:
            return
        # There is no future for what was received before a checkpoint.
        futures = [self._under_way[b.index] for b in ending if b.index in self._under_way]
        self._exchanges.wait_for(futures)
        self._exchanges.write_back(ending)
        for bucket in ending:
            self._exchanges.pending(bucket).end()
            self._under_way.pop(bucket.index, None)


class RoundSchedule:
    """Exchanges in rounds, which begin and end after optimizer steps. No step waits for them."""

    def __init__(self, rounds: Rounds, exchanges: Exchanges) -> None:
        self._interval_s, self._exchanges = rounds.interval_s, exchanges
        self._under_way: list[Future[Any]] = []
        """Futures of the current round: what all ranks know of it, then the exchanges of the buckets."""
        self._replaced = self._apart = 0
        """How often the weights of this rank were replaced, and how many rounds ranks have differed in that."""
        self._current = True
        """Whether the weights are those with which the round began."""
        self._began_s = float("-inf")

    def ready(self, name: str) -> None:
        """Nothing: rounds wait for no tensor."""

    def ready_bucket(self, index: int) -> None:
        """Nothing: rounds wait for no tensor."""

    def at(self, point: Point) -> None:
        """At STEP, end the round if its exchanges are done, and begin the next if it is due."""
        if point is not Point.STEP:
            return
        if self._under_way:
            if not all(future.done() for future in self._under_way):
                return
            self._end()
        if not self._exchanges.stopped and time.monotonic() - self._began_s >= self._interval_s:
            self._begin(stopping=False)

    def settle(self) -> None:
        """Nothing: a round continues while weights are read or saved."""

    def before_saving(self, *, phase_ends: bool) -> None:
        """Nothing: a round changes no state that checkpoints hold."""

    def before_loading(self) -> None:
        """Finish the rounds on all ranks, without writing back. Collective."""
        self.finish(commit=False)

    def drop(self) -> None:
        """Continue without the result of this round."""
        self._replaced += 1
        self._current = False

    def stop(self) -> None:
        """Run rounds until all ranks stop. Collective."""
        self.finish()

    def resume(self) -> None:
        """Nothing: the next round begins at STEP."""

    def finish(self, *, commit: bool = True) -> None:
        """Run rounds until all ranks finish. Collective."""
        if self._exchanges.stopped:
            return
        agreed = self._end(commit=commit) if self._under_way else False
        while not agreed:
            self._begin(stopping=True)
            agreed = self._end(commit=commit)
        if self._apart and commit:
            raise CommMismatch(
                "some ranks have replaced their weights since their last common round, and others have not (this "
                f"one {self._replaced} times), so that no round averaged them: load the same weights on all ranks"
            )

    def _begin(self, *, stopping: bool) -> None:
        self._began_s, self._current = time.monotonic(), True
        self._exchanges.begin_round()
        self._under_way = [self._exchanges.lane.submit(self._agree, stopping, self._replaced)]
        self._under_way += [self._exchanges.send(bucket) for bucket in self._exchanges.buckets]

    def _agree(self, stopping: bool, replaced: int) -> tuple[bool, bool]:
        """Whether all ranks are stopping, and have replaced their weights equally often. Collective."""
        mine = np.array([stopping, replaced, -replaced])
        least = self._exchanges.lane.comm.allreduce(mine, op="min").tolist()
        return bool(least[0]), least[1] == -least[2]

    def _end(self, *, commit: bool = True) -> bool:
        """Wait for the round and write it back; return whether all ranks were stopping when it began.

        A round of earlier weights is dropped, and so is one in which some ranks have replaced theirs already.
        """
        self._exchanges.wait()
        (agreed, alike), self._under_way = self._under_way[0].result(), []
        self._apart = 0 if alike else self._apart + 1
        if self._apart == APART_ROUNDS:
            self._exchanges.replacements.warn(
                f"the last {APART_ROUNDS} rounds averaged nothing, since some ranks have replaced their weights, "
                "and others have not: load the same weights on all ranks"
            )
        if commit and alike and self._current:
            self._exchanges.commit()
        return bool(agreed)


ExchangeSchedule: TypeAlias = "StepSchedule | DelayedSchedule | RoundSchedule"


def schedule_of(exchanges: Exchanges) -> ExchangeSchedule:
    """Return the schedule for the algorithm of the current phase."""
    window = exchanges.algorithm.window
    if isinstance(window, Rounds):
        return RoundSchedule(window, exchanges)
    return DelayedSchedule(window, exchanges) if window.delay else StepSchedule(window, exchanges)
