"""The former name of `bagua_comm.averages`; it goes in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from . import averages


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    warnings.warn(
        "bagua_comm.collectives is now bagua_comm.averages; import it from there", DeprecationWarning, 2
    )
    return getattr(averages, name)
