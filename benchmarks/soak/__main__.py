"""Train for an hour, and disturb it all the time: processes are killed and stopped, links are slow and are cut.

    python -m benchmarks.soak --minutes 60 --out benchmarks/results/soak
    python -m benchmarks.soak --minutes 3 --every 8

The training runs under `bagua run --spares --restarts` on two emulated hosts, so dead
processes are replaced by spares, and by new starts of mpirun. It fails if a minute passes
without a step, if the memory, threads or descriptors of a process or the files in /dev/shm grow, if something is
left behind, or if a commit or the end has other bytes than an undisturbed training. This needs root
(benchmarks.netlab).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bagua_comm.bootstrap.job import entries
from bagua_comm.launch.verdict import deaths

from .. import netlab
from ..bench.arguments import at_least
from ..bench.record import begin_record, header_lines, write_json
from ..bench.report import write_report
from ..faults.__main__ import write_digits
from . import job, report
from .resources import Limit


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if nothing is wrong."""
    options = parse_arguments(argv)
    record = begin_record("soak", options, packages=["mpi4py"]) | {"ranks": job.RANKS}
    print(*header_lines(record), sep="\n", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder, netlab.build(job.HOSTS, job.RATE) as lab:
            data, entries_file = write_digits(Path(folder, "digits.npz")), Path(folder, "record")
            seconds = options.minutes * 60
            how = {"seconds": seconds, "seed": options.seed, "every_s": options.every, "least": options.min_ranks}
            seen = job.soak(lab, data, entries_file, **how)
            expected = job.undisturbed(data, seen.last_step())
            happened = summary(entries_file)
    except netlab.LabError as exc:
        print(f"soak: {exc}", file=sys.stderr)
        return 1
    record["results"] = report.results(seen, expected, Limit()) | {"job": happened}
    if record["results"]["problems"]:
        record["output"] = seen.output.splitlines()[-200:]
        print(*record["output"], sep="\n")
    if options.out is not None:
        write_json(options.out.with_suffix(".json"), record)
        write_report(options.out, lambda _: report.markdown(record))
    print(report.markdown(record))
    return 1 if record["results"]["problems"] else 0


def summary(file: Path) -> dict[str, int]:
    """How often what happened, by the record of `run`."""
    found = list(entries(file.read_text().splitlines())) if file.exists() else []
    recoveries = {(e.get("attempt"), e.get("meeting")) for e in found if e["kind"] == "recovery"}
    return {
        "attempts": sum(e["kind"] == "attempt" for e in found),
        "deaths": len(deaths(found)),
        "recoveries": len(recoveries),
        "joined": sum(e["kind"] == "start" for e in found),
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=_positive, default=60.0, help="how long undisturbed steps would take (60)"
    )
    parser.add_argument(
        "--every", type=_positive, default=20.0, help="seconds between two disturbances, on average (20)"
    )
    parser.add_argument(
        "--min-ranks", type=at_least(1), default=2, help="of the job; with fewer it starts again (2)"
    )
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    options = parser.parse_args(argv)
    if options.out is not None and options.out.suffix == ".json":
        options.out = options.out.with_suffix("")
    return options


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
