"""Bodies that test the calls of a Communicator beyond its conformance kit and random_calls.py, in any world.

`put` copies a NumPy array to the host or device of the ranks' arrays. References are computed by NumPy.
"""

import numpy as np
import pytest

from bagua_comm import ArrayError, CommMismatch, CommTimeout, UnsupportedError, wait_all, wait_any
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import sample


def sized(put, count):
    """This number of elements; few on a stand-in for a GPU, where a thread works on each."""
    return count if put is np.copy else -(-count // 50)


def to_host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def same(actual, expected):
    actual = to_host(actual)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.dtype.kind == "c":
        np.testing.assert_allclose(actual, expected, rtol=1e-5 if expected.dtype == np.complex64 else 1e-12)
    else:
        assert actual.tobytes() == expected.tobytes()


def close(actual, expected):
    """Compare sums that NCCL adds in any order."""
    actual = to_host(actual)
    assert actual.dtype == expected.dtype
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=2e-2, atol=1e-2)


def counts_count_at_the_root(comm, put):
    """Those of other ranks are ignored; they may be NumPy's, and arrays may have other shapes."""
    p, rank, counts = comm.size, comm.rank, [(3 * r + 1) % 5 * 700 for r in range(comm.size)]
    for root in (0, p - 1):
        xs = [sample(r, (counts[r],), "float32") for r in range(p)]
        everything, given = np.concatenate(xs), np.array(counts) if rank == root else counts[::-1]
        out = put(np.zeros((1, everything.size, 1), np.float32)) if rank == root else None
        assert comm.gather(put(xs[rank]), out, root=root, counts=given) is out
        mine = put(np.zeros((counts[rank], 1), np.float32))
        assert comm.scatter(put(everything) if rank == root else None, mine, root=root, counts=given) is mine
        same(to_host(mine).reshape(-1), xs[rank])
        if rank == root:
            same(to_host(out).reshape(-1), everything)


def parts_in_their_place(comm, put):
    """The own part of an array may already be in its place, and a result may go there."""
    p, rank, counts = comm.size, comm.rank, [r + 1 for r in range(comm.size)]
    end = sum(counts[: rank + 1])
    expected = np.repeat(np.arange(p), counts)
    whole = put(np.where(expected == rank, rank, -1))
    own = whole[end - counts[rank] : end]
    comm.gather(own, whole if rank == 0 else None, root=0, counts=counts if rank == 0 else None)
    if rank == 0:
        same(whole, expected)
    comm.scatter(whole if rank == 0 else None, own, root=0, counts=counts if rank == 0 else None)
    same(own, np.full(counts[rank], rank))
    whole[...] = put(expected)
    assert comm.reduce_scatter(whole, own, counts=counts) is own
    same(own, np.full(counts[rank], p * rank))


def many_at_once(comm, put):
    """Columns, results where they are given, and none at all."""
    rank, p = comm.rank, comm.size
    column, x = put(np.full((4, 2), rank))[:, 0], put(np.full(3, 1.0 + rank))  # one is not contiguous
    first, second = comm.allreduce_many([column, x], [column, None])
    assert first is column
    assert to_host(column.copy()).tolist() == [sum(range(p))] * 4
    same(second, np.full(3, p * (p + 1) / 2))
    assert all(x is given for x, given in zip([x], comm.broadcast_many([x], root=p - 1), strict=True))
    same(x, np.full(3, float(p)))
    assert comm.allreduce_many([]) == []


def total_of(xs, op):
    return np.add.reduce(xs) / (len(xs) if op == "avg" else 1)


def complex_numbers(comm, put):
    """Sums and averages, in every reduction, at every size."""
    p, rank = comm.size, comm.rank
    for dtype in ("complex64", "complex128"):
        for count in (1, sized(put, 10_000)):
            xs = [sample(r, (p, count), dtype) for r in range(p)]
            for op in ("sum", "avg"):
                x, expected = put(xs[rank]), total_of(xs, op)
                close(comm.allreduce(x, op=op), expected)
                at_root = comm.reduce(x, root=p - 1, op=op)
                if rank == p - 1:
                    close(at_root, expected)
                close(comm.reduce_scatter(x, op=op), expected[rank : rank + 1])
                assert comm.allreduce(x, out=x, op=op) is x
                close(x, expected)
        total = comm.allreduce(put(np.array(1 + 2j * rank, dtype_named(dtype))))
        assert to_host(total) == p + 1j * p * (p - 1)
        for op in ("min", "max"):
            raises(UnsupportedError, f"no op='{op}' for {dtype}; reduce magnitudes", comm.scan, total, op=op)
        raises(UnsupportedError, f"no op='band' for {dtype}$", comm.allreduce, total, op="band")


