"""How kernels are compiled beside a training: the process, its lease, its pauses, and its end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from support.compilers import LIMIT_S, FakeCompiler, has_ended, home_with_kernels, state_of
from support.waiting import until

from bagua_comm.kernels import compiled
from bagua_comm.kernels.compiler_process import NO_LEASE, verdict_of
from bagua_comm.kernels.numba import background
from bagua_comm.kernels.numba.background import BackgroundCompiler, Pacing, ProcessorLoad
from bagua_comm.kernels.numba.cache import (
    GOOD,
    Lease,
    load_unchecked,
    object_path,
    read_object,
    read_verdict,
    verdict_path,
    write_verdict,
)
from bagua_comm.kernels.numba.signatures import KERNELS
from bagua_comm.system.processes import processor_ticks

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


# Pauses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "full"), [((80, 50, 10, 60), True), ((30, 90, 10, 70), False), ((0,) * 4, False)]
)
def test_processors_are_busy_if_little_of_them_is_left_over(times, full):
    ticks = iter([[1000] * 8, [1000 + spent for spent in times] + [1000] * 4])
    assert ProcessorLoad(lambda: next(ticks), cores=2).is_full() is full


def test_the_times_of_processors_are_known():
    first, second = processor_ticks(), processor_ticks()
    assert len(first) == 8
    assert all(0 <= before <= after for before, after in zip(first, second, strict=True))
    assert sum(first) > 0


WAITS_FOR_GO = """
import time
while not (folder / 'go').exists(): time.sleep(0.01)
(folder / 'verdict').write_text('good')
"""


def pid_of(starter):
    return until(lambda: starter.started)[0].pid


def finish(compiler, folder):
    """Let the fake compiler end, and return why there are no kernels."""
    (folder / "go").touch()
    assert compiler.finished.wait(LIMIT_S)
    return compiler.failure


def test_the_compiler_pauses_again_and_again_while_all_processors_are_busy(folder):
    starter = FakeCompiler(WAITS_FOR_GO)
    compiler = BackgroundCompiler(folder, print, start=starter, pacing=Pacing(0.05), is_busy=lambda: True)
    for _ in range(2):
        until(lambda: state_of(pid_of(starter)) == "T")
        until(lambda: state_of(pid_of(starter)) != "T")
    assert finish(compiler, folder) is None


def test_a_pause_ends_if_a_caller_waits_for_the_kernels(folder):
    starter, for_ever = FakeCompiler(WAITS_FOR_GO), Pacing(1e-9, 1e-9)
    compiler = BackgroundCompiler(folder, print, start=starter, pacing=for_ever, is_busy=lambda: True)
    until(lambda: state_of(pid_of(starter)) == "T")
    compiler.hurry()
    assert finish(compiler, folder) is None


def test_a_pause_ends_once_processors_are_idle(folder):
    starter, for_ever, busy = FakeCompiler(WAITS_FOR_GO), Pacing(1e-9, 1e-9), threading.Event()
    busy.set()
    compiler = BackgroundCompiler(folder, print, start=starter, pacing=for_ever, is_busy=busy.is_set)
    until(lambda: state_of(pid_of(starter)) == "T")
    busy.clear()
    assert finish(compiler, folder) is None


# The end of the compiler --------------------------------------------------------------------------------


START = """
import sys
from bagua_comm.kernels.numba import background
from bagua_comm.kernels.selection import HostKernels

def start(step, folder, lease, *, urgent):
    process = background.start(step, folder, lease, urgent=True)
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
    if ends == "exits":
        assert not list(tmp_path.rglob("lease"))


@pytest.mark.slow
def test_a_compiler_that_is_stopped_while_it_imports_ends_with_its_parent(tmp_path):
    code = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from bagua_comm.kernels.numba import background, cache\n"
        "folder = Path(sys.argv[1]); lease = cache.Lease(folder); lease.claim()\n"
        "process = background.start('make', folder, lease, urgent=False)\n"
        "while 'numpy' not in Path(f'/proc/{process.pid}/maps').read_text(): time.sleep(0.001)\n"
        "os.killpg(process.pid, signal.SIGSTOP)\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S)
    assert result.returncode == -signal.SIGKILL
    until(lambda: has_ended(int(result.stdout)))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["make", "check"])
