"""The lock of a folder of checkpoints: one object of one process may save there."""

import os

import pytest
from support.children import Forked, forked

from bagua_comm import CheckpointError
from bagua_comm.checkpoint.folders import Folder


def test_two_objects_of_a_program_do_not_save_in_one_folder(tmp_path):
    first, second = Folder(tmp_path), Folder(tmp_path)
    first.begin(1)
    for _ in range(2):  # that it was refused frees nothing
        with pytest.raises(CheckpointError, match="or another Checkpoints of this one; close that"):
            second.begin(2)
    assert forked(first.close) == 0  # nor does what a forked child closes
    with open(tmp_path / ".lock"):
        pass  # nor that other code closes the file
    with pytest.raises(CheckpointError, match="another program saves checkpoints in"):
        second.begin(2)
    first.close()
    second.begin(2)
    del second  # it is never closed
    first.begin(3)
    first.close()


def test_a_forked_child_does_not_keep_the_folder_from_others(tmp_path):
    first, (reader, writer) = Folder(tmp_path), os.pipe()
    first.begin(1)

    def wait():
        os.close(writer)
        os.read(reader, 1)  # it lives until the parent has saved again

    child = Forked(wait)
    os.close(reader)
    first.close()
    second = Folder(tmp_path)
    second.begin(2)
    second.close()
    os.close(writer)
    assert child.code() == 0
