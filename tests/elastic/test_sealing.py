"""Environment variables of spawned processes: only the same user can read them."""

import os
import subprocess
import sys
from pathlib import Path
from secrets import token_hex

import pytest
from support.children import started

from bagua_comm.elastic.mpi import unsealing
from bagua_comm.elastic.mpi.sealing import seal

TELLS = "import os, sys; print(os.environ['SECRET'], os.environ['SHOWN'], 'BAGUA_SEAL' in os.environ, flush=True)"
WAITS = "; sys.stdin.read()"


def test_a_program_has_its_variables_and_they_are_on_no_command_line():
    program = [sys.executable, "-c", TELLS + WAITS, "argument"]
    secrets = {"SECRET": "mark" * 25_000, "MORE": token_hex(50_000)}  # too long for one argument
    sealed = seal(secrets | {"SHOWN": "no"}, {"SHOWN": "yes"}, program)
    assert not any("markmark" in word for word in sealed.command)
    assert "SHOWN=yes" in sealed.command
    name, _, value = sealed.variable.partition("=")
    assert len(sealed.variable) < 256  # what MPI takes
    with started(
        ["env", *sealed.command],
        env={"PATH": os.environ["PATH"], name: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == f"{secrets['SECRET']} no False\n"
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        process.stdin.close()
    assert list(map(os.fsdecode, words)) == program


@pytest.mark.parametrize("variables", [{}, {"A": "b\nc=d", "E": "\udcff\u00e9", "F": ""}])
def test_a_sealed_message_is_opened_with_its_key_alone(variables):
    sealed = seal(variables, {}, ["/bin/true"])
    at = next(n for n, word in enumerate(sealed.command) if word.isdecimal())
    texts = sealed.command[at + 1 : at + 1 + int(sealed.command[at])]
    key = bytes.fromhex(sealed.variable.partition("=")[2])
    assert unsealing.unseal(texts, key) == variables
    assert seal(variables, {}, ["/bin/true"]).variable != sealed.variable
    with pytest.raises(ValueError, match="sealed with another key"):
        unsealing.unseal(texts, bytes(32))


def test_files_of_the_current_folder_are_not_taken_for_pythons_own_modules(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(5)")
    sealed = seal({}, {}, [sys.executable, "-c", ""])
    name, _, value = sealed.variable.partition("=")
    assert subprocess.run(["env", *sealed.command], env={**os.environ, name: value}, cwd=tmp_path).returncode == 0
