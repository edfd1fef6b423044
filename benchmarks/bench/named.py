"""Algorithms and codecs by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from bagua_comm import Algorithm, BFloat16, Codec, Float16, MinMaxUInt8
from bagua_comm.planning.costmodel import METHODS, TorchDDP

NAMED: dict[str, Algorithm] = {
    name: method for name, method in METHODS.items() if not isinstance(method, TorchDDP)
}
"""The library's table of algorithms."""


def from_name(name: str, **arguments: Any) -> Algorithm:
    """The algorithm of this name in the library's table, with some of its arguments changed.

    >>> from_name("diloco-100", local_steps=8).local_steps
    8
    """
    algorithm: Any = NAMED[name]
    changed: Algorithm = dataclasses.replace(algorithm, **arguments)
    return changed


CODECS: dict[str, Codec] = {
    "minmax": MinMaxUInt8(),
    "bagua": MinMaxUInt8.bagua(),
    "float16": Float16(),
    "bfloat16": BFloat16(),
}
