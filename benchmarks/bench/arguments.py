"""Types of command-line arguments: sizes, lists, names, and the sweep over sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """A positive number of bytes, with a binary suffix as in nccl-tests.

    Raises:
        argparse.ArgumentTypeError: `text` is not a size.

    >>> [parse_size(text) for text in ("8", "4K", "64M", "1G")]
    [8, 4096, 67108864, 1073741824]
    """
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected for example 8, 4K, 64M or 1G")
    return int(digits) * unit


def format_size(nbytes: int) -> str:
    """A number of bytes, as `parse_size` reads it.

    >>> format_size(10 * 2**20), format_size(1536)
    ('10M', '1536')
    """
    for suffix, unit in reversed(_SUFFIXES.items()):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer >= `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
        return int(text)

    return parse


def one_of(known: Collection[str], what: str) -> Callable[[str], str]:
    """The type of an argument that is a name among `known`; `what` is its noun in messages.

    >>> one_of(["exact", "bytegrad"], "algorithm")("exakt")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: there is no algorithm 'exakt'; expected one of exact, bytegrad
    """

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"there is no {what} {text!r}; expected one of {', '.join(known)}")
        return text

    return parse


def comma_list(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """The type of an argument that is a list with commas, whose parts `parse` reads.

    >>> comma_list(int)("1,2,3"), comma_list(int)("")
    ([1, 2, 3], [])
    """
    return lambda text: [parse(part) for part in text.split(",")] if text else []


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a sweep over sizes, with the letters of nccl-tests, and `--json`."""
    positive = at_least(1)
    parser.add_argument("-b", "--minbytes", type=parse_size, default="8", help="smallest size")
    parser.add_argument("-e", "--maxbytes", type=parse_size, default="64M", help="largest size")
    parser.add_argument("-f", "--stepfactor", type=at_least(2), default=4, help="factor between two sizes")
    parser.add_argument("-n", "--iters", type=positive, default=20, help="timed calls per size")
    parser.add_argument("-w", "--warmup_iters", type=at_least(0), default=5, help="untimed calls before them")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`, where the record goes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")


def add_out_argument(parser: argparse.ArgumentParser, default: Path, *endings: str) -> None:
    """Add `--out STEM`, where a report goes: STEM with each of the endings."""
    files = ", ".join(f"STEM.{ending}" for ending in endings)
    parser.add_argument("--out", type=Path, default=default, metavar="STEM", help=f"write {files}")


def sweep(first: int, last: int, factor: int) -> list[int]:
    """The sizes from `first` to `last`, each `factor` times the one before.

    >>> sweep(8, 1024, 4)
    [8, 32, 128, 512]
    """
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= factor
    return sizes
