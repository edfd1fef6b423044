"""Tools for tests, ours and yours: worlds of threads, fleets of threads that die, a recording transport, kits.

`check_transport`, `check_codec` and `check_algorithm` test the contracts: an implementation that passes can
replace the library's own anywhere.
"""

from .algorithms import check_algorithm
from .codecs import check_codec
from .fleets import ThreadFleet, ThreadJob, run_fleet
from .recording import Call, Recording
from .simulation.program import Simulation, simulate
from .simulation.scheduler import SimulationError
from .transports import SIZES, check_transport
from .values import reduced, sample, whole_range
from .worlds import run_ranks

__all__ = [
    "SIZES",
    "Call",
    "Recording",
    "Simulation",
    "SimulationError",
    "ThreadFleet",
    "ThreadJob",
    "check_algorithm",
    "check_codec",
    "check_transport",
    "reduced",
    "run_fleet",
    "run_ranks",
    "sample",
    "simulate",
    "whole_range",
]
