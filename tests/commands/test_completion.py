"""`completion`: what shells complete. argcomplete itself is played by a module of one function."""

import sys
from types import ModuleType

import pytest

from bagua_comm import __main__ as cli


@pytest.fixture
def argcomplete(monkeypatch):
    module = ModuleType("argcomplete")
    module.shellcode = lambda names, shell: f"complete {names} in {shell}"
    module.autocomplete = lambda parser: sys.exit(f"completes {parser.prog}")
    monkeypatch.setitem(sys.modules, "argcomplete", module)
    return module


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_the_code_of_argcomplete(shell, argcomplete, capsys):
    assert cli.main(["completion", shell]) == 0
    assert capsys.readouterr().out == f"complete ['bagua'] in {shell}\n"


def test_a_shell_that_asks_is_answered_before_anything_is_done(argcomplete, monkeypatch):
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit, match="completes python -m bagua_comm"):
        cli.main(["run", "--dry-run", __file__])


def test_without_argcomplete_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install argcomplete" in capsys.readouterr().err


def test_argcomplete_finds_its_mark_where_it_looks():
    """It reads so much of the file that a console script names."""
    with open(cli.__file__) as file:
        assert "PYTHON_ARGCOMPLETE_OK" in file.read(1024)
