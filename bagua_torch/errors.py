"""Errors that are also of the type that PyTorch's own wrapper raises in the same place."""

from __future__ import annotations

from bagua_comm import ArrayError, CommError, CommMismatch


class MisuseError(ArrayError, RuntimeError):
    """An argument or a call is wrong; PyTorch's own raises a RuntimeError."""


class MismatchError(CommMismatch, RuntimeError):
    """The ranks' modules differ; PyTorch's own raises a RuntimeError."""


class EarlyEndError(CommError, RuntimeError):
    """A rank has no more batches while others do; PyTorch's own raises a RuntimeError."""
