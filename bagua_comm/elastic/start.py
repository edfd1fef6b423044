"""The fleet of this process, according to its launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from .. import kernels
from ..bootstrap import connection as bootstrap
from ..bootstrap.rendezvous import Limit
from ..errors import BootstrapError
from ..transports import LocalTransport
from .fixed import FixedFleet
from .fleet import Fleet
from .mpi.parent import ParentInfo

_log = logging.getLogger(__name__)

_under_torchrun: Callable[[float], Fleet] | None = None


def register_torchrun_fleet(start: Callable[[float], Fleet]) -> None:
    """Have `start(timeout_s)` make the fleet under torchrun; bagua_torch calls this when it is imported."""
    global _under_torchrun
    _under_torchrun = start


def start(timeout_s: float = bootstrap.TIMEOUT_S) -> Fleet:
    """The fleet of all processes that were started with this one.

    Collective. Under `bagua run --ulfm` and under torchrun the fleet survives deaths. Under any other mpirun, and
    without a launcher, it only reports them.

    Args:
        timeout_s: How long a process may stay away from a rendezvous, and a call may wait for its peers, in
            seconds.

    Raises:
        BootstrapError: The world cannot be set up, or this process is connected already; see `connect`.
        CommTimeout: MPI has started on all ranks, but one has not joined in time.
        RankFailed: A process died before the others could continue without it.
    """
    bootstrap.check_timeout(timeout_s)
    bootstrap.refuse_a_second_world()
    if bootstrap.under_torchrun():
        if _under_torchrun is None:
            raise BootstrapError(
                "elastic.run: torchrun started this process, and only bagua_torch can connect its processes; "
                "import bagua_torch before"
            )
        return _under_torchrun(timeout_s)
    if not bootstrap.starts_a_fleet():
        return FixedFleet(bootstrap.connect(timeout_s=timeout_s))

    def gather() -> Fleet:
        from .mpi import fleet as mpi  # this needs MPI to have started

        return mpi.gather(timeout_s)

    recruiter = bootstrap.job().recruiter
    if not recruiter:
        return bootstrap.start_fleet(timeout_s, gather)
    parent = ParentInfo.parse(recruiter)
    # No other process waits for a joining one yet, so whatever is slow the first time happens now.
    kernels.on_host()
    bootstrap.open_world(LocalTransport(), [0]).close()
    limit = Limit(lambda: f"{parent} has ended" if parent.has_ended() else None, _exit)
    return limit.run(lambda: bootstrap.start_fleet(timeout_s, gather))


def _exit(why: str) -> None:
    """End this joining process, which can no longer be admitted: MPI may block for ever."""
    _log.info("a joining process ends: %s", why)
    os._exit(0)
