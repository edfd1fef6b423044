"""Averages of an array over ranks: exact, quantized, sparse, with error feedback, by node, and reproducible."""

from .base import Average, Exact, Gathers, InPlace, Shards
from .error_feedback import ErrorFeedback
from .hierarchical import Hierarchical
from .quantized import Quantized, quantized_allgather, quantized_allreduce, quantized_reduce_scatter
from .reproducible import Reproducible, reproducible_allreduce
from .reproducible_scalars import reproducible_sum
from .top_k import TopK

__all__ = [
    "Average",
    "ErrorFeedback",
    "Exact",
    "Gathers",
    "Hierarchical",
    "InPlace",
    "Quantized",
    "Reproducible",
    "Shards",
    "TopK",
    "quantized_allgather",
    "quantized_allreduce",
    "quantized_reduce_scatter",
    "reproducible_allreduce",
    "reproducible_sum",
]
