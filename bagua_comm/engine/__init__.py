"""The engine: exchanges the buckets of a training step by an algorithm's schedule."""

from ..execution.lane import Lane, StreamLane, ThreadLane
from .checks import check_fit
from .engine import Engine, EngineCallbacks

__all__ = ["Engine", "EngineCallbacks", "Lane", "StreamLane", "ThreadLane", "check_fit"]
