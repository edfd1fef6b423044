"""Algorithms and codecs by name."""

from __future__ import annotations

from bagua_comm import Algorithm, BFloat16, Codec, Float16, Int4, MinMaxUInt8
from bagua_comm.planning.costmodel import METHODS, TorchDDP

COMPARED: dict[str, Algorithm] = {
    name: method for name, method in METHODS.items() if not isinstance(method, TorchDDP)
}
"""The algorithms that advice compares."""

CODECS: dict[str, Codec] = {
    "minmax": MinMaxUInt8(),
    "bagua": MinMaxUInt8.bagua(),
    "int4": Int4(),
    "float16": Float16(),
    "bfloat16": BFloat16(),
}
