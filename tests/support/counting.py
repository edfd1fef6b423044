"""A local transport that counts its messages, for tests of how they grow with the number of ranks."""

import threading
from typing import NamedTuple

from bagua_comm.comm import Communicator
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


class Count(NamedTuple):
    """The messages that one rank has sent to others, their bytes, and its exchanges that sent or received any."""

    messages: int = 0
    nbytes: int = 0
    rounds: int = 0

    def __sub__(self, before):
        return Count(*(a - b for a, b in zip(self, before, strict=True)))


class CountingTransport(LocalTransport):
    """A rank of a local world; transports made from it by `split` count for it, too."""

    def __init__(self, hub, rank, *, timeout_s=60.0, total=None):
        super().__init__(hub, rank, timeout_s=timeout_s)
        self.total = [Count()] if total is None else total
        self.peers = set()
        """The ranks that it has exchanged messages with."""

    def exchange(self, sends, recvs, **tag):
        """Count, and exchange."""
        others = [x for peer, x in sends if peer != self.rank]
        messages, nbytes, rounds = self.total[0]
        is_round = bool(others) or any(peer != self.rank for peer, _ in recvs)
        total = nbytes + sum(x.nbytes for x in others)
        self.total[0] = Count(messages + len(others), total, rounds + is_round)
        self.peers |= {peer for peer, _ in (*sends, *recvs)} - {self.rank}
        super().exchange(sends, recvs, **tag)

    def split(self, color, key):
        """A counting transport."""
        made = super().split(color, key)
        return CountingTransport(made._hub, made.rank, timeout_s=made.timeout_s, total=self.total)


def count_ranks(size, body):
    """The `Count` of each rank over `body(comm)`, after the communicator has been made."""
    return [count for ((count, _),) in count_each(size, [(False, body)])]


def count_each(size, bodies):
    """For each rank, the `Count` and the number of peers of each body, given whether calls are compared."""

    def count(transport):
        return CountingTransport(transport._hub, transport.rank, timeout_s=transport.timeout_s)

    def run(comm: Communicator):
        found, transport = [], comm.transports[0]
        for check, body in bodies:
            comm.check = check
            before = transport.total[0]
            transport.peers.clear()
            body(comm)
            found.append((transport.total[0] - before, len(transport.peers)))
        return found

    stack = threading.stack_size(256 * 1024)
    try:
        return run_ranks(size, run, wrap=count)
    finally:
        threading.stack_size(stack)
