"""A fleet over torch.distributed: processes that find each other through torchrun's store.

Gloo cannot leave a process out of those that it connects. So after a death the living meet in the store, and
open new connections among themselves, under a key that nobody used before. A meeting is four kinds of keys:

    call/m      somebody wants meeting m; every process looks for this key, and gives its communicators up
    here/m/i    process i has come
    dead/i      process i is gone, and why: one that sees it by its number (on the same host, and in the same
                container) has found it ended, or has killed it since it did not come in time; if all of those are
                silent, any process says so
    result/m    who lives and who has died: whoever first finds that nobody is missing writes it, once and for all

Torchrun's agent on the first node serves the store. When that is gone, a meeting fails with an error that says
so; what trains meanwhile goes on.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, TimeoutError  # noqa: A004 - another one until Python 3.11
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from bagua_comm import (
    ArrayError,
    BootstrapError,
    CommAborted,
    CommError,
    CommTimeout,
    Communicator,
    RankFailed,
    UnsupportedError,
)
from bagua_comm.bootstrap import environment
from bagua_comm.bootstrap.connection import open_world
from bagua_comm.elastic.fleet import Death, Fleet, Meeting, Process
from bagua_comm.transports import Transport

from . import agent_folder, transport
from .board import NAP_S, Board, Card, enter
from .bootstrap import rendezvous, use_device

T = TypeVar("T")

LOOK_S = 0.05
"""How often each process looks in the store whether a meeting is called."""

BEAT_S = 1.0
"""How often it writes there that it lives."""

SILENT_S = 6.0
"""How long the processes of a host may be silent, when all are missed, before they are counted as dead."""

AGENT_S = 60.0
"""How long a process waits for torchrun's agent to end it; the agent looks after its processes every 0.1 s."""

WATCH_S = 5.0
"""How long to wait for the end of the watch, whose last question to the store may be under way."""

ENDED, DOOMED = "has ended well", "is ended by torchrun, together with"
"""Why a process that does not live is no longer there: these begin a reason."""

_log = logging.getLogger(__name__)


def start_fleet(timeout_s: float) -> TorchrunFleet:
    """The fleet of the processes that torchrun has started with this one. Collective.

    If torchrun starts all processes again when one dies, they keep their copies where their successors find them.

    Raises:
        ArrayError: BAGUA_SPARES leaves nobody to train.
        BootstrapError: The others do not come, or there is no folder for the copies.
        RankFailed: The store of torchrun's agent cannot be reached.
    """
    try:
        store, rank, size = rendezvous()
    except (RuntimeError, ValueError) as exc:
        raise BootstrapError(
            f"elastic.run: torchrun started this process, but the store of its agent cannot be reached: {exc}"
        ) from exc
    folder = agent_folder.provide() if environment.torchrun_restarts() else None
    agent = agent_folder.agent()
    return TorchrunFleet(
        store, rank, size, timeout_s=timeout_s, spares=environment.job().spares, folder=folder, agent=agent
    )


