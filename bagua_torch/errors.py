"""Errors that are also of the type that PyTorch's wrapper raises in the same case."""

from __future__ import annotations

from bagua_comm import ArrayError, CommError, CommMismatch


class MisuseError(ArrayError, RuntimeError):
    """An argument or a call is wrong; PyTorch's wrapper raises a RuntimeError."""


class MismatchError(CommMismatch, RuntimeError):
    """The ranks' modules differ; PyTorch's wrapper raises a RuntimeError."""


class EarlyEndError(CommError, RuntimeError):
    """A rank has no more batches while others do; PyTorch's wrapper raises a RuntimeError."""
