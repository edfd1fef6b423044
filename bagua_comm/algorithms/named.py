"""Algorithms by name, for command lines and configuration files.

    from_name("bytegrad")
    from_name("qadam", warmup_steps=100)
    from_name({"name": "every", "n": 4, "algorithm": {"name": "decentralized", "peers": "shift_one"}})

A new algorithm needs one entry in `NAMED`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ..averages import Average, ErrorFeedback, Exact, Hierarchical, Quantized, TopK
from ..averages.reproducible import Reproducible
from ..codecs import BFloat16, Codec, Float16, Int4, MinMaxUInt8
from ..errors import ArrayError, BaguaError, shown
from .async_average import AsyncModelAverage
from .base import Algorithm
from .by_node import by_node
from .combinators import after, every
from .decentralized import Decentralized
from .diloco import DiLoCo
from .gradient import ByteGrad, GradientAllReduce
from .low_precision import LowPrecisionDecentralized, LowPrecisionOnePeer
from .qadam import QAdam
from .sparse_loco import SparseLoCo
from .streaming_diloco import StreamingDiLoCo


def _hierarchical(inner: Average | None = None, inside: Exact | Quantized | None = None) -> GradientAllReduce:
    return GradientAllReduce(Hierarchical(inner or Exact(), inside=inside or Exact()))


def _error_feedback(
    inner: Quantized | TopK | None = None,
    decay: float = 0.0,
    reset_every: int | None = None,
    residual_codec: Codec | None = None,
    retain: float = 1.0,
) -> GradientAllReduce:
    return GradientAllReduce(ErrorFeedback(inner or Quantized(), decay, reset_every, residual_codec, retain))


def _warm_up(steps: int = 50, local_steps: int = 10) -> Algorithm:
    return after(steps, GradientAllReduce(), DiLoCo(local_steps))


NAMED: Mapping[str, Callable[..., Algorithm]] = MappingProxyType(
    {
        # Gradients
        "gradient-allreduce": GradientAllReduce,
        "exact": partial(GradientAllReduce, Exact()),
        "reproducible": partial(GradientAllReduce, Reproducible()),
        "float16": partial(GradientAllReduce, Quantized(Float16())),
        "bfloat16": partial(GradientAllReduce, Quantized(BFloat16())),
        "bytegrad": ByteGrad,
        "bagua": partial(GradientAllReduce, Quantized(MinMaxUInt8.bagua())),
        "int4": partial(GradientAllReduce, Quantized(Int4())),
        "error-feedback": _error_feedback,
        "int4-error-feedback": partial(_error_feedback, Quantized(Int4())),
        "hierarchical": _hierarchical,
        "hierarchical-bytes": partial(_hierarchical, Quantized()),
        "hierarchical-all-bytes": partial(_hierarchical, Quantized(), Quantized()),
        "hierarchical-int4": partial(_hierarchical, Quantized(Int4())),
        "qadam": QAdam,
        # Weights
        "decentralized": Decentralized,
        "shift-one": partial(Decentralized, "shift_one"),
        "one-peer": partial(Decentralized, "one_peer_exponential"),
        "low-precision": LowPrecisionDecentralized,
        "low-precision-ring": LowPrecisionDecentralized,
        "low-precision-one-peer": LowPrecisionOnePeer,
        "async": AsyncModelAverage,
        "diloco": DiLoCo,
        "diloco-100": partial(DiLoCo, 100),
        "diloco-100-bytes": partial(DiLoCo, 100, average=Quantized()),
        "streaming-diloco": StreamingDiLoCo,
        "streaming-diloco-int4": partial(StreamingDiLoCo, average=Quantized(Int4())),
        "sparseloco": SparseLoCo,
        "sparseloco-hierarchical": partial(
            SparseLoCo, average=Hierarchical(ErrorFeedback(TopK(), retain=SparseLoCo.decay))
        ),
        # Made of other algorithms
        "every": every,
        "every-4": partial(every, 4, Decentralized("one_peer_exponential")),
        "shift-one-every-4": partial(every, 4, Decentralized("shift_one")),
        "by-node": by_node,
        "shift-one-by-node": partial(by_node, Decentralized("shift_one")),
        "low-precision-by-node": partial(by_node, LowPrecisionDecentralized()),
        "after": after,
        "warm-up": _warm_up,
    }
)
"""Functions that make algorithms, by name; their arguments are the settings."""

AVERAGES: Mapping[str, Callable[..., Average]] = MappingProxyType(
    {
        "exact": Exact,
        "reproducible": Reproducible,
        "quantized": Quantized,
        "error-feedback": ErrorFeedback,
        "hierarchical": Hierarchical,
        "top-k": TopK,
    }
)
"""Functions that make averages, by name."""

CODECS: Mapping[str, Callable[..., Codec]] = MappingProxyType(
    {
        "minmax-uint8": MinMaxUInt8,
        "bagua": MinMaxUInt8.bagua,
        "int4": Int4,
        "float16": Float16,
        "bfloat16": BFloat16,
    }
)
"""Functions that make codecs, by name."""

_OBJECTS: Mapping[str, tuple[str, Mapping[str, Callable[..., object]]]] = MappingProxyType(
    {
        "algorithm": ("algorithm", NAMED),
        "first": ("algorithm", NAMED),
        "then": ("algorithm", NAMED),
        "average": ("average", AVERAGES),
        "inner": ("average", AVERAGES),
        "inside": ("average", AVERAGES),
        "codec": ("codec", CODECS),
        "residual_codec": ("codec", CODECS),
    }
)
"""Settings whose values are algorithms, averages or codecs, with the tables of their names."""


def from_name(name: str | Mapping[str, Any], **settings: Any) -> Algorithm:
    """Make an algorithm from its name and settings, as a configuration file has them.

    A setting that is an algorithm, an average or a codec is given by its name, by a mapping with "name" and
    settings, or as an object.

    Args:
        name: One of `NAMED`, with hyphens or underscores; or a mapping with "name" and settings.
        settings: The arguments of the algorithm.

    Raises:
        ArrayError: There is no such name or setting, a setting is missing, or its value is out of range.

    >>> from_name("every", n=4, algorithm={"name": "decentralized", "peers": "shift_one"})
    every(4, Decentralized(peers='shift_one'))
    >>> from_name("gradient_allreduce", average={"name": "quantized", "codec": "float16"})
    GradientAllReduce(average=Quantized(codec=Float16(), min_bytes=None))
    """
    if isinstance(name, Mapping):
        settings, name = {**name, **settings}, ""
        name = settings.pop("name", None)
    made: Algorithm = _make("algorithm", NAMED, name, settings)
    return made


def _make(
    kind: str, table: Mapping[str, Callable[..., object]], name: object, settings: Mapping[str, object]
) -> Any:
    """Make the entry of `table` that has this name, with these settings."""
    known = name.lower().replace("_", "-") if isinstance(name, str) else name
    if not isinstance(known, str) or known not in table:
        raise ArrayError(f"from_name: there is no {kind} {shown(name)}{_suggestions(name, table)}")
    parameters = inspect.signature(table[known]).parameters
    for setting in settings:
        if setting not in parameters:
            raise ArrayError(
                f"from_name: {known!r} has no setting {shown(setting)}{_suggestions(setting, parameters)}"
            )
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in settings]
    if missing:
        raise ArrayError(f"from_name: {known!r} needs {' and '.join(map(repr, missing))}")
    arguments = {setting: _value_of(setting, value) for setting, value in settings.items()}
    try:
        return table[known](**arguments)
    except BaguaError:
        raise
    except (TypeError, ValueError) as exc:
        raise ArrayError(f"from_name: {known!r} does not take {arguments}: {exc}") from exc


def _value_of(setting: str, value: object) -> object:
    """The value of a setting; a name, or a mapping with a name, becomes an object."""
    if setting not in _OBJECTS or not isinstance(value, (str, Mapping)):
        return value
    given = {"name": value} if isinstance(value, str) else dict(value)
    return _make(*_OBJECTS[setting], given.pop("name", None), given)


def _suggestions(found: object, names: Iterable[str]) -> str:
    """The end of an error message for a wrong name: a similar name, if there is one, and all valid names."""
    names = sorted(names)
    close = difflib.get_close_matches(str(found).lower().replace("_", "-"), names) or difflib.get_close_matches(
        str(found), names
    )
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint or ';'} expected one of {', '.join(names)}" if names else "; it has no settings"
