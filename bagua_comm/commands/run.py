"""`bagua run`: start ranks by mpirun, or print or write the command instead.

Start a Python script on several ranks by mpirun. With Open MPI every rank also gets RANK, WORLD_SIZE, LOCAL_RANK
and LOCAL_WORLD_SIZE, and MASTER_ADDR and MASTER_PORT if the first host is known, so that Accelerate, Transformers
and torch.distributed find the ranks. Variables that are set are not changed.

The process becomes mpirun, so signals and the exit code are mpirun's. With spares or restarts, it supervises
mpirun.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

from ..bootstrap import launchers
from ..bootstrap.environment import own_variables
from ..flight import FlightError, read_folder
from ..flight.recorder import default_folder
from ..launch import job_scripts
from ..launch import measure_links as links
from ..launch.cli import CommandError, natural, positive, program_name
from ..launch.hosts import is_supervised, named_hosts, ranks_of
from ..launch.mpirun import Mpirun, ask_mpirun, find_mpirun
from ..launch.plan import make_plan, stays_here
from ..launch.stderr_filter import AtEnd, Death, filter_stderr
from ..launch.supervisor import supervise
from ..net.choosing import Net

SUMMARY = "start a Python script on several ranks"


SUPERVISION: dict[str, tuple[Callable[[str], object], str, str]] = {
    "--spares": (natural, "S", "start S more ranks as spares; one replaces a rank that dies (implies --ulfm)"),
    "--restarts": (natural, "N", "restart mpirun up to N times when ranks or hosts are lost (implies --ulfm)"),
    "--min-ranks": (positive, "M", "with --spares or --restarts: end if fewer than M ranks can train (1)"),
    "--record": (str, "FILE", "with --spares or --restarts: write a line of JSON for each event there"),
}
"""The options of supervision: the parser and the name of the value, and the help."""

FLAGS = {
    "--ulfm": "let the other ranks continue when one dies: they get RankFailed, and call shrink() (Open MPI)",
    "-v --verbose": "print the command, with a reason for each part, and Open MPI's paragraphs on MPI_Abort",
    "--dry-run": "print the command instead, as a line for a shell; the values of --env are hidden",
    "--force": "let --write replace a file",
}
"""The options without a value, and their help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument(
        "-n",
        "-np",
        "--ranks",
        type=positive,
        metavar="N",
        help="how many ranks; by default one for each slot of the hosts or of a scheduler's allocation, or for "
        "each core here",
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--host", metavar="LIST", help="hosts to run on: node1:4,node2:4 for 4 ranks on each")
    hosts.add_argument("--hostfile", metavar="FILE", help="a file with one host on each line: node1 slots=4")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="an environment variable for all ranks; without a value, the one in this environment",
    )
    parser.add_argument("--interface", metavar="NAME", help="the network to use, for MPI, gloo and NCCL: eth0")
    parser.add_argument(
        "--links",
        type=links.number_or_auto,
        metavar="N",
        help="TCP connections between two ranks on different hosts (Open MPI; 1); auto: measure the best number",
    )
    parser.add_argument(
        "--net",
        choices=get_args(Net),
        help="the network of NCCL between hosts: our plugin, which uses many TCP connections; NCCL's own; "
        "or, with auto, the plugin if it can be built and there are several hosts",
    )
    parser.add_argument(
        "--mpirun", action="append", default=[], metavar="ARG", help="one more argument for mpirun"
    )
    for name, (kind, value, text) in SUPERVISION.items():
        parser.add_argument(name, type=kind, metavar=value, help=text)
    for names, text in FLAGS.items():
        parser.add_argument(*names.split(), action="store_true", help=text)
    parser.add_argument(
        "--write",
        nargs=2,
        metavar=("KIND", "FILE"),
        help=f"write the same job for a cluster instead; KIND is {job_scripts.KIND}, and FILE may be -",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)


WAIT_S = 5.0
"""How long a rank must have been in a call for `run` to mention it when the job was ended."""


def run(options: argparse.Namespace) -> int:
    """Start the ranks; returns only for `--dry-run` and `--write`.

    Raises:
        CommandError: The arguments exclude each other, or there is no mpirun.
    """
    if not options.module and not Path(options.script).is_file():
        name = Path(options.script).name.rstrip("0123456789.")
        advice = "; leave it out: run itself starts Python" if name == "python" else ""
        if options.script == "bagua":
            advice = f"; a command of it runs as a module: {program_name()} run -n 2 -m bagua_comm doctor"
        raise CommandError(f"there is no file {options.script}{advice}")
    _check_supervision(options)
    if options.write:
        _write_script(options)
        return 0
    if options.force:
        raise CommandError("--force is for --write")
    if options.ranks is None and {"-n", "-np", "--ranks"} & set(options.args):
        print(
            f"{program_name()} run: -n after {options.script} is an argument of the script; to set the number of "
            f"ranks, put it before: {program_name()} run -n 2 {options.script}",
            file=sys.stderr,
        )
    if not options.dry_run:
        _check_alone(options.script)
    mpirun = find_mpirun()
    if mpirun is None:
        raise CommandError("there is no mpirun; pip install 'bagua-comm[mpi]' brings Open MPI", exit_code=127)
    known = ask_mpirun(mpirun)
    if options.links == links.AUTO:
        options.links = _measured_links(options, known)
    plan = make_plan(options, known)
    if options.verbose:
        print(*plan.lines(), sep="\n", file=sys.stderr)
    if options.dry_run:
        print(plan.shell())
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    with _named_run():
        if known.is_open_mpi and not options.verbose:
            filter_stderr(_note_on_records(explain_deaths=not (options.ulfm or is_supervised(options))))
        if is_supervised(options):
            return supervise(options, lambda placement, job: make_plan(options, known, placement, job))
        return os.execve(mpirun, plan.command, {**os.environ, **plan.variables})


