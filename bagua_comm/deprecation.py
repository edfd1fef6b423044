"""Warnings about former names, at the line of the program that uses one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_SKIPPED = frozenset({"bagua_comm", "bagua_torch", "abc", "importlib", "_frozen_importlib"})
"""Top-level modules that a warning does not point at; `abc` and `importlib` run class and import statements."""


def warn_renamed(former: str, name: str) -> None:
    """Warn that `former` is now `name`, at the innermost line that does not belong to this library."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        f"{former} is now {name}",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names were renamed; it returns the objects of the new names.

    Args:
        module: `__name__` of the module.
        names: New names by former names.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return find
