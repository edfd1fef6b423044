"""Training algorithms: what is exchanged, when, and how."""

from .async_average import AsyncModelAverage
from .base import Algorithm, Point, Window
from .decentralized import Decentralized
from .diloco import DiLoCo
from .gradient import ByteGrad, GradientAllReduce
from .low_precision import LowPrecisionDecentralized, LowPrecisionOnePeer
from .qadam import QAdam
from .schedule import after, every

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "ByteGrad",
    "Decentralized",
    "DiLoCo",
    "GradientAllReduce",
    "LowPrecisionDecentralized",
    "LowPrecisionOnePeer",
    "Point",
    "QAdam",
    "Window",
    "after",
    "every",
]
