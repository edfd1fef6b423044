"""The logger "bagua_comm", silent by default, and the messages that are the same on all ranks.

    logging.basicConfig(level=logging.INFO)

Decisions for all ranks are logged once: the world that `connect` made and the speed of its links, the plan of
buckets, a switch of the algorithm, the choice of the tuner, complete checkpoints. Rank 0 logs them at INFO, the
other ranks at DEBUG.
Events of every step are in counters and in the trace; warnings are Python's `warnings`, and errors are raised.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

ROOT = logging.getLogger("bagua_comm")
ROOT.addHandler(logging.NullHandler())


def log_on_root(logger: logging.Logger, rank: int, text: str, *args: object) -> None:
    """Log a message that is the same on all ranks: at INFO on rank 0, at DEBUG on the others."""
    logger.log(logging.DEBUG if rank else logging.INFO, text, *args, stacklevel=2)


def log_world(logger: logging.Logger, comm: Any, nodes: Sequence[object], *, version: str) -> None:
    """Log the ranks of a communicator, the label of each rank's node, the transports, and the versions.

    Args:
        logger: Where to log.
        comm: The communicator.
        nodes: A label for the node of each rank.
        version: The version of this library.
    """
    if not logger.isEnabledFor(logging.DEBUG if comm.rank else logging.INFO):
        return
    sizes = sorted(Counter(nodes).values())
    ranks = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    over = " and ".join(transport.name for transport in comm.transports)
    device = "no device" if comm.device is None else f"device {comm.device}"
    mpi = sys.modules.get("mpi4py.MPI") if comm.transports[0].name == "mpi" else None
    library = f", {library_name(mpi.Get_library_version())}" if mpi is not None else ""
    log_on_root(
        logger,
        comm.rank,
        "rank %d of %d on %s (nodes: %d, ranks on each: %s), over %s, %s; bagua_comm %s, Python %s, NumPy %s%s",
        *(comm.rank, comm.size, platform.node(), len(sizes), ranks, over, device),
        *(version, platform.python_version(), np.__version__, library),
    )


def library_name(text: str) -> str:
    """Return the name and the version of an MPI library, from its MPI_Get_library_version.

    >>> library_name("Open MPI v5.0.11, package: Debian"), library_name("MPICH Version:      5.0.2")
    ('Open MPI v5.0.11', 'MPICH 5.0.2')
    """
    name, colon, version = text.strip().partition("\n")[0].partition(",")[0].partition(":")
    name = re.sub(r"(MPI)? Version *$", "", name, flags=re.IGNORECASE) if colon else name
    return f"{name} {version.strip()}".strip()


def megabytes(nbytes: float) -> str:
    """Return a number of bytes as text.

    >>> megabytes(1_234_567), megabytes(1_000), megabytes(999)
    ('1.2 MB', '0.001 MB', '999 bytes')
    """
    if nbytes < 1e3:
        return f"{nbytes:.0f} bytes"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e6:.3f} MB"
