"""`run --restarts`: what is started again and what is not, the record, signals, and what is left behind.

mpirun is a stand-in here, which starts processes that know their rank; tests/elastic has Open MPI's.
"""

import textwrap
from pathlib import Path

import pytest

from bagua_comm import __main__ as cli
from bagua_comm.commands import job_folder, run, supervise
from bagua_comm.commands.mpirun import Mpirun
from bagua_comm.job import entries

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

PRELUDE = """\
import os, signal, sys, time
sys.path.insert(0, {root!r})
from bagua_comm.job import Job
job, rank = Job.of(os.environ), int(os.environ["OMPI_COMM_WORLD_RANK"])
job.record("start", rank=rank)
"""


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
    """Run a program as two ranks; returns the exit code and what the record tells."""
    script, record = tmp_path / "program.py", tmp_path / "record"
    root = str(Path(run.__file__).parents[2])
    script.write_text(PRELUDE.format(root=root) + textwrap.dedent(program))
    code = cli.main(["run", "-n", "2", "--record", str(record), *arguments, str(script)])
    assert list((tmp_path / "shm").iterdir()) == []
    return code, list(entries(record.read_text().splitlines()))


def kinds(record, *chosen):
    return [entry["kind"] for entry in record if entry["kind"] in chosen]


def test_ranks_that_were_killed_are_started_again(mpirun, tmp_path, capsys):
    program = """
        if job.attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.attempt == 1:
            job.record("trained")
        job.record("exit")
    """
    code, record = supervised(tmp_path, program, "--restarts", "3", "-v")
    assert code == 0
    assert kinds(record, "job", "attempt", "end", "verdict") == ["job", *["attempt", "end"] * 2, "verdict"]
    assert record[-1]["well"]
    told = capsys.readouterr().err
    assert "attempt 1 is lost: rank 1 (pid " in told
    assert "the job ended well (2 attempts, 1 death" in told


def test_a_job_is_started_again_no_more_often_than_was_asked_for(mpirun, tmp_path, capsys):
    code, record = supervised(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "--restarts", "1")
    assert code == 137
    assert len(kinds(record, "attempt")) == 2
    assert not record[-1]["well"]
    assert "did not end well: ranks 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("raise ValueError", 1, "exit code 1"),
        (
            "job.record('error', rank=rank, error='KeyError', text='x', due_to_others=False); sys.exit(1)",
            1,
            "KeyErr",
        ),
    ],
)
def test_what_would_only_happen_again_is_not_started_again(program, code, why, mpirun, tmp_path, capsys):
    given = f"job.record('exit')\n{program}" if "error" not in program else program
    found, record = supervised(tmp_path, given, "--restarts", "3")
    assert found == code
    assert kinds(record, "attempt") == ["attempt"]
    assert why in capsys.readouterr().err


def test_the_program_must_stay_the_same(mpirun, tmp_path, capsys):
    program = "open(__file__, 'a').write('#'); os.kill(os.getpid(), signal.SIGKILL)"
    code, record = supervised(tmp_path, program, "--restarts", "3")
    assert code == 137
    assert kinds(record, "attempt") == ["attempt"]
    assert "program.py has changed since the job was started" in capsys.readouterr().err


def test_ranks_know_their_job(mpirun, tmp_path):
    program = "job.committed(7 + job.attempt); job.record('exit', spares=job.spares, least=job.min_ranks)"
    code, record = supervised(tmp_path, program, "--spares", "1", "--min-ranks", "2")
    assert code == 0
    told = [(entry["spares"], entry["least"]) for entry in record if entry["kind"] == "exit"]
    assert told == [(1, 2)] * 3
    assert next(entry["number"] for entry in record if entry["kind"] == "commit") == 7
