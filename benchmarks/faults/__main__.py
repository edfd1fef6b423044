"""Kill ranks of trainings at random moments, again and again: do they continue, with the right weights?

    python -m benchmarks.faults --trials 200 --seed 1 --out benchmarks/results/faults
    python -m benchmarks.faults --trials 200 --seed 1 --out benchmarks/results/faults --continue
    python -m benchmarks.faults --trials 200 --only kill-1-17

Every trial is a training of its own under `python -m bagua_comm run`, which is struck from outside. It writes
STEM.json after each trial, and STEM.md and STEM.png at the end. The exit code is 0 if all trials ended as they
must, and left nothing behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.arguments import at_least
from ..bench.record import begin_record, header_lines, write_json
from ..bench.report import write_report
from . import commits, hosts, plans, report
from .plans import Case, Trial
from .trial import Seen, run_trial, shortened, timeline
from .verdict import judge


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials."""
    options = parse_arguments(argv)
    trials = planned(options)
    record = _record(options)
    ranks = {row.get("ranks", plans.RANKS) for row in record["trials"]} | {trial.ranks for trial in trials}
    record["ranks"] = ", ".join(map(str, sorted(ranks)))
    done = {row["name"] for row in record["trials"]}
    print(*header_lines(record), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = write_digits(Path(folder, "digits.npz"))
        for trial in trials:
            if trial.name in done:
                continue
            row = tried(trial, data, record)
            record["trials"].append(row)
            print(line_of(row), flush=True)
            if row["outcome"] == "failed":
                print(*(f"    {text}" for text in [*row["problems"], *row["output"]]), sep="\n", flush=True)
            if options.out is not None:
                write_json(options.out.with_suffix(".json"), record)
    if options.commits:
        record["commits"] = [commits.measured(*where) for where in ((1, ""), (4, "1gbit"))]
        print(*(report.commit_line(row) for row in record["commits"]), sep="\n", flush=True)
    rows = record["trials"]
    if options.out is not None:
        write_json(options.out.with_suffix(".json"), record)
    print(*report.lines(rows), sep="\n")
    if options.out is not None:
        write_report(options.out, lambda figure: report.markdown(record, figure), lambda: report.draw(rows))
    return 1 if any(row["outcome"] in ("failed", "missed") or row["left"] for row in rows) else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=at_least(0), default=15, help="trainings whose ranks are killed (15)")
    parser.add_argument("--torch", type=at_least(0), default=0, help="the same with DistributedDataParallel (0)")
    parser.add_argument("--sharded", type=at_least(0), default=0, help="the same with fully_shard (0)")
    parser.add_argument("--stops", type=at_least(0), default=0, help="trainings whose ranks are stopped (0)")
    parser.add_argument("--classes", type=at_least(0), default=0, help="other faults, each so often (0); root")
    parser.add_argument("--hosts", type=at_least(0), default=0, help="trainings that lose a host (0); needs root")
    parser.add_argument("--commits", action="store_true", help="what it costs to commit 100 MB; needs root")
    parser.add_argument("--limit", type=at_least(1), default=60, help="seconds that a training may take (60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="NAME", help="the trial of this name alone")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.json, STEM.md and STEM.png")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave out trials in STEM.json")
    options = parser.parse_args(argv)
    if options.out is not None and options.out.suffix == ".json":
        options.out = options.out.with_suffix("")
    return options


def planned(options: argparse.Namespace) -> list[Trial]:
    """The trials that are asked for."""
    trials = [
        *plans.kills(options.trials, options.seed),
        *plans.torch_kills(options.torch, options.seed),
        *plans.sharded_kills(options.sharded, options.seed),
        *plans.stops(options.stops, options.seed),
        *plans.classes(options.classes, options.seed),
    ]
    trials += hosts.deaths(options.hosts, options.seed)
    trials += hosts.bad_links(options.classes, options.seed)
    trials = [dataclasses.replace(trial, limit_s=options.limit) for trial in trials]
    if options.only is not None:
        trials = [trial for trial in trials if trial.name == options.only]
        if not trials:
            raise SystemExit(f"there is no trial {options.only}")
    return trials


def _record(options: argparse.Namespace) -> dict[str, Any]:
    """The record to continue, or a new one."""
    file = None if options.out is None else options.out.with_suffix(".json")
    if options.go_on and file is not None and file.exists():
        record: dict[str, Any] = json.loads(file.read_text())
        if record["seed"] != options.seed:
            raise SystemExit(f"{file} has trials of seed {record['seed']}")
        return {**record, **begin_record("faults", options, packages=["mpi4py"])}
    record = begin_record("faults", options, packages=["mpi4py"])
    return {**record, "seed": options.seed, "undisturbed": {}, "trials": []}


def tried(trial: Trial, data: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Run a trial; its row of the record."""
    undisturbed, case = record["undisturbed"], f"{trial.case.framework}: {trial.case.name}"
    if trial.case.reproducible and not undisturbed.get(case):
        undisturbed[case] = digest_undisturbed(trial.case, data, trial.limit_s)
    seen = hosts.run_on_hosts(trial, data) if trial.kind == "host" else run_trial(trial, data)
    verdict = judge(trial, seen, undisturbed.get(case))
    return {
        "name": trial.name,
        "group": group_of(trial),
        "ranks": trial.ranks,
        "algorithm": trial.case.name,
        "framework": trial.case.framework,
        "blows": [f"{blow.phase}+{blow.delay_s * 1e3:.1f}ms" for blow in trial.blows],
        "struck": [(round(s.t - seen.began, 4), s.pid, s.rank) for s in seen.strokes],
        **vars(verdict),
        "left": seen.left,
        "seconds": round(seen.seconds, 2),
        "output": [*timeline(seen), *shortened(seen.output + seen.stacks)] if verdict.outcome == "failed" else [],
    }


def group_of(trial: Trial) -> str:
    """The group of a table that a trial belongs to."""
    if trial.fault:
        return trial.fault
    if trial.kind == "host":
        return trial.blows[0].phase
    if trial.case.framework == "sharded" and any(len(blow.choices) > 1 for blow in trial.blows):
        return f"{trial.kind}, two at once"
    stopped = any(blow.signal != plans.SIGKILL for blow in trial.blows)
    return f"stop, {trial.kind}" if stopped else trial.kind


def digest_undisturbed(case: Case, data: Path, limit_s: float) -> str:
    """The digest of a training of two ranks that nobody disturbs; empty if that fails."""
    trial = Trial("undisturbed", "fewer", case, 0, 1, case.steps, 1, (), ranks=2, limit_s=limit_s)
    seen: Seen = run_trial(trial, data)
    digests = {event.facts["digest"] for event in seen.of("done")}
    if len(digests) != 1:
        print(f"# a training that nobody disturbed failed:\n{seen.output}", flush=True)
        return ""
    return str(digests.pop())


def line_of(row: dict[str, Any]) -> str:
    """A trial in one line."""
    times = report.times_of([row])
    took = f", {times[0]:.0f} ms" if times.size else ""
    where = ", ".join(row["blows"])
    left = f", left {row['left']}" if row["left"] else ""
    return (
        f"{row['name']:>12} {row['group']:>20} {row['algorithm']} at {where}: {row['outcome']}{took}"
        f" ({row['seconds']:.1f} s){left}"
    )


def write_digits(file: Path) -> Path:
    """Write scikit-learn's digits where ranks read them without importing it."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data / 16).astype(np.float32)[order]
    np.savez(file, images=images, labels=digits.target[order].astype(np.int64))
    return file


if __name__ == "__main__":
    sys.exit(main())
