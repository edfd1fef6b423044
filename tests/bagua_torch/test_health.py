"""Rows of step times of PyTorch's models: with and without optimizers, in `no_sync`, and in `join`."""

import contextlib

import pytest
from support.torch_training import batch, loss_of, make_model, sgd

from bagua_comm import DiLoCo, GradientAllReduce, after
from bagua_comm.engine import monitor
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel


def rows(batches, *, algorithm=None, knows_optimizer=True, parts=1):
    """The number of rows that each rank knows at the end, by how many batches ranks have."""

    def body(comm):
        model = make_model()
        optimizer = sgd(model.parameters())
        given = (optimizer,) if knows_optimizer else ()
        algorithm_ = algorithm or GradientAllReduce()
        with contextlib.closing(DistributedDataParallel(model, *given, algorithm=algorithm_, comm=comm)) as ddp:
            with ddp.join() if len(set(batches)) > 1 else contextlib.nullcontext():
                for step in range(batches[comm.rank]):
                    optimizer.zero_grad()
                    for part in range(parts):
                        with ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                            loss_of(ddp, batch(comm.rank, 10 * step + part)).backward()
                    optimizer.step()
            return (
                len(comm.health().rows),
                [bool(row.steps) for row in comm.health().rows.values()],
                comm.health().slow,
            )

    return run_ranks(len(batches), body, timeout_s=20)


@pytest.mark.parametrize(("knows_optimizer", "parts"), [(True, 1), (False, 3)])
def test_all_ranks_know_the_rows_of_all(knows_optimizer, parts):
    for count, with_steps, _ in rows([30, 30], knows_optimizer=knows_optimizer, parts=parts):
        assert (count, with_steps) == (2, [True, True])


def test_a_rank_without_data_is_not_compared(monkeypatch):
    monkeypatch.setattr(monitor, "ROW_S", 0.0)
    for count, with_steps, slow in rows([8, 60, 60]):
        assert (count, with_steps, slow) == (3, [False, True, True], ())


def test_rows_follow_from_one_algorithm_to_the_next():
    algorithm = after(12, GradientAllReduce(), DiLoCo(local_steps=3))
    for count, _, _ in rows([60, 60], algorithm=algorithm):
        assert count == 2
