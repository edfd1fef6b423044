"""Communication primitives for data-parallel training: exact, quantized and relaxed averaging of arrays.

On every rank:

    with bagua_comm.connect() as comm:          # all ranks under mpirun, else one
        comm.allreduce(x, out=x, op="avg")      # x: NumPy or CuPy
"""

from . import elastic, optim, topology
from ._version import __version__ as __version__
from .algorithms import (
    Algorithm,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Point,
    QAdam,
    Rounds,
    SparseLoCo,
    StreamingDiLoCo,
    Window,
    after,
    by_node,
    every,
)
from .averages import (
    Average,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Quantized,
    TopK,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
)
from .averages.reproducible import Reproducible, reproducible_allreduce
from .averages.reproducible_scalars import reproducible_sum
from .bootstrap import connect, default
from .bucket import Bucket, BucketSpec, Plan, TensorSpec
from .checkpoint import Checkpoints, Own
from .codecs import BFloat16, Codec, Float16, Int4, MinMaxUInt8
from .comm import Communicator, Grid, Nodes, weigh
from .engine import Engine
from .errors import (
    ArrayError,
    BaguaError,
    BootstrapError,
    CheckpointError,
    CommAborted,
    CommError,
    CommMismatch,
    CommTimeout,
    RankFailed,
    StoreError,
    UnsupportedError,
)
from .execution.lane import Lane
from .execution.requests import wait_all, wait_any
from .hooks import CallView, Hook, NanWatch
from .planning.tuner import Tuner

__all__ = [
    "Algorithm",
    "ArrayError",
    "AsyncModelAverage",
    "Average",
    "BFloat16",
    "BaguaError",
    "BootstrapError",
    "Bucket",
    "BucketSpec",
    "ByteGrad",
    "CallView",
    "CheckpointError",
    "Checkpoints",
    "Codec",
    "CommAborted",
    "CommError",
    "CommMismatch",
    "CommTimeout",
    "Communicator",
    "Decentralized",
    "DiLoCo",
    "Engine",
    "ErrorFeedback",
    "Exact",
    "Float16",
    "GradientAllReduce",
    "Grid",
    "Hierarchical",
    "Hook",
    "Int4",
    "Lane",
    "LowPrecisionDecentralized",
    "LowPrecisionOnePeer",
    "MinMaxUInt8",
    "NanWatch",
    "Nodes",
    "Own",
    "Plan",
    "Point",
    "QAdam",
    "Quantized",
    "RankFailed",
    "Reproducible",
    "Rounds",
    "SparseLoCo",
    "StoreError",
    "StreamingDiLoCo",
    "TensorSpec",
    "TopK",
    "Tuner",
    "UnsupportedError",
    "Window",
    "after",
    "by_node",
    "connect",
    "default",
    "elastic",
    "every",
    "optim",
    "quantized_allgather",
    "quantized_allreduce",
    "quantized_reduce_scatter",
    "reproducible_allreduce",
    "reproducible_sum",
    "topology",
    "wait_all",
    "wait_any",
    "weigh",
]