def products_of_complex_numbers(comm, put):
    p, rank = comm.size, comm.rank
    for count in (3, 30_000):
        xs = [sample(r, (p, count), "complex128") for r in range(p)]
        x, expected = put(xs[rank]), np.multiply.reduce(xs)
        np.testing.assert_allclose(comm.allreduce(x, op="prod"), expected, rtol=1e-9)
        np.testing.assert_allclose(comm.reduce_scatter(x, op="prod"), expected[rank : rank + 1], rtol=1e-9)
        np.testing.assert_allclose(comm.scan(x, op="prod"), np.multiply.reduce(xs[: rank + 1]), rtol=1e-9)


def a_row_of_ranks(comm, put):
    """None at its ends: nothing is sent, and nothing is written."""
    rank, end = comm.rank, comm.size - 1
    left, right = rank - 1 if rank else None, rank + 1 if rank < end else None
    out = put(np.array([-1]))
    assert comm.sendrecv(put(np.array([rank])), out, dest=right, source=left) is out
    assert to_host(out).tolist() == [rank - 1]

    halo = put(np.array([-1, -1]))
    mine = put(np.array([rank]))
    comm.exchange([(left, mine), (right, mine)], [(left, halo[:1]), (right, halo[1:])])
    assert to_host(halo).tolist() == [rank - 1, rank + 1 if rank < end else -1]
    comm.exchange([(None, mine)], [(None, halo)])
    assert to_host(halo).tolist() == [rank - 1, rank + 1 if rank < end else -1]
    for call in (lambda: comm.send(mine, dest=None), lambda: comm.recv(mine, source=None)):
        raises(ArrayError, "(dest|source) is None, expected a rank .*PROC_NULL", call)
    raises(UnsupportedError, "got builtins.list|list; wrap", comm.sendrecv, [1], out, dest=None, source=None)


def halos_by_tags(comm, put):
    """On a ring of any size, by one exchange, of short and of long rows, in any order of the lists."""
    p, rank = comm.size, comm.rank
    up, down = (rank - 1) % p, (rank + 1) % p
    for count in (1, sized(put, 40_000)):
        grid = put(np.stack([np.full(count, value) for value in (-1, 10 * rank, 10 * rank + 1, -1)]))
        sends, recvs = [(up, grid[1], "up"), (down, grid[2], 7)], [(up, grid[0], 7), (down, grid[3], "up")]
        comm.exchange(sends, recvs if rank % 2 else recvs[::-1])
        same(grid[0].copy(), np.full(count, 10 * up + 1))
        same(grid[3].copy(), np.full(count, 10 * down))


def tags_in_any_order(comm, put):
    """Each receive takes the first message of its tag, also if others came before, of any dtype and length."""
    long, right, left = sized(put, 40_000), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    quoted = 12 * "\\'"
    messages = {0: (3, "f8", 1), "7": (long, "i4", 2), 7: (2, "c8", 3), "empty": (0, "f4", 4)}
    messages[quoted] = 2, "f4", 5
    for _ in range(3):
        for tag in (0, quoted, "7", 7, "7", "empty"):
            count, dtype, value = messages[tag]
            for dest in range(1, comm.size) if comm.rank == 0 else ():
                comm.send(put(np.full(count, value, dtype)), dest=dest, tag=tag)
        for tag in (7, "empty", "7", 0, "7", quoted) if comm.rank else ():
            count, dtype, value = messages[tag]
            out = put(np.full(count, -1, dtype))
            assert comm.recv(out, source=0, tag=tag) is out
            same(out, np.full(count, value, dtype))
        out = put(np.zeros(2))
        comm.sendrecv(put(np.full(2, comm.rank + 0.5)), out, dest=right, source=left, tag=5)
        same(out, np.full(2, left + 0.5))


