"""Errors that are also of the type that PyTorch's wrapper raises in the same case."""

from __future__ import annotations

from bagua_comm import ArrayError, CommError, CommMismatch, UnsupportedError


class MisuseError(ArrayError, RuntimeError):
    """An argument or a call is wrong; PyTorch's wrapper raises a RuntimeError."""


class MismatchError(CommMismatch, RuntimeError):
    """The ranks' modules differ; PyTorch's wrapper raises a RuntimeError."""


class MissingError(UnsupportedError, AttributeError):
    """PyTorch's wrapper has this attribute and ours does not, or it cannot be set; an AttributeError as well."""


class EarlyEndError(CommError, RuntimeError):
    """A rank has no more batches while others do; PyTorch's wrapper raises a RuntimeError."""
