"""What steps of a sharded model use: bytes on the link of a host, and processor time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bagua_comm import Communicator


class Use:
    """Counts the bytes that this host sends in steps, and the processor time of this rank.

    Args:
        comm: All ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._sent, self._worked = comm, list[int](), list[float]()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one step of all ranks. Collective."""
        self._comm.barrier()
        before, start = sent_bytes(), time.process_time()
        yield
        self._worked.append(time.process_time() - start)
        self._comm.barrier()
        if before is not None:
            self._sent.append((sent_bytes() or 0) - before)

    def link_bytes(self) -> int | None:
        """The median of all steps, of the busiest host; None if they are not counted. Collective."""
        rows = self._comm.allgather_object(int(np.median(self._sent)) if self._sent else None)
        return None if None in rows else max(rows)

    def processor_s(self) -> float:
        """The median of the processor time of all steps, the sum over all ranks. Collective."""
        return sum(self._comm.allgather_object(float(np.median(self._worked))))


def sent_bytes(devices: Path = Path("/proc/self/net/dev")) -> int | None:
    """Bytes that the interface which GLOO_SOCKET_IFNAME names has sent; None without that."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name in (None, "lo") or not devices.exists():
        return None
    rows = dict(line.split(":") for line in devices.read_text().splitlines() if ":" in line)
    counts = {each.strip(): row.split() for each, row in rows.items()}
    return int(counts[name][8]) if name in counts else None
