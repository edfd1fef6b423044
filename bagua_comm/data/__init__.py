"""Data for ranks: samplers that balance their work, and caches of samples that are slow to make."""

from .balanced import BalancedSampler
from .sampler import PlainSampler

__all__ = ["BalancedSampler", "PlainSampler"]
