"""Tables on the screen, in the form of nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column: its title and unit, and its group."""

    title: str
    unit: str = ""
    width: int = 6
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells, right-aligned under their columns; lines above the rows begin with `#`."""

    columns: tuple[Column, ...]

    def header(self) -> list[str]:
        """The groups, the titles and the units."""
        lines = [
            self._groups(),
            self.row([column.title for column in self.columns]),
            self.row([column.unit for column in self.columns]),
        ]
        return ["#", *(f"#{line[1:]}".rstrip() for line in lines)]

    def row(self, cells: Sequence[str]) -> str:
        """One line."""
        pairs = zip(self.columns, cells, strict=True)
        return "  ".join(f"{cell:>{column.width}}" for column, cell in pairs)

    def _groups(self) -> str:
        parts: list[tuple[str, int]] = []
        for column in self.columns:
            if parts and parts[-1][0] == column.group:
                parts[-1] = (column.group, parts[-1][1] + 2 + column.width)
            else:
                parts.append((column.group, column.width))
        return "  ".join(f"{name:^{width}}" for name, width in parts)


def number(value: float) -> str:
    """A number with at most two decimals, and no more than fit into seven characters.

    >>> number(3.14159), number(31415.9), number(3141592.6)
    ('3.14', '31415.9', '3141593')
    """
    decimals = 2 if value < 1e4 else 1 if value < 1e5 else 0
    return f"{value:.{decimals}f}"
