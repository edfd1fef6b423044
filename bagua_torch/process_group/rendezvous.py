"""The first rendezvous of a fleet in torchrun's store, and how a restarted process joins a running fleet.

The store outlives processes, and torchrun may start them again with the same ranks, some more often than others.
So neither ranks nor counters make a key unique. Each process writes a hello with its nonce. Rank 0 proposes a
fleet of the hellos that it finds, under a new prefix. A process confirms the proposal if it contains its nonce.
When all have confirmed, the fleet is formed. The hello of a dead process is never confirmed, and is overwritten
by the process that gets its rank.

A process that torchrun has restarted alone finds that the fleet of the others is alive. It registers there, too,
and is admitted in one of their rendezvous.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any, NamedTuple

from bagua_comm import BootstrapError
from bagua_comm.elastic.fleet import ProcessInfo

from .store import FleetStore, Store

POLL_S = 0.005
"""Interval at which a waiting process polls the store."""


class Membership(NamedTuple):
    """The membership of this process in a fleet."""

    prefix: str
    """The prefix of the keys of the fleet."""
    number: int
    """The number of this process."""
    processes: dict[int, ProcessInfo]
    """All processes of the fleet, by number."""
    rounds: int
    """Number of rendezvous before the first one that includes this process."""


def join(store: Store, rank: int, size: int, *, timeout_s: float, agent: int | None = None) -> Membership:
    """Form a fleet of all processes that torchrun has started, or join the one that they have formed.

    Collective among the processes that torchrun has started together.

    Args:
        store: Their store.
        rank: The rank of this process.
        size: The number of ranks.
        timeout_s: How long to wait for the others.
        agent: See `ProcessInfo.agent`.

    Raises:
        BootstrapError: A process did not join within `timeout_s`, or the job had ended.
        RankFailed: The store cannot be reached.
    """
    return _Join(store, rank, size, ProcessInfo.of_this(agent)).run(timeout_s)


class _Join:
    def __init__(self, store: Store, rank: int, size: int, info: ProcessInfo) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._common = FleetStore(store, "bagua/elastic")
        self._info, self._nonce = info, secrets.token_hex(8)
        self._proposed: list[str] = []
        """The nonces of the fleet that this process proposed last."""
        self._prefix = ""
        """The prefix of that fleet."""
        self._running: FleetStore | None = None
        """The store of the running fleet, which does not include this process."""
        self._heartbeat = 0
        self._number: int | None = None
        """The number of this process in the running fleet."""
        self._rounds = 0
        """Number of rendezvous of the running fleet that this process has checked."""

    def run(self, timeout_s: float) -> Membership:
        self._common.set(f"hello/{self._rank}", {"nonce": self._nonce, **asdict(self._info)})
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self._rank == 0:
                self._propose()
            self._confirm()
            fleet = self._common.get("fleet")
            if fleet is not None and fleet["nonces"][self._rank : self._rank + 1] == [self._nonce]:
                processes = {number: ProcessInfo(**info) for number, info in enumerate(fleet["processes"])}
                return Membership(fleet["prefix"], self._rank, processes, 0)
            if fleet is not None and self._is_alive(fleet):
                until = time.monotonic() + timeout_s
            if (membership := self._admitted()) is not None:
                return membership
            time.sleep(POLL_S)
        missing = [rank for rank in range(self._size) if not self._common.has(f"hello/{rank}")]
        raise BootstrapError(
            f"elastic.run: rank {self._rank} of {self._size} has waited {timeout_s:g} s for the others to join"
            + (f"; there is nothing of ranks {missing}" if missing else "")
        )

    # A new fleet ------------------------------------------------------------------------------------

    def _propose(self) -> None:
        hellos = [self._common.get(f"hello/{rank}") for rank in range(self._size)]
        if None in hellos:
            return
        nonces = [hello.pop("nonce") for hello in hellos]
        if nonces != self._proposed:
            self._proposed, self._prefix = nonces, f"bagua/elastic/{secrets.token_hex(8)}"
            self._common.set("proposal", {"prefix": self._prefix, "nonces": nonces, "processes": hellos})
        elif self._common.has(*(f"{self._prefix}/{rank}" for rank in range(self._size))):
            self._common.set("fleet", self._common.get("proposal"))

    def _confirm(self) -> None:
        proposal = self._common.get("proposal")
        if proposal is not None and self._nonce in proposal["nonces"]:
            self._common.set(f"{proposal['prefix']}/{self._rank}")

    # A running fleet --------------------------------------------------------------------------------

    def _is_alive(self, fleet: dict[str, Any]) -> bool:
        """Whether the fleet has sent heartbeats since the last call; if so, register there."""
        if self._running is None or self._running.prefix != fleet["prefix"]:
            self._running, self._number, self._rounds = FleetStore(self._store, fleet["prefix"]), None, 0
            self._heartbeat = self._running.add("heartbeat")
        heartbeat = self._running.add("heartbeat")
        if heartbeat == self._heartbeat:
            return False
        self._heartbeat = heartbeat
        if self._number is None:
            self._number = len(fleet["processes"]) - 1 + self._running.add("joining", 1)
            self._running.set(f"process/{self._number}", asdict(self._info))
        return True

    def _admitted(self) -> Membership | None:
        """The membership in the running fleet, once a rendezvous includes this process."""
        if self._running is None or self._number is None:
            return None
        if self._running.has("over"):
            raise BootstrapError("elastic.run: the job has ended before this process was admitted")
        result = self._running.get(f"result/{self._rounds + 1}")
        if result is None:
            return None
        if self._number in result["alive"]:
            processes = {int(number): ProcessInfo(**info) for number, info in result["processes"].items()}
            return Membership(self._running.prefix, self._number, processes, self._rounds)
        self._rounds += 1
        return None
