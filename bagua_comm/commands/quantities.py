"""Numbers and quantities with units, read from the arguments of a command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..planning.costmodel.inputs import LARGEST

_BANDWIDTHS = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
_RATE = re.compile(
    r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([kmgtKMGT])(i(?=[bB]))?([a-zA-Z]*(?:/s|/sec)?)\s*"
)
"""A number, a prefix, "i" where it is a power of 1024, and a unit."""
_BITS = re.compile(r"(bits?|Bits?|BITS?)(/s|/sec|ps)?|bps|b/s")
_BYTES = re.compile(r"(B|[Bb]ytes?|BYTES?)(/s|/sec|ps)?")
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_SIZES = {"": 1.0}
for _power, _letter in enumerate("kmg", 1):
    _SIZES |= {_letter: 1e3**_power, f"{_letter}b": 1e3**_power, f"{_letter}ib": 1024.0**_power}


def bandwidth(text: str) -> float:
    """Gbit/s, from a text such as "10gbit", "500mbit", "10 Gbit/s", "10 Gb/s" or "10gbps".

    An error says what bytes are in bits, and that "gb" and "gb/s" may be either.
    """
    match = _RATE.fullmatch(text)
    if match is not None and float(match[1]) < LARGEST:
        number, prefix, unit = float(match[1]), match[2].lower(), match[4]
        binary = 1.024 ** ("kmgt".index(prefix) + 1) if match[3] else 1.0
        if _BYTES.fullmatch(unit):
            same = f"{8 * binary * number:.6g}{prefix}bit"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is in bytes, expected bits; that is {same}")
        if unit in ("", "b", "b/s") and not (unit == "b/s" and match[2].isupper()):
            guesses = f"{binary * number:.6g}{prefix}bit, or {8 * binary * number:.6g}{prefix}bit"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} may be in bits or in bytes; {guesses}?")
        if _BITS.fullmatch(unit):
            text = f"{binary * number if match[3] else match[1]}{prefix}bit"
    return _bandwidth(text)


@dataclass(frozen=True, eq=False)
class Quantity:
    """Parses a number with one of `units`; the result is in the unit that is 1."""

    what: str
    """What it is, with its article."""
    units: Mapping[str, float]
    """The units, with their values; "" if there may be none."""
    examples: str
    """Texts that would be right."""
    likely: Sequence[str] = ()
    """The units that a number without one may have been meant in. Zero needs none."""
    least: float | None = None
    """The smallest value; if None, any above zero."""

    def __call__(self, text: str) -> float:
        """Return the value of a text."""
        return self.value(text, self.likely)

    def value(self, text: str, likely: Sequence[str]) -> float:
        """Return the value of a text, which needs a unit if some are `likely`."""
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*(?:/s)?)\s*", text.lower())
        try:
            if match is None:
                raise ValueError
            value, unit = float(match[1]), match[2]
            if likely and not unit and value:
                guesses = " or ".join(f"{match[1][:40]}{each}" for each in likely)
                raise argparse.ArgumentTypeError(f"{text[:40]!r} has no unit; {guesses}?")
            value *= self.units[unit] if unit or not likely else 1.0
        except (ValueError, KeyError):
            raise self._error(text, "is not") from None
        if value < (self.least or 0) or (value == 0 and self.least is None):
            raise self._error(text, "is too small for")
        if value > LARGEST:
            raise self._error(text, "is too large for")
        return value

    def _error(self, text: str, problem: str) -> argparse.ArgumentTypeError:
        return argparse.ArgumentTypeError(f"{text[:40]!r} {problem} {self.what}; expected e.g. {self.examples}")


@dataclass(frozen=True, eq=False)
class Whole(Quantity):
    """Parses a whole number of at least 1, with a unit or without.

    A fraction needs a unit: "1.5" is a forgotten one, not a number of bytes. So does a number below `plain_from`.
    """

    least: float | None = 1
    plain_from: float = 0

    def __call__(self, text: str) -> int:
        """Return the value of a text."""
        fraction = re.fullmatch(r"\s*[0-9]*\.[0-9]*[1-9][0-9]*\s*", text) is not None
        plain = re.fullmatch(r"\s*[0-9]+\s*", text) is not None and float(text) < self.plain_from
        return round(self.value(text, self.likely if fraction or plain else ()))


seconds = Quantity("a time", _TIMES, "1.2s, 300ms or 50us", ("ms", "s"), least=0)
latency = Quantity("a time", _TIMES, "50us or 1ms", ("us", "ms"), least=0)
number = Quantity("a number", {"": 1.0}, "2 or 0.5", least=0)
size_in_bytes = Whole("a size", _SIZES, "553M, 1.2G or 512KiB", ("M", "G"))
parameters = Whole("a number of parameters", _COUNTS, "124M, 1.5B or 7087872", ("M", "B"))

model_bytes, model_parameters = (replace(each, plain_from=10_000) for each in (size_in_bytes, parameters))
"""A model has more bytes, and more parameters, than 10,000: a small number without a unit is a forgotten unit."""

_bandwidth = Quantity("a bandwidth", _BANDWIDTHS, "10gbit or 500mbit", ("mbit", "gbit"))
_work = Quantity("work", _COUNTS, "0 or 1.5M", least=0)


def layers(text: str) -> list[tuple[int, int, float]]:
    """(count, parameters, work) of groups of equal layers, from a text such as "38.6M:0,12x7.1M,1536".

    The work of a layer is relative to that of the others; by default it is its number of parameters.
    """
    found: list[tuple[int, int, float]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:([1-9][0-9]{0,5})x)?([^x:]+)(?::([^:]+))?", part)
        if match is None:
            raise argparse.ArgumentTypeError(
                f"{part[:40]!r} is not [COUNTx]PARAMETERS[:WORK]; expected e.g. 12x7.1M or 38.6M:0"
            )
        held = parameters(match[2])
        work = float(held) if match[3] is None else _work(match[3])
        found.append((int(match[1] or 1), held, work))
    return found


def duration(value: float) -> str:
    """A time in seconds, as people read it.

    >>> duration(0.0123), duration(2)
    ('12.3 ms', '2.00 s')
    """
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
