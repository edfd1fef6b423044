"""Figures of `--plot`, by matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..launch.cli import CommandError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> Figure:
    """Make a figure of this size, in inches.

    Raises:
        CommandError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise CommandError("--plot needs matplotlib: pip install matplotlib") from exc
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file, in the format that the end of its name says.

    Raises:
        CommandError: The file cannot be written, or there is no such format.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise CommandError(f"--plot {path}: {exc}") from exc
