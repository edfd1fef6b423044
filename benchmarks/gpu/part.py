"""Shared by all parts of benchmarks.gpu: their arguments, and the writing of results."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import lines


def part_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that benchmarks.gpu gives to each of its parts."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to append the results")
    parser.add_argument("--under", nargs="+", default=[], metavar="KEY", help="their place in the record")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="make all arrays N times smaller")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="how often each call is timed")
    return parser


class Results(dict[str, Any]):
    """Results that are written to their file, as lines, as soon as they are known. Only rank 0 writes."""

    def __init__(self, path: Path, *, under: Sequence[str] = (), rank: int = 0) -> None:
        super().__init__()
        self._path, self._under = path if rank == 0 else None, under
        self._failed: list[str] = []

    @classmethod
    def of(cls, options: argparse.Namespace, *, rank: int = 0) -> Results:
        """Results that go where the arguments of a part say."""
        return cls(options.out, under=options.under, rank=rank)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self._path is not None:
            lines.append(self._path, [*self._under, name], value)

    @contextlib.contextmanager
    def going_on(self, name: str) -> Iterator[None]:
        """If the body of `with` raises, its error becomes the result `name`, and the program continues."""
        try:
            yield
        except Exception as exc:
            traceback.print_exc()
            self[name] = {"failed": f"{type(exc).__name__}: {exc}"}
            self._failed.append(name)

    def end(self) -> None:
        """Leave the program with exit code 1 if anything has failed."""
        if self._failed:
            sys.exit(f"failed: {', '.join(self._failed)}")
