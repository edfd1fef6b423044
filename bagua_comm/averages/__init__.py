"""Averages of an array over ranks: exact, quantized, sparse, with error feedback, by node, and reproducible."""

from .base import Average, Exact, InPlace
from .error_feedback import ErrorFeedback
from .hierarchical import Hierarchical
from .quantized import Quantized, quantized_allreduce
from .quantized_shards import quantized_allgather, quantized_reduce_scatter
from .reproducible import Reproducible, reproducible_allreduce
from .top_k import TopK

__all__ = [
    "Average",
    "ErrorFeedback",
    "Exact",
    "Hierarchical",
    "InPlace",
    "Quantized",
    "Reproducible",
    "TopK",
    "quantized_allgather",
    "quantized_allreduce",
    "quantized_reduce_scatter",
    "reproducible_allreduce",
]
