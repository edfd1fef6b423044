"""Several TCP connections between two ranks of Open MPI (`btl_tcp_links`), with traffic on all of them.

By default, Open MPI 5 hardly uses them, and may hang:

* It assigns each link after the first half of the bandwidth and twice the latency. Eager messages, such as the
  pieces of our collectives, use only the links with the least latency: the first. `equal_links` makes all of them
  equal, and eager messages use them in turn.
* The first sender on a link opens it. If both ranks do so at once, there may be more connections than links; Open
  MPI then forgets some of those that it has accepted, and their senders wait forever. With `open_in_order`, one
  rank of each pair opens all links before any other message is sent.
* Each message advances the turn by two. So all of an odd number of links are used (see `odd`), and every second
  one of an even number.

MPI reads the environment variables when it starts; `environment.set_mpi_variables` sets them.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "OMPI_MCA_btl_tcp_links"
"""The variable by which mpirun passes the number of links to ranks."""

LATENCY, BANDWIDTH = 100, 100
"""The nominal figures of every link. Open MPI only compares them."""

TAG = 32767
"""The tag of messages that open links: the largest that every MPI allows."""

OPENING_BYTES = 1 << 10
"""The size of messages that open links. Open MPI sends 256 bytes and less on another path, with its own turn."""

OTHER_FILES = 64
"""The number of open files of a rank beside its connections."""


def odd(count: int) -> int:
    """Return the number of links to request, so that at least `count` are used.

    >>> odd(1), odd(4), odd(5)
    (1, 5, 5)
    """
    return count | 1


def equal_links(count: int, interfaces: Iterable[str] | None = None) -> dict[str, str]:
    """Return the environment variables that make `count` links of each interface equal; none for a single link.

    Args:
        count: The number of links.
        interfaces: The names of this host's network interfaces; if None, the system's list.
    """
    if count < 2:
        return {}
    names = [name for _, name in socket.if_nameindex()] if interfaces is None else interfaces
    values = {"latency": LATENCY, "bandwidth": BANDWIDTH}
    return {
        f"OMPI_MCA_btl_tcp_{figure}_{name}:{link}": str(value)
        for name in names
        for link in range(count)
        for figure, value in values.items()
    }


def complaint(count: int, others: int) -> str | None:
    """Return the reason why this process cannot open `count` links to each of `others` ranks; None if it can."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or count * others + OTHER_FILES <= allowed:
        return None
    return (
        f"{VARIABLE} is {count}, so a rank needs {count * others} connections to {others} ranks on other hosts, "
        f"and a process may open {allowed} files; ask for fewer links, or raise the limit on all hosts: ulimit "
        f"-n {count * others + OTHER_FILES}"
    )


def open_in_order(world: MPI.Intracomm, count: int, poll_s: float) -> None:
    """Open all links between each pair of ranks from the lower rank.

    Collective, and the first communication after MPI has started.

    Args:
        world: A communicator of mpi4py of all ranks.
        count: The number of links between two ranks.
        poll_s: The interval between two checks for messages.
    """
    message = np.zeros(OPENING_BYTES, np.uint8)
    sink = np.zeros((max(1, world.rank), count, OPENING_BYTES), np.uint8)
    requests = [world.Irecv(sink[peer, link], peer, TAG) for peer in range(world.rank) for link in range(count)]
    requests += [
        world.Isend(message, peer, TAG) for peer in range(world.rank + 1, world.size) for _ in range(count)
    ]
    while requests:
        if requests[-1].Test():
            requests.pop()
        else:
            time.sleep(poll_s)
