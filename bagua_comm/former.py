"""Former names of modules, which work for one release after a move, and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any


def former_name_of(module: ModuleType, name: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module called `name`, which has become `module`."""

    def get(attribute: str) -> Any:
        value = getattr(module, attribute)
        warnings.warn(f"{name} is now {module.__name__}", DeprecationWarning, 2)
        return value

    return get
