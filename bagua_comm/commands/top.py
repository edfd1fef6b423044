"""`bagua top`: a live view of a running job, from the files that its processes write.

Show what each rank of a running job does: its step, steps a second, its own work and its waits, bytes, memory,
the call that it is in, and what is wrong: a rank that died, hangs or is slow. In a terminal, s sorts by own work,
w by waits, r by rank; q ends. Ranks write files for it, and need not answer, so it works while they hang.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from collections.abc import Callable, Iterator, Sequence

from ..flight.batches import more, named
from ..launch.cli import CommandError
from ..launch.hosts import is_here, parse_hosts
from ..launch.remote_shell import end, find_remote_shell
from ..live.findings import duration, findings
from ..live.reading import folder_of, is_running, read_job
from ..live.status import LiveError, Status
from ..live.table import Order, lines, size_of

SUMMARY = "show what each rank of a running job does, live"

KEYS: dict[str, Order] = {"r": "rank", "s": "slowest", "w": "waiting"}
"""What keys sort by."""

HELP = "r rank, s slowest, w waiting, q end"

ENDED = "this job has ended"

START_S = 5.0
"""How much longer than its shell another host may take for its first answer, since Python starts there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    parser.add_argument(
        "job",
        nargs="?",
        help="the name of the job, its first characters, or its folder; by default the job that runs here",
    )
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--json", action="store_true", help="as JSON, a line each time")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="how often it looks; 1 by default"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--host",
        metavar="HOST,...",
        help="the other hosts to ask, over ssh or what mpirun uses; by default those of the job",
    )
    where.add_argument("--here", action="store_true", help="ask no other host")


def run(options: argparse.Namespace) -> int:
    """Show the job. The exit code is 1 if it has ended, else 0."""
    draws = not (options.once or options.json) and sys.stdout.isatty()
    if draws:
        _check_rich()
    with contextlib.closing(_View(options)) as view:
        with contextlib.suppress(KeyboardInterrupt):
            if draws:
                _draw(view, options.interval)
            else:
                _print(view, options)
        return 0 if is_running(view.ranks) else 1


