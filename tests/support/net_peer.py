"""The other end of a connection of the network plugin, in a process that tests can kill.

    python net_peer.py LIBRARY sender HANDLE SIZE COUNT
    python net_peer.py LIBRARY receiver SIZE COUNT

A receiver first prints its handle. Both print "there" after COUNT messages, then wait for the end of their input.
"""

import contextlib
import ctypes
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bagua_comm.net.binding import HANDLE_BYTES, Plugin


def start(library, *arguments):
    """Start one; its output is read by lines."""
    command = [sys.executable, __file__, str(library), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def address_of(handle):
    """The socket address in a handle: behind the nonce."""
    family, port, *ip = struct.unpack_from("=H2s4B", bytes(handle), 8)
    assert family == socket.AF_INET
    return ".".join(map(str, ip)), int.from_bytes(port, "big")


def meet(plugin, handle, listener, limit_s=30.0):
    """A connection to oneself, sender and receiver, and how many seconds it took."""
    sender = receiver = None
    start_s = time.monotonic()
    while not (sender and receiver):
        receiver = receiver or plugin.accepted(listener)
        sender = sender or plugin.connected(0, handle)
        assert time.monotonic() - start_s < limit_s
    return sender, receiver, time.monotonic() - start_s


@contextlib.contextmanager
def listening(library):
    """A plugin that listens in the body of `with`: the plugin, a handle and a listener."""
    plugin = Plugin(library)
    plugin.start()
    handle, listener = plugin.listener(0)
    yield plugin, handle, listener
    plugin.closeListen(listener)


def main(library, role, *arguments):
    plugin = Plugin(Path(library))
    plugin.start()
    comm = None
    size, count = map(int, arguments[-2:])
    data = np.zeros(size, np.uint8)
    if role == "receiver":
        handle, listener = plugin.listener(0)
        print(bytes(handle).hex(), flush=True)
        while comm is None:
            comm = plugin.accepted(listener)
        post = plugin.receive
    else:
        handle = ctypes.create_string_buffer(bytes.fromhex(arguments[0]), HANDLE_BYTES)
        while comm is None:
            comm = plugin.connected(0, handle)
        post = plugin.send
    for _ in range(count):
        request = post(comm, data.ctypes.data, size)
        while plugin.finished(request) is None:
            pass
    print("there", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
