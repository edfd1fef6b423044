"""Python binding of NCCL's table of network plugin functions, versions 10 to 12.

The names are those of NCCL's header `net.h`. The plugin is called exactly as NCCL calls it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_float, c_int, c_int16, c_int32, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CommError

VERSIONS = (10, 11, 12)
"""The versions of the table that the plugin exports."""

HANDLE_BYTES = 128
"""The size of a handle, which `listen` fills in and `connect` takes."""

PTR_HOST, PTR_CUDA = 1, 2

SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 2, 3, 4, 5, 6

RESULTS = {1: "CUDA", SYSTEM_ERROR: "system", INTERNAL_ERROR: "internal", INVALID_ARGUMENT: "argument"}
RESULTS |= {INVALID_USAGE: "usage", REMOTE_ERROR: "remote: the peer died, or the network failed"}

_LIMITS: list[tuple[str, Any]] = [("maxP2pBytes", c_size_t), ("maxCollBytes", c_size_t)]
_PROPERTIES: list[tuple[str, Any]] = [
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
]


class Properties10(ctypes.Structure):
    """Properties of a device, version 10: 104 bytes."""

    _fields_ = (*_PROPERTIES, ("devs", c_int * 4), *_LIMITS)


class Properties11(ctypes.Structure):
    """Properties of a device, version 11: 112 bytes."""

    _fields_ = (*Properties10._fields_, ("maxMultiRequestSize", c_int))


class Properties12(ctypes.Structure):
    """Properties of a device, version 12: 128 bytes."""

    _fields_ = (
        *_PROPERTIES,
        ("devs", c_int * 8),
        *_LIMITS,
        ("maxMultiRequestSize", c_int),
        ("railId", c_int16),
        ("planeId", c_int16),
    )


PROPERTIES = {10: Properties10, 11: Properties11, 12: Properties12}


class Config(ctypes.Structure):
    """Configuration of a communicator."""

    _fields_ = (("trafficClass", c_int),)


class Attributes(ctypes.Structure):
    """NCCL's hints on the traffic, from version 11 on."""

    _fields_ = (("send", c_int32 * 4), ("recv", c_int32 * 4), ("op", ctypes.c_uint32 * 3))


LOG = ctypes.CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p)
"""NCCL's log function: level, flags, file, line, format; its variable arguments are not accessible here."""

_SILENT = LOG(lambda *_: None)
"""A log function without output, which lives as long as the library that uses it."""

