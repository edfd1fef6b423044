"""Which kernels NumPy arrays use, and what users see where there are no compiled ones."""

import logging
import os
import sys
import threading

import numpy as np
import pytest
from support.children import forked
from support.compilers import FakeCompiler, home_with_kernels, run
from support.waiting import until

from bagua_comm import kernels
from bagua_comm.kernels import compiled, host
from bagua_comm.kernels.numba import cache
from bagua_comm.kernels.numba.cache import object_path, verdict_path, write_object
from bagua_comm.kernels.numba.signatures import KERNELS
from bagua_comm.kernels.selection import HostKernels

pytestmark = pytest.mark.needs("numba")

WRITES_GOOD = "(folder / 'verdict').write_text('good')"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of compiled kernels in a home of this test's own."""
    found = home_with_kernels(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


def warnings_in(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_second_process_finds_them_on_disk_and_needs_no_numba(folder):
    code = "import sys; from bagua_comm import kernels; print(kernels.on_host().__name__, 'numba' in sys.modules)"
    assert run(code, folder.parents[2]).split() == ["bagua_comm.kernels.compiled", "False"]


@pytest.mark.slow
def test_a_damaged_file_is_compiled_again_while_numpys_kernels_work(folder):
    object_path(folder, "checksum_blocks").write_bytes(b"not an object file")
    code = (
        "import threading; from bagua_comm import kernels\n"
        "waiting = threading.Thread(target=kernels.compile_now); waiting.start()\n"
        "while 'until the compiled ones are ready' not in kernels.state(): waiting.join(0.01)\n"
        "first = kernels.on_host(); waiting.join()\n"
        "print(first.__name__, kernels.on_host().__name__)"
    )
    assert run(code, folder.parents[2]).split() == ["bagua_comm.kernels.host", "bagua_comm.kernels.compiled"]
    assert {path.name for path in folder.iterdir()} == {"verdict", "lock"} | {f"{name}.o" for name in KERNELS}


@pytest.mark.parametrize("first", ["load_or_compile", "compile_now"])
def test_compiling_gives_way_to_other_work_unless_a_caller_waits(folder, first):
    verdict_path(folder).unlink()
    mine = HostKernels(starter := FakeCompiler(WRITES_GOOD))
    if first == "load_or_compile":
        assert mine.load_or_compile() is host
    mine.compile_now(60)
    assert mine.load_or_compile() is compiled
    assert starter.urgent == [first == "compile_now"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about threads and fork
def test_a_child_that_was_forked_while_a_thread_looked_for_them_looks_itself(folder, monkeypatch):
    verdict_path(folder).unlink()
    looking, end, parent = threading.Event(), threading.Event(), os.getpid()

    def look(path):
        if os.getpid() == parent:
            looking.set()
            end.wait(20)

    mine = HostKernels(FakeCompiler(WRITES_GOOD))
    monkeypatch.setattr("bagua_comm.kernels.selection.load", look)
    thread = threading.Thread(target=mine.load_or_compile)
    thread.start()
    assert looking.wait(20)
    code = forked(lambda: mine.load_or_compile() is not host, limit_s=20)
    end.set()
    thread.join()
    mine.end()
    assert code == 0


@pytest.mark.slow
def test_a_forked_child_that_asks_for_them_gets_them(folder):
    verdict_path(folder).unlink()
    code = (
        "import os; from bagua_comm import kernels\n"
        "from bagua_comm.kernels.selection import HostKernels\n"
        "mine = HostKernels(); mine.load_or_compile(urgent=True)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    mine.compile_now(60)\n"
        "    os._exit(0 if mine.fastest is kernels.compiled else 1)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    assert run(code, folder.parents[2]).split() == ["0"]


def test_a_forked_child_neither_compiles_nor_waits(tmp_path):
    code = (
        "import os, sys, time; from bagua_comm import kernels\n"
        "kernels.on_host()\n"
        'while not (state := kernels.state()).startswith("NumPy\'s until the compiled ones"): time.sleep(0.01)\n'
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(kernels.on_host() is not kernels.host)\n"
        "print(os.waitpid(child, 0)[1], kernels.state() == state)"
    )
    assert run(code, tmp_path).split() == ["0", "True"]


def test_a_compiler_that_crashes_leaves_numpys_kernels_and_one_message(folder, caplog):
    verdict_path(folder).unlink()
    crash = "import os, signal; print('no room', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    mine = HostKernels(FakeCompiler(crash))
    with pytest.raises(RuntimeError, match="no compiled kernels: compiling them ended with -9: no room"):
        mine.compile_now(60)
    assert mine.load_or_compile() is host
    assert warnings_in(caplog) == [
        "the kernels of NumPy's arrays stay NumPy's: compiling them ended with -9: no room"
    ]


@pytest.mark.slow
def test_kernels_that_differ_from_numpys_are_refused(folder, caplog):
    """One of them does nothing: a process compares them before they are used, and writes why they are not."""
    from llvmlite import binding

    letters = "".join({"i": ", i64", "f": ", double"}[letter] for letter in KERNELS["checksum_blocks"])
    module = binding.parse_assembly(f"define void @checksum_blocks(i8*, i8*{letters}) {{ ret void }}")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    write_object(object_path(folder, "checksum_blocks"), machine.emit_object(module))
    verdict_path(folder).unlink()
    with pytest.raises(RuntimeError, match=r"they differ from NumPy's in arrays of float32"):
        HostKernels().compile_now(60)
    caplog.clear()
    mine = HostKernels()
    assert mine.load_or_compile() is host
    assert mine.load_or_compile() is host
    (warning,) = warnings_in(caplog)
    assert warning.startswith("the kernels of NumPy's arrays are NumPy's: comparing them ended with 1: ")
    assert kernels.state().startswith("NumPy's: comparing them ended with 1: ")


@pytest.mark.parametrize("where", ["no home", "no folder"])
def test_where_nothing_can_be_kept_numpys_kernels_stay(folder, monkeypatch, caplog, where):
    file = folder.parents[2] / "file"
    file.touch()
    if where == "no home":
        monkeypatch.setenv("HOME", str(file))
    else:
        folder.rename(file.with_name("elsewhere"))
        folder.touch()
    mine = HostKernels()
    with pytest.raises(RuntimeError, match=r"nothing can be kept|File exists"):
        mine.compile_now(60)
    assert mine.load_or_compile() is host
    assert len(warnings_in(caplog)) == 1


def test_without_numba_numpys_kernels_are_used(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    mine = HostKernels()
    assert mine.load_or_compile() is host
    assert "pip install 'bagua-comm[fast]'" in kernels.state()
    assert warnings_in(caplog) == []
    with pytest.raises(ImportError, match="Numba is not installed"):
        mine.compile_now(60)


def test_where_numba_lacks_its_compiler_numpys_kernels_stay(folder):
    code = (
        "import logging, sys; sys.modules['llvmlite.binding'] = None; logging.basicConfig(stream=sys.stdout)\n"
        "from bagua_comm import kernels\n"
        "print([kernels.on_host() is kernels.host for _ in range(2)]); print(kernels.state())\n"
        "try: kernels.compile_now()\n"
        "except RuntimeError as exc: print(exc)"
    )
    warning, used, state, error = run(code, folder.parents[2]).splitlines()
    assert warning.startswith(
        "WARNING:bagua_comm.kernels:the kernels of NumPy's arrays are NumPy's: Numba cannot be"
    )
    assert used == "[True, True]"
    assert "Numba cannot be used here: " in state
    assert "Numba cannot be used here: " in error


def test_kernels_that_llvm_does_not_load_leave_numpys(folder, monkeypatch, caplog):
    def refuse(folder):
        raise RuntimeError("no memory that can be run")

    monkeypatch.setattr(cache, "load_unchecked", refuse)
    mine = HostKernels()
    assert mine.load_or_compile() is host
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(RuntimeError, match="they cannot be loaded: RuntimeError: no memory"):
        mine.compile_now(60)


def test_the_state_says_where_they_are_and_whether_they_are_being_made(folder):
    assert kernels.state() == f"compiled, in {folder}"
    verdict_path(folder).unlink()
    assert "compiled them in the background" in kernels.state()
    with cache.locked(folder):
        assert kernels.state() == f"NumPy's until the compiled ones are ready, in {folder}"


def test_waiting_for_them_has_an_end(folder):
    verdict_path(folder).unlink()
    mine = HostKernels()
    with cache.locked(folder):
        with pytest.raises(TimeoutError, match=r"were not compiled within 0\.05 s"):
            mine.compile_now(0.05)
        threads = threading.active_count()
        mine.end()
    assert threading.active_count() == threads - 1


def test_ranks_use_compiled_kernels_as_soon_as_they_are_ready(folder):
    verdict_path(folder).unlink()
    mine = HostKernels(FakeCompiler(f"while not (folder / 'go').exists(): pass\n{WRITES_GOOD}"))
    assert mine.load_or_compile() is host
    (folder / "go").touch()
    until(lambda: mine.fastest is compiled)
    assert kernels.of(np.ones(1)) in (host, compiled)
