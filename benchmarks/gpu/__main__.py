"""Starts `benchmarks.gpu.run`, where the arguments are described."""

from .run import command

command()
