"""`bagua trace`: where the time of training steps went, from a file of `Communicator.trace`.

Show where the time of training steps went: passes, optimizer, waits for exchanges, the share of communication
that is hidden, the slowest rank, and each bucket; and what to change. The file is one that `Communicator.trace`
has written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from ..launch.cli import CommandError
from ..timeline.advice import advise
from ..timeline.page import make_page
from ..timeline.reading import read_timeline
from ..timeline.summary import summarize
from ..timeline.text import describe

SUMMARY = "show where the time of training steps went, from a timeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace`."""
    parser.add_argument("file", type=Path, help="the file that Communicator.trace has written")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="PAGE", help="also write a page to look at in a browser, without a network"
    )


def run(options: argparse.Namespace) -> int:
    """Print the summary. The exit code is 1 if the file is damaged, or has neither steps nor calls; else 0."""
    timeline = read_timeline(options.file)
    summary = summarize(timeline)
    advice = advise(summary)
    if options.html is not None and options.html.exists() and options.html.samefile(options.file):
        raise CommandError(
            f"--html {options.html}: that is the timeline itself; expected another file for the page"
        )
    if options.html is not None:
        try:
            page = make_page(timeline, summary, advice, title=options.file.name)
            options.html.write_text(page, encoding="utf-8")
        except OSError as exc:
            raise CommandError(f"--html {options.html}: {exc.strerror or exc}") from exc
        print(f"wrote {options.html}", file=sys.stderr)  # so that JSON stays alone
    if options.json:
        print(json.dumps({**dataclasses.asdict(summary), "notes": timeline.notes, "advice": advice}, indent=2))
    else:
        print(describe(summary, timeline.notes, advice))
    return 0 if (summary.ranks or summary.calls) and not timeline.notes else 1
