"""Run a program of threads in an order that is drawn from a seed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection
from random import Random
from typing import TypeVar

from . import substitutes
from .deliveries import Delays
from .scheduler import Scheduler

T = TypeVar("T")

LIBRARIES = "bagua_comm", "bagua_torch"
"""Packages whose modules always wait under the control of the scheduler."""


class Simulation:
    """The simulation in progress, as its program sees it."""

    def __init__(self, seed: int, scheduler: Scheduler) -> None:
        self.seed, self._scheduler = seed, scheduler
        self.random = Random(f"program {seed}")
        """Random numbers for the program, for example to choose who fails, and when."""

    @property
    def now_s(self) -> float:
        """The virtual time since the beginning, in seconds."""
        return self._scheduler.now_s

    def sleep(self, seconds: float) -> None:
        """Let this thread wait for so long, in virtual time."""
        self._scheduler.wait("sleep", seconds)

    @property
    def delay_s(self) -> Callable[[int, int], float]:
        """The delay of each message in virtual seconds, a function of the ranks of its sender and its receiver.

        By default it draws up to 50 ms for some messages. It may be set, for example to lose the messages of a
        rank.
        """
        return self._scheduler.delay_s

    @delay_s.setter
    def delay_s(self, delay_s: Callable[[int, int], float]) -> None:
        self._scheduler.delay_s = delay_s

    @property
    def digest(self) -> str:
        """A digest of the order of all threads so far: equal if two simulations took the same course."""
        return self._scheduler.digest()


def simulate(
    program: Callable[[Simulation], T],
    seed: int,
    *,
    packages: Collection[str] = (),
    max_steps: int = 1_000_000,
    limit_s: float = 60.0,
) -> T:
    """Run `program(simulation)` with its threads in an order that is drawn from `seed`; return its result.

    The threads that the program starts, such as those of `run_ranks`, `run_fleet` and lanes, run one at a time.
    Time is virtual: waits and timeouts cost nothing. Messages of the local transport arrive after delays, which
    are drawn as well; those from one rank to another arrive in their order. Equal seeds give equal runs, step by
    step, in every process.

    The scheduler controls the threads, locks, conditions and events of `threading`, and `queue`,
    `ThreadPoolExecutor` and `time`, in the modules of this library, in that of `program`, and in `packages`. The
    next thread is drawn where one acquires a lock, waits, sleeps or ends, and nowhere else. A thread that waits
    for anything else, such as a socket, blocks the simulation.

    Args:
        program: The program, a function of a `Simulation`. It must end all threads that it starts.
        seed: The seed.
        packages: Names of further modules, or of packages of modules, whose waits are controlled.
        max_steps: With more steps than this, the simulation fails.
        limit_s: The longest time that it may take, in real seconds.

    Raises:
        SimulationError: All threads wait without a limit, threads are left at the end, or there were too many
            steps. The message shows the latest steps, and where each thread waits.
        CommTimeout: It has taken longer than `limit_s`: a thread waits outside of the scheduler's control.

    An error of the program is raised with the seed in a note.

    >>> from bagua_comm.testing import run_ranks
    >>> simulate(lambda simulation: run_ranks(3, lambda comm: comm.rank), seed=7)
    [0, 1, 2]
    """
    scheduler = Scheduler(seed, max_steps)
    scheduler.delay_s = Delays(scheduler.random)
    simulation = Simulation(seed, scheduler)
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(program(simulation))
        except BaseException as exc:
            if scheduler.failure is not None:
                raise
            errors.append(exc)

    main = scheduler.add("the program")
    thread = threading.Thread(target=scheduler.run, args=(main, body), name="simulation", daemon=True)
    collects = gc.isenabled()
    with scheduler.active(), substitutes.in_place({*LIBRARIES, *packages, program.__module__}):
        gc.disable()  # what it finalizes, and when, would differ from run to run
        try:
            scheduler.begin(main)
            thread.start()
            scheduler.check_over(limit_s)
        finally:
            if collects:
                gc.enable()
    failure = errors[0] if errors else scheduler.failure
    if failure is not None:
        if hasattr(failure, "add_note"):
            failure.add_note(f"in the simulation of seed {seed} ({scheduler.digest()})")
        raise failure
    return results[0]
