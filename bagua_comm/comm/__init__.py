"""The communicator, and the course of its calls."""

from .communicator import Communicator, Nodes

__all__ = ["Communicator", "Nodes"]
