"""InfiniBand and RoCE: the devices of this host, and whether an MPI library can use them."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path("/sys/class/infiniband")
"""Where Linux shows the devices."""

MAPS = Path("/proc/self/maps")
"""Where Linux shows the shared libraries that this process has loaded."""


def devices() -> dict[str, str]:
    """Return the rates and states of the ports of each device, as `{"mlx5_0": "200 Gb/sec, ACTIVE"}`."""
    try:
        found = sorted(FOLDER.iterdir())
    except OSError:
        return {}
    return {device.name: "; ".join(map(_port, sorted(device.glob("ports/*")))) or "no port" for device in found}


def _port(folder: Path) -> str:
    try:
        rate, state = ((folder / name).read_text().strip() for name in ("rate", "state"))
    except OSError as exc:
        return f"port {folder.name} cannot be read: {exc.strerror}"
    return f"{rate.partition(' (')[0]}, {state.rpartition(' ')[2]}"  # "200 Gb/sec (4X HDR)", "4: ACTIVE"


def why_unused(maps: str) -> str | None:
    """Why an MPI library does not use these devices; None if it may, or if no port is active.

    Every MPI reaches them by libibverbs, which UCX and libfabric load when MPI starts. Devices of Omni-Path are
    left out: libfabric reaches them by itself.

    Args:
        maps: The contents of `MAPS` of a process that has started MPI.
    """
    loaded = set(re.findall(r"/(libibverbs|libucp|libfabric)[^/\n]*\.so", maps))
    active = [
        f"{name} ({ports})" for name, ports in devices().items() if "ACTIVE" in ports and name[:4] != "hfi1"
    ]
    if not active or "libibverbs" in loaded:
        return None
    names = [name for name, file in {"UCX": "libucp", "libfabric": "libfabric"}.items() if file in loaded]
    has = (
        f"has {' and '.join(names)}, but has not loaded libibverbs" if names else "has neither UCX nor libfabric"
    )
    return f"this machine has {', '.join(active)}, and this MPI {has}: between nodes it uses TCP"
