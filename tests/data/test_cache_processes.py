"""Caches that several processes share: workers, programs, and killed ones."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support import cached_program
from support.waiting import until

from bagua_comm.data import Cached, LMDBStore, local_redis

pytestmark = pytest.mark.needs("lmdb", "msgpack", "redis", "xxhash")
PROGRAM = cached_program.__file__


@contextlib.contextmanager
def started(*arguments, program=(sys.executable, PROGRAM)):
    """The program; killed at the end, if it still runs."""
    process = subprocess.Popen(
        [*program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)


def finished(process):
    """The output of the program."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def run(*arguments):
    with started(*arguments) as process:
        return finished(process)


def loads(log):
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return np.full(3, index)


def test_samples_of_forked_dataloader_workers_are_written_when_they_end_and_counted(tmp_path):
    with LMDBStore(tmp_path) as store, Cached(Numbers(), store) as cached:
        for epoch in (1, 2):
            loader = torch.utils.data.DataLoader(cached, batch_size=4, num_workers=2)
            assert torch.equal(torch.cat(list(loader))[:, 0], torch.arange(24))
            del loader
            assert store.count() == 24
            stats = cached.stats()
            assert (stats.misses, stats.hits) == (24, 24 * (epoch - 1))


@pytest.mark.slow  # but for this: a DataLoader's forked workers, above
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("kind", "flags"), [("lmdb", []), ("redis", []), ("lmdb", ["--dataloader"])])
def test_workers_that_end_have_written_everything(tmp_path, method, kind, flags):
    log = tmp_path / "log"
    with local_redis() if kind == "redis" else contextlib.nullcontext(tmp_path / "db") as place:
        found = run(place, log, "--workers", 2, "--method", method, "--epochs", 2, *flags)
    assert found["ok"]
    assert found["warned"] == []
    assert loads(log) == dict.fromkeys(range(12), 1)
    assert (found["misses"], found["hits"]) == (12, 12)


def test_workers_that_ask_for_the_same_samples_load_each_once(tmp_path):
    log = tmp_path / "log"
    found = run(tmp_path / "db", log, "--workers", 4, "--shared", "--delay", 0.02)
    assert found["ok"]
    assert loads(log) == dict.fromkeys(range(12), 1)
    assert (found["misses"], found["hits"]) == (12, 36)
    assert found["waited"] > 0


def test_two_programs_at_once_share_the_work(tmp_path):
    log = tmp_path / "log"
    with started(tmp_path / "db", log, "--delay", 0.02) as a, started(tmp_path / "db", log, "--delay", 0.02) as b:
        both = [finished(a), finished(b)]
    assert all(found["ok"] and not found["warned"] for found in both)
    assert sum(found["misses"] for found in both) == loads(log).total()
    assert set(loads(log)) == set(range(12))
    with LMDBStore(tmp_path / "db") as store, Cached(cached_program.Slow(12, log, 0), store) as again:
        assert all(cached_program.right(again[i], i) for i in range(12))
        assert (again.stats().hits, again.stats().misses) == (12, 0)


def test_a_program_killed_in_mid_epoch_leaves_the_samples_it_had_written(tmp_path):
    log = tmp_path / "log"
    with started(tmp_path / "db", log, "--delay", 0.05, "-n", 100, "--buffer", 0) as process:
        until(lambda: loads(log).total() >= 4 or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    begun = loads(log).total()
    with LMDBStore(tmp_path / "db") as store, Cached(cached_program.Slow(8, log, 0), store) as again:
        assert all(cached_program.right(again[i], i) for i in range(8))
        assert begun - 1 <= again.stats().hits <= begun
        assert again.stats().hits + again.stats().misses == 8


@pytest.mark.slow
def test_programs_killed_at_any_moment_never_leave_a_wrong_value(tmp_path):
    log = tmp_path / "log"
    for round_ in range(5):
        with started(tmp_path / "db", log, "-n", 3000, "--buffer", 200, "--workers", 2) as process:
            process.stdout.readline()
            time.sleep(0.1 * round_ / 3)  # sleeps: the moment of the kill
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(signal.SIGKILL)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
    found = run(tmp_path / "db", log, "-n", 3000)
    assert found["ok"]
    assert (found["damaged"], found["errors"]) == (0, 0)
    assert found["hits"] > 0


def test_a_worker_that_is_stopped_while_it_loads_does_not_stop_others(tmp_path):
    log = tmp_path / "log"
    with started(tmp_path / "db", log, "--delay", 60) as stopped:
        until(lambda: loads(log) or stopped.poll() is not None)
        assert stopped.poll() is None
        stopped.send_signal(signal.SIGSTOP)
        cached = Cached(cached_program.Slow(12, log, 0), LMDBStore(tmp_path / "db"), wait_s=0.1)
        with pytest.warns(RuntimeWarning, match="loaded here, too"):
            assert cached_program.right(cached[0], 0)
        assert cached.stats().timeouts == 1
    with cached:  # the other was killed, so its lock is free
        assert cached_program.right(cached[1], 1)


@contextlib.contextmanager
def small_disk(folder):
    """The command that starts a program with `folder` on a disk of 10 MB, a new one if this user may mount it."""
    mount = f"mount -t tmpfs -o size=10m tmpfs '{folder}' && exec \"$@\""
    for flags in (["-m"], ["-rm"]):
        wrapped = ["unshare", *flags, "sh", "-c", mount, "sh"]
        if shutil.which("unshare") and subprocess.run([*wrapped, "true"], capture_output=True).returncode == 0:
            yield wrapped
            return
    # No mount: files may not grow beyond 10 MB, which fails in write() alike.
    yield ["sh", "-c", "trap '' XFSZ; ulimit -f 20480; exec \"$@\"", "sh"]


FILL = """
import sys, warnings
import numpy as np
from bagua_comm.data import Cached, LMDBStore

class Large:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return np.full(1 << 19, index, np.uint8)

with warnings.catch_warnings(record=True) as caught, Cached(Large(), LMDBStore(sys.argv[1])) as cached:
    warnings.simplefilter("always")
    for _ in range(2):
        for i in range(40):
            assert (cached[i] == i).all()
    cached.flush()
print(cached.stats())
print(len(caught), *(warning.message for warning in caught))
stats = cached.stats()
assert stats.errors == 1 and stats.damaged == 0 and len(caught) == 1, caught
assert 0 < stats.hits < 40 and stats.unwritten > 0
"""


def test_a_full_disk_is_reported_once_and_loading_continues(tmp_path):
    with small_disk(tmp_path) as wrapped:
        result = subprocess.run(
            [*wrapped, sys.executable, "-c", FILL, str(tmp_path / "db")],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a store fails to write" in result.stdout
