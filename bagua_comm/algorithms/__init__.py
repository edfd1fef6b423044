"""Training algorithms: what is exchanged, when, and how."""

from .base import Algorithm, Point, Window
from .gradient import ByteGrad, GradientAllReduce

__all__ = ["Algorithm", "ByteGrad", "GradientAllReduce", "Point", "Window"]
