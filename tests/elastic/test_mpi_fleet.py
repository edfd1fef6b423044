"""Fleets over mpirun: processes die or stop, and the others hold a rendezvous, connect and continue."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fleet_kills import run_once
from support.launch import run_python

import bagua_comm
from bagua_comm import BootstrapError, RankFailed, UnsupportedError
from bagua_comm.elastic.fleet import ProcessInfo
from bagua_comm.elastic.start import start
from bagua_comm.system.processes import kill, start_of

DYING = """
    import json
    import os
    import signal
    import time

    import numpy as np

    import bagua_comm
    from bagua_comm import CommError, CommMismatch, UnsupportedError
    from bagua_comm.elastic.start import start

    fleet = start(timeout_s=TIMEOUT)
    said = {"me": fleet.me, "wanted": fleet.wanted, "errors": []}

    def error_of(call, *arguments):
        try:
            call(*arguments)
        except Exception as exc:
            said["errors"].append(f"{type(exc).__name__}: {exc}")
            return exc

    first = fleet.rendezvous()
    said["first"] = [process.number for process in first.alive]
    error_of(fleet.connect, [fleet.me, fleet.me])
    spares = said["first"][fleet.wanted :]
    first_members = said["first"][: fleet.wanted]
    old = fleet.connect(first_members) if fleet.me not in spares else None
    cause = None
    if fleet.me in spares:
        said["called"] = fleet.stand_by(first_members)
    else:
        assert bagua_comm.default() is old
        old.barrier()
        if fleet.me in VICTIMS:
            os.kill(os.getpid(), signal.SIGNAL)
        cause = error_of(old.allreduce, np.ones(3))
    second = fleet.rendezvous(cause)
    if old is not None:
        error_of(old.allreduce, np.ones(3))
    said["dead"] = [[death.process.number, death.process.host, death.reason] for death in second.dead]
    alive = [process.number for process in second.alive]
    with fleet.connect(alive[::-1]) as comm:
        said["rank"] = comm.rank
        for n in (10, 10_000, 1_000_000):
            x = np.zeros(n, np.float32) + fleet.me
            comm.broadcast(x, root=0)
            assert (x == alive[-1]).all()
            assert (comm.allreduce(np.ones(n, np.float32)) == comm.size).all()
    fleet.end() if fleet.me not in spares else fleet.stand_by(alive)
    print(json.dumps(said), flush=True)
