"""`run --restarts`: what is started again and what is not, the record, signals, and what is left behind.

mpirun is a stand-in here, which starts processes that know their rank; test_lost_host.py has Open MPI's.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launch import run_python, with_packages
from support.waiting import until

from bagua_comm import __main__ as cli
from bagua_comm.bootstrap.job import Job, entries
from bagua_comm.commands import run
from bagua_comm.errors import BootstrapError
from bagua_comm.launch import job_folder
from bagua_comm.launch import supervisor as supervise
from bagua_comm.launch.mpirun import Mpirun
from bagua_comm.launch.remote_shell import RemoteShell
from bagua_comm.launch.verdict import deaths, judge, time_lost_s
from bagua_comm.system import processes

MPIRUN = """\
#!/bin/sh
# Starts so many processes, and returns the exit code of the last that did not return 0.
while [ "$1" != sh ]; do [ "$1" = -n ] && ranks=$2; shift; done
code=0 pids=
trap 'kill $pids; exit 143' TERM INT
for rank in $(seq 0 $((ranks - 1))); do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$ranks "$@" & pids="$pids $!"
done
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""

PRELUDE = (
    f"""\
namespace = {processes.pid_namespace()!r}
"""
    + """\
import json, os, signal, sys, time
rank, attempt = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["BAGUA_ATTEMPT"])

def record(kind, **facts):  # as Job.record does, which takes longer to import than all of this
    entry = dict(kind=kind, time=time.time(), attempt=attempt, rank=rank, **facts)
    entry |= dict(host="h", namespace=namespace, pid=os.getpid())
    with open(os.environ["BAGUA_JOB_FOLDER"] + "/record", "a") as file:
        file.write(json.dumps(entry) + "\\n")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

record("start")
"""
)
"""The first lines of each program."""


@pytest.fixture(autouse=True)
def listens_to_sigint():
    """Where these tests run in the background of a shell, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """A stand-in for Open MPI's mpirun, and a folder for the folders of jobs."""
    file = tmp_path / "mpirun"
    file.write_text(MPIRUN)
    file.chmod(0o755)
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(job_folder, "shared_memory", lambda: memory)
    monkeypatch.setattr(run, "find_mpirun", lambda: str(file))
    monkeypatch.setattr(run, "ask_mpirun", lambda path: Mpirun(path, "Open MPI", "5.0.11"))
    monkeypatch.setattr(supervise, "LOOK_S", 0.01)
    return file


def supervised(tmp_path, program, *arguments):
    """Run a program as two ranks; return the exit code and the events of the record."""
    script, record = tmp_path / "program.py", tmp_path / "record"
    script.write_text(PRELUDE + textwrap.dedent(program))
    code = cli.main(["run", "-n", "2", "--record", str(record), *arguments, str(script)])
    assert list((tmp_path / "shm").iterdir()) == []
    return code, list(entries(record.read_text().splitlines()))


def kinds(record, *chosen):
    return [entry["kind"] for entry in record if entry["kind"] in chosen]


def test_ranks_that_were_killed_are_started_again(mpirun, tmp_path, capsys):
    program = """
        if attempt == 0 and rank == 1:
            die()
        if attempt == 1:
            record("trained")
        record("exit")
    """
    code, record = supervised(tmp_path, program, "--restarts", "3", "-v")
    assert code == 0
    assert kinds(record, "job", "attempt", "end", "verdict") == ["job", *["attempt", "end"] * 2, "verdict"]
    assert record[-1]["well"]
    told = capsys.readouterr().err
    assert "attempt 1 is lost: rank 1 (pid " in told
    assert "rank 0 (pid " in told
    assert "the job succeeded (2 attempts, 1 death, " in told


OWN_ERROR = "record('error', error='KeyError', text='x', due_to_others=False); sys.exit(rank)"


@pytest.mark.parametrize(
    ("program", "restarts", "code", "attempts", "words"),
    [("die()", 1, 137, 2, "the job failed: ranks "), (OWN_ERROR, 3, 1, 1, "the job failed: rank ")],
    ids=["as often as was asked for", "an error of its own"],
)
def test_a_job_is_started_again_only_where_it_may_help(
    mpirun, tmp_path, capsys, program, restarts, code, attempts, words
):
    found, record = supervised(tmp_path, program, "--restarts", str(restarts))
    assert found == code
    assert kinds(record, "attempt") == ["attempt"] * attempts
    assert not record[-1]["well"]
    assert words in capsys.readouterr().err


