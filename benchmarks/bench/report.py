"""Reports: a Markdown file, a figure beside it, and the tables in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .record import Record, listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records in JSON files."""
    return [json.loads(path.read_text()) for path in paths]


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> list[str]:
    """The lines of a table; `align` has "l" or "r" for each column, and by default all are "l".

    >>> markdown_table(["name", "size"], [["a", 1]], "lr")
    ['| name | size |', '| --- | ---: |', '| a | 1 |']
    """
    rule = ["---:" if letter == "r" else "---" for letter in align or "l" * len(titles)]
    return [f"| {' | '.join(map(str, cells))} |" for cells in (titles, rule, *rows)]


def or_dash(value: float | None, form: str) -> str:
    """The value in this format, or a dash where there is none.

    >>> or_dash(0.5, "{:.0%}"), or_dash(None, "{:.0%}")
    ('50%', '-')
    """
    return "-" if value is None else form.format(value)


def machine_of(record: Record) -> str:
    """The machine, the ranks and the versions of a record, in one line."""
    machine = record["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores; {record['ranks']} ranks; {listed(record['versions'])}"


def write_report(
    stem: Path, markdown: Callable[[str | None], str], draw: Callable[[], Figure] | None = None
) -> str:
    """Write STEM.png and STEM.md, and return the text.

    Args:
        stem: The path without an ending.
        markdown: Makes the text, from the name of the figure; from None if there is no figure.
        draw: Makes the figure. Without Matplotlib there is none.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    picture = None
    if draw is not None:
        try:
            figure = draw()
            picture = f"{stem.name}.png"
            figure.savefig(stem.with_name(picture), dpi=max(110, figure.dpi))
            use_palette(stem.with_name(picture))
        except ImportError as exc:
            print(f"# no figure: {exc}", file=sys.stderr)
    text = markdown(picture)
    stem.with_name(f"{stem.name}.md").write_text(text)
    return text


def use_palette(picture: Path) -> None:
    """Reduce a picture to 128 colors, which makes the file of a chart two or three times smaller."""
    from PIL import Image  # Matplotlib needs it, too

    with Image.open(picture) as image:
        image.convert("RGB").quantize(128).save(picture, optimize=True)
