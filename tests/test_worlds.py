"""Worlds of the ranks of a communicator of mpi4py, `connect(comm=)`, and their nodes."""

import re
import time

import pytest
from support.launch import run_python


def launch(tmp_path, ranks, script, **options):
    return run_python(ranks, script=(tmp_path / "script.py", script), **options)


@pytest.mark.slow
def test_the_ranks_of_a_communicator_are_the_world(tmp_path):
    result = launch(
        tmp_path,
        4,
        """
        import bagua_comm, numpy as np
        from bagua_comm import BootstrapError
        from mpi4py import MPI

        everyone = MPI.COMM_WORLD
        rank = everyone.Get_rank()

        def refusal(comm):
            try:
                return bagua_comm.connect(comm=comm)
            except BootstrapError as error:
                return str(error).split(":")[1].split(",")[0]

        half = everyone.Split(rank % 2, -rank)  # in the opposite order
        with bagua_comm.connect(comm=half, timeout_s=60) as comm:
            assert bagua_comm.default() is comm
            assert (comm.rank, comm.size) == (half.Get_rank(), 2)
            assert (comm.local_size, comm.node) == (2, 0)
            print("sum", rank, comm.allreduce(np.full(300_000, rank))[0])
        assert half.allreduce(1) == 2  # it was duplicated

        first_three = everyone.Split(MPI.UNDEFINED if rank == 3 else 0, rank)
        if rank == 3:
            print("outside", refusal(first_three))
        else:
            with bagua_comm.connect(comm=first_three, timeout_s=60) as comm:
                print("three", comm.size, comm.allreduce(np.array(rank)))

        both = half.Create_intercomm(0, everyone, 3 - (rank + 1) % 2)
        print("inter", refusal(both))
        """,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(
        [
            *(f"sum {rank} {total}" for rank, total in enumerate([2, 4, 2, 4])),
            *["three 3 3"] * 3,
            "outside  comm is MPI.COMM_NULL",
            *["inter  comm is an inter-communicator"] * 4,
        ]
    )


@pytest.mark.slow
def test_ranks_of_one_host_share_a_node_and_memory_though_mpi_says_they_are_alone(tmp_path):
    result = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np
        from mpi4py import MPI

        class Apart(MPI.Intracomm):
            def Split_type(self, *arguments):
                return self.Split(self.Get_rank())

        with bagua_comm.connect(comm=Apart(MPI.COMM_WORLD), timeout_s=60) as comm:
            assert type(comm.transports[0]._endpoint.comm) is Apart
            window = comm.transports[0]._endpoint.window is not None
            total = comm.allreduce(np.full(3_000_000, comm.rank + 1.0))  # through the window
            print(comm.node, comm.local_size, comm.by_node().intra.size, window, set(total.tolist()))
        """,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0 2 2 True {3.0}\n" * 2


@pytest.mark.slow
def test_an_exception_in_a_world_of_some_ranks_ends_all(tmp_path):
    start = time.monotonic()
    result = launch(
        tmp_path,
        3,
        """
        import time
        from mpi4py import MPI
        import bagua_comm

        pair = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() // 2)
        if MPI.COMM_WORLD.Get_rank() == 2:
            time.sleep(80)
        with bagua_comm.connect(comm=pair, timeout_s=60) as comm:
            if comm.rank == 1:
                raise RuntimeError("rank one has a bad day")
            comm.barrier()
        """,
    )
    assert result.returncode == 1
    assert "RuntimeError: rank one has a bad day" in result.stderr
    assert time.monotonic() - start < 55


@pytest.mark.slow
def test_only_ranks_of_the_communicator_are_missed(tmp_path):
    result = launch(
        tmp_path,
        3,
        """
        import time
        from mpi4py import MPI
        import bagua_comm

        rank = MPI.COMM_WORLD.Get_rank()
        pair = MPI.COMM_WORLD.Split(0 if rank != 1 else 1, rank)
        if rank != 0:
            time.sleep(80)
        bagua_comm.connect(comm=pair, timeout_s=1)
        """,
    )
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if "connect: rank" in line]
    assert re.search(r"connect: rank 0 of 3 .*: rank 2 \(process \d+\) runs, but has not called connect", line)
    assert "rank 1 " not in line
