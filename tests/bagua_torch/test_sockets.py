"""Children of a rank do not keep its connections open when it dies."""

import os
import select
import socket
import subprocess
import sys

import numpy as np
import pytest
from support.children import Forked
from support.gloo import run_threads

from bagua_comm import Communicator, RankFailed
from bagua_torch.process_group import children

TIMEOUT_S = 20.0

LIST_FILES = """
import pathlib
print(*(each.readlink() for each in pathlib.Path('/proc/self/fd').iterdir() if each.is_symlink()))
"""


def test_a_forked_child_that_outlives_its_rank_does_not_hide_its_death():
    def body(transport):
        comm = Communicator([transport])
        comm.barrier()
        if comm.rank == 1:
            ends = os.pipe()

            def wait():
                os.close(ends[1])
                select.select([ends[0]], [], [], 3 * TIMEOUT_S)  # until the parent closes the other end

            child = Forked(wait)
            transport.abort()
            return lambda: [*map(os.close, ends), child.code()][-1]
        with pytest.raises(RankFailed, match="rank 0 lost rank 1"):
            comm.recv(np.ones(1), source=1)
        return None

    end = run_threads(2, body, timeout_s=TIMEOUT_S)[1]
    assert end() == 0


def test_a_started_program_does_not_inherit_connections():
    def body(transport):
        Communicator([transport]).barrier()
        if transport.rank == 0:
            mine = set(children._known.values())
            assert mine
            found = subprocess.run(
                [sys.executable, "-c", LIST_FILES], close_fds=False, capture_output=True, text=True, check=True
            )
            assert not mine & set(found.stdout.split())

    run_threads(2, body, timeout_s=TIMEOUT_S)


def test_a_socket_of_the_user_that_got_the_same_descriptor_stays_open(monkeypatch):
    ours, users = socket.socketpair()

    def file(end):
        return os.readlink(f"/proc/self/fd/{end.fileno()}")

    with ours, users:
        monkeypatch.setattr(children, "_known", {ours.fileno(): file(ours), users.fileno(): "socket:[1]"})
        children._close_in_child()
        assert (file(ours), file(users)[:7]) == ("/dev/null", "socket:")
