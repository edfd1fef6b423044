"""What this library decides, for `logging`: the logger "bagua_comm" and those below it, silent by default.

    logging.basicConfig(level=logging.INFO)

INFO has what is decided once and for all ranks: the world that `connect` made, the plan of buckets, another
algorithm, what the tuner chose, checkpoints that are complete. Rank 0 says it at INFO, the others at DEBUG. What
happens in every step is in counters and in the trace; warnings are Python's `warnings`, and errors are raised.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

ROOT = logging.getLogger("bagua_comm")
ROOT.addHandler(logging.NullHandler())


def tell(logger: logging.Logger, rank: int, text: str, *args: object) -> None:
    """Log what is the same on all ranks: at INFO on rank 0, at DEBUG on the others."""
    logger.log(logging.DEBUG if rank else logging.INFO, text, *args, stacklevel=2)


def tell_world(logger: logging.Logger, comm: Any, nodes: Sequence[object]) -> None:
    """Log the world that a communicator is: its ranks, their `nodes` (a label for each), what carries arrays."""
    if not logger.isEnabledFor(logging.DEBUG if comm.rank else logging.INFO):
        return
    from . import __version__

    sizes = sorted(Counter(nodes).values())
    ranks = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    over = " and ".join(transport.name for transport in comm.transports)
    device = "no device" if comm.device is None else f"device {comm.device}"
    mpi = sys.modules.get("mpi4py.MPI") if comm.transports[0].name == "mpi" else None
    library = f", {mpi.Get_library_version().split(',')[0].strip()}" if mpi is not None else ""
    tell(
        logger,
        comm.rank,
        "rank %d of %d on %s (nodes: %d, ranks on each: %s), over %s, %s; bagua_comm %s, Python %s, NumPy %s%s",
        *(comm.rank, comm.size, platform.node(), len(sizes), ranks, over, device),
        *(__version__, platform.python_version(), np.__version__, library),
    )


def megabytes(nbytes: float) -> str:
    """A number of bytes as text.

    >>> megabytes(1_234_567), megabytes(999)
    ('1.2 MB', '0.001 MB')
    """
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e6:.3f} MB"