def requests_in_the_background(comm, put):
    """As in MPI programs: begin to receive, begin to send, compute, wait for all; short and long arrays."""
    p, rank = comm.size, comm.rank
    others = [other for other in range(p) if other != rank]
    for count in (1, sized(put, 40_000)):
        outs = {other: put(np.zeros(count)) for other in others}
        begun = [comm.irecv(outs[other], source=other, tag="x") for other in others]
        begun += [comm.isend(put(np.full(count, rank + 1.0)), dest=other, tag="x") for other in reversed(others)]
        total = comm.iallreduce(put(np.full(count, rank)))
        first = put(np.full(3, rank))
        root = comm.ibroadcast(first, root=p - 1)
        assert not others or wait_any(begun) < len(begun)
        results = wait_all([*begun, total, root])
        for other, result in zip(others, results, strict=False):
            assert result is outs[other]
            same(result, np.full(count, other + 1.0))
        same(results[-2], np.full(count, sum(range(p))))
        assert results[-1] is first
        same(first, np.full(3, p - 1))
        assert all(request.done() for request in begun)
    for name, wrong in {"op": "mean", "out": put(np.ones(2)), "timeout_s": 0}.items():
        raises(ArrayError, f"iallreduce: {name} ", comm.iallreduce, first, **{name: wrong})
    raises(UnsupportedError, "iallreduce: x: ", comm.iallreduce, "sum")
    raises(ArrayError, f"ibroadcast: root is {p}, expected a rank", comm.ibroadcast, first, root=p)
    raises(ArrayError, "ibroadcast: x ", comm.ibroadcast, np.float64(1), root=0)
    same(comm.iallreduce(first).result(), np.full(3, p * (p - 1)))  # the lane has seen none of them
    raises(ArrayError, "isend: dest is -1", comm.isend, first, dest=-1)
    raises(ArrayError, "irecv: source is None", comm.irecv, first, source=None)
    raises(ArrayError, r"irecv: source is \(0,\)", comm.irecv, first, source=(0,))
    raises(ArrayError, r"send: dest is \(0,\)", comm.send, first, dest=(0,))
    raises(ArrayError, "isend: tag is -2", comm.isend, first, dest=0, tag=-2)


def wrong_tags(comm, put):
    """They are refused before anything is sent."""
    x, other = put(np.ones(2)), put(np.zeros(2))
    for tag in (-1, 32768, 1.0, True, None, "", "x" * 25, "é"):
        expected = ArrayError, "tag is .*, expected an integer from 0 to 32767, or a text"
        raises(*expected, comm.send, x, dest=0, tag=tag)
        raises(*expected, comm.recv, x, source=0, tag=tag)
        raises(*expected, comm.sendrecv, x, other, dest=0, source=0, tag=tag)
        raises(*expected, comm.exchange, [(0, x, tag)], [])
    raises(ArrayError, "expected lists of .*array, tag", comm.exchange, [(0, x, 1, 2)], [])


def a_tag_that_nobody_sends(comm, put):
    """The error names the tag, the peer, and the tags that have come instead; the communicator is broken."""
    if comm.rank == 0:
        for tag in ("loss", 3, 3):
            comm.send(put(np.ones(2)), dest=1, tag=tag)
    if comm.rank == 1:
        message = r"waited 0.5 s.* rank 0 with tag 'lost'; from there came messages with other tags: 'loss', 3"
        request = comm.irecv(put(np.ones(2)), source=0, tag="lost", timeout_s=0.5)
        comm.send(put(np.ones(2)), dest=0)  # a call with another limit
        raises(CommTimeout, message, request.result)


