"""`bagua run --restarts N`: starts mpirun, and restarts it when ranks or hosts are lost.

An attempt is one start of mpirun. After it, the supervisor gathers the records of the ranks, ends leftover
processes, judges the outcome (`verdict`), and starts the next attempt on the hosts that answer. The folder of the
job outlives mpirun, so training continues from the snapshots in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..bootstrap.job import COMMITTED, RECORD, Event, Job, add_lines, entries
from ..system.files import shared_memory, shared_memory_is_full
from ..system.processes import pid_namespace, state_of
from . import job_folder
from .cli import CommandError, count, program_name
from .heartbeat import Heartbeat
from .hosts import Host, Placement, Ranks, is_here, known_hosts, ranks_of
from .plan import Plan
from .remote_shell import ANSWER_S, RemoteShell, find_remote_shell
from .signals import Signals, die_with_supervisor
from .verdict import Verdict, deaths, judge, time_lost_s, unfinished

LOOK_S = 0.1
"""The interval between two checks of mpirun and the record."""

END_S = 15.0
"""The time that mpirun has to end its ranks after a signal; then it is killed."""

OVER_S = 3.0
"""The interval between two checks whether all ranks have ended; mpirun hangs if it runs after two of them."""

LOST_END_S = 1.0
"""The time that mpirun has to end its ranks where it may wait for a host that is lost."""

FULL_S = 5.0
"""How long before the end of an attempt a full `shared_memory` is taken for its reason."""

SEGMENTS = re.compile(r"/dev/shm/(bagua_comm-mpi-[^/]*/)?sm_segment\.[^/]*")
"""The files by which ranks of Open MPI share memory, and their folder where `bootstrap.segments` has made one."""


def supervise(options: argparse.Namespace, plan: Callable[[Placement, Job], Plan]) -> int:
    """Run a job to its end; returns the exit code.

    Args:
        options: The arguments of `run`.
        plan: Returns the plan of an attempt.

    Raises:
        CommandError: The arguments exclude each other, or the folder of the job cannot be made.
    """
    hosts = known_hosts(options)
    first = Placement(ranks_of(options, hosts), hosts)
    others = [host.name for host in hosts if not is_here(host.name)]
    shell = find_remote_shell(options.mpirun)
    clean_up(limit_s=ANSWER_S)
    try:
        folder = job_folder.make({"hosts": others, "agent": shell.words})
    except OSError as exc:
        raise CommandError(f"the folder of the job cannot be made: {exc}") from exc
    job = Job(folder.name, folder.path, first.ranks.spares, options.min_ranks)
    supervisor, signals = _Supervisor(options, plan, job, first, others, shell), Signals()
    try:
        signals.install()
        return supervisor.run(signals)
    finally:
        signals.restore()
        if options.record:
            supervisor.copy_record(options.record)
        supervisor.leave_hosts()
        folder.remove()


def clean_up(*, limit_s: float) -> None:
    """Remove the leftovers of supervisors that were killed, here and on their other hosts."""
    for folder, facts in job_folder.stale():
        job_folder.end_leftovers(folder.name.removeprefix(job_folder.PREFIX))
        hosts, words = facts.get("hosts"), facts.get("agent")
        if hosts and words:
            RemoteShell(tuple(words)).ask(hosts, f"rm -rf {shlex.quote(str(folder))}", limit_s=limit_s)


@dataclass
class _Supervisor:
    options: argparse.Namespace
    plan: Callable[[Placement, Job], Plan]
    job: Job
    first: Placement
    others: list[str]
    """The other hosts, which the launch agent reaches."""
    shell: RemoteShell
    entries: list[Event] = field(default_factory=list)
    """The entries of all attempts that have ended."""
    dead: int = 0
    """The number of processes that have died."""
    gone: set[str] = field(default_factory=set)
    """The hosts that did not answer the last check."""
    commits: list[int] = field(default_factory=list)
    """The numbers of the last commits on other hosts."""
    shown: set[tuple[object, ...]] = field(default_factory=set)
    """The keys of the entries that were printed, since several ranks record the same event."""
    was_full: bool = False
    """Whether the memory that processes of this host share was full when the last attempt ended."""
    shown_bytes: int = 0
    """The number of bytes of the record that were printed."""

    def run(self, signals: Signals) -> int:
        """Run attempts until one succeeds or fails; returns the exit code."""
        ranks, restarts = self.first.ranks, self.options.restarts or 0
        self._check_hosts()
        command = [self.options.script, *self.options.args]
        hosts = [str(host) for host in self.first.hosts]
        facts = {"ranks": ranks.training, "spares": ranks.spares, "min_ranks": ranks.least, "hosts": hosts}
        self.job.record("job", command=command, **facts)
        placement, verdict = self.first, Verdict("stopped", 1, "nothing was started")
        for attempt in range(restarts + 1):
            self.job = replace(self.job, attempt=attempt, spares=placement.ranks.spares)
            verdict = self._attempt(placement, signals)
            if verdict.outcome != "lost":
                break
            left = restarts - attempt
            self.say(f"attempt {attempt + 1} is lost: {verdict.why}; {count(left, 'restart')} left")
            if not left:
                break
            try:
                placement = self._next_placement()
            except CommandError as exc:
                verdict = replace(verdict, why=f"{verdict.why}; {exc}")
                break
            if signals.first is not None:
                verdict = _stopped(signals.first)
                break
        self._conclude(verdict)
        return verdict.code

    def _check_hosts(self) -> None:
        """Keep the hosts that answer the launch agent; mpirun may start ranks on the others by another way."""
        answers = self.shell.ask(self.others, "true")
        self.others = [host for host in self.others if answers[host] is not None]
        if silent := [host for host in answers if answers[host] is None]:
            how = f"`{shlex.join(self.shell.words)}` within {self.shell.answer_s:g} s"
            self.say(f"{', '.join(silent)}: does not answer {how}, so it is not watched")

    def say(self, text: str) -> None:
        """Print a message."""
        print(f"{program_name()} run: {text}", file=sys.stderr, flush=True)

    def copy_record(self, file: str) -> None:
        """Copy the record to a file of the user."""
        try:
            shutil.copyfile(self.record, file)
        except OSError as exc:
            self.say(f"--record {file}: {exc}")

    def segments(self, host: str | None = None, more: Sequence[Event] = ()) -> list[str]:
        """Return the files by which ranks share memory, or their folders; ranks that are killed leave them.

        Args:
            host: The host of the ranks; all hosts if None.
            more: Entries besides those of attempts that have ended.
        """
        found = [*self.entries, *more]
        starts = [entry for entry in found if entry["kind"] == "start" and host in (None, entry["host"])]
        shared = {file for entry in starts for file in entry.get("shared", ())}
        matches = {file: SEGMENTS.fullmatch(file) for file in shared}
        return sorted({os.path.dirname(file) if match[1] else file for file, match in matches.items() if match})

    def leave_hosts(self) -> None:
        """End what the job has left on other hosts, those too that have answered again, and remove its files."""
        records = self.shell.ask(self.others, f"cat {shlex.quote(str(self.record))} 2>/dev/null")
        lines = [line for text in records.values() if text for line in text.splitlines()]
        files = shlex.join(
            [str(self.job.folder), *self.segments(more=list(entries(lines)))]
        )  # of lost hosts, too
        find = self._find_processes()
        end = f"kill {find} 2>/dev/null && sleep 1; kill -9 {find} 2>/dev/null; rm -rf {files}"
        answers = records | self.shell.ask([host for host in records if records[host] is not None], end)
        if silent := [host for host in answers if answers[host] is None]:
            self.say(
                f"{', '.join(silent)}: no answer at the end, so processes of this job, and {files}, may be left"
            )

    def _find_processes(self) -> str:
        """A command of sh that yields the process ids of the job on a host."""
        return f"$(grep -lazxF BAGUA_JOB={self.job.name} /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)"

    # An attempt -------------------------------------------------------------------------------------

    def _attempt(self, placement: Placement, signals: Signals) -> Verdict:
        """Run one attempt, clean up after it, and return the verdict."""
        ranks, hosts = placement.ranks, [str(host) for host in placement.hosts]
        facts = {"ranks": ranks.training, "spares": ranks.spares, "hosts": hosts, "left_out": placement.left_out}
        self.job.record("attempt", **facts)
        code, lost = self._run(self.plan(placement, self.job), placement, signals)
        hard = signals.count > 1
        job_folder.end_leftovers(self.job.name, grace_s=0.0 if hard else job_folder.GRACE_S)
        there = [host.name for host in placement.hosts if host.name not in lost]
        limit_s = None if signals.first is None else LOST_END_S if hard else ANSWER_S
        gone = [*lost, *self._gather(there, limit_s=limit_s)]
        self.gone = set(gone)
        self._print_news()
        self.job.record("end", code=code)
        mine = self._entries_of_attempt()
        self.entries += mine
        for path in self.segments(socket.gethostname()):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path)
        if signals.first is not None:
            return _stopped(signals.first)
        verdict = judge(mine, code, gone=gone)
        if self.was_full and not verdict.succeeded:
            room = f"{shared_memory()} was full, and processes that need more of it are killed: make room there"
            verdict = replace(verdict, why=f"{verdict.why}; {room}")
        self.dead += len(deaths(mine)) or (len(unfinished(mine)) if verdict.outcome == "lost" else 0)
        return verdict

    def _run(self, plan: Plan, placement: Placement, signals: Signals) -> tuple[int, list[str]]:
        """Run mpirun; returns its exit code, below 0 if a signal ended it, and the hosts that were lost."""
        environment = {**os.environ, **plan.variables}
        with signals.held():
            process = subprocess.Popen(
                plan.command, env=environment, start_new_session=True, preexec_fn=die_with_supervisor()
            )
            signals.forward_to(process)
        heartbeat = Heartbeat(self.shell, [host.name for host in placement.hosts if host.name in self.others])
        lost: list[str] = []
        full_s = -FULL_S
        deadline, look_s, over = float("inf"), time.monotonic() + OVER_S, False
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
                self._print_news()
                if process.returncode is None:  # ranks that have ended leave some room
                    full_s = time.monotonic() if shared_memory_is_full() else full_s
                self.was_full = time.monotonic() - full_s < FULL_S
                if process.returncode is not None:
                    return process.returncode, lost
                if not lost and (lost := heartbeat.lost()):
                    self.say(f"{', '.join(lost)} stopped answering, so this attempt ends")
                    process.terminate()
                if lost or signals.first is not None:
                    deadline = min(deadline, time.monotonic() + (LOST_END_S if lost else END_S))
                if all(is_here(host.name) for host in placement.hosts) and time.monotonic() > look_s:
                    look_s = time.monotonic() + OVER_S
                    over_before, over = over, self._all_have_ended()
                    if over and over_before:
                        deadline = look_s - OVER_S  # mpirun hangs
                if time.monotonic() > deadline:
                    process.kill()
        finally:
            signals.forward_to(None)
            heartbeat.close()
            for name in ("ompi", "prte"):  # an mpirun that was killed has left its temporary files
                shutil.rmtree(Path(tempfile.gettempdir(), f"{name}.{process.pid}"), ignore_errors=True)

    def _all_have_ended(self) -> bool:
        """Whether all ranks of this attempt have started and ended; False if they are not visible."""
        here = pid_namespace()
        starts = [entry for entry in self._entries_of_attempt() if entry["kind"] == "start"]
        return (
            bool(starts)
            and len(starts) >= starts[0].get("size", 1)
            and all(entry.get("namespace") == here and state_of(entry["pid"]) == "ended" for entry in starts)
        )

    def _gather(self, hosts: Sequence[str], *, limit_s: float | None) -> list[str]:
        """Gather the records of other hosts, and end leftover processes; returns the hosts that do not answer.

        Without a limit, a host that is silent is asked once more.
        """
        folder = shlex.quote(str(self.job.folder))
        commit, find = '{"kind": "commit", "number": %d}\\n', self._find_processes()
        script = (
            f"for i in 1 2 3; do kill -9 {find} 2>/dev/null; done; cat {folder}/{RECORD} 2>/dev/null; "
            f"[ ! -s {folder}/{COMMITTED} ] || printf {shlex.quote(commit)} $(cat {folder}/{COMMITTED})"
        )
        answers = self.shell.ask([host for host in hosts if host in self.others], script, limit_s=limit_s)
        if limit_s is None:
            answers |= self.shell.ask([host for host, answer in answers.items() if answer is None], script)
        known = set(self._lines())  # emulated hosts share the record
        news = [line for answer in answers.values() for line in (answer or "").splitlines() if line not in known]
        self.commits += [entry["number"] for entry in entries(news) if entry["kind"] == "commit"]
        add_lines(self.record, [line for line in news if '"kind": "commit"' not in line])
        return [host for host, answer in answers.items() if answer is None]

    @property
    def record(self) -> Path:
        """The file of the record on this host."""
        assert self.job.folder is not None
        return self.job.folder / RECORD

    def _lines(self) -> list[str]:
        """The lines of the record so far; empty if it could not be written."""
        return self.record.read_text().splitlines() if self.record.exists() else []

    def _entries_of_attempt(self) -> list[Event]:
        return [entry for entry in entries(self._lines()) if entry.get("attempt") == self.job.attempt]

    # Between attempts -------------------------------------------------------------------------------

    def _next_placement(self) -> Placement:
        """Return the hosts that answer, and the ranks that fit on them.

        Raises:
            CommandError: They have too few slots.
        """
        hosts, ranks = self.first.hosts, self.first.ranks
        answers = self.shell.ask([host for host in self.others if host not in self.gone], "true")
        answers |= dict.fromkeys(self.gone)  # these were checked a moment ago
        gone = [host for host in hosts if host.name in answers and answers[host.name] is None]
        self.gone = {host.name for host in gone}
        if not gone:
            return self.first
        names, limit_s = ", ".join(host.name for host in gone), self.shell.answer_s
        self.say(f"{names} did not answer within {limit_s:g} s, and is left out")
        share = -(-ranks.started // len(hosts))
        left = tuple(Host(host.name, host.slots or share) for host in hosts if host not in gone)
        started = min(ranks.started, sum(host.slots or 0 for host in left))
        training = min(ranks.training, started)
        if training < ranks.least:
            raise CommandError(
                f"the hosts that answer have room for {count(training, 'rank')}, and --min-ranks is {ranks.least}"
            )
        spares = started - training
        return Placement(Ranks(training, spares, ranks.least), left, tuple(host.name for host in gone))

    # Output -----------------------------------------------------------------------------------------

    def _print_news(self) -> None:
        """With `-v`, print the new entries of the record."""
        if not self.options.verbose or not self.record.exists():
            return
        with open(self.record, "rb") as file:
            file.seek(self.shown_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.shown_bytes += len(whole)
        for entry in entries(whole.decode(errors="replace").splitlines()):
            key = (entry["kind"], entry.get("attempt"), entry.get("meeting"), str(entry.get("dead")))
            if entry["kind"] not in ("death", "recovery") or key not in self.shown:  # several ranks record these
                self.shown.add(key)
                self._print(entry)

    def _print(self, entry: Event) -> None:
        rank = f"rank {entry.get('rank')} (pid {entry.get('pid')} on {entry.get('host')})"
        dead, recovery_s = entry.get("dead") or {}, float(entry.get("seconds") or 0)
        texts = {
            "attempt": f"attempt {entry.get('attempt', 0) + 1}: {entry.get('ranks')} training ranks, "
            f"{entry.get('spares')} spares",
            "start": f"{rank} has started",
            "death": f"process {dead.get('number')} (pid {dead.get('pid', 'unknown')} on {dead.get('host')}): "
            f"{entry.get('reason')}",
            "recovery": f"training continues with {entry.get('ranks')} ranks after {recovery_s:.2f} s",
            "trained": f"pid {entry.get('pid')} on {entry.get('host')} has trained to the end",
            "error": f"{rank} ends with {entry.get('error')}: {entry.get('text')}",
            "exit": f"{rank} has finished",
        }
        if entry["kind"] in texts:
            self.say(texts[entry["kind"]])

    def _conclude(self, verdict: Verdict) -> None:
        """Record the verdict, and print a summary."""
        here = self.job.last_commit()
        if commits := [*self.commits, *([] if here is None else [here])]:
            self.job.record("commit", number=max(commits))
        self.job.record("verdict", well=verdict.succeeded, code=verdict.code, why=verdict.why)
        facts = [count(self.job.attempt + 1, "attempt"), count(self.dead, "death")]
        if (lost_s := time_lost_s(self.entries)) > 0:
            facts.append(f"{lost_s:.1f} s lost")
        how = "the job succeeded" if verdict.succeeded else f"the job failed: {verdict.why}"
        self.say(f"{how} ({', '.join(facts)})")


def _stopped(number: signal.Signals) -> Verdict:
    return Verdict("stopped", 128 + number, f"{number.name} has ended this job")