"""


def go_on(tmp_path, ranks, victims, *, spares=0, signal="SIGKILL", timeout_s=20):
    """The results of the survivors of a fleet, by their numbers, after some of its processes got a signal."""
    text = DYING.replace("VICTIMS", str(victims)).replace("signal.SIGNAL", f"signal.{signal}")
    script = tmp_path / "dying.py", text.replace("TIMEOUT", str(timeout_s))
    result = run_python(
        ranks, script=script, flags=["--ulfm"], env={**os.environ, "BAGUA_SPARES": str(spares)}, timeout_s=90
    )
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    survivors = {each["me"]: each for each in said}
    assert sorted(survivors) == [rank for rank in range(ranks) if rank not in victims], result.stderr
    return survivors


@pytest.mark.timeout(100)
def test_the_other_process_continues_when_the_first_one_dies(tmp_path):
    said = go_on(tmp_path, 2, [0])[1]
    assert (said["first"], said["rank"]) == ([0, 1], 0)
    assert [[number, reason] for number, _, reason in said["dead"]] == [[0, "died"]]
    assert said["errors"][1].startswith("RankFailed: ")
    assert re.search(r"(rank|process) 0 \(on .*, process \d+, which has ended\) died", said["errors"][1])


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_others_continue_with_a_spare_when_the_first_process_dies(tmp_path):
    said = go_on(tmp_path, 3, [0], spares=1)
    for me, each in said.items():
        assert (each["wanted"], each["first"]) == (2, [0, 1, 2])
        assert [[number, reason] for number, _, reason in each["dead"]] == [[0, "died"]]
        assert each["rank"] == {1: 1, 2: 0}[me]
        assert each["errors"][0].startswith("ArrayError: connect: members are [")
    failed, refused = said[1]["errors"][1:]
    assert failed.startswith(("RankFailed: ", "CommAborted: "))  # the spare may notice it first
    assert re.search(r"(rank|process) 0 \(on .*, process \d+, which has ended\) died", failed)
    assert refused.startswith(("CommError: ", "CommAborted: "))
    assert said[2]["called"] is True


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[1, 2], [0, 3]])
def test_two_processes_die_at_once(tmp_path, victims):
    for each in go_on(tmp_path, 4, victims).values():
        assert [number for number, _, _ in each["dead"]] == victims


@pytest.mark.slow
def test_a_process_that_is_stopped_is_killed_by_one_of_its_host(tmp_path):
    for each in go_on(tmp_path, 3, [1], signal="SIGSTOP", timeout_s=5).values():
        ((number, _, reason),) = each["dead"]
        assert number == 1
        assert "being stopped, and was killed" in reason


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_conformance_of_a_channel(tmp_path, ranks):
    text = """
        from bagua_comm.elastic.start import start
        from bagua_comm.testing import check_transport

        fleet = start(timeout_s=60)
        comm = fleet.connect([process.number for process in fleet.rendezvous().alive])
        check_transport(comm, sizes=(2048, 65536, 1 << 18))
        fleet.end()
        print("conforms", flush=True)
    """
    result = run_python(ranks, script=(tmp_path / "conformance.py", text), flags=["--ulfm"], timeout_s=280)
    assert result.stdout.count("conforms") == ranks, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "spares", "victims"),
    [
        (3, 0, [(0, "kill", "training", 0.05)]),
        (4, 1, [(1, "kill", "training", 0.1), (3, "kill", "start", 0.3)]),
        (4, 1, [(2, "stop", "training", 0.2)]),
    ],
)
def test_a_training_ends_with_the_weights_of_an_undisturbed_one(processes, spares, victims):
    problem, _, text = run_once(processes, spares, victims)
    assert problem is None, text


def test_one_process_without_a_launcher_is_a_fleet_with_one_rendezvous():
    fleet = start(timeout_s=7)
    with pytest.raises(BootstrapError, match="connected already"):
        start()
    (process,) = fleet.rendezvous().alive
    assert (process.number, process.pid, fleet.timeout_s) == (0, os.getpid(), 7)
    with fleet.connect([0]) as comm:
        assert comm.allreduce(np.ones(2)).tolist() == [1, 1]
    with pytest.raises(UnsupportedError, match=r"members are \[0, 1\], expected all 1 processes"):
        fleet.connect([0, 1])
    assert not fleet.stand_by([0])
    with pytest.raises(RankFailed, match=r"lost \(rank 1 died\); start it by .*--ulfm") as caught:
        fleet.rendezvous(RankFailed("rank 1 died", [1]))
    assert caught.value.ranks == (1,)
    fleet.end()
    assert bagua_comm.bootstrap.current() is None


def test_a_process_is_killed_only_if_it_is_the_one_that_is_meant():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = start_of(child.pid)
        assert began > start_of(os.getppid())
        assert not kill(child.pid, began + 1)
        assert child.poll() is None
        assert kill(child.pid, began)
        assert child.wait() == -9
    assert not kill(child.pid, began)
    assert start_of(child.pid) == 0


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_at_the_end_a_process_that_hangs_is_not_waited_for(tmp_path):
    text = """
        import os
        import signal

        from bagua_comm.elastic.start import start

        fleet = start(timeout_s=5)
        fleet.rendezvous()
        if fleet.me == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        fleet.connect([0, 1]).barrier()
        fleet.end()
        print("ended", flush=True)
    """
    env = {**os.environ, "BAGUA_SPARES": "1"}
    result = run_python(3, script=(tmp_path / "end.py", text), flags=["--ulfm"], env=env, timeout_s=90)
    assert result.stdout.count("ended") == 2, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_training_continues_undisturbed_when_a_spare_dies(tmp_path):
    text = """
        import json
        import os
        import signal
        import time

        from bagua_comm import elastic
        from bagua_comm.elastic.start import start

        fleet = start(timeout_s=20)
        if fleet.me == 2:
            fleet.stand_by = lambda training: os.kill(os.getpid(), signal.SIGKILL)
        state, entered = elastic.State(step=0), []

        def train(comm):
            entered.append(state.step)
            while state.step < 40:
                if fleet.me == 1 and state.step == 30:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
                state.step += 1
                comm.barrier()
                state.commit()

        elastic.run(state, fleet=fleet)(train)
        dead = [[death.process.number for death in change.dead] for change in elastic.history()]
        print(json.dumps({"me": fleet.me, "entered": entered, "dead": dead}), flush=True)
    """
    env = {**os.environ, "BAGUA_SPARES": "2"}
    result = run_python(4, script=(tmp_path / "spares.py", text), flags=["--ulfm"], env=env, timeout_s=90)
    said = {each["me"]: each for each in map(json.loads, result.stdout.splitlines())}
    assert {me: each["entered"] for me, each in said.items()} == {0: [0, 30], 3: [30]}, result.stderr
    assert said[0]["dead"] == [[1, 2]]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_wait_on_a_device_ends_with_a_death_and_a_rendezvous(tmp_path):
    text = """
        import os
        import signal
        import time

        from bagua_comm.elastic.start import start

        fleet = start(timeout_s=20)
        comm = fleet.connect([process.number for process in fleet.rendezvous().alive])
        comm.barrier()
        if fleet.me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 20
        while (error := comm.transports[0].poll_failures(["a communicator of a device"])) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        print(f"{type(error).__name__}: {error}", flush=True)
        fleet.rendezvous(error)
        fleet.end()
    """
    result = run_python(3, script=(tmp_path / "hear.py", text), flags=["--ulfm"], timeout_s=90)
    heard = result.stdout.splitlines()
    assert len(heard) == 2, result.stderr
    for line in heard:  # the one that notices the death starts a rendezvous, of which the other may hear first
        assert re.match(r"(RankFailed|CommAborted): .*(rank|process) 1 \(.*\) died", line), line


# Fencing --------------------------------------------------------------------------------------------------------


def test_a_half_of_a_split_ends_and_names_a_process_that_it_does_not_reach():
    from bagua_comm.elastic.mpi.agreement import RESUME, Agreement, Participant
    from bagua_comm.transports.mpi.world import Place

    def info(process):
        return ProcessInfo(f"space {process // 2}", 100 + process, 1, f"host {process // 2}", f"h{process // 2}")

    participants = {each: Participant(RESUME, info(each)) for each in range(4)}
    places = {each: Place(f"h{each // 2}", 100 + each, False) for each in range(4)}
    for index, silent in ((0, (2, 3)), (3, (0, 1))):
        living = [each for each in range(4) if each != index]
        agreement = Agreement(
            SimpleNamespace(index=index, places=places, living=lambda living=living: living), 3.0
        )
        agreement.participants = participants
        expected = (
            rf"process {silent[0]} \(on h{silent[0] // 2}, .*\) has not answered for 4 s, .* link to it is broken"
        )
        with pytest.raises(RankFailed, match=expected):
            agreement._fence(silent[0], 4.0, silent)
        agreement._fence(silent[0], 4.0, silent[:1])  # its neighbour answers, and kills it
