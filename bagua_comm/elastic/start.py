"""The fleet of this process, according to its launcher."""

from __future__ import annotations

from collections.abc import Callable

from ..bootstrap.connection import TIMEOUT_S, check_timeout, connect
from ..bootstrap.environment import under_torchrun
from ..bootstrap.mpi_start import start_fleet, under_ulfm
from ..bootstrap.world import refuse_a_second_world
from ..errors import BootstrapError
from .fixed import FixedFleet
from .fleet import Fleet

_under_torchrun: Callable[[float], Fleet] | None = None


def register_torchrun_fleet(start: Callable[[float], Fleet]) -> None:
    """Have `start(timeout_s)` make the fleet under torchrun; bagua_torch calls this when it is imported."""
    global _under_torchrun
    _under_torchrun = start


def start(timeout_s: float = TIMEOUT_S) -> Fleet:
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
    check_timeout(timeout_s)
    refuse_a_second_world()
    if under_torchrun():
        if _under_torchrun is None:
            raise BootstrapError(
                "elastic.run: torchrun started this process, and only bagua_torch can connect its processes; "
                "import bagua_torch before"
            )
        return _under_torchrun(timeout_s)
    if not under_ulfm():
        return FixedFleet(connect(timeout_s=timeout_s))

    def gather() -> Fleet:
        from .mpi import fleet as mpi  # this needs MPI to have started

        return mpi.gather(timeout_s)

    return start_fleet(timeout_s, gather)