def messages_of_another_dtype(comm, put):
    """The receiver names both dtypes, and takes the message; so the next receive gets the next one."""
    for count in (2, sized(put, 40_000)):
        for dest in range(1, comm.size) if comm.rank == 0 else ():
            comm.send(put(np.ones(count)), dest=dest, tag=4)
            comm.send(put(np.full(count, 7)), dest=dest, tag=4)
        if comm.rank:
            out = put(np.zeros(count, int))
            sides = rf"int64\[{count}\] with tag 4 from rank 0, which sent float64\[{count}\]"
            raises(CommMismatch, f"rank {comm.rank} expected {sides}", comm.recv, out, source=0, tag=4)
            assert not to_host(out).any()
            same(comm.recv(out, source=0, tag=4), np.full(count, 7))


def messages_again(comm, put):
    """The first and the prepared calls between two ranks move, refuse and count the same."""
    p, rank = comm.size, comm.rank
    right, left = (rank + 1) % p, (rank - 1) % p
    counts, results = [], []
    told = comm.on(after=lambda call: results.append((str(call), call.result is None)))
    for i in range(3):
        before = {name: comm.counters.by_operation[name].payload_bytes for name in ("send", "recv", "sendrecv")}
        results.clear()
        out = put(np.zeros(3))
        assert comm.sendrecv(put(np.full(3, 10.0 * i + rank)), out, dest=right, source=left) is out
        same(out, np.full(3, 10.0 * i + left))
        if rank == 0:
            for dest in range(1, p):
                comm.send(put(np.full((2, 2), i)), dest=dest)
        else:
            out = put(np.zeros((2, 2), int))
            assert comm.recv(out, source=0) is out
            same(out, np.full((2, 2), i))
        after = {name: comm.counters.by_operation[name].payload_bytes for name in before}
        texts = [(text.split(" #")[0], is_none) for text, is_none in results]
        counts.append(({name: after[name] - before[name] for name in before}, texts))
    told.remove()
    assert counts[0] == counts[1] == counts[2]

    x, out = put(np.full(3, 1.0 + rank)), put(np.zeros(3))
    raises(ArrayError, "out overlaps x", comm.sendrecv, x, x, dest=right, source=left)
    for wrong in (float(right), p, -1, "0"):
        raises(ArrayError, "expected a rank", comm.sendrecv, x, out, dest=wrong, source=left)
    raises(ArrayError, "dest is None", comm.send, put(np.full((2, 2), 1)), dest=None)
    raises(UnsupportedError, "NoneType", comm.sendrecv, x, None, dest=right, source=left)
    whole = put(np.zeros((3, 2)))
    comm.sendrecv(x, whole[:, 1], dest=right, source=left)  # not contiguous
    same(whole[:, 1].copy(), np.full(3, 1.0 + left))
    comm.sendrecv(whole[:, 1], out, dest=right, source=left)
    same(out, np.full(3, 1.0 + (left - 1) % p))
    same(comm.sendrecv(x, put(np.zeros((1, 3))), dest=right, source=left), np.full((1, 3), 1.0 + left))


def objects_of_every_kind(comm, put):
    p, rank = comm.size, comm.rank
    mine = {"rank": rank, "array": np.full(rank * 3000, rank), "text": "x" * rank}
    for root in (0, p - 1):
        found = comm.gather_object(mine, root=root)
        if rank == root:
            assert [each["rank"] for each in found] == list(range(p))
            assert all(
                (each["array"] == r).all() and each["array"].size == 3000 * r for r, each in enumerate(found)
            )
        else:
            assert found is None
        objs = (("for", r, "y" * 5000 * r) for r in range(p)) if rank == root else None
        assert comm.scatter_object(objs, root=root) == ("for", rank, "y" * 5000 * rank)
    assert comm.scatter_object([None] * p if rank == 0 else None, root=0) is None

    right, left = (rank + 1) % p, (rank - 1) % p
    comm.send_object(mine["text"], dest=right)
    comm.send_object(("second", rank), dest=right)
    out = put(np.zeros(1))
    assert comm.recv_object(source=left) == "x" * left
    assert comm.recv_object(source=left) == ("second", left)
    comm.sendrecv(put(np.ones(1)), out, dest=right, source=left)
    assert to_host(out)[0] == 1


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("not me")


