"""What the processes of a fleet write into torchrun's store for each other, and how a fleet begins.

The store outlives processes, and torchrun may start them again with the same ranks, some more often than others.
So no number that a process counts or is told makes a key new. Every process writes a greeting with a word of its
own. Rank 0 proposes a fleet of the greetings that it finds, under a key that nobody used before; who finds its
own word in the proposal confirms it; when all have, it is the fleet. A greeting of a process that has died is
never confirmed, and is overwritten by the process that takes its rank.

A process that torchrun has started again alone finds that the fleet of the others lives. It then registers
there, too, and is let in at one of their meetings.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from bagua_comm import BootstrapError, RankFailed
from bagua_comm.elastic.fleet import Process
from bagua_comm.processes import ProcessId, this_host

T = TypeVar("T")

NAP_S = 0.005
"""How long a process sleeps between looks at the store while it waits there."""


class Board:
    """A part of a store: JSON values under keys, through a connection of its own.

    Args:
        store: A store of torch.distributed.
        root: What all keys begin with.

    Raises:
        RankFailed: The store cannot be reached; so does every method.
    """

    def __init__(self, store: Any, root: str) -> None:
        self.store, self.root = store, root
        self._part = self._ask(
            lambda: dist.distributed_c10d.PrefixStore(root, store.clone() if hasattr(store, "clone") else store)
        )

    def put(self, key: str, value: object = True) -> None:
        """Write a value, in place of the one before."""
        self._ask(lambda: self._part.set(key, json.dumps(value)))

    def has(self, *keys: str) -> bool:
        """Whether all these keys have values; does not wait."""
        return bool(self._ask(lambda: self._part.check(list(keys))))

    def get(self, key: str) -> Any:
        """The value of a key; None if there is none. Does not wait."""
        return json.loads(self._ask(lambda: self._part.get(key))) if self.has(key) else None

    def settle(self, key: str, value: object) -> Any:
        """The value that some process wrote first; this one, if none did."""
        return json.loads(self._ask(lambda: self._part.compare_set(key, "", json.dumps(value))))

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter, which begins at 0; returns what it is then."""
        return int(self._ask(lambda: self._part.add(key, more)))

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as exc:
            where = f" at {self.store.host}:{self.store.port}" if hasattr(self.store, "port") else ""
            raise RankFailed(
                f"the store{where}, in which the processes of this job find each other, is gone: torchrun's "
                "agent that serves it has ended, or its host. Without it the job cannot go on after a death; "
                f"with --max-restarts torchrun starts all of them again ({str(exc).splitlines()[0]})"
            ) from exc


@dataclass(frozen=True)
class Card(ProcessId):
    """What the others need to know of a process."""

    host: str
    """See `processes.this_host`."""
    name: str
    """The host's name."""
    agent: int | None = None
    """The process of its namespace that ends it when another one of its processes dies; None if there is none."""

    @classmethod
    def of_this(cls, agent: int | None = None) -> Card:
        """That of this process."""
        return cls(**vars(ProcessId.mine()), host=this_host(), name=socket.gethostname(), agent=agent)

    def process(self, number: int) -> Process:
        """The process, by its number."""
        return Process(number, self.name, self.pid)


class Entry(NamedTuple):
    """How this process came into a fleet."""

    key: str
    """What the keys of the fleet begin with."""
    number: int
    """That of this process."""
    cards: dict[int, Card]
    """Of all processes of the fleet, by number."""
    meetings: int
    """How many meetings there were before the first one that has this process."""


def enter(store: Any, rank: int, size: int, *, timeout_s: float, agent: int | None = None) -> Entry:
    """Begin a fleet with all processes that torchrun has started, or come into the one that they are.

    Collective among those that torchrun has started at the same time.

    Args:
        store: Their store.
        rank: The rank of this one.
        size: How many there are.
        timeout_s: How long to wait for the others.
        agent: See `Card`.

    Raises:
        BootstrapError: A process did not come within `timeout_s`; or the job had ended.
        RankFailed: The store cannot be reached.
    """
    return _Arrival(store, rank, size, Card.of_this(agent)).enter(timeout_s)


class _Arrival:
    def __init__(self, store: Any, rank: int, size: int, card: Card) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._hall = Board(store, "bagua/elastic")
        self._card, self._word = card, secrets.token_hex(8)
        self._proposed: list[str] = []
        """The words of the fleet that this process proposed last."""
        self._other: Board | None = None
        """That of the fleet in which this process is not."""
        self._pulse = 0
        self._number: int | None = None
        """That which this process has got in the other fleet."""
        self._met = 0
        """Which meetings of the other fleet this process has looked at."""

    def enter(self, timeout_s: float) -> Entry:
        self._hall.put(f"greeting/{self._rank}", {"word": self._word, **asdict(self._card)})
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self._rank == 0:
                self._propose()
            self._confirm()
            fleet = self._hall.get("fleet")
            if fleet is not None and fleet["words"][self._rank : self._rank + 1] == [self._word]:
                cards = {number: Card(**card) for number, card in enumerate(fleet["cards"])}
                return Entry(fleet["key"], self._rank, cards, 0)
            if fleet is not None and self._lives(fleet):
                until = time.monotonic() + timeout_s
            if (entry := self._join()) is not None:
                return entry
            time.sleep(NAP_S)
        missing = [rank for rank in range(self._size) if not self._hall.has(f"greeting/{rank}")]
        raise BootstrapError(
            f"elastic.run: rank {self._rank} of {self._size} has waited {timeout_s:g} s for the others to come"
            + (f"; there is nothing of ranks {missing}" if missing else "")
        )

    # A new fleet ------------------------------------------------------------------------------------

    def _propose(self) -> None:
        greetings = [self._hall.get(f"greeting/{rank}") for rank in range(self._size)]
        if None in greetings:
            return
        words = [greeting.pop("word") for greeting in greetings]
        if words != self._proposed:
            self._proposed, self._key = words, f"bagua/elastic/{secrets.token_hex(8)}"
            self._hall.put("proposal", {"key": self._key, "words": words, "cards": greetings})
        elif self._hall.has(*(f"{self._key}/{rank}" for rank in range(self._size))):
            self._hall.put("fleet", self._hall.get("proposal"))

    def _confirm(self) -> None:
        proposal = self._hall.get("proposal")
        if proposal is not None and self._word in proposal["words"]:
            self._hall.put(f"{proposal['key']}/{self._rank}")

    # A fleet that goes on ---------------------------------------------------------------------------

    def _lives(self, fleet: dict[str, Any]) -> bool:
        """Whether its processes have been heard of since the last look; if so, register there."""
        if self._other is None or self._other.root != fleet["key"]:
            self._other, self._number, self._met = Board(self._store, fleet["key"]), None, 0
            self._pulse = self._other.count("pulse")
        pulse = self._other.count("pulse")
        if pulse == self._pulse:
            return False
        self._pulse = pulse
        if self._number is None:
            self._number = len(fleet["cards"]) - 1 + self._other.count("newcomers", 1)
            self._other.put(f"card/{self._number}", asdict(self._card))
        return True

    def _join(self) -> Entry | None:
        if self._other is None or self._number is None:
            return None
        if self._other.has("over"):
            raise BootstrapError("elastic.run: the job has ended before this process was let in")
        result = self._other.get(f"result/{self._met + 1}")
        if result is None:
            return None
        if self._number in result["alive"]:
            cards = {int(number): Card(**card) for number, card in result["cards"].items()}
            return Entry(self._other.root, self._number, cards, self._met)
        self._met += 1
        return None
