"""Compiling the plugin: once, whole files, any compiler, and messages that say what to do."""

import ctypes
import os
import subprocess
import sys

import pytest
from support.commands import output_of

from bagua_comm import net
from bagua_comm.errors import BootstrapError
from bagua_comm.net import building


def test_it_is_compiled_once_and_found_again_also_where_files_are_made_for_a_whole_group(tmp_path):
    assert net.path(tmp_path) is None
    before = os.umask(0o002)
    try:
        library = net.build(tmp_path)
    finally:
        os.umask(before)
    made = library.stat().st_mtime_ns
    assert net.path(tmp_path) == library == net.build(tmp_path)
    assert library.stat().st_mtime_ns == made
    assert [*tmp_path.iterdir()] == [library]
    assert library.name.startswith("libnccl-net-bagua-")
    assert library.suffix == ".so"


@pytest.mark.slow
def test_many_at_once_get_one_whole_file(tmp_path):
    code = "import sys; from pathlib import Path; from bagua_comm import net; print(net.build(Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, tmp_path]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    (library,) = {process.communicate(timeout=300)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 3
    ctypes.CDLL(library)
    assert [str(path) for path in tmp_path.iterdir()] == [library]


def test_the_source_compiles_without_a_warning(tmp_path):
    command = next(building.compilers())
    assert building.compile_to(command, tmp_path / "strict.so", ["-Werror", "-Wshadow"]).exists()


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building.default_folder() == tmp_path / "bagua_comm" / "net"


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "compilers", lambda: iter(()))
    with pytest.raises(BootstrapError, match=r"install one .* or pip install ziglang"):
        net.build(tmp_path)
    assert net.path(tmp_path) is None


def test_a_compiler_that_fails_is_skipped_and_the_last_error_names_all(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no headers here >&2\nexit 1\n")
    broken.chmod(0o755)
    good = next(building.compilers())
    monkeypatch.setattr(building, "compilers", lambda: iter([(str(broken),), good]))
    library = net.build(tmp_path / "net")
    assert net.path(tmp_path / "net") == library
    monkeypatch.setattr(building, "compilers", lambda: iter([(str(broken),), (str(broken), "-again")]))
    with pytest.raises(BootstrapError) as raised:
        net.build(tmp_path / "other")
    assert str(raised.value).count("no headers here") == 2
    assert [*(tmp_path / "other").iterdir()] == []


def test_ziglang_is_tried_last_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: object())
    last = [*building.compilers()][-1]
    assert last[1:5] == ("-m", "ziglang", "cc", "-target")
    assert last[5].endswith("-linux-gnu.2.17")


def test_the_command_builds_finds_and_checks(tmp_path, capsys):
    folder = ["--folder", str(tmp_path)]
    assert "net build" in output_of(capsys, "net", "path", *folder, code=1)
    built = output_of(capsys, "net", "build", *folder)
    assert output_of(capsys, "net", "path", *folder) == built
    assert "all bytes arrived intact" in output_of(capsys, "net", "check", *folder)


def test_a_file_that_is_no_plugin_is_refused(tmp_path):
    with pytest.raises(BootstrapError, match="cannot be loaded"):
        net.check(tmp_path / "none.so")
