"""How compiled kernels get on disk and into processes, and what happens where that fails."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bagua_comm import files, kernels
from bagua_comm.kernels import compiled, compiler_process, host
from bagua_comm.kernels.numba import background, cache
from bagua_comm.kernels.numba.background import BackgroundCompiler
from bagua_comm.kernels.numba.cache import Lease
from bagua_comm.kernels.numba.signatures import KERNELS
from bagua_comm.processes import processor_ticks

pytestmark = pytest.mark.needs("numba")

PATIENCE_S = 60.0


@pytest.fixture
def ready():
    """The folder in which the kernels of this machine lie."""
    kernels.compile_now()
    return cache.cache_dir()


@pytest.fixture
def folder(tmp_path, ready):
    """A copy of it, in a home of its own; nothing else is compiled but what a test removes."""
    copy = tmp_path / ".cache" / "bagua_comm" / ready.name
    shutil.copytree(ready, copy)
    for made in (copy.parent.parent, copy.parent, copy):
        made.chmod(0o700)
    return copy


@pytest.fixture
def fresh(monkeypatch):
    """As if no kernel had been used in this process."""
    for name in ("_fastest", "_compiler"):
        monkeypatch.setattr(kernels, name, None)
    monkeypatch.setattr(kernels, "_failure", "")


def wait_until(condition):
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)  # sleeps: between looks at other processes


def is_gone(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def run(code, home, **variables):
    """What a Python process with this home prints."""
    command = [sys.executable, "-c", code]
    variables = {**os.environ, "HOME": str(home), **variables}
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_second_process_finds_them_on_disk_and_needs_no_numba(folder):
    code = "import sys; from bagua_comm import kernels; print(kernels.on_host().__name__, 'numba' in sys.modules)"
    assert run(code, folder.parents[2]).split() == ["bagua_comm.kernels.compiled", "False"]


def test_what_cannot_be_read_is_compiled_again_while_numpy_works(folder):
    (folder / "checksum_blocks.o").write_bytes(b"not an object file")
    code = (
        "from bagua_comm import kernels; first = kernels._load_or_compile(urgent=True);"
        "kernels.compile_now(); print(first.__name__, kernels.on_host().__name__)"
    )
    assert run(code, folder.parents[2]).split() == ["bagua_comm.kernels.host", "bagua_comm.kernels.compiled"]
    assert {path.name for path in folder.iterdir()} == {"verdict"} | {f"{name}.o" for name in KERNELS}


def test_a_file_that_is_not_whole_or_that_others_can_have_written_is_not_read(folder):
    path = folder / "add_fixed.o"
    content = path.read_bytes()
    assert cache.read_object(path) == content[32:]
    for wrong in (content[:-1], content + b"0", b"", b"0" + content[1:]):
        path.write_bytes(wrong)
        assert cache.read_object(path) is None
    path.write_bytes(content)
    path.chmod(0o666)
    assert cache.read_object(path) is None
    path.unlink()
    assert cache.load_unchecked(folder) is None


START = """
import sys
from bagua_comm import kernels
from bagua_comm.kernels.numba import background
start = background.start
def start_urgently(*arguments, urgent):
    process = start(*arguments, urgent=True)
    print(process.pid, flush=True)
    return process