@contextmanager
def _named_run() -> Iterator[None]:
    """Give this run a name in the environment of all that it starts."""
    os.environ["BAGUA_RUN"] = secrets.token_hex(3)
    try:
        yield
    finally:
        del os.environ["BAGUA_RUN"]


def _check_alone(script: str) -> None:
    """Refuse to start a job in each process of another one, as in `mpirun -n 2 bagua run script.py`.

    Raises:
        CommandError: A launcher has started this process as one of many.
    """
    launch = launchers.find(own_variables())
    if launch is not None and launch.is_one_of_many and launch.launcher is not launchers.TORCHRUN:
        raise CommandError(
            f"{launch.launcher.name} has started this process as rank {launch.rank} already, and run would start "
            f"a whole job in each rank; leave out one of the two: mpirun -n 2 python {script}, or "
            f"{program_name()} run -n 2 {script}"
        )


def _note_on_records(*, explain_deaths: bool) -> AtEnd | None:
    """The function that returns a note on the records which the ranks of this job leave; None if they leave none.

    The note says how to diagnose a death, unless ranks survive those, and a job that was ended, for instance by
    Ctrl-C, while a rank had long been in a call. It is empty if there are no records on this host.
    """
    folder = os.environ.get("BAGUA_FLIGHT_FOLDER") or default_folder()
    if not folder:
        return None
    before, mine = set(Path(folder).glob("*/")), f"-run{os.environ.get('BAGUA_RUN', '')}"

    def note(death: Death | None) -> str:
        new = sorted(set(Path(folder).glob("*/")) - before)  # jobs that ran at the same time wrote there, too
        jobs = [job for job in new if job.name.endswith(mine)]
        jobs = jobs or [job for job in new if "-run" not in job.name]  # ranks on other hosts do not get the name
        command = " or ".join(f"{program_name()} diagnose {shlex.quote(str(job))}" for job in jobs)
        if death is not None and explain_deaths:
            if death.exit_code:
                ended = f"rank {death.rank} has ended with exit code {death.exit_code}, and all ranks with it"
                return f"{ended}; for what the others did: {command}\n" if command else ""
            return f"for what ranks other than {death.rank} on {death.host} did: {command}\n" if command else ""
        waits = next(filter(None, map(_wait_at_the_end, jobs)), "")
        return f"the job was ended while {waits}; for what all ranks did: {command}\n" if waits else ""

    return note


def _wait_at_the_end(job: Path) -> str:
    """The rank that had been longest in its call when the job was ended.

    Empty if none had been for `WAIT_S`, or after an error, which has been printed.
    """
    with suppress(FlightError):
        records = read_folder(job)
        waits = [(wait[1], record.who, wait[0]) for record in records if (wait := record.open_call()) is not None]
        if waits and not any(record.failures or record.left for record in records):
            seconds, who, call = max(waits)
            return f"{who} had waited in {call} for {seconds:.0f} s" if seconds > WAIT_S else ""
    return ""


def _write_script(options: argparse.Namespace) -> None:
    """Write the script of `--write`.

    Raises:
        CommandError: The arguments exclude each other, or the file exists or cannot be written.
    """
    kind, file = options.write
    text = job_scripts.job_script(options, kind, file)
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        with open(file, "w" if options.force else "x", encoding="utf-8", errors="surrogateescape") as out:
            out.write(text)
    except FileExistsError:
        raise CommandError(f"--write: {file} is there already; --force replaces it") from None
    except OSError as exc:
        raise CommandError(f"--write {file}: {exc}") from exc


def _measured_links(options: argparse.Namespace, mpirun: Mpirun) -> int | None:
    """The result of `--links auto`. Starts ranks.

    Raises:
        CommandError: The measurement is not possible.
    """
    mpirun.must_be_open_mpi("--links")
    if options.dry_run:
        raise CommandError("--links auto starts ranks to measure, and --dry-run starts nothing: give a number")
    alone = stays_here(mpirun, options.mpirun)
    return links.measure(options, alone, lambda trial, placement: make_plan(trial, mpirun, placement))


def _check_supervision(options: argparse.Namespace) -> None:
    """Raise `CommandError` if the arguments of supervision exclude each other."""
    for flag, given in (("--min-ranks", options.min_ranks), ("--record", options.record)):
        if given is not None and not is_supervised(options):
            raise CommandError(f"{flag} is for --spares and --restarts; --restarts 0 supervises without restarts")
    if is_supervised(options):
        ranks_of(options, named_hosts(options))
    if options.record is not None and not Path(options.record).absolute().parent.is_dir():
        raise CommandError(f"--record {options.record}: there is no folder {Path(options.record).parent}")
