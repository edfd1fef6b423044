"""Trainings that lose ranks at random moments; `python -m benchmarks.faults --trials 200` tries more."""

import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import get_args

import pytest
from support.children import Forked
from support.waiting import until

from benchmarks.faults import hosts, means, plans, report, verdict
from benchmarks.faults.__main__ import main, tried, write_digits
from benchmarks.faults.events import Event, EventReader, EventWriter
from benchmarks.faults.leftovers import MARK, TrialFolder
from benchmarks.faults.means import Means
from benchmarks.faults.plans import Blow, Case, Trial
from benchmarks.faults.trial import Seen, Stroke, timeline
from benchmarks.faults.verdict import judge

EXACT = Case("GradientAllReduce()")


def of_kind(kind, case=EXACT, blow=None, **more):
    blow = blow or Blow("commit", 20, 0.001, choices=(0.4,))
    settings = {"spares": int(kind == "spare"), "min_ranks": 3 if kind == "too few" else 1, "steps": 60, **more}
    return Trial(f"test-{kind.replace(' ', '-')}", kind, case, commit_every=1, blows=(blow,), **settings)


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("trial", "outcome"),
    [
        (of_kind("spare", plans.CASES[0]), "went on"),
        (of_kind("fewer", Case("ByteGrad()"), Blow("construct", 0, 0.002)), "went on"),
        (of_kind("too few"), "ended"),
        (of_kind("fewer", plans.SHARDED, Blow("step", 8, 0.001, choices=(0.4,)), steps=24), "went on"),
    ],
    ids=["spare", "fewer", "too few", "sharded"],
)
def test_a_training_that_loses_a_rank_continues_or_ends_as_it_must(tmp_path, trial, outcome):
    row = tried(trial, write_digits(tmp_path / "digits.npz"), {"undisturbed": {}})
    text = "\n".join([*row["problems"], *row["output"]])
    assert row["outcome"] == outcome, text
    assert row["left"] == [], text


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_disk_that_fills_in_a_checkpoint_fails_that_save_alone(tmp_path):
    if os.geteuid() != 0:  # the disk is a file system of its own
        return
    trial = next(trial for trial in plans.classes(1, 1) if trial.fault == "full disk")
    # Compared with no second training, and long enough for a blow that comes late on busy cores.
    trial = dataclasses.replace(trial, case=EXACT, steps=600)
    row = tried(trial, write_digits(tmp_path / "digits.npz"), {"undisturbed": {}})
    text = "\n".join([*row["problems"], *row["output"]])
    assert (row["outcome"], row["left"]) == ("went on", []), text


# Plans ------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_trials_and_another_one_others():
    first, again, other = (list(plans.kills(60, seed)) for seed in (1, 1, 2))
    assert first == again
    assert [trial.blows for trial in first] != [trial.blows for trial in other]
    assert {trial.kind for trial in first} == {"spare", "fewer", "too few"}
    assert {trial.case for trial in first} == set(plans.CASES)
    assert {blow.phase for trial in first for blow in trial.blows} >= {"construct", "step", "commit", "recover"}
    assert list(plans.kills(20, 1)) == first[:20]


def test_every_class_of_faults_has_trials_that_a_seed_repeats():
    first, again = list(plans.classes(2, 1)), list(plans.classes(2, 1))
    assert first == again
    faults = {trial.fault for trial in first}
    assert faults == {"GIL, long", "GIL, short", "SIGSEGV", "out of memory", "full disk", *plans._WITH_A_DEATH}
    assert {blow.means for trial in first for blow in trial.blows} == set(get_args(Means)) - {"link"}
    links = list(hosts.bad_links(1, 1))
    assert {trial.fault for trial in links} == set(get_args(plans.LinkFault))
    assert all(blow.seconds > trial.timeout_s for trial in links for blow in trial.blows)
    names = [trial.name for trial in [*first, *links]]
    assert len(set(names)) == len(names)


# Means ------------------------------------------------------------------------------------------------------


def test_whoever_keeps_the_gil_lets_no_other_thread_run_and_no_signal_ends_it():
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.005):
            ticks.append(time.monotonic())

    other = threading.Thread(target=tick)
    other.start()
    until(lambda: ticks)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    began = time.monotonic()
    means.keep_gil(0.3)
    ended = time.monotonic()
    over.set()
    other.join()
    signal.signal(signal.SIGALRM, before)
    assert ended - began > 0.25
    assert sum(began + 0.02 < tick < ended - 0.02 for tick in ticks) <= 1


