"""The cases of tests/golden: bytes that were worked out separately from the codecs."""

import json
from pathlib import Path

from bagua_comm import Int4, MinMaxUInt8
from bagua_comm.kernels.host import Draws

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = ("minmax", "int4")


def cases_of(family):
    """The entries of a manifest."""
    return json.loads((GOLDEN / f"{family}.json").read_text())


def codec_of(case):
    """The codec of a case."""
    if "rotate" not in case:
        return MinMaxUInt8(block=case["block"], eps=case["eps"])
    rounding = "nearest" if case["key"] is None else "stochastic"
    return Int4(block=case["block"], rotate=case["rotate"], rounding=rounding)


def draws_of(case):
    """The random numbers of stochastic rounding."""
    return None if case.get("key") is None else Draws(case["key"], case["counter"])
