"""Classes that derive from a class of another library, which is imported only when an object is made."""

from __future__ import annotations

import functools


@functools.cache
def with_base(cls: type, base: type) -> type:
    """The class `cls`, derived from `base` as well."""
    if issubclass(cls, base):
        return cls
    made = type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
    made.__qualname__ = cls.__qualname__
    return made