_ANY = POINTER(c_void_p)
_OWN: dict[int, dict[str, Any]] = {
    10: {
        "init": (LOG, c_void_p),
        "listen": (c_int, c_void_p, _ANY),
        "connect": (c_int, POINTER(Config), c_void_p, _ANY, _ANY),
    },
    11: {
        "init": (_ANY, c_uint64, POINTER(Config), LOG, c_void_p),
        "listen": (c_void_p, c_int, c_void_p, _ANY),
        "connect": (c_void_p, c_int, c_void_p, _ANY, _ANY),
    },
}
_OWN[12] = _OWN[11]
_SHARED: dict[str, tuple[Any, ...]] = {
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
_FINAL: dict[str, tuple[Any, ...]] = {"finalize": (c_void_p,), "setNetAttr": (c_void_p, POINTER(Attributes))}


@functools.cache
def table_type(version: int) -> type[ctypes.Structure]:
    """The structure of the symbol ncclNetPlugin_v10, _v11 or _v12."""
    own = _OWN[version]
    functions: dict[str, tuple[Any, ...]] = {
        "init": own["init"],
        "devices": (POINTER(c_int),),
        "getProperties": (c_int, c_void_p),
        "listen": own["listen"],
        "connect": own["connect"],
        **_SHARED,
        **(_FINAL if version > 10 else {}),
    }
    fields: list[tuple[str, Any]] = [("name", c_char_p)]
    fields += [(name, ctypes.CFUNCTYPE(c_int, *arguments)) for name, arguments in functions.items()]
    return type(f"Table{version}", (ctypes.Structure,), {"_fields_": tuple(fields)})


class PluginError(CommError):
    """A function of the plugin failed; `code` is NCCL's ncclResult_t."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} of the network plugin failed: {code} ({RESULTS.get(code, 'unknown')})")
        self.code = code


@dataclass
class Request:
    """A message in transfer; it must be tested until it is done, and its buffer kept until then."""

    pointer: c_void_p
    buffer: object


class Plugin:
    """A compiled plugin, called as NCCL calls it. The library stays loaded until the process ends.

    Args:
        library: The compiled plugin.
        version: The version of its table: 10, 11 or 12.
        symbol: The prefix of the table's name, for a library that is not an NCCL plugin.

    Raises:
        OSError: The library cannot be loaded.
        ValueError: It has no such table.
    """

    def __init__(self, library: Path, version: int = 12, *, symbol: str = "ncclNetPlugin_v") -> None:
        self.library = ctypes.CDLL(str(library))
        self.version = version
        self.table: Any = table_type(version).in_dll(self.library, f"{symbol}{version}")

    def __getattr__(self, function: str) -> Any:
        """The function of the table by this name, which raises an error if it fails."""
        called = getattr(self.table, function)

        def checked(*arguments: Any) -> None:
            if code := called(*arguments):
                raise PluginError(function, code)

        return checked

    def has(self, function: str) -> bool:
        """Whether an entry of the table is not NULL."""
        return bool(getattr(self.table, function, None))

    def start(self) -> c_void_p:
        """Call init; return the context."""
        context = c_void_p()
        if self.version == 10:
            self.init(_SILENT, None)
        else:
            self.init(ctypes.byref(context), 1, ctypes.byref(Config(-1)), _SILENT, None)
        return context

    def stop(self, context: c_void_p) -> None:
        """Call finalize, if it exists."""
        if self.version > 10:
            self.finalize(context)

    def count(self) -> int:
        """The number of devices."""
        number = c_int()
        self.devices(ctypes.byref(number))
        return number.value

    def properties(self, device: int) -> Any:
        """The properties of a device."""
        properties = PROPERTIES[self.version]()
        self.getProperties(device, ctypes.byref(properties))
        return properties

    def listener(self, context: c_void_p, device: int) -> tuple[Any, c_void_p]:
        """Listen on a device; return the handle for the peer, and the listener."""
        handle, listener = ctypes.create_string_buffer(HANDLE_BYTES), c_void_p()
        if self.version == 10:
            self.listen(device, handle, ctypes.byref(listener))
        else:
            self.listen(context, device, handle, ctypes.byref(listener))
        return handle, listener

    def connected(self, context: c_void_p, device: int, handle: Any) -> c_void_p | None:
        """Attempt to connect to this end's copy of a handle; None if it is not done yet."""
        comm, no_device = c_void_p(), c_void_p()
        to = (ctypes.byref(comm), ctypes.byref(no_device))
        if self.version == 10:
            self.connect(device, ctypes.byref(Config(-1)), handle, *to)
        else:
            self.connect(context, device, handle, *to)
        return comm if comm.value else None

    def accepted(self, listener: c_void_p) -> c_void_p | None:
        """Attempt to accept a connection; None if there is none yet."""
        comm, no_device = c_void_p(), c_void_p()
        self.accept(listener, ctypes.byref(comm), ctypes.byref(no_device))
        return comm if comm.value else None

    def send(self, comm: c_void_p, address: int, nbytes: int, buffer: object = None) -> Request | None:
        """Send a message; None if it must be tried again later."""
        request = c_void_p(1)
        self.isend(comm, address, nbytes, 0, None, None, ctypes.byref(request))
        return Request(request, buffer) if request.value else None

    def receive(self, comm: c_void_p, address: int, nbytes: int, buffer: object = None) -> Request | None:
        """Receive a message of at most `nbytes`; None if it must be tried again later."""
        request, data, size, tag = c_void_p(1), c_void_p(address), c_size_t(nbytes), c_int(0)
        handle = c_void_p()
        one = [ctypes.byref(value) for value in (data, size, tag, handle, handle, request)]
        self.irecv(comm, 1, *one)
        return Request(request, buffer) if request.value else None

    def finished(self, request: Request) -> int | None:
        """The size of the message of a finished request; None before."""
        done, size = c_int(-1), c_int(-1)
        self.test(request.pointer, ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None


def counters(library: Path) -> list[int]:
    """Bytes that this process has sent through a library on the first flow of each connection, the second, ..."""
    loaded = ctypes.CDLL(str(library))
    sent = (c_uint64 * 64)()
    flows = loaded.bagua_net_counters(sent, len(sent))
    return list(sent[:flows])
