"""The engine: the buckets of a training step, exchanged beside it by an algorithm's schedule."""

from .engine import Engine, check_fit

__all__ = ["Engine", "check_fit"]
