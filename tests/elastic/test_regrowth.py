"""Processes that are spawned to replace dead ones, over mpirun: they join after a commit."""

import json
import os

import pytest
from support.launch import run_python

LAST, HOLD_S = 8, 60

TRAINING = """
    import json
    import os
    import signal
    import sys
    import threading
    import time
    from pathlib import Path

    sys.modules["numba"] = None  # importing it takes seconds

    import numpy as np

    from bagua_comm import elastic

    ranks, kills, last, hold_s = KILLS_AND_MORE
    marks = Path(__file__).parent

    def once(name):
        \"\"\"Whether nobody has come here before.\"\"\"
        try:
            os.close(os.open(marks / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    is_new = "BAGUA_RECRUITER" in os.environ
    marker, shown = "not for others".replace(" ", "-"), set()
    if not is_new:
        os.environ["SECRET"] = marker

    def watch():
        \"\"\"Look for the marker on all command lines of this host.\"\"\"
        while True:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if marker.encode() in path.read_bytes():
                        shown.add(path.parent.name)
                except OSError:
                    pass
            time.sleep(0.001)  # sleeps: between looks at all processes

    if "rank 0" not in kills and not is_new:
        threading.Thread(target=watch, daemon=True).start()
    if is_new and "early" in kills and once("early"):
        die()
    if is_new and "exit" in kills and once("exit"):
        sys.exit(3)
    state = elastic.State(step=0, sums=np.zeros(3))

    def train(comm):
        if is_new and "spawned" in kills and once("spawned"):
            die()
        until = time.monotonic() + hold_s
        while state.step < last:
            if f"rank {comm.rank}" in kills and state.step == 2 and once(f"rank {comm.rank}"):
                die()
            state.sums += comm.allreduce(np.ones(3), op="avg")
            waits = state.step == last - 2 and comm.size < ranks
            waits = comm.broadcast_object(waits and time.monotonic() < until, root=0)
            if waits:
                state.sums -= 1
                time.sleep(0.02)  # sleeps: the length of a step
            else:
                state.step += 1
            state.commit()
        return comm.size

    size = elastic.run(state, regrow=True, timeout_s=20)(train)
    joined = [[each.number for each in change.joined] for change in elastic.history()]
    dead = [each.process.number for change in elastic.history() for each in change.dead]
    said = {"new": is_new, "size": size, "sum": state.sums[0], "joined": joined, "dead": dead}
    said |= {"secret": os.environ["SECRET"] == marker, "shown": sorted(shown)}
    print(json.dumps(said), flush=True)
"""


def regrow(tmp_path, ranks, kills, *flags):
    """The results of the processes that trained to the end."""
    text = TRAINING.replace("KILLS_AND_MORE", repr((ranks, kills, LAST, HOLD_S)))
    script = tmp_path / "regrow.py", text
    result = run_python(ranks, script=script, flags=flags or ["--ulfm"], env=dict(os.environ), timeout_s=110)
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert {each["size"] for each in said} == {len(said)} == {ranks}, result.stdout + result.stderr
    assert {each["sum"] for each in said} == {LAST}
    assert result.returncode == 0 or not flags, result.stderr  # mpirun's own exit code is no verdict
    return said


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_is_started_in_the_place_of_a_dead_one(tmp_path):
    said = regrow(tmp_path, 2, ["rank 1"])
    assert [each["new"] for each in said].count(True) == 1
    assert [each["joined"] for each in said if not each["new"]] == [[[], [2]]]
    assert [each["joined"] for each in said if each["new"]] == [[[2]]]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_spawned_process_has_the_variables_of_the_job_and_no_other_user_can_read_them(tmp_path):
    said = regrow(tmp_path, 2, ["rank 1"])
    assert [each["secret"] for each in said] == [True, True]
    assert [each["shown"] for each in said] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", [["rank 0"], ["rank 0", "rank 2"]])
def test_another_one_starts_processes_when_the_first_ones_die(tmp_path, kills):
    said = regrow(tmp_path, 3, kills)
    assert [each["new"] for each in said].count(True) == len(kills)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_spawned_process_that_dies_after_it_has_joined_is_replaced(tmp_path):
    (old,) = (each for each in regrow(tmp_path, 2, ["rank 1", "spawned"]) if not each["new"])
    assert old["dead"] == [1, 2]
    assert old["joined"][-1] == [3]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_spawned_process_that_dies_before_it_is_ready_is_replaced(tmp_path):
    (old,) = (each for each in regrow(tmp_path, 2, ["rank 1", "early"]) if not each["new"])
    assert old["dead"] == [1]
    assert old["joined"] == [[], [2]]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("spawned", ["exit", "lives"])
def test_a_supervised_job_that_has_grown_again_ends_well(tmp_path, spawned):
    regrow(tmp_path, 2, ["rank 1", spawned], "--restarts", "1")
