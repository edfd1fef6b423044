"""Training algorithms: what ranks exchange, when, and how."""

from .async_average import AsyncModelAverage
from .base import Algorithm, Pending, Point, Rounds, StepWeights, Window
from .by_node import by_node
from .combinators import after, every
from .decentralized import Decentralized
from .diloco import DiLoCo
from .gradient import ByteGrad, GradientAllReduce
from .low_precision import LowPrecisionDecentralized, LowPrecisionOnePeer
from .named import NAMED, from_name
from .qadam import QAdam
from .sparse_loco import SparseLoCo
from .streaming_diloco import StreamingDiLoCo

__all__ = [
    "NAMED",
    "Algorithm",
    "AsyncModelAverage",
    "ByteGrad",
    "Decentralized",
    "DiLoCo",
    "GradientAllReduce",
    "LowPrecisionDecentralized",
    "LowPrecisionOnePeer",
    "Pending",
    "Point",
    "QAdam",
    "Rounds",
    "SparseLoCo",
    "StepWeights",
    "StreamingDiLoCo",
    "Window",
    "after",
    "by_node",
    "every",
    "from_name",
]
