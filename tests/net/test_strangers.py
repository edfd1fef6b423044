"""The network plugin's door: silent sockets, and a peer that speaks our language and means harm."""

import contextlib
import ctypes
import socket
import struct
import threading
import time

import numpy as np
import pytest
from support.net_builds import built
from support.net_peer import address_of, listening, meet

from bagua_comm.net import binding
from bagua_comm.net.binding import PluginError

MAGIC = 0x316E2D6175676162
LAST = 1 << 63
WAIT_S = 30.0
SOON_S = 5.0
"""Strangers may be silent for ten seconds; a peer must not wait for that."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built(tmp_path_factory.mktemp("net"))


ELSEWHERE = """
#define _GNU_SOURCE
#include <netinet/tcp.h>
#include <time.h>
#undef TCP_DEFER_ACCEPT
#define TCP_DEFER_ACCEPT TCP_NODELAY
static inline int before_it_was_set_back(clockid_t clock, struct timespec *time) {
  int error = clock_gettime(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += 3600;
  return error;
}
#define clock_gettime before_it_was_set_back
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A build for a system that hands silent connections over at once, and whose time of day was set back."""
    return built(tmp_path_factory.mktemp("net"), "elsewhere", header=ELSEWHERE)


@pytest.fixture(params=["library", pytest.param("elsewhere", marks=pytest.mark.slow)])
def door(request):
    """A plugin that listens: with a handle and a listener."""
    with listening(request.getfixturevalue(request.param)) as door:
        yield door


@pytest.mark.parametrize("says", [b"", b"baguagua"], ids=["nothing", "half a hello"])
def test_a_peer_behind_64_silent_sockets_is_admitted_at_once(door, says):
    plugin, handle, listener = door
    with contextlib.ExitStack() as strangers:
        for _ in range(64):
            stranger = strangers.enter_context(socket.create_connection(address_of(handle), timeout=WAIT_S))
            stranger.sendall(says)
        sender, receiver, seconds = meet(plugin, handle, listener)
    plugin.closeSend(sender)
    plugin.closeRecv(receiver)
    assert seconds < SOON_S


def test_a_peer_is_admitted_while_silent_sockets_are_renewed(door):
    plugin, handle, listener = door
    address, done = address_of(handle), threading.Event()

    def renew():
        while not done.is_set():
            with contextlib.ExitStack() as strangers, contextlib.suppress(OSError):
                for _ in range(32):
                    stranger = strangers.enter_context(socket.create_connection(address, timeout=WAIT_S))
                    stranger.sendall(b"x")

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        met = [meet(plugin, ctypes.create_string_buffer(bytes(handle), len(handle)), listener) for _ in range(3)]
    finally:
        done.set()
        renewing.join()
    for sender, receiver, seconds in met:
        plugin.closeSend(sender)
        plugin.closeRecv(receiver)
        assert seconds < SOON_S


class Peer:
    """A sender that frames its messages as it likes."""

    def __init__(self, plugin, handle, listener):
        self.address, (self.nonce,) = address_of(handle), struct.unpack_from("=Q", bytes(handle))
        first = socket.create_connection(self.address, timeout=WAIT_S)
        first.sendall(struct.pack("=QQ", MAGIC, self.nonce))
        start = time.monotonic()
        while not (receiver := plugin.accepted(listener)):
            assert time.monotonic() - start < WAIT_S
        self.receiver, self.plugin = receiver, plugin
        nonce, port, _, _ = struct.unpack("=QHHI", self.read(first, 16))
        self.further = (self.address[0], socket.ntohs(port)), nonce
        self.flows = [first, self.open()]

    def read(self, flow, count):
        data = b""
        while len(data) < count:
            data += flow.recv(count - len(data))
        return data

    def open(self):
        """One more flow."""
        address, nonce = self.further
        flow = socket.create_connection(address, timeout=WAIT_S)
        flow.sendall(struct.pack("=QQ", MAGIC, nonce))
        return flow

    def send(self, flow, begin, end, *, last=False, only=None):
        """A frame of message 0, or the beginning of it."""
        data = bytes(range(begin, end))[:only]
        self.flows[flow].sendall(struct.pack("=IIQ", 0, end - begin, begin | LAST * last) + data)

    def receive(self, nbytes):
        """Message 0 at the receiver; None while it is incomplete."""
        out = np.zeros(nbytes, np.uint8)
        request = self.plugin.receive(self.receiver, out.ctypes.data, out.size)
        end = time.monotonic() + 0.2
        size = None
        while size is None and time.monotonic() < end:
            size = self.plugin.finished(request)
        return None if size is None else out[:size].tolist()

    def close(self):
        self.plugin.closeRecv(self.receiver)
        for flow in self.flows:
            flow.close()


@pytest.fixture
def peer(library):
    with listening(library) as door:
        peer = Peer(*door)
        yield peer
        peer.close()


def test_frames_of_two_flows_make_a_message_in_any_order(peer):
    peer.send(1, 60, 100, last=True)
    peer.send(0, 0, 40)
    peer.send(1, 40, 60)
    assert peer.receive(120) == list(range(100))


@pytest.mark.parametrize(
    "frames",
    [
        [(0, 0, 100, False, 50), (1, 0, 100, True, None)],  # the first flow has still to write
        [(0, 0, 50, False, None), (1, 25, 50, False, None), (0, 75, 100, True, None)],  # as many bytes, and a gap
        [(0, 0, 60, False, None), (1, 40, 100, True, None)],
        [(0, 0, 100, False, None), (1, 0, 100, True, None)],
    ],
)
def test_frames_that_overlap_are_refused(peer, frames):
    for flow, begin, end, last, only in frames:
        peer.send(flow, begin, end, last=last, only=only)
    with pytest.raises(PluginError) as caught:
        peer.receive(200)
    assert caught.value.code == binding.INTERNAL_ERROR


@pytest.mark.slow
def test_helpers_continue_when_the_time_of_day_is_set_back(elsewhere):
    """The helper thread serves an idle connection; its sleep ends by a monotonic clock."""
    with listening(elsewhere) as (plugin, handle, listener):
        sender, receiver, _ = meet(plugin, handle, listener)
        data, out = np.ones(32 << 20, np.uint8), np.zeros(32 << 20, np.uint8)
        sending = plugin.send(sender, data.ctypes.data, data.size)
        receiving = plugin.receive(receiver, out.ctypes.data, out.size)
        end = time.monotonic() + SOON_S
        while plugin.finished(receiving) is None:  # only the helper serves the sender
            assert time.monotonic() < end, "the helper sleeps"
        while plugin.finished(sending) is None:
            assert time.monotonic() < end
        assert out.all()
        plugin.closeSend(sender)
        plugin.closeRecv(receiver)
