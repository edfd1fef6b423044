"""The communicator, and its calls."""

from .base import EngineRegistry
from .communicator import Communicator, Nodes
from .grid import Grid

__all__ = ["Communicator", "EngineRegistry", "Grid", "Nodes"]
