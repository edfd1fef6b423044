"""`run --write`: the same job for Slurm, which runs such jobs in tests/clusters."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from support.commands import output_of

from bagua_comm import __main__ as cli

HOSTS = ("--host", "node1:2,node2:2")


def written(capsys, kind, *arguments):
    return output_of(capsys, "run", "--write", kind, "-", *arguments)


def directives(text):
    """The options of the `#SBATCH` lines: name -> value."""
    lines = re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE)
    assert len(dict(lines)) == len(lines)
    return dict(lines)


def last_command(text):
    return shlex.split(text.splitlines()[-1])


def test_slurm_gets_the_numbers_of_ranks_and_nodes(capsys):
    job = directives(written(capsys, "slurm", *HOSTS, __file__))
    assert (job["nodes"], job["ntasks"], job["ntasks-per-node"]) == ("2", "4", "2")
    assert job["job-name"] == "test-job-scripts"
    job = directives(written(capsys, "slurm", "-n", "3", __file__))
    assert (job["nodes"], job["ntasks"], job["ntasks-per-node"]) == ("1", "3", "3")
    job = directives(written(capsys, "slurm", "--host", "a:1,b:2", __file__))
    assert (job["nodes"], job["ntasks"]) == ("2", "3")
    assert "ntasks-per-node" not in job


def test_slurm_gets_the_same_arguments_quoted_for_the_shell(capsys):
    given = ["--env", "A=b 'c' $d", "--interface", "eth0", "--links", "2", "--mpirun=--report-bindings", "--ulfm"]
    text = written(capsys, "slurm", *given, "-m", "package.train", "--name", "x y")
    command = last_command(text)
    assert command[:6] == [sys.executable, "-m", "bagua_comm", "run", "-n", "$SLURM_NTASKS"]
    assert command[command.index("MASTER_PORT") + 1 :] == [*given, "-m", "package.train", "--name", "x y"]
    assert f"\ncd {shlex.quote(os.getcwd())}\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=30).returncode == 0


def test_spares_are_tasks_of_slurm_too(capsys):
    given = ["--spares", "2", "--restarts", "3", "--min-ranks", "1", "--record", "record"]
    text = written(capsys, "slurm", *HOSTS, *given, __file__)
    assert directives(text)["ntasks"] == "4"
    assert directives(text)["signal"] == "B:TERM@60"
    command = last_command(text)
    assert command[command.index("-n") + 1] == "$((SLURM_NTASKS - 2))"
    assert command[-len(given) - 1 :] == [*given, __file__]


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "the next line\n"), (["--restarts", "1"], "")], ids=["plain", "supervised"]
)
def test_lines_below_the_command_run_or_a_comment_says_that_they_do_not(monkeypatch, capsys, arguments, said):
    """What a user appended never ran. In a supervised job Slurm's signal must reach run, and not the shell."""
    monkeypatch.setattr(sys, "executable", "true")
    text = written(capsys, "slurm", *HOSTS, *arguments, __file__)
    added = f"{text.splitlines()[-1]}\necho the next line\n"
    environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "4"}
    result = subprocess.run(["bash", "-c", added], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == said
    assert ("lines below it never run" in text.splitlines()[-2]) == (not said)


def test_variables_of_the_user_replace_those_of_the_script(capsys):
    command = last_command(written(capsys, "slurm", "--env", "OMP_NUM_THREADS=4", __file__))
    assert [word for word in command if word.startswith("OMP_NUM_THREADS")] == ["OMP_NUM_THREADS=4"]


def test_a_job_of_an_array_gives_its_ranks_its_number(tmp_path, monkeypatch, capsys):
    """The last line of the script, with a program in place of Python that prints its arguments."""
    monkeypatch.setattr(sys, "executable", "echo")
    line = written(capsys, "slurm", *HOSTS, __file__).splitlines()[-1]
    for number, expected in (({"SLURM_ARRAY_TASK_ID": "3"}, True), ({}, False)):
        environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "4", **number}
        said = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=True)
        assert ("-n 4 --env SLURM_ARRAY_TASK_ID --env OMP" in said.stdout) == expected, said.stdout


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (["-m", "pack_age.My_Train"], "my-train"),
        (["-m", "___"], "job"),
        (["-m", "x" * 99], "x" * 50),
        (["-m", "pack_age.2024_train"], "job-2024-train"),
        (["-m", "7" * 99], "job-" + "7" * 46),
    ],
)
def test_the_name_of_a_job_has_letters_digits_and_hyphens(script, name, capsys):
    assert directives(written(capsys, "slurm", *script))["job-name"] == name


def test_a_file_that_is_there_is_not_replaced_unless_it_is_wanted(tmp_path, capsys):
    file = tmp_path / "job.sh"
    assert cli.main(["run", "--write", "slurm", str(file), __file__]) == 0
    assert f"sbatch {file}" in file.read_text()
    file.write_text("mine")
    assert cli.main(["run", "--write", "slurm", str(file), __file__]) == 2
    assert f"{file} is there already; --force replaces it" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert cli.main(["run", "--write", "slurm", str(file), "--force", __file__]) == 0
    assert file.read_text().startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--write", "pbs", "job.sh", __file__], "--write pbs: expected slurm, and a file"),
        (["--write", "slurm", "no/such/folder/job.sh", __file__], "--write no/such/folder/job.sh: "),
        (["--write", "slurm", "-", "no_such_file.py"], "there is no file no_such_file.py"),
        (["--write", "slurm", "-", "--host", "a,b", __file__], "how many ranks?"),
        (["--write", "slurm", "-", "--env", "A B=1", __file__], "'A B' is not the name of a variable"),
        (["--force", __file__], "--force is for --write"),
    ],
)
def test_scripts_that_cannot_be_written_are_refused_with_what_to_do(arguments, message, capsys):
    assert message in output_of(capsys, "run", *arguments, code=2)


# Names with special characters --------------------------------------------------------------------------


def test_no_name_leaves_its_comment(tmp_path, monkeypatch):
    """A line that begins within a quoted name would be run."""
    folder = tmp_path / "a\ntouch broken\n"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("")
    monkeypatch.setattr(sys, "executable", "/bin/py\ntouch broken\nthon")
    file = "job\ntouch broken\n.sh"
    assert cli.main(["run", "--write", "slurm", file, "train.py"]) == 0
    text = (folder / file).read_text()
    assert "broken" not in text[: text.index("set -euo pipefail")].replace("\\ntouch broken\\n", "")
    ran = text[: text.index("export OMP_NUM_THREADS")] + "pwd"
    result = subprocess.run(["bash"], input=ran, text=True, capture_output=True, timeout=30, cwd=tmp_path)
    assert result.stdout == f"{folder}\n", result.stderr
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.rglob("broken"))


def test_a_slurm_script_has_the_bytes_of_names_that_are_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert cli.main(["run", "--write", "slurm", "job.sh", "train.py", os.fsdecode(b"a\xffb")]) == 0
    assert b"a\xffb" in (tmp_path / "job.sh").read_bytes()
