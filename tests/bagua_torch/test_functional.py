"""Differentiable collectives, against plain tensors of all ranks side by side and against finite differences."""

import threading

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from bagua_comm import ArrayError, BFloat16, CommError, CommMismatch, MinMaxUInt8, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import functional

COUNTS = [[0, 2, 1, 3], [1, 0, 2, 1], [4, 1, 0, 0], [2, 2, 2, 0]]
"""How many rows each rank sends to each, for up to four ranks."""


def uneven(comm, x):
    sends = COUNTS[comm.rank][: comm.size]
    recvs = [COUNTS[r][comm.rank] for r in range(comm.size)]
    # As many rows as are sent, made of x.
    rows = torch.cat([x] * 3)[: sum(sends)]
    return functional.alltoall(comm, rows, counts=sends, out_counts=recvs)


CALLS = {
    "allreduce": lambda comm, x: functional.allreduce(comm, x),
    "allreduce avg": lambda comm, x: functional.allreduce(comm, x, op="avg"),
    "allgather": lambda comm, x: functional.allgather(comm, x),
    "reduce_scatter": lambda comm, x: functional.reduce_scatter(comm, x),
    "reduce_scatter avg": lambda comm, x: functional.reduce_scatter(comm, x, op="avg"),
    "alltoall": lambda comm, x: functional.alltoall(comm, x),
    "alltoall by counts": uneven,
    "broadcast": lambda comm, x: functional.broadcast(comm, x, root=comm.size - 1),
}

