"""Python binding of NCCL's table of network plugin functions, version 10.

The names are those of NCCL's header `net.h`. The plugin is called exactly as NCCL calls it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ..errors import CommError

HANDLE_BYTES = 128
"""The size of a handle, which `listen` fills in and `connect` takes."""

PTR_HOST, PTR_CUDA = 1, 2

SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 2, 3, 4, 5, 6

RESULTS = {1: "CUDA", SYSTEM_ERROR: "system", INTERNAL_ERROR: "internal", INVALID_ARGUMENT: "argument"}
RESULTS |= {INVALID_USAGE: "usage", REMOTE_ERROR: "remote: the peer died, or the network failed"}


class Properties(ctypes.Structure):
    """Properties of a device."""

    _fields_ = (
        ("name", c_char_p),
        ("pciPath", c_char_p),
        ("guid", c_uint64),
        ("ptrSupport", c_int),
        ("regIsGlobal", c_int),
        ("forceFlush", c_int),
        ("speed", c_int),
        ("port", c_int),
        ("latency", c_float),
        ("maxComms", c_int),
        ("maxRecvs", c_int),
        ("netDeviceType", c_int),
        ("netDeviceVersion", c_int),
        ("ndevs", c_int),
        ("devs", c_int * 4),
        ("maxP2pBytes", c_size_t),
        ("maxCollBytes", c_size_t),
    )


_ANY = POINTER(c_void_p)
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "init": (c_void_p, c_void_p),
    "devices": (POINTER(c_int),),
    "getProperties": (c_int, POINTER(Properties)),
    "listen": (c_int, c_void_p, _ANY),
    "connect": (c_int, c_void_p, c_void_p, _ANY, _ANY),
    "accept": (c_void_p, _ANY, _ANY),
    "regMr": (c_void_p, c_void_p, c_size_t, c_int, _ANY),
    "regMrDmaBuf": (c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, _ANY),
    "deregMr": (c_void_p, c_void_p),
    "isend": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p, _ANY),
    "irecv": (c_void_p, c_int, _ANY, POINTER(c_size_t), POINTER(c_int), _ANY, _ANY, _ANY),
    "iflush": (c_void_p, c_int, _ANY, POINTER(c_int), _ANY, _ANY),
    "test": (c_void_p, POINTER(c_int), POINTER(c_int)),
    "closeSend": (c_void_p,),
    "closeRecv": (c_void_p,),
    "closeListen": (c_void_p,),
    "getDeviceMr": (c_void_p, c_void_p, _ANY),
    "irecvConsumed": (c_void_p, c_int, c_void_p),
    "makeVDevice": (POINTER(c_int), c_void_p),
}
"""The functions of the table, and the types of their arguments."""


class Table(ctypes.Structure):
    """The table that a plugin exports."""

    _fields_ = (
        ("name", c_char_p),
        *((name, ctypes.CFUNCTYPE(c_int, *arguments)) for name, arguments in FUNCTIONS.items()),
    )


class PluginError(CommError):
    """A function of the plugin failed; `code` is NCCL's ncclResult_t."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} of the network plugin failed: {code} ({RESULTS.get(code, 'unknown')})")
        self.code = code


class Plugin:
    """A compiled plugin, called as NCCL calls it. The library stays loaded until the process ends.

    Args:
        library: The compiled plugin.
        symbol: The name of its table, for a library that is not an NCCL plugin.

    Raises:
        OSError: The library cannot be loaded.
        ValueError: It has no such table.
    """

    def __init__(self, library: Path, *, symbol: str = "ncclNetPlugin_v10") -> None:
        self.library = ctypes.CDLL(str(library))
        self.table: object = Table.in_dll(self.library, symbol)

    def __getattr__(self, function: str) -> Any:
        """The function of the table by this name, which raises an error if it fails."""
        called = getattr(self.table, function)

        def checked(*arguments: object) -> None:
            if code := called(*arguments):
                raise PluginError(function, code)

        return checked

    def start(self) -> None:
        """Call init, without a function for logs and one for profiles."""
        self.init(None, None)

    def count(self) -> int:
        """The number of devices."""
        number = c_int()
        self.devices(ctypes.byref(number))
        return number.value

    def properties(self, device: int) -> Properties:
        """The properties of a device."""
        properties = Properties()
        self.getProperties(device, ctypes.byref(properties))
        return properties

    def listener(self, device: int) -> tuple[object, c_void_p]:
        """Listen on a device; return the handle for the peer, and the listener."""
        handle, listener = ctypes.create_string_buffer(HANDLE_BYTES), c_void_p()
        self.listen(device, handle, ctypes.byref(listener))
        return handle, listener

    def connected(self, device: int, handle: object) -> c_void_p | None:
        """Attempt to connect to this end's copy of a handle; None if it is not done yet."""
        return self._made("connect", device, None, handle)

    def accepted(self, listener: c_void_p) -> c_void_p | None:
        """Attempt to accept a connection; None if there is none yet."""
        return self._made("accept", listener)

    def _made(self, function: str, *arguments: Any) -> c_void_p | None:
        """Call a function that makes an end of a connection, and nothing for a device."""
        comm, no_device = c_void_p(), c_void_p()
        getattr(self, function)(*arguments, ctypes.byref(comm), ctypes.byref(no_device))
        return comm if comm.value else None

    def send(self, comm: c_void_p, address: int, nbytes: int) -> c_void_p | None:
        """Send a message: the request, to be tested until it is done; None if it must be tried again later."""
        request = c_void_p(1)
        self.isend(comm, address, nbytes, 0, None, None, ctypes.byref(request))
        return request if request.value else None

    def receive(self, comm: c_void_p, address: int, nbytes: int) -> c_void_p | None:
        """Receive a message of at most `nbytes`: the request; None if it must be tried again later."""
        request, data, size, tag = c_void_p(1), c_void_p(address), c_size_t(nbytes), c_int(0)
        handle = c_void_p()
        one = [ctypes.byref(value) for value in (data, size, tag, handle, handle, request)]
        self.irecv(comm, 1, *one)
        return request if request.value else None

    def finished(self, request: c_void_p) -> int | None:
        """The size of the message of a finished request; None before."""
        done, size = c_int(-1), c_int(-1)
        self.test(request, ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None


def counters(library: Path) -> list[int]:
    """Bytes that this process has sent through a library on the first flow of each connection, the second, ..."""
    loaded = ctypes.CDLL(str(library))
    sent = (c_uint64 * 64)()
    flows = loaded.bagua_net_counters(sent, len(sent))
    return list(sent[:flows])
