"""Texts of keys and values: complete for identification, shortened for messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain

_COMPARED = 2000
"""The longest text that ranks compare as it is; of a longer one they compare the ends and a digest."""
_SHOWN = 80
"""Characters of each of two texts in a message."""
_PATH = 400
"""Characters of a path in a message."""


def distinct(values: Iterable[object]) -> list[str]:
    """A distinct text for each key of a dict.

    >>> distinct(["a", 1, float("nan"), float("nan")])
    ["'a'", '1', 'nan', 'nan#2']
    """
    found: dict[str, int] = {}  # text -> number of keys
    for value in values:
        text = unlike = whole(value)
        while unlike in found:
            found[text] += 1
            unlike = f"{text}#{found[text]}"
        found[unlike] = 1
    return list(found)


def whole(value: object) -> str:
    """The repr of `value`, also of an integer with more digits than Python converts."""
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, tuple):
            return f"({', '.join(map(whole, value))},)"
        return hex(value) if isinstance(value, int) else object.__repr__(value)


def compared(text: str) -> str:
    """A text that ranks compare in place of `text`: not much longer than `_COMPARED`, and distinct."""
    if len(text) <= _COMPARED:
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    half = _COMPARED // 2
    return f"{text[:half]}...{text[-half:]} ({len(text)} characters, {digest})"


def apart(mine: str, other: str) -> tuple[str, str]:
    """Two different texts, for a message: if one is long, the surroundings of the first difference.

    >>> apart("short", "shore")
    ('short', 'shore')
    >>> [len(text) for text in apart("a" * 500 + "x" + "b" * 500, "a" * 500 + "y" + "b" * 500)]
    [86, 86]
    """
    if max(len(mine), len(other)) <= _SHOWN:
        return mine, other
    pairs = enumerate(zip(chain(mine, [None]), chain(other, [None]), strict=False))
    first = next((n for n, (a, b) in pairs if a != b), 0)
    begin = max(0, first - _SHOWN // 2)
    return _part(mine, begin), _part(other, begin)


def _part(text: str, begin: int) -> str:
    end = begin + _SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def shortened(path: str) -> str:
    """A path for a message: without its middle if it is very long."""
    return path if len(path) <= _PATH else f"{path[: _PATH // 2]}...{path[-_PATH // 2 :]}"
