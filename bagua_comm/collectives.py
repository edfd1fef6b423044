"""The former name of `bagua_comm.averages`; it goes in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from . import averages


def __getattr__(name: str) -> Any:
    value = getattr(averages, name)
    warnings.warn("bagua_comm.collectives is now bagua_comm.averages", DeprecationWarning, 2)
    return value
