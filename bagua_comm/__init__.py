"""Communication primitives for data-parallel training: exact, quantized and relaxed averaging of arrays.

with bagua_comm.connect() as comm:                  # all ranks under mpirun, else one
comm.allreduce(x, out=x, op="avg")              # x: NumPy or CuPy
"""

from . import topology
from .algorithms import Algorithm, ByteGrad, GradientAllReduce, Point, Window
from .bootstrap import connect, default
from .bucket import Bucket, BucketSpec, Plan, TensorSpec
from .codecs import BFloat16, Codec, Float16, MinMaxUInt8
from .collectives import Average, Exact, Hierarchical, Quantized, quantized_allreduce
from .comm import Communicator, Nodes
from .engine import Engine
from .errors import (
    ArrayError,
    BaguaError,
    BootstrapError,
    CommAborted,
    CommError,
    CommMismatch,
    CommTimeout,
    RankFailed,
    UnsupportedError,
)
from .lane import Lane

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "ArrayError",
    "Average",
    "BFloat16",
    "BaguaError",
    "BootstrapError",
    "Bucket",
    "BucketSpec",
    "ByteGrad",
    "Codec",
    "CommAborted",
    "CommError",
    "CommMismatch",
    "CommTimeout",
    "Communicator",
    "Engine",
    "Exact",
    "Float16",
    "GradientAllReduce",
    "Hierarchical",
    "Lane",
    "MinMaxUInt8",
    "Nodes",
    "Plan",
    "Point",
    "Quantized",
    "RankFailed",
    "TensorSpec",
    "UnsupportedError",
    "Window",
    "connect",
    "default",
    "quantized_allreduce",
    "topology",
]
