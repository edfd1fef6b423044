"""The former name of `bagua_comm.planning.tuner`; it goes in the next release."""

from __future__ import annotations

import warnings
from typing import Any

from .planning import tuner


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    warnings.warn(
        "bagua_comm.tuner is now bagua_comm.planning.tuner; import it from there", DeprecationWarning, 2
    )
    return getattr(tuner, name)