background.start = start_urgently
kernels.on_host()
"""


@pytest.mark.parametrize("ends", ["exits", "is killed"])
def test_the_compiler_ends_with_the_process_that_started_it(tmp_path, ends):
    variables = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", START + "sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=variables, **pipes) as user:
        compiler = int(user.stdout.readline())
        assert not is_gone(compiler)
        if ends == "exits":
            user.stdin.close()
        else:
            user.kill()
        assert user.wait(PATIENCE_S) == (0 if ends == "exits" else -signal.SIGKILL)
    wait_until(lambda: is_gone(compiler))
    assert not list(tmp_path.rglob("verdict"))
    if ends == "exits":
        assert not list(tmp_path.rglob("lease"))


@pytest.mark.parametrize("first", ["on_host", "compile_now"])
def test_compiling_gives_way_to_other_work_unless_somebody_waits(folder, fresh, monkeypatch, first):
    (folder / "verdict").unlink()
    monkeypatch.setattr(kernels, "cache_dir", lambda: folder)
    popen, urgent = subprocess.Popen, []
    code = f"open({str(folder / 'verdict')!r}, 'w').write('good')"
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **more: (urgent.append("urgent" in command), popen([sys.executable, "-c", code], **more))[
            1
        ],
    )
    getattr(kernels, first)()
    kernels.compile_now()
    assert urgent == [first == "compile_now"]


@pytest.mark.parametrize(
    ("times", "full"), [((80, 50, 10, 60), True), ((30, 90, 10, 70), False), ((0,) * 4, False)]
)
def test_processors_are_busy_if_little_of_them_is_left_over(monkeypatch, times, full):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    counts = iter([[1000] * 8, [1000 + ticks for ticks in times] + [1000] * 4])
    monkeypatch.setattr(background, "processor_ticks", lambda: next(counts))
    assert background._ProcessorLoad().is_full() is full


def test_the_times_of_processors_are_known():
    first, second = processor_ticks(), processor_ticks()
    assert len(first) == 8
    assert all(0 <= before <= after for before, after in zip(first, second, strict=True))
    assert sum(first) > 0


@pytest.fixture
def signals(folder, monkeypatch):
    """What the compiler is sent, which ends once there is a file "go"."""
    (folder / "verdict").unlink()
    code = (
        "import os, time; from pathlib import Path\n"
        "os.setsid()\n"
        f"while not Path({str(folder / 'go')!r}).exists(): time.sleep(0.01)\n"
        f"Path({str(folder / 'verdict')!r}).write_text('good')"
    )
    popen, killpg, seen = subprocess.Popen, os.killpg, []

    def note(group, number):
        killpg(group, number)
        if number == signal.SIGSTOP:
            wait_until(lambda: Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        seen.append(number)

    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", code], **more))
    monkeypatch.setattr(os, "killpg", note)
    return seen


def test_the_compiler_rests_while_all_processors_are_busy_until_somebody_waits(folder, signals, monkeypatch):
    monkeypatch.setattr(background._ProcessorLoad, "is_full", lambda self: True)
    monkeypatch.setattr(background, "_FIRST_SHARE", 0.05)
    compiler = BackgroundCompiler(folder, lambda functions: None)
    wait_until(lambda: len(signals) >= 4)
    monkeypatch.setattr(background, "_LAST_SHARE", 1e-9)
    monkeypatch.setattr(background, "_FIRST_SHARE", 1e-9)
    wait_until(lambda: len(signals) % 2 == 1)
    compiler.hurry()
    (folder / "go").touch()
    assert compiler.finished.wait(PATIENCE_S)
    assert compiler.failure is None
    assert signals == [signal.SIGSTOP, signal.SIGCONT] * (len(signals) // 2)


def test_a_rest_ends_once_processors_are_free(folder, signals, monkeypatch):
    full = iter([True])
    monkeypatch.setattr(background._ProcessorLoad, "is_full", lambda self: next(full, False))
    monkeypatch.setattr(background, "_FIRST_SHARE", 1e-9)
    compiler = BackgroundCompiler(folder, lambda functions: None)
    wait_until(lambda: signals == [signal.SIGSTOP, signal.SIGCONT])
    (folder / "go").touch()
    assert compiler.finished.wait(PATIENCE_S)
    assert compiler.failure is None
    assert len(signals) == 2


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
    result = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE_S)
    wait_until(lambda: is_gone(int(result.stdout)))


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
    process = int(subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE_S).stdout)
    try:
        wait_until(lambda: is_gone(process))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_the_compiler_finds_numba_in_the_folder_of_a_package_of_this_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(compiled.__file__).parent))
    monkeypatch.setattr(background, "_MAIN", "import numba; print(numba.__file__); main = exit")
    process = background.start("make", tmp_path, Lease(tmp_path), urgent=True)
    output = process.communicate(timeout=PATIENCE_S)[0].decode()
    assert "bagua_comm" not in output
    assert Path(output.splitlines()[0]).name == "__init__.py"


def test_a_forked_child_neither_compiles_nor_waits(tmp_path):
    code = (
        "import os; from bagua_comm import kernels\n"
        "kernels.on_host()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    kernels._compiler.end()\n"
        "    os._exit(0 if kernels.on_host() is kernels.host else 1)\n"
        "print(os.waitpid(child, 0)[1], kernels._compiler._thread.is_alive())"
    )
    assert run(code, tmp_path).split() == ["0", "True"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about threads and fork
def test_a_child_that_was_forked_while_a_thread_looked_for_them_looks_itself(monkeypatch):
    monkeypatch.setattr(kernels, "_fastest", None)
    monkeypatch.setattr(kernels, "cache_dir", lambda: (_ for _ in ()).throw(cache.UnavailableError("not here")))
    monkeypatch.setattr(kernels, "numba_is_installed", lambda: False)
    with kernels._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends it if it waits
            os._exit(0 if kernels.on_host() is host else 1)
    assert os.waitpid(child, 0) == (child, 0)


def test_a_forked_child_that_asks_for_them_gets_them(folder):
    (folder / "verdict").unlink()
    code = (
        "import os; from bagua_comm import kernels\n"
        "kernels._load_or_compile(urgent=True)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    kernels.compile_now()\n"
        "    os._exit(0 if kernels.on_host() is kernels.compiled else 1)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    assert run(code, folder.parents[2]).split() == ["0"]


def test_the_compiler_is_no_process_of_the_job_and_inherits_nothing_open(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    monkeypatch.setenv("SOME_LIBRARY_PATH", "kept")
    code = (
        "import os; print([name for name in os.environ if name.startswith(('OMPI_', 'PMIX_'))],"
        "os.environ['SOME_LIBRARY_PATH'], [n for n in os.listdir('/proc/self/fd') if n not in '0123'])"
    )
    popen, started = subprocess.Popen, []  # what runs is `code`
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: started.append(popen([sys.executable, "-c", code], **more))
    )
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        background.start("make", tmp_path, Lease(tmp_path), urgent=False)
        said = started[0].communicate(timeout=PATIENCE_S)[0]
    assert said.decode().split() == ["[]", "kept", "[]"]


def test_one_process_compiles_for_all(folder, monkeypatch):
    (folder / "verdict").unlink()
    started, began = [], threading.Event()

    def start(*arguments, urgent):
        started.append(arguments)
        began.wait(PATIENCE_S)
        code = f"open({str(folder / 'verdict')!r}, 'w').write('good')"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    monkeypatch.setattr(background, "start", start)
    taken = []
    compilers = [BackgroundCompiler(folder, taken.append) for _ in range(3)]
    wait_until(lambda: started)
    began.set()
    assert all(compiler.finished.wait(PATIENCE_S) for compiler in compilers)
    assert len(started) == 1
    assert [functions.keys() for functions in taken] == [KERNELS.keys()] * 3
    assert not folder.joinpath("lease").exists()


def test_a_lease_that_nobody_renews_is_taken_away(tmp_path, monkeypatch):
    mine, other = Lease(tmp_path), Lease(tmp_path)
    assert other.claim()
    assert not mine.claim()
    assert (mine.is_held(), other.is_held()) == (False, True)
    monkeypatch.setattr(cache, "_STALE_S", 0.05)
    os.utime(mine.path, (2e9, 2e9))  # it was renewed, by a clock that is wrong
    assert not mine.claim()
    assert other.is_held()
    wait_until(mine.claim)
    assert (mine.is_held(), other.is_held()) == (True, False)
    other.drop()
    assert mine.is_held()
    mine.drop()
    assert not mine.path.exists()


def test_a_compiler_that_was_stopped_leaves_the_work_to_who_took_its_lease(tmp_path):
    lease = Lease(tmp_path)
    assert lease.claim()
    process = background.start("make", tmp_path, lease, urgent=True)
    os.kill(process.pid, signal.SIGSTOP)
    lease.path.write_text("another one")
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == compiler_process._NO_LEASE
    assert lease.path.read_text() == "another one"
    assert not (tmp_path / "verdict").exists()


def said_by(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_compiler_that_crashes_leaves_numpys_kernels_and_one_message(folder, fresh, monkeypatch, caplog):
    (folder / "verdict").unlink()
    code = "import os, signal; print('no room', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(background, "start", lambda *_, urgent: subprocess.Popen(command, stdout=subprocess.PIPE))
    monkeypatch.setattr(kernels, "cache_dir", lambda: folder)
    with pytest.raises(RuntimeError, match="no compiled kernels: compiling them ended with -9: no room"):
        kernels.compile_now()
    assert kernels.on_host() is host
    assert said_by(caplog) == [
        "the kernels of NumPy's arrays stay NumPy's: compiling them ended with -9: no room"
    ]


@pytest.mark.parametrize(
    ("ended", "verdict"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("os._exit(75)", None),  # its lease is another one's
        ("os.kill(os.getpid(), signal.SIGILL)", "comparing them ended with -4: no message"),
        ("sys.exit('they differ')", "comparing them ended with 1: they differ"),
    ],
)
def test_only_what_the_kernels_themselves_do_is_held_against_them(folder, monkeypatch, ended, verdict):
    (folder / "verdict").unlink()
    command = [sys.executable, "-c", f"import os, signal, sys; {ended}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    monkeypatch.setattr(compiler_process, "start", lambda *_, urgent: subprocess.Popen(command, **pipes))
    with contextlib.nullcontext() if verdict else pytest.raises(SystemExit, match="comparing them ended"):
        compiler_process._make(folder, Lease(folder), urgent=True)
    assert cache.read_verdict(folder) == verdict


def test_what_another_one_has_made_before_the_lease_was_free_is_not_made_again(folder, monkeypatch):
    (folder / "verdict").unlink()
    claim = Lease.claim

    def claim_late(lease):
        cache.write_verdict(folder, "good")
        return claim(lease)

    monkeypatch.setattr(Lease, "claim", claim_late)
    monkeypatch.setattr(background, "start", lambda *_, urgent: pytest.fail("it was made again"))
    taken = []
    compiler = BackgroundCompiler(folder, taken.append)
    assert compiler.finished.wait(PATIENCE_S)
    assert [functions.keys() for functions in taken] == [KERNELS.keys()]


def test_kernels_that_differ_from_numpys_are_refused(folder, fresh, monkeypatch, caplog):
    functions = cache.load_unchecked(folder)
    monkeypatch.setattr(compiled, "_run", type(compiled._run)())
    monkeypatch.setattr(
        compiler_process, "load_unchecked", lambda folder: {**functions, "checksum_blocks": lambda *_: None}
    )
    with pytest.raises(cache.UnavailableError, match="they differ from NumPy's in arrays of float32"):
        compiler_process._check(folder)

    cache.write_verdict(folder, "they differ")
    for module in (kernels, cache):
        monkeypatch.setattr(module, "cache_dir", lambda: folder)
    assert kernels.on_host() is host
    assert kernels.on_host() is host
    assert said_by(caplog) == ["the kernels of NumPy's arrays are NumPy's: they differ"]
    assert kernels.state() == "NumPy's: they differ"
    with pytest.raises(RuntimeError, match="there are no compiled kernels: they differ"):
        kernels.compile_now()


@pytest.mark.parametrize("where", ["no home", "no folder"])
def test_where_nothing_can_be_kept_numpys_kernels_stay(tmp_path, fresh, monkeypatch, caplog, where):
    file = tmp_path / "file"
    file.touch()
    if where == "no home":
        monkeypatch.setattr(files.Path, "home", lambda: file)
    else:
        monkeypatch.setattr(kernels, "cache_dir", lambda: file)
    with pytest.raises(RuntimeError, match=r"nothing can be kept|File exists"):
        kernels.compile_now()
    assert kernels.of(np.ones(1)) is host
    assert len(said_by(caplog)) == 1


def test_without_numba_they_are_those_of_numpy(fresh, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert kernels.on_host() is host
    assert "pip install 'bagua-comm[fast]'" in kernels.state()
    assert said_by(caplog) == []
    with pytest.raises(ImportError, match="Numba is not installed"), kernels.use("compiled"):
        pass


@pytest.mark.parametrize("missing", ["llvmlite", "llvmlite.binding"])
def test_where_numba_lacks_its_compiler_numpys_kernels_stay(fresh, monkeypatch, caplog, missing):
    cache._key.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert kernels.on_host() is host
    assert "Numba cannot be used here: " in kernels.state()
    assert len(said_by(caplog)) == 1
    with pytest.raises(RuntimeError, match="Numba cannot be used here"):
        kernels.compile_now()


def test_what_llvm_does_not_load_leaves_numpys_kernels(folder, fresh, monkeypatch, caplog):
    def refuse(folder):
        raise RuntimeError("no memory that can be run")

    monkeypatch.setattr(cache, "load_unchecked", refuse)
    monkeypatch.setattr(kernels, "cache_dir", lambda: folder)
    assert kernels.on_host() is host
    assert len(said_by(caplog)) == 1
    with pytest.raises(RuntimeError, match="they cannot be loaded: RuntimeError: no memory"):
        kernels.compile_now()


def test_the_state_says_where_they_are_and_whether_they_are_being_made(folder, monkeypatch):
    monkeypatch.setattr(cache, "cache_dir", lambda: folder)
    assert kernels.state() == f"compiled, in {folder}"
    (folder / "verdict").unlink()
    assert "compiled them in the background" in kernels.state()
    (folder / "lease").touch()
    assert kernels.state() == f"NumPy's until the compiled ones are ready, in {folder}"


def test_waiting_for_them_has_an_end(folder, fresh, monkeypatch):
    (folder / "verdict").unlink()
    (folder / "lease").touch()
    monkeypatch.setattr(kernels, "cache_dir", lambda: folder)
    with pytest.raises(TimeoutError, match=r"were not compiled within 0\.05 s"):
        kernels.compile_now(0.05)
    kernels._compiler.end()
    assert kernels._compiler.finished.is_set()
