"""Detection of dead processes through process ids where they are visible, and through heartbeats elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from bagua_comm.elastic.fleet import ProcessInfo

from .store import FleetStore

SILENT_S = 6.0
"""How long a process may send no heartbeat, if no living process sees it, before it is counted as dead."""


class FailureDetector:
    """Finds dead processes, and writes them to the store.

    Args:
        store: The store of the fleet.
        processes: All processes of the fleet, by number.
    """

    def __init__(self, store: FleetStore, processes: Mapping[int, ProcessInfo]) -> None:
        self._store, self._processes = store, processes
        self._heartbeats: dict[int, tuple[int, float]] = {}
        """By process: the last heartbeat seen, and when it was new."""

    def reset(self) -> None:
        """Measure silence from now on."""
        self._heartbeats.clear()

    def find_dead(self, suspects: Iterable[int], living: Sequence[int], silent_s: float = SILENT_S) -> list[int]:
        """The dead processes among the suspects.

        Args:
            suspects: The numbers of processes.
            living: Processes that are known to live. One that sees a suspect by its process id decides.
            silent_s: How long a process may send no heartbeat, if no living process sees it.
        """
        dead = []
        for each in suspects:
            if self._processes[each].is_visible():
                why = "died" if self._processes[each].has_ended() else None
            elif self._is_seen(each, living):
                why = self._store.get(f"dead/{each}")
            else:
                so_far_s = self._silent_s(each)
                why = f"was not heard of for {so_far_s:.0f} s" if so_far_s > silent_s else None
            if why is not None:
                self._store.set_once(f"dead/{each}", why)
                dead.append(each)
        return dead

    def fence(self, suspects: Iterable[int], living: Sequence[int], why: str) -> None:
        """Kill the suspects that are visible, and declare those dead that no living process sees."""
        for each in suspects:
            if self._processes[each].is_visible():
                self._processes[each].kill()
                self._store.set_once(f"dead/{each}", f"{why}, and was killed")
            elif not self._is_seen(each, living):
                self._store.set_once(f"dead/{each}", why)

    def _is_seen(self, number: int, living: Iterable[int]) -> bool:
        """Whether a living process sees this one by its process id."""
        return any(self._processes[other].namespace == self._processes[number].namespace for other in living)

    def _silent_s(self, number: int) -> float:
        heartbeat, now_s = self._store.add(f"heartbeat/{number}"), time.monotonic()
        last, since_s = self._heartbeats.setdefault(number, (heartbeat, now_s))
        if heartbeat != last:
            self._heartbeats[number] = (heartbeat, now_s)
            return 0.0
        return now_s - since_s
