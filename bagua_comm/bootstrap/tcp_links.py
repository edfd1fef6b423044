"""Several TCP connections between two ranks of Open MPI (`btl_tcp_links`), so that all of them carry something.

Left to itself, Open MPI 5 makes little of them, and may hang:

* It gives every link but the first half of the bandwidth and twice the latency. Messages that are sent without
  asking the receiver, as the pieces of our collectives are, take the links with the least latency: the first
  alone. `equal_links` makes all of them equal, and such messages take them in turn.
* Whoever sends to a link first opens it. If both ranks do so at once, there may be more connections than links;
  Open MPI then forgets some of those that it has accepted, and their senders wait for ever. `open_in_order` has
  one rank of each pair open all links before anything else is sent.
* Each message moves the turn by two. So `odd` links are all used, and of an even number every second one.

The environment variables must be there before MPI starts; `bootstrap` sets them.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

VARIABLE = "OMPI_MCA_btl_tcp_links"
"""Where mpirun tells ranks the number of links."""

LATENCY, BANDWIDTH = 100, 100
"""What every link is said to have. Only comparisons count."""

TAG = 32767
"""Of the messages that open links: the largest that every MPI allows."""

OPENING_BYTES = 1 << 10
"""Such a message's size. Open MPI sends 256 bytes and less in another way, which counts as a turn of its own."""

OTHER_FILES = 64
"""How many files a rank has open beside its connections."""


def odd(count: int) -> int:
    """The number of links to ask for, so that at least `count` are used.

    >>> odd(1), odd(4), odd(5)
    (1, 5, 5)
    """
    return count | 1


def equal_links(count: int, interfaces: Iterable[str] | None = None) -> dict[str, str]:
    """The environment variables that make `count` links of each interface equal; none for a single link.

    Args:
        count: How many links.
        interfaces: The names of this host's network interfaces; if None, they are asked for.
    """
    if count < 2:
        return {}
    names = [name for _, name in socket.if_nameindex()] if interfaces is None else interfaces
    values = {"latency": LATENCY, "bandwidth": BANDWIDTH}
    return {
        f"OMPI_MCA_btl_tcp_{what}_{name}:{link}": str(value)
        for name in names
        for link in range(count)
        for what, value in values.items()
    }


def complaint(count: int, others: int) -> str | None:
    """Why this process cannot open so many links to each of `others`; None if it can."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or count * others + OTHER_FILES <= allowed:
        return None
    return (
        f"{VARIABLE} is {count}, so a rank needs {count * others} connections to {others} ranks on other hosts, "
        f"and a process may open {allowed} files; ask for fewer links, or raise the limit on all hosts: ulimit "
        f"-n {count * others + OTHER_FILES}"
    )


def open_in_order(world: Any, count: int, nap_s: float) -> None:
    """Have the lower rank of each pair open all of its links to the other.

    Collective, and the first communication after MPI has started.

    Args:
        world: A communicator of mpi4py of all ranks.
        count: How many links there are between two ranks.
        nap_s: How long to sleep between two looks at what has come.
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
            time.sleep(nap_s)
