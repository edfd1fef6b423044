"""The addresses at which a process listens, from Linux' /proc."""

import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path


def listening_addresses(pid="self"):
    """The addresses at which a process listens, over IPv4 and IPv6."""
    folder, owned = f"/proc/{pid}/fd", set()
    for name in os.listdir(folder):
        with suppress(OSError):  # it has been closed since
            owned.add(os.readlink(f"{folder}/{name}"))
    found = []
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in owned:
                found.append(_address(words[1].partition(":")[0]))
    return sorted(found)


def _address(text):
    """An address that the kernel wrote: words of 32 bits in hexadecimal, in the byte order of this machine."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
