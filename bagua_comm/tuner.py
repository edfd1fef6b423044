"""The former name of `bagua_comm.planning.tuner`; it goes in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from .planning import tuner


def __getattr__(name: str) -> Any:
    value = getattr(tuner, name)
    warnings.warn("bagua_comm.tuner is now bagua_comm.planning.tuner", DeprecationWarning, 2)
    return value
