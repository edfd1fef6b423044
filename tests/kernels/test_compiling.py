"""How kernels are compiled beside a training: the process, its lock, and its end."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest
from support.children import Forked
from support.compilers import LIMIT_S, FakeCompiler, has_ended, home_with_kernels, state_of
from support.waiting import until

from bagua_comm.kernels import compiled
from bagua_comm.kernels.compiler_process import NO_PARENT, verdict_of
from bagua_comm.kernels.numba import background
from bagua_comm.kernels.numba.background import BackgroundCompiler
from bagua_comm.kernels.numba.cache import (
    GOOD,
    load_unchecked,
    locked,
    object_path,
    read_object,
    read_verdict,
    verdict_path,
    write_verdict,
)
from bagua_comm.kernels.numba.signatures import KERNELS

pytestmark = pytest.mark.needs("numba")


@pytest.fixture
def folder(tmp_path):
    """A folder of compiled kernels, without a verdict."""
    found = home_with_kernels(tmp_path)
    verdict_path(found).unlink()
    return found


def test_a_file_that_is_not_whole_or_that_others_can_have_written_is_not_read(folder):
    path = object_path(folder, "add_fixed")
    content = path.read_bytes()
    assert read_object(path) == content[32:]
    for wrong in (content[:-1], content + b"0", b"", b"0" + content[1:]):
        path.write_bytes(wrong)
        assert read_object(path) is None
    path.write_bytes(content)
    path.chmod(0o666)
    assert read_object(path) is None
    path.unlink()
    assert load_unchecked(folder) is None


# The process and its end ------------------------------------------------------------------------------


WAITS_FOR_GO = """
import time
while not (folder / 'go').exists(): time.sleep(0.01)
(folder / 'verdict').write_text('good')
"""


START = """
import sys
from bagua_comm.kernels.numba import background
from bagua_comm.kernels.selection import HostKernels

def start(step, folder, *, urgent):
    process = background.start(step, folder, urgent=True)
    print(process.pid, flush=True)
    return process

HostKernels(start).load_or_compile()
sys.stdin.read()
"""


@pytest.mark.parametrize("ends", ["exits", pytest.param("is killed", marks=pytest.mark.slow)])
def test_the_compiler_ends_with_the_process_that_started_it(tmp_path, ends):
    variables = {**os.environ, "HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", START], env=variables, **pipes) as user:
        compiler = int(user.stdout.readline())
        assert not has_ended(compiler)
        if ends == "exits":
            user.stdin.close()
        else:
            user.kill()
        assert user.wait(LIMIT_S) == (0 if ends == "exits" else -signal.SIGKILL)
    until(lambda: has_ended(compiler))
    assert not list(tmp_path.rglob("verdict"))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["make", "check"])
def test_a_process_whose_parent_ends_before_it_has_started_ends_too(tmp_path, step):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from bagua_comm.kernels.numba import background\n"
        "process = background.start(sys.argv[2], Path(sys.argv[1]), urgent=False)\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), step]
    result = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S)
    assert result.returncode == -signal.SIGKILL
    process = int(result.stdout)
    try:
        until(lambda: has_ended(process))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


# The process and its surroundings -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_compiler_finds_numba_where_a_folder_of_that_name_comes_first(folder, monkeypatch):
    """A program that lies in bagua_comm/kernels, where there is a package numba, compiles kernels."""
    monkeypatch.syspath_prepend(os.path.dirname(compiled.__file__))
    process = background.start("make", folder, urgent=True)
    assert process.communicate(timeout=LIMIT_S)[0] == b""
    assert read_verdict(folder) == GOOD


def test_the_compiler_is_no_process_of_the_job_and_inherits_nothing_open(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("SOME_LIBRARY_PATH", "kept")
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        process = background.start("make", tmp_path, urgent=False)
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
        with open(f"/proc/{process.pid}/environ") as variables:
            names = dict(line.split("=", 1) for line in variables.read().split("\0") if line)
        links = [os.readlink(each.path) for each in os.scandir(f"/proc/{process.pid}/fd")]
        process.kill()
        process.communicate()
    assert not [name for name in names if name.startswith(("OMPI_", "PMIX_"))]
    assert names["SOME_LIBRARY_PATH"] == "kept"
    assert len(links) >= 3
    assert file.name not in links


# The lock -----------------------------------------------------------------------------------------------


def test_one_process_compiles_for_all(folder):
    starter, used = FakeCompiler(WAITS_FOR_GO), []
    compilers = [BackgroundCompiler(folder, used.append, start=starter) for _ in range(3)]
    until(lambda: starter.started)
    (folder / "go").touch()
    assert all(compiler.finished.wait(LIMIT_S) for compiler in compilers)
    assert len(starter.started) == 1
    assert [functions.keys() for functions in used] == [KERNELS.keys()] * 3


def test_a_lock_ends_with_its_block_though_a_child_was_forked_there(tmp_path):
    with locked(tmp_path) as is_mine:
        assert is_mine
        with locked(tmp_path) as is_mine:
            assert not is_mine
        child = Forked(signal.pause)
    with locked(tmp_path) as is_mine:
        code = child.kill()
    assert (is_mine, code) == (True, -signal.SIGKILL)


def test_where_a_file_system_has_no_locks_each_process_compiles(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path) as is_mine:
        assert is_mine


def test_kernels_that_were_compiled_before_the_lock_was_free_are_not_compiled_again(folder):
    """Another process holds the lock when this one looks first, writes its verdict, and releases the lock."""
    starter, used = FakeCompiler("raise SystemExit('it was made again')"), []
    with locked(folder):
        compiler = BackgroundCompiler(folder, used.append, start=starter)
        write_verdict(folder, GOOD)
    assert compiler.finished.wait(LIMIT_S)
    assert [functions.keys() for functions in used] == [KERNELS.keys()]
    assert starter.started == []


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ("pass", GOOD),
        ("os.kill(os.getpid(), signal.SIGTERM)", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        (f"os._exit({NO_PARENT})", None),
        ("os.kill(os.getpid(), signal.SIGILL)", "comparing them ended with -4: no message"),
        ("sys.exit('they differ')", "comparing them ended with 1: they differ"),
    ],
)
def test_only_failures_of_the_kernels_themselves_count_against_them(ends, verdict):
    command = [sys.executable, "-c", f"import os, signal, sys; {ends}"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    assert verdict_of(result.returncode, result.stdout) == verdict