def test_a_job_that_is_lost_while_there_is_no_shared_memory_left_says_so(mpirun, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervise, "shared_memory_is_full", lambda: True)
    code, _ = supervised(tmp_path, "die()", "--restarts", "0")
    assert code == 137
    assert re.search("did not finish; /.* was full, and processes that need more", capsys.readouterr().err)
    code, _ = supervised(tmp_path, "record('exit')", "--restarts", "0")
    assert code == 0
    assert "was full" not in capsys.readouterr().err


def test_ranks_know_their_job_and_the_last_commit_is_recorded(mpirun, tmp_path):
    program = """
        open(os.environ["BAGUA_JOB_FOLDER"] + "/committed", "w").write("7")
        record("exit", spares=os.environ["BAGUA_SPARES"], least=os.environ["BAGUA_MIN_RANKS"])
    """
    code, record = supervised(tmp_path, program, "--spares", "1", "--min-ranks", "2")
    assert code == 0
    assert [(entry["spares"], entry["least"]) for entry in record if entry["kind"] == "exit"] == [("1", "2")] * 3
    assert [entry["number"] for entry in record if entry["kind"] == "commit"] == [7]


def test_children_of_ranks_that_were_killed_are_ended(mpirun, tmp_path):
    program = """
        import subprocess
        if rank == 0:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            record("exit", child=child.pid)
        die()
    """
    _, record = supervised(tmp_path, program, "--restarts", "0")
    (child,) = [entry["child"] for entry in record if entry["kind"] == "exit"]
    assert processes.state_of(child) in ("ended", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_mpirun_and_the_supervision(number, code, mpirun, tmp_path, monkeypatch, capsys):
    program = f"""
        if rank == 0:
            os.kill(int(os.environ["SUPERVISOR"]), {int(number)})
        time.sleep(600)
    """
    monkeypatch.setenv("SUPERVISOR", str(os.getpid()))
    handler = signal.getsignal(number)
    found, record = supervised(tmp_path, program, "--restarts", "3")
    assert found == code
    assert kinds(record, "attempt") == ["attempt"]
    started = [entry["pid"] for entry in record if entry["kind"] == "start"]
    until(lambda: all(processes.state_of(pid) != "running" for pid in started))
    assert f"{number.name} has ended this job" in capsys.readouterr().err
    assert signal.getsignal(number) is handler


def test_the_second_signal_kills_processes_that_ignore_the_first(mpirun, tmp_path, monkeypatch):
    mpirun.write_text(MPIRUN.replace("trap '", "trap 'kill -INT $SUPERVISOR #"))
    program = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            os.kill(int(os.environ["SUPERVISOR"]), signal.SIGINT)
        time.sleep(600)
    """
    monkeypatch.setenv("SUPERVISOR", str(os.getpid()))
    code, record = supervised(tmp_path, program, "--restarts", "3")
    assert code == 130
    assert not any(processes.state_of(entry["pid"]) == "running" for entry in record if entry["kind"] == "start")


def test_a_folder_whose_supervisor_is_gone_is_removed_by_the_next_one(mpirun, tmp_path):
    memory = tmp_path / "shm"
    gone, living = job_folder.make({"hosts": []}), job_folder.make({"hosts": []})
    os.close(gone.lock)  # as the kernel does when a process ends

    supervise.clean_up(limit_s=1.0)

    assert list(memory.iterdir()) == [living.path]
    living.remove()
    assert list(memory.iterdir()) == []


def test_a_host_that_was_lost_and_answers_again_is_left_clean(tmp_path, capsys):
    agent, folder = tmp_path / "agent", tmp_path / "folder"
    agent.write_text(f'#!/bin/sh\n[ -e {tmp_path}/down-$1 ] && exit 255\nshift; exec sh -c "$*"\n')
    agent.chmod(0o755)
    folder.mkdir()
    (folder / "snapshot").touch()
    segment = Path(f"/dev/shm/sm_segment.test.{os.getpid()}.0.0")
    segment.touch()
    start = {"kind": "start", "host": "h1", "attempt": 0, "shared": [str(segment)]}
    (folder / supervise.RECORD).write_text(json.dumps(start) + "\n")  # gathered by no attempt
    (tmp_path / "down-h2").touch()
    job, shell = Job(f"lost-{os.getpid()}", folder), RemoteShell((str(agent),))
    daemon = subprocess.Popen(["sleep", "100"], env={**os.environ, "BAGUA_JOB": job.name})
    supervisor = supervise._Supervisor(None, None, job, None, ["h1", "h2"], shell, gone={"h1", "h2"})

    supervisor.leave_hosts()

    assert daemon.wait(10) == -signal.SIGTERM
    assert not folder.exists()
    assert not segment.exists()
    told = capsys.readouterr().err
    assert f"h2: no answer at the end, so processes of this job, and {folder} {segment}, may be left" in told
    assert "h1" not in told


def test_a_host_that_is_silent_once_after_an_attempt_is_asked_again(mpirun, tmp_path, monkeypatch):
    """One slow answer of srun made a job lost that had ended well, and started it again."""
    agent, asked = tmp_path / "agent", tmp_path / "asked"
    silent_once = f"case \"$*\" in *'kill -9'*) [ -e {asked} ] || {{ touch {asked}; exit 255; }};; esac"
    agent.write_text(f'#!/bin/sh\n{silent_once}\nshift; exec sh -c "$*"\n')
    agent.chmod(0o755)
    monkeypatch.setattr(supervise, "find_remote_shell", lambda given: RemoteShell((str(agent),)))
    code, record = supervised(tmp_path, "record('exit')", "--restarts", "1", "--host", "h1:2")
    assert asked.exists()
    assert (code, kinds(record, "attempt")) == (0, ["attempt"])


@pytest.mark.slow
def test_a_supervisor_that_is_killed_ends_its_ranks_and_the_next_one_cleans_up(tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(100)")
    command = [sys.executable, "-m", "bagua_comm", "run", "-n", "2", "--restarts", "1", str(script)]
    job = subprocess.Popen(command, env=with_packages())
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2, limit_s=90)
    ranks = [int(pid) for pid in pids.read_text().split()]
    found = job_folder.shared_memory().glob(f"{job_folder.PREFIX}*")
    (folder,) = [each for each in found if is_of(each, job)]

    job.kill()
    assert job.wait() == -signal.SIGKILL

    until(lambda: all(processes.state_of(rank) != "running" for rank in ranks), limit_s=90)
    supervise.clean_up(limit_s=1.0)
    assert not folder.exists()


ELASTIC = """
import os, signal, sys
import numpy as np
from bagua_comm import elastic
from bagua_comm.bootstrap.environment import job

state = elastic.State(weights=np.zeros(100), step=0)

@elastic.run(state, timeout_s=60)
def train(comm):
    print("enters at step", state.step, "with", comm.size, "ranks", flush=True)
    while state.step < 10:
        if state.step == 5 and job().attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # this one, then the spare
        state.weights += comm.allreduce(np.full(100, state.step, float), op="avg")
        state.step += 1
        state.commit()
    assert (state.weights == sum(range(10))).all()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_continues_from_memory_when_all_ranks_are_killed(tmp_path):
    record = tmp_path / "record"
    flags = ["--spares", "1", "--restarts", "1", "--record", str(record)]
    result = run_python(2, flags=flags, script=(tmp_path / "script.py", ELASTIC), timeout_s=250)
    assert result.returncode == 0, result.stderr
    assert "enters at step 5 with 2 ranks" in result.stdout
    assert "the job succeeded (2 attempts, " in result.stderr
    told = list(entries(record.read_text().splitlines()))
    assert len(kinds(told, "trained")) == 2
    assert [each["number"] for each in told if each["kind"] == "commit"] > [10]
    shared = [file for each in told if each["kind"] == "start" for file in each["shared"]]
    assert len(shared) >= 6
    assert not any(os.path.exists(file) for file in shared)


def is_of(folder, job):
    """Whether this job's supervisor made the folder."""
    (first, *_) = entries((folder / "record").read_text().splitlines())
    return first["pid"] == job.pid


# The verdict -----------------------------------------------------------------------------------------------


def entry(kind, rank=0, attempt=0, **facts):
    return {"kind": kind, "attempt": attempt, "host": "a", "pid": 100 + rank, "rank": rank, **facts}


START = [entry("start", rank, size=2) for rank in range(2)]
TRAINED = [entry("trained", rank) for rank in range(2)]
EXIT = [entry("exit", rank) for rank in range(2)]
OWN = entry("error", 1, error="ValueError", text="x", due_to_others=False)
UNCONNECTED = entry("death", dead={"number": 1, "host": "a"}, reason="ended without calling connect")
OTHERS = entry("error", 0, error="RankFailed", text="rank 1 died", due_to_others=True)


@pytest.mark.parametrize(
    ("told", "code", "gone", "verdict"),
    [
        ([*START, *EXIT], 0, [], ("succeeded", 0)),
        ([*START, *EXIT], 0, ["b"], ("succeeded", 0)),  # all have finished, and their host is slow to answer
        ([START[0], EXIT[0]], 0, ["b"], ("lost", 1)),  # the entries of rank 1 are on the host that is gone
        ([*START, EXIT[0]], 0, ["b"], ("lost", 1)),
        ([*START, *EXIT], 137, ["b"], ("lost", 137)),
        ([*START, OTHERS, EXIT[1]], 0, ["b"], ("lost", 1)),
        ([START[0], {**START[0], "namespace": "b"}, EXIT[0]], 0, [], ("lost", 1)),  # two of one number
        ([*START, *TRAINED, *EXIT], 137, [], ("succeeded", 0)),  # a spare was killed, or a rank before
        ([*START, TRAINED[0], EXIT[0]], 0, [], ("succeeded", 0)),
        ([*START, *TRAINED, EXIT[0]], 0, [], ("failed", 1)),  # killed after training, in what follows
        ([*START, *TRAINED, *EXIT], 3, [], ("failed", 3)),
        ([*START, EXIT[0], OWN], 1, [], ("failed", 1)),
        ([*START, OTHERS, OWN], 137, [], ("failed", 1)),
        ([*START, OTHERS], 1, [], ("lost", 1)),
        ([*START, OTHERS], 0, [], ("lost", 1)),
        ([OTHERS], 1, [], ("lost", 1)),  # it waited for ranks that did not start in time
        ([*START, EXIT[0]], 0, [], ("lost", 1)),
        (START, 137, [], ("lost", 137)),
        ([UNCONNECTED, UNCONNECTED], 1, [], ("lost", 1)),
        ([*START, *EXIT, UNCONNECTED], 1, [], ("failed", 1)),
        ([], 137, [], ("lost", 137)),
        ([], -9, [], ("lost", 137)),
        ([], 0, ["b"], ("lost", 1)),
        ([], 255, ["b"], ("lost", 255)),
        ([], 213, [], ("failed", 213)),  # mpirun's own, for an argument that it does not know
        ([], 1, [], ("failed", 1)),
        ([], 0, [], ("succeeded", 0)),
    ],
)
def test_the_verdict_on_a_record_and_an_exit_code(told, code, gone, verdict):
    found = judge(told, code, gone=gone)
    assert (found.outcome, found.code) == verdict
    assert found.why


def test_each_death_counts_once_and_time_between_attempts_is_lost():
    seen = [entry("death", rank, dead={"number": 3, "host": "a", "pid": 7}) for rank in range(3)]
    twins = [entry("death", dead={"number": number, "host": "a", "pid": 7}) for number in range(2)]
    assert len(deaths([*seen, *twins])) == 3
    recoveries = [entry("recovery", rank, meeting=2, seconds=0.5) for rank in range(3)]
    between = [
        entry("end", time=10.0),
        entry("start", attempt=1, time=12.0),
        entry("start", attempt=1, time=13.0),
    ]
    assert time_lost_s([*recoveries, *between]) == 2.5


# The job, as processes see it ------------------------------------------------------------------------------


def test_a_record_holds_values_that_json_lacks_as_text_and_ignores_truncated_lines(tmp_path):
    job = Job("name", tmp_path / "folder", attempt=2)
    job.prepare()
    job.record("death", dead={"number": Path("x")})
    with open(tmp_path / "folder" / "record", "a") as file:
        file.write('{"kind": "sta')
    (told,) = entries((tmp_path / "folder" / "record").read_text().split("\n"))
    assert (told["attempt"], told["dead"]) == (2, {"number": "x"})
    with pytest.raises(ValueError, match="the kind is 'dead', expected one of job, attempt"):
        job.record("dead")


def test_without_a_supervisor_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Job().record("start")
    Job().committed(1)
    assert list(tmp_path.iterdir()) == []
    assert Job().last_commit() is None


def test_the_last_commit_replaces_the_one_before(tmp_path):
    job = Job("name", tmp_path)
    assert job.last_commit() is None
    for number in (10**9, 7):
        job.committed(number)
    assert job.last_commit() == 7


@pytest.mark.parametrize("variables", [{"BAGUA_SPARES": "x"}, {"BAGUA_MIN_RANKS": "0"}, {"BAGUA_ATTEMPT": "-1"}])
def test_a_variable_that_is_no_number_is_refused(variables):
    with pytest.raises(BootstrapError, match=f"{next(iter(variables))} is '.*', expected a number from"):
        Job.of(variables)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(BootstrapError, match="belongs to another user"):
        Job("name", tmp_path).prepare()
    with pytest.raises(BootstrapError, match="cannot be made"):
        Job("name", tmp_path / "a" / "b").prepare()
