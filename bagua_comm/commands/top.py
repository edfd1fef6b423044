"""`bagua top`: a live view of a running job, from the files that its processes write.

Show what each rank of a running job does: its step, steps a second, its own work and its waits, bytes, memory,
the call that it is in, and what is wrong: a rank that died, hangs or is slow. In a terminal, s sorts by own work,
w by waits, r by rank; q ends. Ranks write files for it, and need not answer, so it works while they hang.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import select
import shlex
import shutil
import signal
import sys
import termios
import threading
import time
import tty

from ..flight.batches import named
from ..launch.cli import CommandError
from ..launch.hosts import is_here, parse_hosts
from ..launch.remote_shell import end, find_remote_shell
from ..live.findings import findings
from ..live.reading import folder_of, read_job
from ..live.status import Status, is_running
from ..live.table import Order, lines, size_of

SUMMARY = "show what each rank of a running job does, live"

KEYS: dict[str, Order] = {"r": "rank", "s": "slowest", "w": "waiting"}
"""What keys sort by."""

HELP = "r rank, s slowest, w waiting, q end"

INTERVAL_S = 1.0
"""Seconds between two looks."""

START_S = 5.0
"""How much longer than its shell another host may take to answer, since Python starts there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    parser.add_argument(
        "job", nargs="?", help="the name of the job, or its folder; by default the job of yours that runs here"
    )
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--json", action="store_true", help="as JSON, a line every second")
    parser.add_argument(
        "--host",
        metavar="HOST,...",
        help="the other hosts to ask, by ssh or what mpirun uses: by default all of the job; localhost for none",
    )


def run(options: argparse.Namespace) -> int:
    """Show the job. The exit code is 1 if it has ended, else 0."""
    with contextlib.closing(_View(options)) as view:
        with contextlib.suppress(KeyboardInterrupt):
            if options.once or options.json or not (sys.stdout.isatty() and sys.stdin.isatty()):
                _print(view, once=options.once, as_json=options.json)
            else:
                _draw(view)
        return 0 if is_running(view.ranks) else 1


class _View:
    """The ranks of a job on all hosts. On others, the same command prints them as JSON.

    Args:
        options: The arguments of `top`.

    Raises:
        LiveError: There is no such job.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder = folder_of(options.job)
        self.ranks = read_job(self._folder)
        first, self._shell = self.ranks[0], find_remote_shell([])
        words = [sys.executable, "-m", "bagua_comm", "top", first.job, "--json", "--host", "localhost"]
        command = shlex.join([*words, *(["--once"] if options.once else [])])
        hosts = [host.name for host in parse_hosts(options.host or first.hosts) if not is_here(host.name)]
        self._processes = {host: self._shell.start(host, command) for host in hosts}
        self._heard: dict[str, tuple[float, list[Status]]] = dict.fromkeys(hosts, (time.monotonic(), []))
        follow = functools.partial(threading.Thread, target=self._follow, daemon=True)
        self._threads = {host: follow(args=(host,)) for host in hosts}
        for thread in self._threads.values():
            thread.start()
        for thread in self._threads.values() if options.once else ():
            thread.join(self._shell.answer_s + START_S)

    def _follow(self, host: str) -> None:
        """Read what the command prints on a host."""
        process = self._processes[host]
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            for line in process.stdout if process is not None and process.stdout is not None else ():
                ranks = [Status.from_dict(each) for each in json.loads(line)["ranks"]]
                self._heard[host] = time.monotonic(), ranks

    def look(self) -> list[str]:
        """Read the statuses again; returns what keeps it from seeing all ranks."""
        ranks, problems = {(each.process, each.rank): each for each in read_job(self._folder)}, []
        for host, (heard_s, found) in self._heard.items():
            ranks = {(each.process, each.rank): each for each in found} | ranks
            is_lost = is_running(found) and time.monotonic() - heard_s > START_S
            if is_lost or not (found or self._threads[host].is_alive()):
                problems.append(f"{host} does not answer; does `{shlex.join(self._shell.words)} {host} true`?")
        self.ranks = sorted(ranks.values(), key=lambda each: each.rank)
        if missing := sorted(set(range(size_of(self.ranks))) - {each.rank for each in self.ranks}):
            problems.append(f"nothing is known of {named(missing)}; the hosts are {self.ranks[0].hosts}")
        return problems

    def close(self) -> None:
        """End what was started on other hosts."""
        end(self._processes.values())


def _print(view: _View, *, once: bool, as_json: bool) -> None:
    """Print the job once, or every second until it ends."""
    width = shutil.get_terminal_size((1000, 24)).columns
    while True:
        problems = view.look()
        if as_json:
            told, ranks = [*findings(view.ranks), *problems], [each.as_dict() for each in view.ranks]
            found = {"job": ranks[0]["job"], "running": is_running(view.ranks), "problems": told, "ranks": ranks}
            print(json.dumps(found), flush=True)
        else:
            print("\n".join(lines(view.ranks, width, "rank", problems)), flush=True)
        if once or not is_running(view.ranks):
            return
        time.sleep(INTERVAL_S)


def _draw(view: _View) -> None:
    """Draw the job in the terminal until q is pressed, also after it has ended; then print the last picture."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        text = "a live view needs the package rich: pip install 'bagua-comm[top]'; --once needs none"
        raise CommandError(text) from None
    console, order, key, picture = Console(), KEYS["r"], "", list[str]()
    before = termios.tcgetattr(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is left in order
    try:
        tty.setcbreak(sys.stdin)
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while key != "q":
                picture = lines(view.ranks, console.width, order, view.look())
                text = "\n".join([*picture[: console.height - 1], HELP])
                screen.update(Text(text, no_wrap=True), refresh=True)
                pressed = select.select([sys.stdin], [], [], INTERVAL_S)[0]
                key = os.read(sys.stdin.fileno(), 1).decode(errors="replace") if pressed else ""
                order = KEYS.get(key, order)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        print("\n".join(picture))
