"""Messages under a credit window: all arrive, whatever the network does, and no rank sends too far ahead."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bagua_comm.transports.mpi.paced_messages import PacedMessages

examples = settings(deadline=None, derandomize=True, max_examples=30)


class Request:
    """A message that has been sent, or is waited for; it ends when the network says so."""

    def __init__(self, x):
        self.x, self.has_ended = x, False

    def Test(self):
        return self.has_ended


class Network:
    """Moves messages of some ranks in any order that MPI allows: it keeps the order between two ranks."""

    def __init__(self, size):
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        self.sent, self.awaited = {pair: deque() for pair in pairs}, {pair: deque() for pair in pairs}

    def ready(self):
        """The pairs of ranks between which a message can arrive."""
        return [pair for pair in self.sent if self.sent[pair] and self.awaited[pair]]

    def deliver(self, pair):
        send, recv = self.sent[pair].popleft(), self.awaited[pair].popleft()
        recv.x[...] = send.x
        send.has_ended = recv.has_ended = True


class Comm:
    """One rank's side of a network; counts how far it sends ahead."""

    def __init__(self, network, rank):
        self.network, self.rank, self.sends, self.recvs, self.furthest = network, rank, [], [], 0

    def Isend(self, buffer, peer, tag):
        self.sends.append(Request(buffer[0]))
        self.network.sent[self.rank, peer].append(self.sends[-1])
        self.furthest = max(self.furthest, len(self.sends) - sum(recv.has_ended for recv in self.recvs))
        return self.sends[-1]

    def Irecv(self, buffer, peer, tag):
        self.recvs.append(Request(buffer[0]))
        self.network.awaited[peer, self.rank].append(self.recvs[-1])
        return self.recvs[-1]


def others(rank, size):
    return [(rank + k) % size for k in range(1, size)]


def carry_out(size, ahead, exchanges, pick):
    """All ranks begin all exchanges, and a network delivers in the order that `pick` chooses; the ranks' sides.

    `exchanges` gives (sends, recvs) of a rank for each exchange.
    """
    network = Network(size)
    comms = [Comm(network, rank) for rank in range(size)]
    paced = [PacedMessages(comm, ahead) for comm in comms]
    ends = [[paced[rank].add(*exchange) for exchange in exchanges(rank)] for rank in range(size)]
    while ready := network.ready():
        network.deliver(pick(ready))
        for each in paced:
            each.advance()
    assert all(ended() for mine in ends for ended in mine), "messages wait for each other"
    assert all(each.is_idle() for each in paced)
    return comms


@examples
@given(st.integers(2, 6), st.sampled_from([1, 2, 9, None]), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_message_arrives_whatever_the_order_and_none_is_sent_too_early(size, ahead, count, random):
    sent = np.arange(size * count * size, dtype=np.int32).reshape(size, count, size)
    got = np.full_like(sent, -1)

    def exchanges(rank):
        for i in range(count):
            sends = [(peer, sent[rank, i, peer : peer + 1]) for peer in others(rank, size)]
            yield sends, [(peer, got[rank, i, peer : peer + 1]) for peer in others(rank, size)]

    comms = carry_out(size, ahead, exchanges, random.choice)
    for rank in range(size):
        got[rank, :, rank] = sent[rank, :, rank]
    assert (got == sent.transpose(2, 1, 0)).all()
    if ahead is not None:
        assert max(comm.furthest for comm in comms) <= ahead


@examples
@given(st.integers(3, 6), st.sampled_from([1, 3]), st.randoms(use_true_random=False))
def test_a_rank_may_send_more_than_it_receives(size, ahead, random):
    """A broadcast in parts from rank 0, which receives nothing: first to one rank each, then to all."""
    sent, got = np.arange(size, dtype=np.int32), np.full((size, size), -1, np.int32)
    got[0] = sent

    def exchanges(rank):
        rest = [peer for peer in others(rank, size) if peer != 0]
        if rank == 0:
            yield [(peer, sent[peer : peer + 1]) for peer in rest], []
            yield [(peer, sent[:1]) for peer in rest], []
        else:
            yield [], [(0, got[rank, rank : rank + 1])]
            mine = sent[rank : rank + 1]  # received by the exchange before
            parts = [(peer, got[rank, peer : peer + 1]) for peer in others(rank, size)]
            yield [(peer, mine) for peer in rest], parts

    carry_out(size, ahead, exchanges, random.choice)
    assert (got == sent).all()


def test_an_exchange_has_ended_before_a_later_one():
    network = Network(2)
    comms = [Comm(network, rank) for rank in range(2)]
    paced, x = [PacedMessages(comm, 1) for comm in comms], np.zeros(4, np.uint8)
    first = [paced[rank].add([(1 - rank, x)], [(1 - rank, x.copy())]) for rank in range(2)]
    second = [paced[rank].add([(1 - rank, x)], [(1 - rank, x.copy())]) for rank in range(2)]
    assert [len(comm.sends) for comm in comms] == [1, 1]
    for pair in ((0, 1), (1, 0)):
        network.deliver(pair)
    assert [ended() for ended in first] == [True, True]
    assert [ended() for ended in second] == [False, False]
    assert [len(comm.sends) for comm in comms] == [2, 2]
