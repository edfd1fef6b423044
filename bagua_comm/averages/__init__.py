"""Averages of an array over ranks: exact, quantized, with error feedback, by node, and reproducible."""

from .quantized import Average, ErrorFeedback, Exact, Hierarchical, InPlace, Quantized, quantized_allreduce

__all__ = ["Average", "ErrorFeedback", "Exact", "Hierarchical", "InPlace", "Quantized", "quantized_allreduce"]