def test_the_clock_of_a_trial_is_set_and_the_monotonic_one_is_not(tmp_path):
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        with pytest.raises(RuntimeError, match="needs a C compiler"):
            means.make_clock(tmp_path)
        return
    environment = {**os.environ, **means.make_clock(tmp_path)}
    show = "import time; input(); print(time.time(), time.monotonic())"
    ask = {"input": "\n", "env": environment, "text": True, "capture_output": True}
    for shift in (0, -86400, 86400):
        means.set_clock(tmp_path, shift)
        said = subprocess.run([sys.executable, "-S", "-c", show], check=True, **ask).stdout
        date, monotonic = map(float, said.split())
        assert abs(date - time.time() - shift) < 60
        assert abs(monotonic - time.monotonic()) < 60


@pytest.mark.parametrize(("size", "room"), [(3 * (1 << 19) + 100, 0), (1 << 16, 5000)])
def test_all_room_is_used_up_but_what_is_to_be_left(tmp_path, size, room):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # as on a file system of that size
    try:
        means.fill(tmp_path, room=room)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "filler").stat().st_size == size - room


def test_who_was_only_late_or_harmed_without_need_to_die_is_not_gone():
    seen = Seen(0.0, [Event(9.0, 10, "done", {})])
    harmed = {"GIL": (10, 11), "link": (10, 11), "descriptors": (12,), "clock": (12,), "out of memory": (10, 13)}
    for by, pids in harmed.items():
        seen.strokes = [Stroke(1.0, pid, 0, 0, signal.SIGKILL, by) for pid in pids]
        assert seen.gone() == {"GIL": {11}, "link": {11}, "out of memory": {10, 13}}.get(by, set())
    seen.strokes = [Stroke(1.0, 10, 0, 0, signal.SIGSEGV)]
    assert seen.gone() == {10}


def test_a_full_shared_memory_may_end_a_training_if_that_is_named():
    trial = next(trial for trial in plans.classes(1, 1) if trial.uses("full memory"))
    stroke = Stroke(1.0, 10, 0, 0, signal.SIGKILL, "full memory")
    named = Seen(0.0, [], [stroke], exit_code=1, output="lost: /dev/shm was full, and processes that need more")
    assert judge(trial, named).outcome == "ended"
    unnamed = Seen(0.0, [], [stroke], exit_code=1, output="lost: rank 1 did not finish")
    assert judge(trial, unnamed).problems == ["nothing named the full /dev/shm"]


# How it is judged -------------------------------------------------------------------------------------------


def a_recovery(**changes):
    """Two of three ranks go on after a death in step 3, and end with the same bytes."""
    alive, events = (11, 12), [Event(0.0, pid, "hello", {"host": "here"}) for pid in (10, 11, 12)]
    for rank, pid in enumerate((10, 11, 12)):
        events.append(Event(0.1, pid, "enter", {"rank": rank, "size": 3, "step": 0, "digest": "zero"}))
    for pid in (10, 11, 12):
        facts = {"step": 2, "digest": "two", "total": 3.0 * pid}
        events.append(Event(0.3, pid, "commit", facts))
        events.append(Event(0.3, pid, "committed", {"step": 2}))
    for rank, pid in enumerate(alive):
        facts = {"rank": rank, "size": 2, "step": 2, "digest": "two", "total": 0.0, **changes.get("enter", {})}
        events.append(Event(1.2, pid, "enter", facts))
        events.append(Event(1.3 + rank / 10, pid, "step", {"step": 3}))
        facts = {
            "rank": rank,
            "size": 2,
            "began": 2,
            "digest": "end",
            "replayed": "end",
            **changes.get("done", {}),
        }
        events.append(Event(2.0, pid, changes.get("last", "done"), facts))
    return Seen(0.0, events, [Stroke(1.0, 10, 0, 0, signal.SIGKILL)], exit_code=changes.get("exit_code", 0))


def test_a_recovery_is_timed_to_the_first_step_of_the_last_rank():
    verdict = judge(of_kind("fewer"), a_recovery())
    assert (verdict.outcome, verdict.problems) == ("went on", [])
    assert verdict.recovery_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exit_code": 1}, "exit code 1"),
        ({"exit_code": None}, "did not end in 60 s"),
        ({"enter": {"digest": "other"}}, "bytes that nobody committed"),
        ({"enter": {"step": 0, "digest": "zero"}}, "it had committed step 2"),
        ({"done": {"replayed": "elsewhere"}}, "taken again end elsewhere"),
        ({"done": {"size": 1}}, "1 ranks trained to the end, expected 2"),
        ({"last": "step"}, "vanished after"),
    ],
)
def test_failures_are_reported(changes, problem):
    verdict = judge(of_kind("fewer"), a_recovery(**changes))
    assert verdict.outcome == "failed"
    assert any(problem in each for each in verdict.problems), verdict.problems


