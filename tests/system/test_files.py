"""Caches, private folders, writing at once: on a machine that others use too, and without a home."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bagua_comm.system import files


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def fresh_private_folder():
    """Each test makes its own, which the process removes when it ends."""
    files.private_folder.cache_clear()
    yield
    files.private_folder.cache_clear()


@pytest.fixture
def generous_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
def test_a_cache_is_its_owners_alone_whatever_the_umask_is(home):
    folder = files.cache_folder("bagua_comm")
    assert folder == home / ".cache" / "bagua_comm"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert files.cache_folder("bagua_comm") == folder


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_cache_that_others_can_write_to_is_not_used(home, mode):
    folder = home / ".cache" / "bagua_comm"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"bagua_comm belongs to another user, or others can write to it"):
        private = files.cache_folder("bagua_comm")
    assert private != folder
    assert private.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_a_cache_of_another_user_is_not_used(home, monkeypatch):
    files.cache_folder("bagua_comm")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert files.cache_folder("bagua_comm") == files.private_folder()


def test_without_a_home_there_is_a_private_folder(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert files.cache_folder("bagua_comm") == files.private_folder()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    assert files.cache_folder("bagua_comm") == files.private_folder()


def test_links_and_files_that_others_could_have_written_are_not_ones_own(tmp_path):
    path, link = tmp_path / "kernel", tmp_path / "link"
    path.write_bytes(b"")
    link.symlink_to(path)
    path.chmod(0o600)
    assert files.is_own_file(path)
    assert not files.is_own_file(link)
    assert not files.is_own_file(tmp_path)
    assert not files.is_own_file(tmp_path / "none")
    path.chmod(0o666)
    assert not files.is_own_file(path)


def test_a_private_folder_is_removed_when_the_process_ends_but_not_by_a_forked_child():
    code = """
        import os, sys
        from bagua_comm.system import files
        folder = files.private_folder()
        (folder / "kernel").write_text("")
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (folder / "kernel").exists()
        print(folder)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip()
    assert not Path(result.stdout.strip()).exists()


def test_a_write_replaces_a_link_and_not_its_target(tmp_path):
    precious, link = tmp_path / "precious", tmp_path / "profile.json"
    precious.write_text("precious")
    link.symlink_to(precious)
    files.write_at_once(link, b"profile")
    assert (precious.read_text(), link.read_text(), link.is_symlink()) == ("precious", "profile", False)


def test_the_unfinished_file_has_another_name_every_time_and_does_not_stay(tmp_path, monkeypatch):
    names = []

    def fail(source, target):
        names.append(Path(source).name)
        assert Path(source).parent == tmp_path
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            files.write_at_once(tmp_path / "profile.json", b"")
    assert len(set(names)) == 2
    assert not any(str(os.getpid()) == name.rsplit(".", 1)[1] for name in names)
    assert list(tmp_path.iterdir()) == []


def run_without_home(tmp_path, code, cupy):
    """Run `code` where no home can be made, and `import cupy` makes its cache folder as CuPy does, or fails."""
    (tmp_path / "file").write_text("")
    (tmp_path / "cupy.py").write_text(textwrap.dedent(cupy))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"},
        "HOME": str(tmp_path / "file" / "home"),
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(files.__file__).parents[2])]),
    }
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert list(temporary.iterdir()) == []  # nothing is left behind
    return result.stdout


LIKE_CUPY = """
    import os

    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "kernel"), "w").close()

    class ndarray:
        pass

    class cuda:
        class runtime:
            class CUDARuntimeError(RuntimeError):
                pass

            @staticmethod
            def getDeviceCount():
                print("imported")
                return 0
"""


def test_connect_works_where_no_home_can_be_written_though_cupy_wants_a_folder_there(tmp_path):
    code = """
        import numpy as np
        import bagua_comm
        with bagua_comm.connect() as comm:
            print(comm.allreduce(np.ones(2)))
    """
    assert "imported" in run_without_home(tmp_path, code, LIKE_CUPY)


def test_a_cupy_that_finds_no_folder_at_all_is_no_reason_not_to_connect(tmp_path):
    code = """
        import bagua_comm
        from bagua_comm.execution import cuda
        with bagua_comm.connect():
            print(cuda.device_facts())
    """
    cupy = "raise FileNotFoundError('[Errno 2] No such file or directory')"
    assert "CuPy cannot be imported" in run_without_home(tmp_path, code, cupy)


@pytest.mark.usefixtures("generous_umask")
def test_a_private_folder_is_no_link_and_no_other_user_can_write_to_it(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    assert files.make_own_folder(folder)
    assert files.make_own_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    link.symlink_to(folder)
    assert not files.make_own_folder(link)
    folder.chmod(0o777)
    assert not files.make_own_folder(folder)
