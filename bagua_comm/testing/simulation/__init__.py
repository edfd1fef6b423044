"""Simulations: a program of threads, run in an order that is drawn from a seed. See `simulate`."""

from .program import Simulation, simulate
from .scheduler import SimulationError

__all__ = ["Simulation", "SimulationError", "simulate"]
