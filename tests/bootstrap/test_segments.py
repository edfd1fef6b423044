"""Files by which ranks share memory, of two jobs that would have the same."""

import os

from support.launch import run_python

JOB = """
    import os
    from pathlib import Path

    import numpy as np

    import bagua_comm
    from bagua_comm.bootstrap.segments import VARIABLE, pattern_of
    from bagua_comm.system.processes import mapped_files

    mine = pattern_of(os.environ).replace("*", os.uname().nodename)
    foreign = Path("/dev/shm", mine)
    foreign.write_bytes(b"another job")
    try:
        with bagua_comm.connect(timeout_s=30) as comm:
            assert comm.allreduce(np.ones(1 << 18, np.float32))[0] == comm.size
            names = {Path(file).name for file in mapped_files("/dev/shm/")}
            assert mine in names, (mine, names)  # the name that Open MPI chooses
            assert foreign.read_bytes() == b"another job"
            folders = {Path(file).parent for file in mapped_files("/dev/shm/") if "sm_segment" in file}
            assert len(folders) == 2, folders
            assert Path("/dev/shm") not in folders
            assert VARIABLE not in os.environ
            print(next(folder for folder in folders if (folder / mine).exists()), flush=True)
    finally:
        foreign.unlink()
"""


def test_a_rank_leaves_a_file_of_another_job_alone_and_no_folder_behind(tmp_path):
    result = run_python(2, script=(tmp_path / "job.py", JOB))
    assert result.returncode == 0, result.stderr
    folders = result.stdout.split()
    assert len(set(folders)) == 2
    assert not any(map(os.path.exists, folders))


def test_a_supervisor_removes_the_folders_of_ranks_that_were_killed(tmp_path):
    killed = JOB.replace("flush=True)", "flush=True); os.kill(os.getpid(), 9)")
    result = run_python(2, flags=["--restarts", "0"], script=(tmp_path / "job.py", killed))
    assert result.returncode != 0
    assert result.stdout.split()
    assert not any(map(os.path.exists, result.stdout.split()))