def objects_that_cannot_be_pickled(comm, put):
    """All ranks get the same error, and can go on."""
    p, rank = comm.size, comm.rank
    bad = Unpicklable() if rank == p - 1 else rank
    message = "this Unpicklable cannot be pickled: RuntimeError: not me"
    raises(UnsupportedError, f"broadcast_object: {message}", comm.broadcast_object, bad, root=p - 1)
    raises(UnsupportedError, f"allgather_object: {message}", comm.allgather_object, bad)
    raises(UnsupportedError, f"gather_object: {message}", comm.gather_object, bad, root=0)
    objs = [0] * (p - 1) + [Unpicklable()] if rank == 0 else None
    raises(UnsupportedError, f"scatter_object: {message}", comm.scatter_object, objs, root=0)
    for wrong, what in ((None, "None"), ([1] * (p + 1), f"{p + 1} objects"), (5, "not a list: TypeError")):
        objs = wrong if rank == p - 1 else None
        raises(ArrayError, f"scatter_object: objs is {what}", comm.scatter_object, objs, root=p - 1)
    raises(UnsupportedError, f"send_object: {message}", comm.send_object, Unpicklable(), dest=rank)
    assert comm.allgather_object(rank) == list(range(p))


def raises(error, message, call, *arguments, **named):
    with pytest.raises(error, match=message):
        call(*arguments, **named)


# From here on, `comm` compares every call


def counts_that_differ(comm, put):
    """Each difference is a mismatch on all ranks, and does no harm."""
    p, rank = comm.size, comm.rank
    x = put(np.zeros(p))
    incoming = [1] * p
    incoming[0] = 2 if rank == 1 else 1
    wrong = "rank 0 sends 1 elements to rank 1, which expects 2"
    out = put(np.zeros(sum(incoming)))
    raises(CommMismatch, wrong, comm.alltoall, x, out, counts=[1] * p, out_counts=incoming)
    y = put(np.zeros(p, np.int64 if rank == 1 else np.uint64))
    raises(CommMismatch, r"alltoall\(uint64, .* but rank 1 called alltoall\(int64", alltoall_of_one_each, comm, y)
    if rank == 1:
        raises(CommMismatch, r"alltoall\(float64, .* but rank 1 called barrier", comm.barrier)
    else:
        raises(CommMismatch, r"alltoall\(float64, .* but rank 1 called barrier", alltoall_of_one_each, comm, x)
    alltoall_of_one_each(comm, x)

    x = put(np.zeros(rank + 1))
    counts = [3, *range(2, p + 1)] if rank else [1, 7, *range(3, p + 1)]
    wrong = "rank 1 sends 2 elements to rank 0, which expects 7"
    raises(CommMismatch, wrong, comm.gather, x, root=0, counts=counts if rank == 0 else None)
    raises(CommMismatch, r"gather\(.* root=0\), but rank 1", comm.gather, x, root=rank, counts=range(1, p + 1))
    whole = put(np.zeros(sum(counts)))
    wrong = "rank 0 sends 7 elements to rank 1, which expects 2"
    raises(CommMismatch, wrong, comm.scatter, whole if rank == 0 else None, x, root=0, counts=counts)
    wrong = r"rank 0 called reduce_scatter\(float64\[7\], op=sum, counts=.* but rank 1 called reduce_scatter"
    counts = [7, *[0] * (p - 1)] if rank == 0 else [0, 7, *[0] * (p - 2)]
    raises(CommMismatch, wrong, comm.reduce_scatter, put(np.zeros(7)), counts=counts)


def alltoall_of_one_each(comm, x):
    counts = [1] * comm.size
    comm.alltoall(x, x.copy(), counts=counts, out_counts=counts)


