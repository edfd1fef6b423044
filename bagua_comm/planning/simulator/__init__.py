"""Simulated training on any number of ranks: the code that trains, with the links and deaths of a cluster.

shapes        arrays without values, on which the code runs
transport     a transport that records the messages of a rank
tracing       the program of a rank, recorded from the engine's schedule, the plan and the algorithm
replay        the program on all ranks, with time
failures      deaths, and the steps that are lost by them

The cost model (`costmodel`) answers in microseconds, by formulas of its own for each algorithm. The simulator
knows no algorithm: it runs them, so that it also predicts one of your own. It takes the same job, cluster and
rates.
"""

from .failures import Failures, Goodput, goodput
from .simulation import Simulation, Variation, simulate

__all__ = ["Failures", "Goodput", "Simulation", "Variation", "goodput", "simulate"]
