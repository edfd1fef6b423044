"""The communicator over threads: its conformance, its transports, its trace file, and its end."""

import json
import sys

import numpy as np
import pytest
from support.call_checks import check_calls

from bagua_comm import ArrayError, CommError, CommMismatch, Communicator, UnsupportedError
from bagua_comm.comm.arguments import hint_of
from bagua_comm.testing import Recording, check_transport, run_ranks
from bagua_comm.timeline.reading import read_timeline
from bagua_comm.transports import LocalTransport, Transport


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4, 8))])
def test_conformance(ranks):
    def body(comm):
        check_transport(comm)
        check_calls(comm)

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))])
def test_conformance_with_every_call_checked(ranks):
    run_ranks(ranks, check_transport, check=True)


@pytest.mark.slow
def test_conformance_on_emulated_nodes():
    run_ranks(4, check_transport, nodes=["a", "b", "a", "a"])


def test_a_transport_of_exchange_alone_has_all_collectives():
    """A transport with exchange, moves and split has all collectives."""

    class Minimal(Transport):
        name = "minimal"

        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.rank, self.size, self.timeout_s = inner.rank, inner.size, inner.timeout_s

        def moves(self, x):
            return self.inner.moves(x)

        def exchange(self, sends, recvs, *, tag=0):
            self.inner.exchange(sends, recvs, tag=tag)

        def split(self, color, key):
            return Minimal(self.inner.split(color, key))

        def abort(self, exit_code=1):
            self.inner.abort(exit_code)

    run_ranks(3, check_transport, wrap=Minimal)


def test_recording_sees_the_calls_of_derived_groups():
    def body(comm):
        twin = comm.dup()
        twin.barrier()
        return [call.name for call in twin.transports[0].calls]

    assert run_ranks(2, body, wrap=Recording)[0] == ["allgather", "barrier"]


def test_shrink_needs_a_transport_that_can():
    with pytest.raises(UnsupportedError, match="local: cannot go on"):
        run_ranks(1, lambda comm: comm.shrink())


def test_check_consistency_names_the_ranks_that_agree():
    def body(comm):
        x = np.zeros(3)
        comm.check_consistency(x)
        x[0] = comm.rank == 1
        with pytest.raises(CommMismatch, match=r"ranks \[0, 2\]; ranks \[1\]"):
            comm.check_consistency(x)

    run_ranks(3, body)


def test_trace_file_has_a_process_per_rank_and_a_row_per_thread(tmp_path):
    path = tmp_path / "a" / "new" / "folder" / "trace.json"

    def body(comm):
        with comm.lane() as lane:
            lane.submit(lane.comm.allreduce, np.zeros(4))
            comm.allgather(np.zeros(2))
        comm.trace(path)

    run_ranks(2, body)

    ranks = read_timeline(path).ranks
    assert ranks.keys() == {0, 1}
    spans = {span.name: span for span in ranks[1].spans}
    assert spans["allreduce"].thread != spans["allgather"].thread
    assert spans["allreduce"].args == {"op": "sum", "dtype": "float64", "bytes": 32, "wire_bytes": 32}


def test_a_block_of_trace_writes_what_began_inside_of_it(tmp_path):
    """Calls before and after it, and a file that stays when the block fails."""

    def body(comm):
        comm.allgather(np.zeros(1))
        with comm.trace(tmp_path / "block.json"):
            comm.allreduce(np.zeros(1))
            comm.tracer.value("loss", 1.0)
        comm.barrier()
        with pytest.raises(ValueError, match="bad day"), comm.trace(tmp_path / "failed.json"):
            raise ValueError("bad day")

    run_ranks(2, body)
    block, failed = (read_timeline(tmp_path / name).ranks[1] for name in ("block.json", "failed.json"))
    assert [span.name for span in block.spans] == ["allreduce"]
    assert [value.name for value in block.values] == ["loss"]
    assert "allgather" in {span.name for span in failed.spans}


def test_a_trace_holds_any_argument_and_a_wrong_path_is_an_error_on_all_ranks(tmp_path):
    def body(comm):
        comm.broadcast(np.zeros(1), root=np.int64(0))
        comm.trace(tmp_path / "trace.json")
        with pytest.raises(NotADirectoryError, match=r"trace\.json/b\.json"):
            comm.trace(tmp_path / "trace.json" / "b.json")
        with pytest.raises(ValueError, match="null byte"):
            comm.trace("a\0b")
        comm.tracer.add("odd", 0, 1, {"shapes": {(1, 2): 3}})
        with pytest.raises(ArrayError, match="keys must be str"):
            comm.trace(tmp_path / "odd.json")
        comm.barrier()

    run_ranks(2, body)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_calls_of_a_closed_communicator_raise():
    def body(comm):
        comm.close()
        comm.close()
        with pytest.raises(CommError, match="allreduce: this communicator is closed"):
            comm.allreduce(np.zeros(1))

    run_ranks(2, body)


def test_close_closes_all_transports_from_the_last_to_the_first_even_if_one_fails():
    closed = []

    class Closing(LocalTransport):
        def close(self):
            closed.append(self)
            if len(closed) == 1:
                raise CommError("told late")

    transports = [Closing(), Closing()]
    comm = Communicator(transports)
    with pytest.raises(CommError, match="told late"):
        comm.close()
    comm.close()
    assert closed == transports[::-1]