def test_a_process_that_is_stopped_as_soon_as_it_starts_ends_with_its_parent(tmp_path, step):
    code = (
        "import contextlib, os, signal, sys; from pathlib import Path\n"
        "from bagua_comm.kernels.numba import background, cache\n"
        "folder, step = Path(sys.argv[1]), sys.argv[2]; lease = cache.Lease(folder); lease.claim()\n"
        "process = background.start(step, folder, lease, urgent=False)\n"
        "print(process.pid, flush=True)\n"
        "with contextlib.suppress(ProcessLookupError):\n"
        "    (os.killpg if step == 'make' else os.kill)(process.pid, signal.SIGSTOP)\n"
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


# The process and its surroundings -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_compiler_finds_numba_where_a_folder_of_that_name_comes_first(folder, monkeypatch):
    """A program that lies in bagua_comm/kernels, where there is a package numba, compiles kernels."""
    monkeypatch.syspath_prepend(os.path.dirname(compiled.__file__))
    lease = Lease(folder)
    assert lease.claim()
    process = background.start("make", folder, lease, urgent=True)
    assert process.communicate(timeout=LIMIT_S)[0] == b""
    assert read_verdict(folder) == GOOD


def test_the_compiler_is_no_process_of_the_job_and_inherits_nothing_open(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("SOME_LIBRARY_PATH", "kept")
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        process = background.start("make", tmp_path, Lease(tmp_path), urgent=False)
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


# The lease ----------------------------------------------------------------------------------------------


def test_one_process_compiles_for_all(folder):
    starter, used = FakeCompiler(WAITS_FOR_GO), []
    compilers = [BackgroundCompiler(folder, used.append, start=starter) for _ in range(3)]
    until(lambda: starter.started)
    (folder / "go").touch()
    assert all(compiler.finished.wait(LIMIT_S) for compiler in compilers)
    assert len(starter.started) == 1
    assert [functions.keys() for functions in used] == [KERNELS.keys()] * 3
    assert not folder.joinpath("lease").exists()


def test_a_lease_that_is_not_renewed_is_removed(tmp_path):
    mine, patient, other = Lease(tmp_path, stale_s=0.05), Lease(tmp_path), Lease(tmp_path)
    assert other.claim()
    assert not mine.claim()
    assert (mine.is_held(), other.is_held()) == (False, True)
    os.utime(mine.path, (2e9, 2e9))  # it was renewed, by a clock that is wrong
    assert not mine.claim()
    assert other.is_held()
    assert not patient.claim()
    until(mine.claim)
    assert not patient.claim()
    assert (mine.is_held(), other.is_held()) == (True, False)
    other.drop()
    assert mine.is_held()
    mine.drop()
    assert not mine.path.exists()


def test_a_compiler_that_has_lost_its_lease_writes_nothing(tmp_path):
    lease = Lease(tmp_path)
    assert lease.claim()
    process = background.start("make", tmp_path, lease, urgent=True)
    os.kill(process.pid, signal.SIGSTOP)
    lease.path.write_text("another one")
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == NO_LEASE
    assert lease.path.read_text() == "another one"
    assert not verdict_path(tmp_path).exists()


def test_kernels_that_were_compiled_before_the_lease_was_free_are_not_compiled_again(folder):
    """It holds the lease when this process looks first, writes its verdict, and drops the lease."""
    other = Lease(folder)
    assert other.claim()
    starter, used = FakeCompiler("raise SystemExit('it was made again')"), []
    compiler = BackgroundCompiler(folder, used.append, start=starter)
    write_verdict(folder, GOOD)
    other.drop()
    assert compiler.finished.wait(LIMIT_S)
    assert [functions.keys() for functions in used] == [KERNELS.keys()]
    assert starter.started == []


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ("pass", GOOD),
        ("os.kill(os.getpid(), signal.SIGTERM)", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        (f"os._exit({NO_LEASE})", None),  # its lease is another one's
        ("os.kill(os.getpid(), signal.SIGILL)", "comparing them ended with -4: no message"),
        ("sys.exit('they differ')", "comparing them ended with 1: they differ"),
    ],
)
def test_only_failures_of_the_kernels_themselves_count_against_them(ends, verdict):
    command = [sys.executable, "-c", f"import os, signal, sys; {ends}"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    assert verdict_of(result.returncode, result.stdout) == verdict
