"""The command line as a whole; its commands are tested in tests/commands."""

import subprocess
import sys
from types import ModuleType

import pytest

import bagua_comm
from bagua_comm import __main__ as cli


@pytest.mark.parametrize(
    ("called", "name"), [("/somewhere/bin/bagua", "bagua"), ("/a/bagua_comm/__main__.py", "python -m bagua_comm")]
)
def test_messages_name_the_program_as_it_was_called(called, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [called])
    assert cli.main(["run", "no_such_file.py"]) == 2
    assert capsys.readouterr().err == f"{name} run: there is no file no_such_file.py\n"
    with pytest.raises(SystemExit):
        cli.main(["no-such-command"])
    line, hint, *more = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: error: argument command: invalid choice: 'no-such-command'")
    assert (hint, more) == (f"  for the arguments: {name} --help", [])


def test_a_misspelled_command_is_answered_by_the_one_that_was_meant(capsys):
    with pytest.raises(SystemExit):
        cli.main(["runn"])
    assert capsys.readouterr().err.splitlines()[0].endswith("; did you mean 'run'?")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--hosts", "a:2", "x.py"], "run: error: unrecognized arguments: --hosts; did you mean --host?"),
        (["trace", "t.json", "t2.json"], "trace: error: unrecognized arguments: t2.json"),
        (["run", "--n=2", "x.py"], "run: error: unrecognized arguments: --n=2; did you mean -n?"),
        (["run", "-x", "FOO=1", "x.py"], "unrecognized arguments: -x; did you mean --env?"),
        (["run", "--nproc-per-node", "2", "x.py"], "unrecognized arguments: --nproc-per-node; did you mean -n?"),
        (
            ["advise", "--nodes", "4", "--bandwith", "1gbit"],
            ", and --bandwith is unrecognized; did you mean --bandwidth?",
        ),
        (["doctor", "plot.png"], "doctor: error: unrecognized arguments: plot.png"),
    ],
)
def test_an_unknown_option_is_answered_by_the_one_that_was_meant(arguments, says, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    line, hint = capsys.readouterr().err.splitlines()
    assert line.endswith(says)
    assert hint.endswith(f"{arguments[0]} --help")


@pytest.mark.parametrize("command", [*cli.COMMANDS, "net check"])
def test_errors_of_arguments_are_two_lines(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--no-such-option"])
    assert end.value.code == 2
    line, hint = capsys.readouterr().err.splitlines()
    assert f" {command.split()[0]}: error: " in line
    assert hint == f"  for the arguments: {line.partition(': error: ')[0]} --help"


def test_the_version_is_the_librarys(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"bagua_comm {bagua_comm.__version__}\n"


def test_the_command_line_needs_no_docstrings():
    command = [sys.executable, "-OO", "-m", "bagua_comm", "run", "--dry-run", __file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_a_reader_of_the_first_line_alone_sees_no_traceback():
    advise = [sys.executable, "-u", "-m", "bagua_comm", "advise", "--model", "vgg16", "--nodes", "4"]
    advise += ["--bandwidth", "10gbit", "--step-time", "1s"]
    process = subprocess.Popen(advise, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # as `head` does, before anything is written
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=300) == 141


def test_a_shell_that_asks_for_completions_is_answered_before_anything_is_done(monkeypatch):
    module = ModuleType("argcomplete")
    module.autocomplete = lambda parser: sys.exit(f"completes {parser.prog}")
    monkeypatch.setitem(sys.modules, "argcomplete", module)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit, match="completes python -m bagua_comm"):
        cli.main(["run", "--dry-run", __file__])


def test_argcomplete_finds_its_mark_where_it_looks():
    """It reads so much of the file that a console script names."""
    with open(cli.__file__) as file:
        assert "PYTHON_ARGCOMPLETE_OK" in file.read(1024)
