"""Optimizers of PyTorch: those that step flat tensors, each of which holds many parameters, and QAdam's."""

from .fused import FusedOptimizer, fuse
from .muon import Muon
from .qadam import QAdamOptimizer

__all__ = ["FusedOptimizer", "Muon", "QAdamOptimizer", "fuse"]
