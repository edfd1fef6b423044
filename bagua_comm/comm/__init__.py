"""The communicator, and its calls."""

from .base import EngineRegistry
from .communicator import Communicator, Nodes
from .grid import Grid
from .weighted import weigh

__all__ = ["Communicator", "EngineRegistry", "Grid", "Nodes", "weigh"]