def test_a_death_after_the_training_has_missed_it():
    seen = a_recovery(exit_code=1)
    assert judge(of_kind("fewer"), seen).outcome == "failed"
    seen.output = "the job failed: rank 0 (pid 10 on here) died after training, so no commit is left"
    assert judge(of_kind("fewer"), seen).outcome == "missed"
    for changes in {"last": "step"}, {"done": {"replayed": "elsewhere"}}, {"enter": {"digest": "other"}}:
        other = a_recovery(exit_code=1, **changes)
        other.output = seen.output
        assert judge(of_kind("fewer"), other).outcome == "failed"


def test_a_rank_that_was_stopped_and_came_back_in_time_counts_as_alive():
    seen = a_recovery()
    back = seen.of("hello", 11)[0].pid
    seen.strokes = [Stroke(1.0, back, 0, 0, signal.SIGSTOP)]
    assert seen.gone() == set()
    seen.strokes = [Stroke(1.0, 10, 0, 0, signal.SIGSTOP)]
    assert seen.gone() == {10}


def test_a_mean_of_committed_weights_is_accepted_on_another_number_of_ranks():
    mean = 3.0 * (10 + 11 + 12) / 3
    assert judge(of_kind("fewer"), a_recovery(enter={"digest": "mean", "total": mean})).outcome == "went on"
    assert judge(of_kind("fewer"), a_recovery(enter={"digest": "mean", "total": mean + 1})).outcome == "failed"


def test_with_reproducible_sums_bytes_must_equal_those_of_an_undisturbed_training():
    trial = of_kind("fewer", Case("GradientAllReduce(Reproducible(addends=12))", reproducible=True))
    assert judge(trial, a_recovery(), "end").outcome == "went on"
    assert judge(trial, a_recovery(), "other").outcome == "failed"


@pytest.mark.parametrize(
    ("message", "after_s", "problem"),
    [
        ("2 ranks are left; dead: process 0 (on here, pid 10) died", 1.0, None),
        ("2 ranks are left; dead: process 0 (on here, pid 10) died", 6.0, "ended after 6.0 s"),
        ("2 ranks are left", 1.0, "did not name [10]"),
    ],
)
def test_an_end_names_the_dead_in_time(message, after_s, problem):
    events = [Event(0.0, pid, "hello", {"host": "here"}) for pid in (10, 11)]
    events.append(Event(1.0 + after_s, 11, "ended", {"error": "RankFailed", "message": message}))
    seen = Seen(0.0, events, [Stroke(1.0, 10, 0, 0, signal.SIGKILL)], exit_code=1)
    verdict = judge(of_kind("too few"), seen)
    assert verdict.outcome == ("ended" if problem is None else "failed")
    assert problem is None or problem in verdict.problems[0]


def a_split(*more, message="rank 2: process 10 (on h0, pid 10) has not answered", step=9):
    """Of four processes, 12 and 13 are cut off while all commit step 9."""
    events = [Event(0.0, pid, "hello", {"host": f"h{pid - 10}"}) for pid in (10, 11, 12, 13)]
    events += [Event(0.9, pid, "commit", {"step": 9, "digest": "nine", "total": 1.0}) for pid in (10, 11, 12, 13)]
    events += [Event(1.1, 12, "committed", {"step": step})]
    events += [Event(6.0, pid, "ended", {"error": "RankFailed", "message": message}) for pid in (12, 13)]
    events += [Event(9.0, 20, "hello", {"host": "h0"}), Event(9.5, 20, "enter", {"step": 9, "size": 2}), *more]
    strokes = [Stroke(1.0, pid, 0, pid - 10, signal.SIGKILL, "link") for pid in (12, 13)]
    return Seen(0.0, sorted(events, key=lambda event: event.t), strokes, exit_code=0)


@pytest.mark.parametrize(
    ("seen", "problems"),
    [
        (a_split(), []),
        (a_split(step=10), ["both halves went on: there are two histories"]),
        (
            a_split(Event(5.0, 13, "enter", {"step": 9, "size": 2})),
            ["both halves went on: there are two histories"],
        ),
        (
            a_split(message="the link broke"),
            ["process 12, which was cut off, named none of [10, 11]: the link broke"],
        ),
    ],
    ids=["one history", "a minority commits", "a minority enters", "no name"],
)
def test_of_two_halves_at_most_one_goes_on(seen, problems):
    assert list(verdict._of_a_split(seen))[:1] == problems


