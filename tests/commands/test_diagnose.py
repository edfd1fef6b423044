"""`diagnose`, on records that are there, and on the stories of ranks under MPI."""

import json
import os
import pickle
import re

import pytest
from support.commands import output_of
from support.launch import run_python

from bagua_comm import __main__ as cli
from bagua_comm.flight import Entry, FlightRecorder
from bagua_comm.flight.pytorch import PREFIX


def write(folder, rank, number):
    flight = FlightRecorder(rank, 2, folder=folder)
    flight.ring.append([("world", True, "barrier", None, (), {}, False), number, None, 1, None, None])
    flight.write()


def test_a_folder_is_explained_in_words_or_as_json(tmp_path, capsys):
    write(tmp_path, 0, 1)
    assert cli.main(["diagnose", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("* rank 1 has not come to barrier #1, where rank 0 waits; it left no record")
    assert cli.main(["diagnose", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0] | {"text": ""} == {
        "kind": "behind",
        "ranks": [1],
        "text": "",
        "group": "world",
        "number": 1,
    }
    assert len(found["ranks"]) == 2


def test_nothing_wrong_is_exit_code_0(tmp_path, capsys):
    write(tmp_path, 0, 1)
    write(tmp_path, 1, 1)
    assert output_of(capsys, "diagnose", str(tmp_path)).startswith("Nothing wrong was found.")


def test_a_folder_without_records_is_a_message(tmp_path, capsys):
    assert "has no records of ranks" in output_of(capsys, "diagnose", str(tmp_path), code=2)


def test_without_a_folder_the_latest_job_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BAGUA_FLIGHT_FOLDER", str(tmp_path))
    write(tmp_path / "job", 0, 1)
    assert cli.main(["diagnose"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("* rank 1 has not come to barrier #1")
    assert f"the latest job in {tmp_path}: " in said.err


def test_a_folder_that_is_gone_may_have_been_removed_for_later_jobs(tmp_path, capsys):
    assert cli.main(["diagnose", str(tmp_path / "job")]) == 2
    assert "The default folder keeps the latest 16 jobs" in capsys.readouterr().err


def test_pytorchs_format_is_written_beside(tmp_path, capsys):
    write(tmp_path / "ours", 0, 1)
    assert cli.main(["diagnose", str(tmp_path / "ours"), "--torch", str(tmp_path / "theirs")]) == 1
    (path,) = (tmp_path / "theirs").iterdir()
    assert path.name == f"{PREFIX}0"
    assert pickle.loads(path.read_bytes())["entries"][0]["profiling_name"] == "gloo:barrier"
    assert "--torch" in output_of(capsys, "diagnose", str(tmp_path / "ours"), "--torch", str(path), code=2)


def test_an_entry_is_a_call_as_it_was_written():
    assert (
        str(Entry("world.1", 7, True, "reduce", "int8", (2,), {"root": 1}))
        == "reduce(int8[2], root=1) #7 of world.1"
    )


PROGRAM = """
    import os, signal, sys, time
    import numpy as np
    import bagua_comm

    with bagua_comm.connect(timeout_s=60) as comm:
        small, large = np.ones(4, np.float32), np.ones(100_000, np.float32)
        for step in range(4):
            odd = step == 3 and comm.rank == 1
            if odd and sys.argv[1] == "hangs":
                time.sleep(60)
            if odd and sys.argv[1] == "leaves":
                break
            if odd and sys.argv[1] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if odd and sys.argv[1] == "differs":
                small = np.ones(5, np.float32)
            if not (odd and sys.argv[1] == "skips"):
                comm.allreduce(small, out=small, timeout_s=4)
            comm.allreduce(large, out=large, op="avg", timeout_s=4)
"""

STORIES = {
    "hangs": ("behind", r"rank 1 has not come to allreduce #7, where ranks 0, 2 wait"),
    "leaves": ("left", r"rank 1 left: its program ended, or it closed its communicator"),
    "dies": ("died", r"rank 1 died"),
    "differs": ("unlike", r"but rank 1 called allreduce\(float32\[5\].*sizes differ \(4 and 5 elements\)"),
    "skips": ("skipped", r"rank 1 left out allreduce"),
}


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_diagnose_explains_failures_of_ranks_under_mpi(story, tmp_path, capsys):
    records = tmp_path / "records"
    script = tmp_path / "program.py", PROGRAM
    env = {**os.environ, "BAGUA_FLIGHT_FOLDER": str(records)}
    result = run_python(3, story, script=script, env=env)
    assert result.returncode != 0
    assert cli.main(["diagnose", str(records), "--json"]) == 1
    kind, words = STORIES[story]
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["ranks"]) == (kind, [1])
    assert re.search(words, finding["text"])
    if story != "dies":  # mpirun itself reports that
        assert f"python -m bagua_comm diagnose {records}" in result.stderr
        assert re.search(r"\n  \* .*rank 1", result.stderr), result.stderr
