"""Lightning's two distributions, `lightning` and `pytorch_lightning`, whose classes are unrelated.

A strategy gets its base class when it is constructed: `BaguaStrategy(...)` is an instance of `BaguaStrategy`, and
of the ParallelStrategy of the distribution that the program has imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from bagua_comm import UnsupportedError

from ..bases import with_base

Package: TypeAlias = Literal["lightning", "pytorch_lightning"]
"""A distribution of Lightning."""

TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""The packages of Trainer and of Fabric, by distribution."""


def new_strategy(cls: type, module: str, homes: Mapping[str, str], package: str | None) -> Any:
    """A new object of `cls`, derived from the ParallelStrategy of a distribution."""
    if package is not None and package not in homes:
        raise UnsupportedError(f"{cls.__name__}: package is {package!r}, expected one of {', '.join(homes)}")
    package = package if package is not None else _imported(cls.__name__, homes)
    try:
        strategies = importlib.import_module(f"{homes[package]}.{module}")
    except ImportError as exc:
        raise UnsupportedError(
            f"{cls.__name__}: {homes[package]} cannot be imported ({exc}); pip install 'bagua-comm[lightning]'"
        ) from exc
    return object.__new__(with_base(cls, strategies.ParallelStrategy))


def _imported(name: str, homes: Mapping[str, str]) -> str:
    """The distribution that the program has imported, or else one that is installed."""
    imported = [package for package, home in homes.items() if home in sys.modules]
    if len(imported) > 1:
        raise UnsupportedError(
            f"{name}: this program has imported both {' and '.join(homes.values())}; name that of the "
            f"Trainer or the Fabric: {name}(..., package={imported[0]!r}) or package={imported[1]!r}"
        )
    return next(iter(imported or filter(_is_installed, homes)), "lightning")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def package_of(cls: type, homes: Mapping[str, str]) -> str:
    """The distribution of the base class of a strategy."""
    modules = {base.__module__ for base in cls.__mro__}
    return next(package for package, home in homes.items() if any(m.startswith(home + ".") for m in modules))