def a_full_disk(message="saving step 6: rank 0: [Errno 28] No space left on device", digest="three", again=9):
    events = []
    for pid in (10, 11, 12):
        said = [("saved", {"step": 3, "digest": "three"}), ("unsaved", {"step": 6, "message": message})]
        said += [("loaded", {"step": 3, "digest": digest, "names": ["step-3"]})]
        said += [("saved", {"step": again, "digest": "last"})]
        said += [("loaded", {"step": again, "digest": "last", "names": ["step-3", f"step-{again}"]})]
        events += [Event(number / 10, pid, what, facts) for number, (what, facts) in enumerate(said)]
    return Seen(0.0, sorted(events, key=lambda event: event.t), [], exit_code=0)


def test_a_full_disk_is_named_and_the_checkpoint_before_stays():
    trial = next(trial for trial in plans.classes(1, 1) if trial.fault == "full disk")
    assert list(verdict._of_checkpoints(trial, a_full_disk())) == []
    (problem,) = list(verdict._of_checkpoints(trial, a_full_disk(message="it failed")))
    assert "expected the same full disk on all" in problem
    assert "process 10 loaded step 3; {'step': 3, 'digest': 'three'} was saved last" in list(
        verdict._of_checkpoints(trial, a_full_disk(digest="a part"))
    )
    assert "nothing was saved after" in list(verdict._of_checkpoints(trial, a_full_disk(again=5)))[-1]
    assert list(verdict._of_checkpoints(trial, Seen(0.0))) == ["no save failed"]


def test_a_timeline_leaves_out_steps_that_went_well():
    lines = timeline(a_recovery())
    assert sum("STRUCK" in line for line in lines) == 1
    assert len(lines) < len(a_recovery().events)


# How it is heard, and what is left --------------------------------------------------------------------------


def test_the_output_of_a_killed_process_is_read(tmp_path):
    with EventReader(tmp_path / "pipe") as listener:

        def child():
            EventWriter(tmp_path / "pipe")("step", step=3)
            os.kill(os.getpid(), signal.SIGKILL)

        process = Forked(child)
        assert process.code() == -signal.SIGKILL
        (event,) = listener.listen(1.0)
        assert (event.pid, event.what, event.facts) == (process.pid, "step", {"step": 3})
        assert list(listener.listen(0.0)) == []


def test_processes_and_files_that_are_left_are_found_and_removed(monkeypatch):
    monkeypatch.setattr("benchmarks.faults.leftovers.GRACE_S", 0.1)
    with TrialFolder("test") as folder:
        assert folder.left() == []
        command = folder.inside(["sh", "-c", "touch /dev/shm/faults-test-left; exec sleep 60"])
        process = subprocess.Popen(command, env=folder.environment())
        (folder.temporary / "file").touch()
        end = time.monotonic() + 20
        while len(left := folder.left()) < 3 and time.monotonic() < end:
            pass
        assert left == [f"process {process.pid}: sleep 60 ", "tmp/file", "/dev/shm/faults-test-left"]
    assert process.wait(10) == -signal.SIGKILL
    assert not folder.path.exists()
    if not folder.own_memory:
        os.unlink("/dev/shm/faults-test-left")
    assert not os.path.exists("/dev/shm/faults-test-left")
    assert MARK not in os.environ


# Records ----------------------------------------------------------------------------------------------------


def test_the_table_counts_outcomes_and_the_report_has_a_figure(tmp_path):
    row = {"name": "kill-1-0", "group": "fewer", "algorithm": "ByteGrad()", "left": [], "problems": ["broke"]}
    times = {"recovery_s": 0.05, "ended_s": None}
    rows = [{**row, **times, "outcome": outcome} for outcome in ("went on", "went on", "failed")]
    lines = report.lines(rows)
    assert lines[4].split() == ["fewer", "3", "2", "1", "0", "0", "50.00", "50.00", "50.00", "50.00"]
    assert lines[5].startswith("# kill-1-0 (ByteGrad()): broke")
    machine = {"cpu": "one", "cores": 2, "cores_per_rank": 2}
    record = {"machine": machine, "versions": {}, "ranks": 3, "seed": 1, "trials": rows}
    assert "| fewer | 3 | 2 | 1 | 0 | 0 | 50.00 |" in report.markdown(record)


def test_an_unknown_trial_is_refused():
    with pytest.raises(SystemExit, match="there is no trial kill-9-9"):
        main(["--trials", "1", "--only", "kill-9-9"])


def test_the_program_explains_itself():
    command = [sys.executable, "-m", "benchmarks.faults", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "--trials" in result.stdout
