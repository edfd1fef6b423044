"""The communicator, and its calls."""

from .base import EngineRegistry
from .communicator import Communicator, Nodes

__all__ = ["Communicator", "EngineRegistry", "Nodes"]