def test_sys_exit_without_an_error_closes():
    comm = Communicator([LocalTransport()])
    with pytest.raises(SystemExit), comm:
        sys.exit(0)
    with pytest.raises(CommError, match="closed"):
        comm.barrier()


def test_names_and_positions_of_other_libraries_get_a_hint():
    def body(comm):
        for name, here in {
            "Allreduce": "allreduce",
            "Get_rank": "rank",
            "Barrier": "barrier",
            "bcast": "broadcast",
            "Isend": "isend",
            "Irecv": "irecv",
            "Ibcast": "ibroadcast",
            "Iallreduce": "iallreduce",
            "Iallgather": r"lane\.submit\(lane\.comm\.allgather, \.\.\.\)",
            "Sendrecv_replace": r"sendrecv\(x\.copy\(\), x, \.\.\.\)",
            "Reduce_scatter_block": "reduce_scatter",
            "Create_cart": r"bagua_comm\.Grid\(comm, dims, periodic\), its shift",
            "Cart_shift": r"bagua_comm\.Grid\(comm, dims, periodic\), its shift",
        }.items():
            match = f"no attribute '{name}'; it is {here} here, see docs/quickstart/coming-from.md"
            with pytest.raises(AttributeError, match=match):
                getattr(comm, name)
        for name in ("Probe", "probe", "Iprobe", "Wait", "Waitall"):
            match = f"no attribute '{name}'; there is none here: .*, see docs/quickstart/coming-from.md"
            with pytest.raises(AttributeError, match=match):
                getattr(comm, name)
        assert not hasattr(comm, "nothing_of_the_sort")
        for op, here in {"SUM": "sum", "mean": "avg"}.items():
            with pytest.raises(ArrayError, match=f"did you mean op='{here}'"):
                comm.allreduce(np.ones(3), op=op)
        with pytest.raises(ArrayError, match=r"MPI\.SUM is op='sum'"):
            comm.allreduce(np.ones(3), op=object())
        with pytest.raises(ArrayError, match="root is True"):
            comm.broadcast(np.ones(3), root=True)
        with pytest.raises(UnsupportedError, match=r"allreduce: out is 'sum', expected an array; .* op='sum'"):
            comm.allreduce(np.ones(3), "sum")

    run_ranks(1, body)


SENDRECV = "give dest and source by name: sendrecv(..., dest=..., source=...)"
ONE_TAG = "tag= is one number, or one text, for both sides"


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda comm, x: comm.send(x, 1), "give dest by name: send(..., dest=...)"),
        (lambda comm, x: comm.broadcast(x, 0), "give root by name: broadcast(..., root=...)"),
        (
            lambda comm, x: comm.sendrecv(x, x, 1, 0),
            SENDRECV,
        ),
        (
            lambda comm, x: comm.sendrecv(x, x, dest=0, sendtag=3, source=0, recvtag=3),
            ONE_TAG,
        ),
        (lambda comm, x: comm.recv(x, source=1, buf=3), "the arguments of recv are out, source, tag, timeout_s"),
        (lambda comm, x: comm.broadcast_object(x, 0), "give root by name: broadcast_object(..., root=...)"),
        (lambda comm, x: sorted(x, 0), ""),
        (lambda comm, x: comm.send(x, dest=-5), ""),
    ],
)
def test_arguments_that_python_refuses_get_a_hint(call, hint):
    comm = Communicator([LocalTransport()])
    with pytest.raises((TypeError, ArrayError)) as raised:
        call(comm, np.ones(2))
    assert hint_of(raised.value, Communicator) == hint


def test_code_that_expects_a_process_group_of_pytorch_gets_a_hint():
    from torch.utils.data import DistributedSampler

    with pytest.raises((ValueError, RuntimeError)) as raised:
        DistributedSampler([0, 1])
    assert hint_of(raised.value, Communicator).startswith("bagua_torch.connect(process_group=True) makes")


def test_the_hint_is_a_note_of_the_error_that_ends_the_program():
    with pytest.raises(TypeError) as raised, Communicator([LocalTransport()]) as comm:
        comm.broadcast(np.ones(2), 0)
    hint = "give root by name: broadcast(..., root=...)"
    assert getattr(raised.value, "__notes__", [hint]) == [hint]  # Python 3.10 has no notes: the exit prints it


def test_what_every_rank_gives_is_in_the_message():
    def body(comm):
        if comm.rank == 1:
            with pytest.raises(UnsupportedError, match=r"every rank gives an array, .* broadcast_object"):
                comm.broadcast(None, root=0)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("code", "passed"), [(0, 0), (3, 3), (np.int64(4), 4), (-1, 255), (256, 1), (2**40 + 2, 2)]
)
def test_abort_passes_on_a_code_that_a_process_can_return(monkeypatch, code, passed):
    codes = []
    monkeypatch.setattr(LocalTransport, "abort", lambda self, exit_code: codes.append(exit_code))

    def body(comm):
        with pytest.raises(ArrayError, match="exit_code is 'x', expected an integer"):
            comm.abort("x")
        comm.abort(code)

    run_ranks(1, body)
    assert codes == [passed]