def messages_that_differ(comm, put):
    """The receiver names both dtypes and sizes, still takes the message, and can go on; objects are no arrays."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    floats = put(np.ones(40_000))

    def both(x, out, message):
        raises(CommMismatch, message, comm.sendrecv, x, out, dest=right, source=left)

    which = rf"rank {comm.rank} expected {{}} from rank {left}, which sent float64\[40000\]"
    both(floats, put(np.zeros(40_000, np.int64)), which.format(r"int64\[40000\]"))
    both(floats, put(np.zeros((2, 2))), which.format(r"float64\[4\]"))
    out = put(np.zeros((200, 200)))
    comm.sendrecv(floats, out, dest=right, source=left)  # another shape with the same number of elements
    assert to_host(out).all()

    comm.send(floats[:3], dest=right) if comm.rank == 0 and comm.size > 1 else None
    if comm.rank == 1:
        message = r"rank 1 expected float32\[3\] from rank 0, which sent float64\[3\]"
        raises(CommMismatch, message, comm.recv, put(np.zeros(3, np.float32)), source=0)
    halves = put(np.zeros(6)), put(np.zeros(2, np.uint8))
    sends = [(right, floats[:6]), (right, floats[6:8])]
    raises(CommMismatch, r"which sent float64\[2\]", comm.exchange, sends, [(left, half) for half in halves])
    assert to_host(halves[0]).all()  # the right message has arrived
    assert not to_host(halves[1]).any()
    if comm.size > 1:
        assert comm.sendrecv(floats, out, dest=right, source=left) is out  # it works on


def objects_and_arrays(comm, put):
    """They never match each other, whatever the order; tags tell objects apart, too."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = put(np.zeros(3))
    comm.send_object("text", dest=right)
    comm.send_object({"tag": 7}, dest=right, tag=7)
    comm.sendrecv(put(np.ones(3)), out, dest=right, source=left)
    assert to_host(out).all()
    assert comm.recv_object(source=left, tag=7) == {"tag": 7}
    assert comm.recv_object(source=left) == "text"


def messages_of_any_source(comm, put):
    """A receive takes the first message of its tag, from whichever of its sources; it says from which."""
    for count in (1, sized(put, 40_000)):
        out = put(np.zeros(count))
        if comm.rank == 0:
            sources = range(1, comm.size)
            found = {comm.recv_any(out, sources=sources, tag=f"x{count}"): float(out[0]) for _ in sources}
            assert found == {rank: rank + 0.5 for rank in sources}
            assert sorted(comm.recv_any_object(tag=str(count)) for _ in sources) == [
                (rank, str(rank)) for rank in sources
            ]
        else:
            comm.send(put(np.full(count, comm.rank + 0.5)), dest=0, tag=f"x{count}")
            comm.send_object(str(comm.rank), dest=0, tag=str(count))
    for wrong in ([], [comm.size], [-1], 1, [True]):
        raises(ArrayError, "recv_any: .*sources", comm.recv_any, out, sources=wrong)
        raises(ArrayError, "recv_any_object: .*sources", comm.recv_any_object, sources=wrong)


def groups_and_lanes_are_compared(comm, put):
    """Barriers, groups, and calls on a lane."""
    for call in (comm.dup, comm.lane):
        if comm.rank == 0:
            raises(CommMismatch, r"rank 0 called split\(\), but rank 1 called dup\(\)", comm.split, 0)
        else:
            raises(CommMismatch, r"rank 0 called split\(\), but rank 1 called dup\(\)", call)
    with comm.lane() as lane, comm.split(0) as group:
        for world in (lane.comm, group):
            x = put(np.zeros(2 + (comm.rank == 1)))
            raises(CommMismatch, r"float64\[2\].* but rank 1 .*float64\[3\]", world.allreduce, x)
        x = put(np.zeros(2, np.int32))
        request = lane.submit(lane.comm.sendrecv, put(np.zeros(2)), x, dest=comm.rank, source=comm.rank)
        raises(CommMismatch, "which sent float64", request.result, timeout=30)
        raises(CommMismatch, "which sent float64", lane.wait)
    comm.barrier()


WITHOUT_CHECK = [
    counts_count_at_the_root,
    parts_in_their_place,
    complex_numbers,
    many_at_once,
    a_row_of_ranks,
    halos_by_tags,
    wrong_tags,
    messages_again,
    objects_and_arrays,
    objects_of_every_kind,
    objects_that_cannot_be_pickled,
]
BY_LABELS = [
    tags_in_any_order,
    messages_of_another_dtype,
    messages_that_differ,
    messages_of_any_source,
    requests_in_the_background,
]
"""For transports that compare the labels of messages."""

WITH_CHECK = [counts_that_differ, messages_that_differ, groups_and_lanes_are_compared]
