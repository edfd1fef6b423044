"""The command: both ends on two emulated hosts, for each scenario."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from bagua_comm.net import build as build_plugin
from bagua_comm.net import building

from .. import netlab
from ..bench import RESULTS, ROOT
from ..bench.record import Record, begin_record, write_json
from ..bench.report import write_report
from .end import run_end
from .link import SCENARIOS, Scenario, class_line, run_tool, shape
from .report import draw, report, table

DESCRIPTION = (
    "Measure the network plugin beside the scheme of NCCL's own sockets, on links whose flows are capped."
)


def run_scenario(scenario: Scenario) -> Record:
    """Measure on two emulated hosts."""
    folder = Path(tempfile.mkdtemp(prefix="bagua-net-"))
    ends: list[subprocess.Popen[str]] = []
    try:
        prepare(folder)
        with netlab.build(2, "10gbit") as lab:
            shape(lab, scenario)
            for host in range(2):
                module = [sys.executable, "-m", "benchmarks.net", "--end", str(host), "--folder", str(folder)]
                command = lab.inside(host, *module, "--only", scenario.name, "--address", lab.address(1))
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                ends.append(subprocess.Popen(command, env=lab.environment(), text=True, **pipes))  # type: ignore[call-overload]
            found = talk(lab, scenario, ends)
            if any(codes := [end.wait(30) for end in ends]):
                raise netlab.LabError(f"the ends ended with exit codes {codes}")
            return found
    finally:
        for end in ends:
            end.kill()
            end.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def prepare(folder: Path) -> None:
    """The libraries, each in a file of its own."""
    plugin = build_plugin()
    for name in ("plugin", "one-flow"):
        shutil.copy(plugin, folder / f"{name}.so")
    source = ROOT / "benchmarks" / "stock_net.c"
    building.compile_to(next(building.compilers()), folder / "stock.so", source=source)


def talk(lab: netlab.Lab, scenario: Scenario, ends: Sequence[subprocess.Popen[str]]) -> Record:
    """Pass handles from end to end, slow a flow down where the scenario has one, and return the results."""
    for _ in scenario.schemes:
        handles = [read(end.stdout) for end in ends]
        for end, handle in zip(ends, reversed(handles), strict=True):
            write(end.stdin, handle)
    write(ends[0].stdin, read(ends[1].stdout))  # host 1 serves from here on
    ports = read(ends[0].stdout)["ports"]
    slowed = {}
    if scenario.slow:
        for name, its in ports.items():
            data = its if name == "plugin" else its[1:]  # NCCL's first socket carries sizes only
            slowed[name] = data[1]
            run_tool("tc", "-n", f"{lab.prefix}-h0", *class_line("change", data[1], scenario.slow).split())
    write(ends[0].stdin, {"go": True})
    found = read(ends[0].stdout)
    about = {"scenario": scenario.name, "text": scenario.text, "line_mb_s": scenario.line_mb_s}
    return {**about, "slowed": slowed, **found}


def read(pipe: IO[str] | None) -> dict[str, Any]:
    assert pipe is not None
    line = pipe.readline()
    if not line:
        raise netlab.LabError("an end has failed; its error is above")
    heard: dict[str, Any] = json.loads(line)
    return heard


def write(pipe: IO[str] | None, what: dict[str, Any]) -> None:
    assert pipe is not None
    pipe.write(json.dumps(what) + "\n")
    pipe.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.net", description=DESCRIPTION)
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--out", type=Path, default=RESULTS / "net", metavar="STEM", help="of the files written")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.end is not None:
        run_end(SCENARIOS[options.only[0]], options.end, options.folder, options.address)
        return 0
    path = options.out.with_suffix(".json")
    record = json.loads(path.read_text()) if path.exists() else begin_record("net", argparse.Namespace())
    record.setdefault("results", [])
    for name in [] if options.report else options.only:
        print(f"# {name}: {SCENARIOS[name].text}", flush=True)
        try:
            result = run_scenario(SCENARIOS[name])
        except netlab.LabError as exc:
            print(f"net: {exc}", file=sys.stderr)
            return 1
        kept = [one for one in record["results"] if one["scenario"] != name]
        record["results"] = sorted([*kept, result], key=lambda one: [*SCENARIOS].index(one["scenario"]))
        write_json(path, record)
        print("\n".join(table(result)), flush=True)
    write_report(options.out, lambda picture: report(record, picture), lambda: draw(record))
    return 0
