"""The speed of links between hosts: partners of ranks, and the size from which arrays are quantized."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from bagua_comm.transports.mpi import link_speed, tuning
from bagua_comm.transports.mpi.link_speed import LinkSpeed, measure_links, partners


@pytest.mark.parametrize("hosts", ["ab", "abab", "aabb", "aaab", "aabbcc", "abcabcab", "aaaabbc", "abbbbbb"])
def test_no_two_ranks_send_to_the_same_one_and_all_messages_cross_hosts(hosts):
    pairs = [partners(hosts, rank) for rank in range(len(hosts))]
    for rank, (receiver, sender) in enumerate(pairs):
        if receiver is not None:
            assert hosts[receiver] != hosts[rank]
            assert pairs[receiver][1] == rank
        if sender is not None:
            assert pairs[sender][0] == rank
    # Every host but one sends from all of its ranks, or from as many as there are elsewhere.
    for host in set(hosts):
        sent = sum(receiver is not None for (receiver, _), each in zip(pairs, hosts, strict=True) if each == host)
        assert sent == min(hosts.count(host), len(hosts) - hosts.count(host))


def test_slower_links_quantize_smaller_arrays():
    speeds = [10.0**exponent for exponent in range(3, 12)]
    sizes = [LinkSpeed(speed, 1e-4).quantize_bytes for speed in speeds]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (tuning.EAGER_BYTES, tuning.QUANTIZE_BYTES)
    assert all(math.log2(size).is_integer() for size in sizes)
    assert LinkSpeed(math.inf, 0.0).quantize_bytes == tuning.QUANTIZE_BYTES
    # Eight bits need one more message than the exact average of small arrays.
    assert LinkSpeed(1.25e6, 0.02).quantize_bytes > LinkSpeed(1.25e6, 1e-4).quantize_bytes


class Link:
    """Messages over a link that lets some bytes pass at once, by a clock of its own; a rank is late at times."""

    def __init__(self, bytes_s, *, burst=0, latency_s=1e-4, late=()):
        self.now, self.sent, self.count = 0.0, 0, 0
        self.bytes_s, self.burst, self.latency_s, self.late = bytes_s, burst, latency_s, late

    def perf_counter(self):
        return self.now

    def exchange(self, sends, recvs, tag):
        ((_, x),) = sends
        ((_, out),) = recvs
        assert x.nbytes == out.nbytes
        at_once = min(self.burst, x.nbytes)
        self.burst -= at_once
        self.now += self.latency_s + (x.nbytes - at_once) / self.bytes_s
        if self.count in self.late:
            self.now += 0.05
        self.count += 1
        self.sent += x.nbytes


def measured(monkeypatch, link):
    """What a rank measures that has one other host beside it, which measures the same."""
    monkeypatch.setattr(link_speed, "time", link)
    monkeypatch.setattr(link_speed, "_slowest", lambda endpoint, mine: mine)
    return measure_links(SimpleNamespace(rank=0, size=2), link, ["a", "b"])


@pytest.mark.parametrize("burst", [0, 1 << 17])
@pytest.mark.parametrize("mbit", [1, 10, 100, 1000, 10_000])
def test_bytes_that_pass_faster_than_the_rate_do_not_hide_it(monkeypatch, mbit, burst):
    link = Link(mbit * 125_000, burst=burst)
    speed = measured(monkeypatch, link)
    at_once = burst / tuning.PROBE_BYTES
    assert 0.99 * link.bytes_s <= speed.bytes_s <= 1.01 * link.bytes_s / (1 - at_once)
    assert speed.quantize_bytes <= 2 * LinkSpeed(link.bytes_s, 1e-4).quantize_bytes
    assert speed.latency_s == pytest.approx(1e-4, rel=0.1)
    assert link.now < 1.1 * tuning.PROBE_BYTES / link.bytes_s + 1.2 * tuning.PROBING_S


def test_a_rank_that_is_late_does_not_make_a_link_slow(monkeypatch):
    late = itertools.chain(range(10), range(11, 14))
    speed = measured(monkeypatch, Link(1.25e9, late={*late}))
    assert speed.quantize_bytes == tuning.QUANTIZE_BYTES


def test_nothing_is_sent_on_one_host():
    assert measure_links(SimpleNamespace(rank=0), None, ["a", "a"]) == LinkSpeed(math.inf, 0.0)


def test_all_ranks_take_the_slowest_speed_and_the_longest_latency():
    others = np.array([[1e6, 1e-5], [2e6, 1e-3]])

    def complete(start, table):
        table[0] = others[0]

    endpoint = SimpleNamespace(rank=1, size=2, complete=complete)
    assert link_speed._slowest(endpoint, LinkSpeed(*others[1])) == LinkSpeed(1e6, 1e-3)
