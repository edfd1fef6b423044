"""The former name of `bagua_comm.planning.costmodel`; it goes in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from .planning import costmodel


def __getattr__(name: str) -> Any:
    value = getattr(costmodel, name)
    warnings.warn("bagua_comm.costmodel is now bagua_comm.planning.costmodel", DeprecationWarning, 2)
    return value
