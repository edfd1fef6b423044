"""Texts of keys and values. Texts that identify something are whole; texts in messages may be short."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain

_COMPARED = 2000
"""Characters of a text that ranks send each other to compare; of a longer one, its ends and a digest."""
_SHOWN = 80
"""Characters of each of two texts in a message."""
_PATH = 400
"""Characters of a path in a message."""


def distinct(values: Iterable[object]) -> list[str]:
    """A text for each of the keys of a dict, in which no other key has the same.

    >>> distinct(["a", 1, float("nan"), float("nan")])
    ["'a'", '1', 'nan', 'nan#2']
    """
    found: dict[str, int] = {}  # by text: how many keys have it
    for value in values:
        text = unlike = whole(value)
        while unlike in found:
            found[text] += 1
            unlike = f"{text}#{found[text]}"
        found[unlike] = 1
    return list(found)


def whole(value: object) -> str:
    """`value` as Python writes it, also where it is an integer with more digits than Python writes."""
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, tuple):
            return f"({', '.join(map(whole, value))},)"
        return hex(value) if isinstance(value, int) else object.__repr__(value)


def compared(text: str) -> str:
    """What ranks send each other of `text`: differs if it differs, and is not much longer than `_COMPARED`."""
    if len(text) <= _COMPARED:
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    half = _COMPARED // 2
    return f"{text[:half]}...{text[-half:]} ({len(text)} characters, {digest})"


def apart(mine: str, other: str) -> tuple[str, str]:
    """Two texts that differ, for a message: where one is long, what lies around the first difference.

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


def place(path: str) -> str:
    """A path for a message: a very long one without its middle."""
    return path if len(path) <= _PATH else f"{path[: _PATH // 2]}...{path[-_PATH // 2 :]}"
