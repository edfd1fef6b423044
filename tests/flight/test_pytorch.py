"""PyTorch's analyser reads our records, and finds what we find."""

from contextlib import suppress

import numpy as np
import pytest
from support import needs

from bagua_comm import CommError
from bagua_comm.flight.pytorch import NAMES, write_dumps
from bagua_comm.testing import run_ranks

needs.package("torch")

from torch.distributed.flight_recorder import fr_trace  # noqa: E402
from torch.distributed.flight_recorder.components.types import COLLECTIVES  # noqa: E402


def analysed(records, folder):
    """The table of collectives that `torchfrtrace` makes of the records."""
    write_dumps(records, folder / "dumps")
    found = []
    original = fr_trace.build_db

    def keep(*arguments):
        found.append(original(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fr_trace, "build_db", keep)
        fr_trace.main([str(folder / "dumps")])
    return found[0].collectives


def records_of(body, size=2):
    def run(comm):
        with suppress(CommError):
            body(comm)
        return comm.flight.record()

    return run_ranks(size, run, timeout_s=0.3)


def test_calls_stand_for_operations_that_the_analyser_knows():
    assert set(NAMES.values()) <= COLLECTIVES


def test_calls_that_match_pass_the_analyser(tmp_path):
    def body(comm):
        x = np.ones(4, np.float32)
        comm.allreduce(x)
        comm.allgather(x)
        comm.reduce_scatter(x)
        comm.alltoall(x)
        comm.broadcast(x, root=1)
        comm.gather(x, root=0)
        comm.allgather(x[: 1 + comm.rank], counts=range(1, 1 + comm.size))
        comm.allgather_object("an object")
        comm.split(0).barrier()
        comm.reduce(x, root=0)

    collectives = analysed(records_of(body), tmp_path)
    assert len(collectives) == 11
    assert [each.collective_name for each in collectives][6] == "gloo:all_reduce"  # the whole result on each rank
    assert all(each.pass_check for each in collectives)
    assert {each.collective_state for each in collectives} == {"completed"}


def test_the_analyser_finds_a_rank_that_is_missing(tmp_path):
    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.allreduce(np.ones(4, np.float32))

    done, missing = analysed(records_of(body), tmp_path)
    assert done.pass_check
    assert (missing.collective_name, missing.collective_seq_id) == ("gloo:all_reduce", 2)
    assert missing.missing_ranks == {1}
    assert missing.collective_frames[0]["name"] == "allreduce(float32[4], op=sum) #2"


def test_the_analyser_finds_sizes_that_differ(tmp_path):
    def body(comm):
        comm.allreduce(np.ones(4 + comm.rank, np.float32))

    (wrong,) = analysed(records_of(body), tmp_path)
    assert "SIZE_OR_SYNTAX_MISMATCH" in str(wrong.mismatch_collectives[1].type_of_mismatch)


def test_calls_that_one_rank_has_forgotten_are_left_out_on_all(tmp_path):
    def body(comm):
        if comm.rank == 1:
            comm.flight.ring = type(comm.flight.ring)(maxlen=3)
        for _ in range(5):
            comm.barrier()

    collectives = analysed(records_of(body), tmp_path)
    assert [each.collective_seq_id for each in collectives] == [3, 4, 5]
    assert all(each.pass_check for each in collectives)
