"""Optimizers that step flat tensors, each of which holds many parameters."""

from .optimizer import FusedOptimizer, _remake, fuse

__all__ = ["FusedOptimizer", "_remake", "fuse"]