class _View:
    """The ranks of a job on all hosts.

    Args:
        options: The arguments of `top`.

    Raises:
        LiveError: There is no such job.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = folder_of(options.job)
        self.ranks = read_job(self.folder)
        first = self.ranks[0]
        given = [host.name for host in parse_hosts(options.host)] if options.host else first.hosts
        others = [] if options.here else [host for host in given if not is_here(host)]
        arguments = [first.job, "--here", "--json", f"--interval={options.interval:g}"]
        self._others = _Others(others, [*arguments, *(["--once"] if options.once else [])])
        if options.once:
            self._others.wait()

    def look(self) -> list[str]:
        """Read the statuses again; returns what keeps it from seeing all ranks."""
        elsewhere, silent = self._others.read()
        mine = read_job(self.folder)
        here = {each.process for each in mine}
        self.ranks = sorted(
            [*mine, *(each for each in elsewhere if each.process not in here)], key=lambda each: each.rank
        )
        known = {each.rank for each in self.ranks}
        missing = sorted(set(range(size_of(self.ranks))) - known)
        return [*silent, *([f"nothing is known of {named(missing)}{self._where()}"] if missing else [])]

    def _where(self) -> str:
        hosts = self.ranks[0].hosts
        return (
            f", which may be on another host: {', '.join(hosts[:8])}{more(hosts[8:])}" if len(hosts) > 1 else ""
        )

    def close(self) -> None:
        """End what was started on other hosts."""
        self._others.close()


class _Others:
    """The same command on other hosts, each of which prints a line of JSON now and then."""

    def __init__(self, hosts: Sequence[str], arguments: Sequence[str]) -> None:
        self._shell = find_remote_shell([])
        command = shlex.join([sys.executable, "-m", "bagua_comm", "top", *arguments])
        self._processes = {host: self._shell.start(host, command) for host in hosts}
        self._latest: dict[str, tuple[float, list[Status]]] = {}
        self._due_s = time.monotonic() + self._shell.answer_s + START_S
        self._threads = [threading.Thread(target=self._follow, args=(host,), daemon=True) for host in hosts]
        for thread in self._threads:
            thread.start()

    def _follow(self, host: str) -> None:
        process = self._processes[host]
        if process is not None and process.stdout is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError, LiveError):
                for line in process.stdout:
                    ranks = [Status.from_dict(each) for each in json.loads(line)["ranks"]]
                    self._latest[host] = time.monotonic(), ranks

    def wait(self) -> None:
        """Wait until all hosts have answered, or cannot any more, for some seconds."""
        for thread in self._threads:
            thread.join(max(0.0, self._due_s - time.monotonic()))

    def read(self) -> tuple[list[Status], list[str]]:
        """The statuses of other hosts, and a line for each host that does not answer."""
        ranks, silent, now_s = [], [], time.monotonic()
        for host, process in self._processes.items():
            heard_s, found = self._latest.get(host, (None, []))
            ranks += found
            over = process is None or process.poll() is not None or now_s > self._due_s
            if heard_s is None and over:
                silent.append(
                    f"{host} does not answer: see that `{' '.join(self._shell.words)} {host} true` works"
                )
            elif heard_s is not None and found and is_running(found) and now_s - heard_s > START_S:
                silent.append(f"{host} has not answered for {duration(now_s - heard_s)}")
        return ranks, silent

    def close(self) -> None:
        """End the commands."""
        end(self._processes.values())


def _print(view: _View, options: argparse.Namespace) -> None:
    """Print the job once, or every now and then until it ends."""
    width = shutil.get_terminal_size((1000, 24)).columns
    while True:
        problems = view.look()
        if options.json:
            ranks = [each.as_dict() for each in view.ranks]
            told = [*findings(view.ranks), *problems]
            found = {
                "job": view.ranks[0].job,
                "running": is_running(view.ranks),
                "problems": told,
                "ranks": ranks,
            }
            print(json.dumps(found), flush=True)
        else:
            print("\n".join(_picture(view, width, "rank", problems)), flush=True)
        if options.once or not is_running(view.ranks):
            return
        time.sleep(options.interval)
        print(end="" if options.json else "\n")


def _picture(view: _View, width: int, order: Order, problems: Sequence[str]) -> list[str]:
    """The lines of the job, which say so if it has ended."""
    return lines(view.ranks, width, order, [*problems, *([] if is_running(view.ranks) else [ENDED])])


def _draw(view: _View, interval_s: float) -> None:
    """Draw the job in the terminal until q is pressed, also where it has ended; then print the last picture."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, order, key, picture = Console(), KEYS["r"], "", list[str]()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the terminal is left in order
    try:
        with _keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as screen:
            while key != "q":
                picture = _picture(view, console.width, order, view.look())
                text = "\n".join([*picture[: console.height - 1], HELP])
                screen.update(Text(text, no_wrap=True), refresh=True)
                key = read_key(interval_s)
                order = KEYS.get(key, order)
    finally:
        print("\n".join(picture))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key for some seconds; the terminal is as before after that."""

    def read(seconds: float) -> str:
        pressed = select.select([sys.stdin], [], [], seconds)[0]
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if pressed else ""

    def none(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    if not sys.stdin.isatty():
        yield none
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield read
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _check_rich() -> None:
    """Raise `CommandError` if the package that draws in a terminal is missing."""
    if importlib.util.find_spec("rich") is None:
        raise CommandError("a live view needs the package rich: pip install 'bagua-comm[top]'; --once needs none")


def _seconds(text: str) -> float:
    """Parse a time, as "0.5"."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a time from 0.1 to 3600 s; expected e.g. 2")
    return seconds
