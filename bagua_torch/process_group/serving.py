"""Stores of torch.distributed that listen at a single address of this host.

PyTorch's TCPStore listens on all interfaces, whatever host name it is given, and has no authentication. So it is
given a socket that is bound already.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua_comm.bootstrap import environment

STORES: Any = dist
"""Has `TCPStore` and `HashStore`, which torch does not export to type checkers."""

LOOPBACK = "127.0.0.1"

_ANY_PORT = 9
"""The port to which a route to another host is looked up; nothing is sent."""


def serve(
    address: str, port: int = 0, *, timeout_s: float, ranks: int | None = None
) -> torch._C._distributed_c10d.TCPStore:
    """Serve a store at an address of this host.

    Args:
        address: An IPv4 or IPv6 address.
        port: The port; a free one if 0.
        timeout_s: How long calls of the store wait.
        ranks: Wait until this many ranks have connected; None not to wait.

    Raises:
        OSError: This host has no such address, or the port is in use.
        RuntimeError: Not all ranks have connected.
    """
    is_ipv6 = ":" in address
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        bound.listen()
        store: torch._C._distributed_c10d.TCPStore = STORES.TCPStore(
            address,
            bound.getsockname()[1],
            ranks,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=ranks is not None,
            multi_tenant=True,
            master_listen_fd=os.dup(bound.fileno()),  # the store closes it
        )
        return store


def address_for(peers: Iterable[str], wanted: str = "") -> str | None:
    """The address at which other hosts, given by name, reach this one; None if none is found.

    It is that of the name `wanted`, or else of the name of this host, unless it is a loopback address or another
    host's; otherwise the source address of the route to the first of them.
    """
    names = wanted, socket.gethostname()
    for address in (address for name in names for address in _addresses_of(name)):
        if not _is_loopback(address) and _is_here(address):
            return address
    for peer in peers:
        for address in _addresses_of(peer):
            with suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, _ANY_PORT))
                source: str = probe.getsockname()[0]
                if not _is_loopback(source):
                    return source
    return None


def master_address(variables: Mapping[str, str]) -> str | None:
    """The address at which rank 0 should serve, according to environment variables.

    None if this process does not serve, or if it is not certain that all ranks reach it at that address:
    MASTER_ADDR may be "localhost" on the host of rank 0, and another name elsewhere; or it may be that of a
    gateway.
    """
    if environment.torchrun_serves(variables) or variables.get("RANK") != "0":
        return None
    name = variables.get("MASTER_ADDR", "")
    on_one_host = variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")
    address = next(filter(_is_here, _addresses_of(name)), None)
    if address is None or (_is_loopback(address) and address != name and not on_one_host):
        return None
    return address


def _addresses_of(name: str) -> list[str]:
    found = []
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
    return [str(each[4][0]) for each in found]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_here(address: str) -> bool:
    """Whether this host has the address."""
    with suppress(OSError), socket.socket(_family(address)) as probe:
        probe.bind((address, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