each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
ranks = pytest.mark.parametrize("p", [1, 2, 3])


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss_of(y, rank):
    """Not linear, not symmetric, and of another scale on each rank."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return ((rank + 1) * torch.sin(y * 0.1 * weights)).sum()


# Derivatives ---------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@each_call
@ranks
def test_gradients_are_those_of_the_sum_of_all_ranks_losses(call, p):
    """gradcheck perturbs the input of all ranks, which all hold the same; each takes its row of it."""

    def body(comm):
        def whole(every):
            mine = functional.reduce_scatter(comm, every, op="avg").squeeze(0)  # row `rank`
            return functional.allreduce(comm, loss_of(call(comm, mine), comm.rank))

        every = draw(p, p, 1).requires_grad_()
        assert gradcheck(whole, every)
        return gradgradcheck(whole, every) if p == 2 else True

    assert run_ranks(p, body) == [True] * p


@pytest.mark.covering(1)
@each_call
@ranks
def test_gradients_are_finite_differences_over_all_ranks(call, p):
    def body(comm):
        def total(x):
            return float(comm.allreduce(loss_of(call(comm, x), comm.rank).detach().numpy()))

        x = draw(p, 1, seed=comm.rank).requires_grad_()
        loss_of(call(comm, x), comm.rank).backward()
        for rank in range(p):
            for place in range(x.numel()):
                step = torch.zeros(x.numel(), dtype=x.dtype)
                step[place] = 1e-6 * (comm.rank == rank)
                step = step.view_as(x)
                slope = (total(x.detach() + step) - total(x.detach() - step)) / 2e-6
                if comm.rank == rank:
                    assert x.grad.view(-1)[place].item() == pytest.approx(slope, abs=1e-7)

    run_ranks(p, body)


@ranks
def test_values_are_those_of_plain_tensors(p):
    xs = [draw(2 * p, 3, seed=rank) for rank in range(p)]
    total = sum(xs[1:], start=xs[0])
    results = run_ranks(
        p,
        lambda comm: {
            name: call(comm, xs[comm.rank]) for name, call in CALLS.items() if name != "alltoall by counts"
        },
    )
    for rank, found in enumerate(results):
        mine = slice(2 * rank, 2 * rank + 2)
        assert found["allreduce"].equal(total)
        torch.testing.assert_close(found["allreduce avg"], total / p)
        assert found["allgather"].equal(torch.stack(xs))
        assert found["reduce_scatter"].equal(total[mine])
        torch.testing.assert_close(found["reduce_scatter avg"], total[mine] / p)
        assert found["alltoall"].equal(torch.cat([x[mine] for x in xs]))
        assert found["broadcast"].equal(xs[-1])


@ranks
def test_uneven_rows_go_where_counts_say(p):
    def body(comm):
        counts = COUNTS[comm.rank][:p]
        rows = [[comm.rank, dest] for dest, n in enumerate(counts) for _ in range(n)]
        x = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
        return functional.alltoall(comm, x, counts=counts)  # the ranks exchange the counts

    for rank, found in enumerate(run_ranks(p, body)):
        expected = [[source, rank] for source in range(p) for _ in range(COUNTS[source][rank])]
        assert found.tolist() == expected


@pytest.mark.parametrize("counts", [[1, 2], None])
def test_encoded_rows_have_the_exact_gradient(counts):
    codec, own = MinMaxUInt8(block=None), 1 if counts else 2

    def body(comm):
        x = draw(3 if counts else 4, 5, seed=comm.rank, dtype=torch.float32).requires_grad_()
        y = functional.alltoall(comm, x, counts=counts, codec=codec)
        weights = draw(*y.shape, seed=10 + comm.rank, dtype=torch.float32)
        (y * weights).sum().backward()
        return x, y, weights

    (x0, y0, w0), (x1, y1, w1) = run_ranks(2, body)
    for y, rows in ((y0, [x0[:own], x1[:own]]), (y1, [x0[own:], x1[own:]])):
        rows = torch.cat(rows).detach().numpy()
        assert y.detach().numpy().tobytes() == codec.decode(codec.encode(rows), np.empty_like(rows)).tobytes()
        assert not np.array_equal(y.detach().numpy(), rows)
    assert x0.grad.equal(torch.cat([w0[:own], w1[:2]]))
    assert x1.grad.equal(torch.cat([w0[own:], w1[2:]]))


# Kinds of tensors ----------------------------------------------------------------------------------------


def test_any_layout_and_float_dtype():
    def body(comm):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = draw(4, 6, seed=comm.rank, dtype=dtype)[:, ::3].t().requires_grad_()  # (2, 4), not contiguous
            y = functional.allgather(comm, x)
            assert (y.dtype, y.shape) == (dtype, (2, 2, 4))
            assert y[comm.rank].equal(x)
            y.sum().backward()  # an expanded gradient
            assert x.grad.equal(torch.full((2, 4), 2, dtype=dtype))
        z = torch.tensor([1 + 2j, 3j], requires_grad=True)
        functional.allreduce(comm, z.conj()).imag.sum().backward()
        assert z.grad.tolist() == [-2j, -2j]

    run_ranks(2, body)


@each_call
def test_empty_tensors_take_part_forward_and_backward(call):
    if call is uneven:

        def call(comm, x):
            return functional.alltoall(comm, x, counts=[0, 0])

    def body(comm):
        x = torch.zeros(0, 3, requires_grad=True)
        call(comm, x).sum().backward()
        return x.grad.shape

    assert run_ranks(2, body) == [(0, 3)] * 2


def test_a_scalar_is_gathered():
    def body(comm):
        x = torch.tensor(float(comm.rank), requires_grad=True)
        y = functional.allgather(comm, x)
        (y * torch.tensor([1.0, 10.0])).sum().backward()
        return y.tolist(), x.grad.item()

    assert run_ranks(2, body) == [([0.0, 1.0], 2.0), ([0.0, 1.0], 20.0)]


@each_call
def test_without_a_gradient_there_is_no_graph(call):
    def body(comm):
        assert not call(comm, torch.ones(2, 2)).requires_grad
        with torch.no_grad():
            assert not call(comm, torch.ones(2, 2, requires_grad=True)).requires_grad
        x = torch.arange(4).reshape(2, 2)
        assert call(comm, x).dtype == torch.int64

    run_ranks(2, body)


def test_a_result_is_memory_of_its_own():
    def body(comm):
        for call in CALLS.values():
            x = draw(2, 2)
            before = x.clone()
            call(comm, x).fill_(7)
            assert x.equal(before)

    run_ranks(1, body)


def test_a_backward_pass_may_run_on_another_thread():
    def body(comm):
        x = torch.ones(2, requires_grad=True)
        y = functional.allreduce(comm, x)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
        return x.grad.tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


# Mistakes of users ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_backward_passes_through_different_calls_raise(check):
    def body(comm):
        x = torch.ones(2, requires_grad=True)
        ys = [functional.allreduce(comm, x), functional.allreduce(comm, x)]
        ys[comm.rank].sum().backward()

    with pytest.raises(CommMismatch, match=r"backward of functional.allreduce #[12] .* but rank [01] called"):
        run_ranks(2, body, check=check)


def test_ranks_of_which_only_some_need_a_gradient_raise():
    def body(comm):
        functional.allreduce(comm, torch.ones(2, requires_grad=comm.rank == 0))

    with pytest.raises(CommMismatch, match=r"with(out)? a gradient"):
        run_ranks(2, body)


def test_the_communicator_is_in_use_until_backward_returns():
    """Rank 0's backward pass, on another thread, waits for rank 1, which is late."""
    refused = threading.Event()

    def body(comm):
        x = torch.ones(2, requires_grad=True)
        y = functional.allreduce(comm, x)
        if comm.rank == 1:
            assert refused.wait(30)
            y.sum().backward()
            return x.grad.tolist()
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        while comm.guard.is_free:
            pass
        with pytest.raises(CommError, match="another thread is in a call"):
            functional.allreduce(comm, x)
        refused.set()
        thread.join()
        return x.grad.tolist()

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, x: functional.allreduce(c, x, op="max"), ArrayError, 'op is \'max\', expected "sum" or "avg"'),
        (lambda c, x: functional.reduce_scatter(c, x, op=None), ArrayError, "reduce_scatter: op is None"),
        (lambda c, x: functional.reduce_scatter(c, x), ArrayError, r"shape \(3, 2\), .* divisible by 2 ranks"),
        (lambda c, x: functional.alltoall(c, x[0, 0]), ArrayError, r"alltoall: x has shape \(\)"),
        (lambda c, x: functional.alltoall(c, x, counts=[1, 1]), ArrayError, r"\(3, 2\), expected \(2, ...\)"),
        (lambda c, x: functional.alltoall(c, x, counts=[3]), ArrayError, r"counts is \[3\], expected 2"),
        (lambda c, x: functional.alltoall(c, x, counts=[4, -1]), ArrayError, r"counts is \[4, -1\]"),
        (
            lambda c, x: functional.alltoall(c, x, counts=[1, 2], out_counts=[1]),
            ArrayError,
            r"out_counts is \[1\]",
        ),
        (lambda c, x: functional.alltoall(c, x, out_counts=[1, 2]), ArrayError, "counts is None; give both"),
        (lambda c, x: functional.alltoall(c, x[0, 0], counts=[0, 0]), ArrayError, r"x has shape \(\)"),
        (lambda c, x: functional.alltoall(c, x, counts=[1, 2], codec=8), ArrayError, "codec is 8"),
        (
            lambda c, x: functional.alltoall(c, x.double(), counts=[1, 2], codec=BFloat16()),
            UnsupportedError,
            "cannot code float64",
        ),
        (lambda c, x: functional.broadcast(c, x, root=2), ArrayError, "root is 2, expected a rank from 0 to 1"),
        (lambda c, x: functional.allgather(c, [1.0]), UnsupportedError, "x is a list, expected a tensor"),
        (lambda c, x: functional.allgather(c, x.to_sparse()), UnsupportedError, "x has layout torch.sparse_coo"),
        (lambda c, x: functional.allgather(c, x.to(torch.float8_e5m2)), UnsupportedError, "float8"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_the_communicator_usable(call, error, message):
    def body(comm):
        with pytest.raises(error, match=message):
            call(comm, torch.ones(3, 2))
        return functional.allreduce(comm, torch.ones(1)).item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_counts_on_some_ranks_alone_raise():
    def body(comm):
        counts = {} if comm.rank else {"counts": [1, 1], "out_counts": [1, 1]}
        with pytest.raises(CommMismatch, match=r"functional.alltoall #1 (\(|with counts)"):
            functional.alltoall(comm, torch.ones(2, 2), **counts)

    run_ranks(2, body, check=True)


def test_counts_that_do_not_fit_together_raise():
    def body(comm):
        recvs = [[1, 1], [2, 1]][comm.rank]  # rank 0 sends one row to rank 1
        functional.alltoall(comm, torch.ones(2, 2), counts=[1, 1], out_counts=recvs)

    with pytest.raises((ArrayError, CommMismatch)):
        run_ranks(2, body)