class TorchrunFleet(Fleet):
    """The processes that torchrun has started, of which some may die.

    Collective. If torchrun starts a process again while the others live, it waits to be let in.

    Args:
        store: A store that outlives every process: that of torchrun's agent.
        rank: The rank that torchrun gave this process.
        size: How many processes torchrun has started.
        timeout_s: How long a process may stay away from a meeting, and a call may wait for its peers.
        spares: How many of the processes stand by at the start.
        folder: Where copies outlive the processes; None if nobody would start these again.
        agent: The process that ends this one when another one of its processes dies; None if there is none.

    Raises:
        ArrayError: There are no more processes than spares.
        BootstrapError: The others do not come.
        RankFailed: The store cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        spares: int = 0,
        folder: Path | None = None,
        agent: int | None = None,
    ) -> None:
        if not 0 <= spares < size:
            raise ArrayError(f"elastic.run: {spares} of {size} processes are spares, so that nobody would train")
        self._store, self.folder = store, folder
        self.wanted, self.timeout_s = size - spares, timeout_s
        entry = enter(store, rank, size, timeout_s=timeout_s, agent=agent)
        self.me, self._cards, self._met = entry.number, entry.cards, entry.meetings
        self._alive = sorted(entry.cards)
        self._first = size
        """The number of the first newcomer."""
        self._board = Board(store, entry.key)
        self._connected: Counter[tuple[int, ...]] = Counter()
        """How often these processes have connected since the last meeting."""
        self._transports: list[Transport] = []
        self._vigil = _Vigil(self._board, self._cards)
        self._lock = threading.Lock()
        self._called = threading.Event()
        self._ended = threading.Event()
        self._newcomers = 0
        self._watch = threading.Thread(target=self._keep_watch, name="bagua-fleet", daemon=True)
        self._watch.start()
        atexit.register(self._end_watch)

    # Meetings ---------------------------------------------------------------------------------------

    def meet(self, cause: CommError | None = None) -> Meeting:
        """See `Fleet.meet`."""
        number = self._met + 1
        self._board.put(f"call/{number}")
        self._give_up(number)
        self._board.put(f"here/{number}/{self.me}")
        since_s = time.monotonic()
        while (result := self._board.get(f"result/{number}")) is None:
            missing = self._missing(number)
            if not missing:
                result = self._board.settle(f"result/{number}", self._outcome())
                break
            here = [each for each in self._alive if each not in missing]
            self._vigil.look(missing, here)
            if time.monotonic() - since_s > self.timeout_s:
                self._vigil.fence(missing, here, f"did not answer for {self.timeout_s:g} s")
            time.sleep(NAP_S)
        return self._begin_after(number, result)

    def _missing(self, number: int) -> list[int]:
        """Who has not come, and is not known to be gone."""
        if self._board.has(*(f"here/{number}/{each}" for each in self._alive)):
            return []
        return [
            each
            for each in self._alive
            if not self._board.has(f"here/{number}/{each}") and self._board.get(f"dead/{each}") is None
        ]

    def _outcome(self) -> dict[str, Any]:
        """What this meeting agrees on, as this process sees it."""
        dead = {each: self._board.get(f"dead/{each}") for each in self._alive}
        ending = {self._agent(each): each for each, why in dead.items() if why not in (None, ENDED)}
        for each in self._alive:
            if dead[each] is None and self._agent(each) in ending:
                dead[each] = f"{DOOMED} {self._process(ending[self._agent(each)])}"
        alive = [each for each in self._alive if dead[each] is None]
        cards = {each: asdict(self._cards[each]) for each in self._alive}
        for each in range(self._first, self._first + self._board.count("newcomers")):
            if each not in self._cards and (card := self._board.get(f"card/{each}")) is not None:
                alive.append(each)
                cards[each] = card
        return {"alive": alive, "dead": [(i, why) for i, why in dead.items() if why], "cards": cards}

    def _agent(self, number: int) -> tuple[str, int]:
        """What a process shares with those that torchrun ends when it dies, and with nobody else."""
        card = self._cards[number]
        return (card.namespace, -number if card.agent is None else card.agent)

    def _begin_after(self, number: int, result: dict[str, Any]) -> Meeting:
        if self.me not in result["alive"]:
            reason = dict(result["dead"]).get(self.me, "was not there")
            if reason.startswith(DOOMED):
                time.sleep(AGENT_S)  # a commit now would be one of fewer ranks than are about to go on
            raise RankFailed(f"process {self.me} {reason}, as the others say; they go on without it")
        self._cards.update({int(each): Card(**card) for each, card in result["cards"].items()})
        dead = tuple(Death(self._process(each), reason) for each, reason in result["dead"])
        with self._lock:
            self._met, self._alive = number, result["alive"]
            self._called.clear()
        self._connected.clear()
        self._vigil.forget()
        return Meeting(number, tuple(map(self._process, self._alive)), dead)

    def _process(self, number: int) -> Process:
        return self._cards[number].process(number)

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`."""
        look_s = 0.0
        while not self._called.wait(LOOK_S):
            if self._board.has("over"):
                return False
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + BEAT_S
                if self._vigil.look(training, [self.me], silent_s=self.timeout_s):
                    return True
        return True

    def end(self) -> None:
        """See `Fleet.end`."""
        self._end_watch()
        atexit.unregister(self._end_watch)
        with suppress(RankFailed):  # without the store nobody can ask
            self._board.put(f"dead/{self.me}", ENDED)
            self._board.put("over")
        if self.folder is not None:
            agent_folder.remove_when_done(self.folder, self.me)

    # Communicators ----------------------------------------------------------------------------------

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`."""
        numbers = tuple(members)
        if len(set(numbers)) < len(numbers) or self.me not in numbers or not set(numbers) <= set(self._alive):
            raise ArrayError(
                f"connect: members are {list(numbers)}, expected different ones of {self._alive}, and process "
                f"{self.me} among them"
            )
        self._connected[numbers] += 1
        names = ",".join(map(str, numbers))
        key = f"{self._board.root}/connect/{self._met}/{names}/{self._connected[numbers]}"
        meeting = transport.Meeting(self._store, key, numbers.index(self.me), len(numbers))
        opened = transport.ProcessGroupTransport(
            timeout_s=self.timeout_s, meeting=meeting, guard=lambda call: self._guarded(numbers, call)
        )
        with self._lock:
            self._transports.append(opened)
        hosts = [self._cards[each].host for each in numbers]
        comm = open_world(opened, hosts, gpu="none" if control else "auto")
        use_device(comm)
        with self._lock:
            self._transports += comm.transports[1:]
        if self._called.is_set():
            self._abort(comm.transports)
        return comm

    def _guarded(self, members: Sequence[int], call: Callable[[], T]) -> T:
        """The result of a call that connects processes; an error once one is gone, or a meeting is called.

        Gloo waits for a process that never comes as long as for one that is late, and cannot be interrupted. So
        a thread waits for gloo, and is left alone where this process can do better.
        """
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=work, name="bagua-connect", daemon=True).start()
        others = [each for each in members if each != self.me]
        until_s = time.monotonic() + self.timeout_s + LOOK_S
        while True:
            with suppress(TimeoutError):
                return future.result(timeout=LOOK_S)
            if gone := self._vigil.look(others, [self.me]):
                names = ", ".join(str(self._process(each)) for each in gone)
                raise RankFailed(f"connect: {names} died meanwhile", [members.index(each) for each in gone])
            if self._called.is_set():
                raise CommAborted("connect: another process calls a meeting")
            if time.monotonic() > until_s:
                raise CommTimeout(f"connect: process {self.me} waited {self.timeout_s:g} s for the others")

    def _give_up(self, number: int) -> None:
        """Give up what is under way in all communicators, before meeting `number`, if that is the next one."""
        with self._lock:
            if self._met + 1 == number:
                self._called.set()
                given_up, self._transports = self._transports, []
                self._abort(given_up)

    @staticmethod
    def _abort(transports: Iterable[Transport]) -> None:
        for each in [*transports][::-1]:  # those of devices first: they tell their peers by that of the host
            with suppress(CommError):
                each.leave("the processes meet")
                each.abort()

    # Beside training --------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        """Write that this process lives, and give its communicators up when a meeting is called."""
        beat_s = 0.0
        try:
            board = Board(self._store, self._board.root)
            while not self._ended.wait(LOOK_S):
                number = self._met + 1
                if not self._called.is_set() and board.has(f"call/{number}"):
                    self._give_up(number)
                if time.monotonic() >= beat_s:
                    beat_s = time.monotonic() + BEAT_S
                    board.count(f"beat/{self.me}", 1)
                    board.count("pulse", 1)
                    self._newcomers = board.count("newcomers")
        except RankFailed as exc:
            _log.warning("%s", exc)

    def _end_watch(self) -> None:
        """Watch no more. A thread that asks the store while Python ends would abort the process."""
        self._ended.set()
        self._watch.join(WATCH_S)

    def recruits_wait(self) -> bool:
        """See `Fleet.recruits_wait`: those that torchrun has started again."""
        return any(self._first + each not in self._cards for each in range(self._newcomers))

    def recruit(self, count: int) -> None:
        """See `Fleet.recruit`.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "regrow: only torchrun starts processes here; give it --max-restarts, and leave regrow out, or start "
            "the program by `python -m bagua_comm run`"
        )


class _Vigil:
    """Finds processes that are gone, and says so on the board."""

    def __init__(self, board: Board, cards: dict[int, Card]) -> None:
        self._board, self._cards = board, cards
        self._beats: dict[int, tuple[int, float]] = {}
        """By process: the last beat that was seen, and when it was new."""

    def forget(self) -> None:
        """Count silence from now on."""
        self._beats.clear()

    def look(self, suspects: Iterable[int], here: Sequence[int], silent_s: float = SILENT_S) -> list[int]:
        """Which of these are gone.

        Args:
            suspects: Processes.
            here: Those that are known to live. One that sees a suspect by its number knows best.
            silent_s: How long a process may be silent if none that sees it is known to live.
        """
        gone = []
        for each in suspects:
            if self._cards[each].is_visible():
                why = "died" if self._cards[each].has_ended() else None
            elif self._is_seen(each, here):
                why = self._board.get(f"dead/{each}")
            else:
                so_far_s = self._silent_s(each)
                why = f"was not heard of for {so_far_s:.0f} s" if so_far_s > silent_s else None
            if why is not None:
                self._board.settle(f"dead/{each}", why)
                gone.append(each)
        return gone

    def fence(self, suspects: Iterable[int], here: Sequence[int], why: str) -> None:
        """See to it that these are gone: a process that sees them by their numbers kills them."""
        for each in suspects:
            if self._cards[each].is_visible():
                self._cards[each].kill()
                self._board.settle(f"dead/{each}", f"{why}, and was killed")
            elif not self._is_seen(each, here):
                self._board.settle(f"dead/{each}", why)

    def _is_seen(self, number: int, here: Iterable[int]) -> bool:
        """Whether one of these processes sees that one by its number."""
        return any(self._cards[other].namespace == self._cards[number].namespace for other in here)

    def _silent_s(self, number: int) -> float:
        beat, now_s = self._board.count(f"beat/{number}"), time.monotonic()
        last, since_s = self._beats.setdefault(number, (beat, now_s))
        if beat != last:
            self._beats[number] = (beat, now_s)
            return 0.0
        return now_s - since_s
