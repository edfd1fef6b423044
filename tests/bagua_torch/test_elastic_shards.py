"""Sharded models (`fully_shard`) under `elastic.run`: survivors go on from the slabs in their memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import thread_groups
from support.elastic_shards import CASES, Training, results, undisturbed
from support.waiting import until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from bagua_comm import ArrayError, CommError, ErrorFeedback, Quantized, RankFailed, UnsupportedError
from bagua_comm.elastic import State, run
from bagua_comm.elastic.session import Session
from bagua_comm.elastic.snapshot.snapshots import slabs_of
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import fsdp


@pytest.fixture(autouse=True)
def groups():
    thread_groups.install()
    yield
    thread_groups.uninstall()


def assert_equal(first, second, *, but=()):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert name in but or torch.equal(value, second[name]), name


def assert_restored(records, step, *, but=()):
    """At the begin of the second entry the state is that of the commit of this step."""
    committed, restored = [each for each in records if each.step == step][:2]
    assert (committed.entered, restored.entered) == (False, True)
    assert_equal(committed.weights, restored.weights, but=but)
    assert_equal(committed.moments, restored.moments)
    assert committed.moments


EXACT = [name for name, case in CASES.items() if case.reduce.is_reproducible]


@pytest.mark.parametrize(
    "case", ["AdamW", *(pytest.param(each, marks=pytest.mark.slow) for each in CASES if each != "AdamW")]
)
def test_three_of_four_ranks_go_on_with_the_bits_of_the_commit(case):
    but = {"count", "total"} if case == "buffers" else ()
    training = Training(CASES[case], ThreadJob(4), [(2, 2)])
    ended = results(training.run())
    assert [each.size for each in ended] == [3, 3, 3]
    for number in (0, 1, 3):
        assert_restored(training.records[number], 2, but=but)
    if case in EXACT:
        assert_equal(undisturbed(case).weights, ended[0].weights, but=but)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["replicas", "error feedback", "error feedback of replicas", "buffers"])
def test_with_a_spare_nothing_differs(case):
    training = Training(CASES[case], ThreadJob(5, wanted=4), [(1, 2)])
    ended = results(training.run())
    assert [each.size for each in ended] == [4] * 4
    assert_equal(undisturbed(case).weights, ended[0].weights)


@pytest.mark.slow
def test_the_mean_of_residuals_stays_on_fewer_ranks():
    """Of the last module, `first`: its rows are padded to those of four and of three ranks."""
    training = Training(CASES["error feedback"], ThreadJob(4), [(2, 2)])
    results(training.run())
    committed, restored = [], []
    for number in range(4):
        records = [each for each in training.records[number] if each.step == 2]
        for record, found in zip(records, (committed, restored), strict=False):
            assert record.residuals["means since the last reset"]["first"] == 2 * 12 / 4
            (of_rank,) = [value for name, value in record.residuals.items() if name.startswith("residuals of")]
            shards, rows = of_rank["first"].view(record.size, -1), -(-7 // record.size)
            weight = shards[:, : rows * 5].reshape(-1)[: 7 * 5]
            found.append(torch.cat([weight, shards[:, rows * 5 :].reshape(-1)[:7]]).double())
    assert (len(committed), len(restored)) == (4, 3)
    assert committed[0].abs().max() > 0
    for each in restored:
        assert torch.allclose(each, torch.stack(committed).mean(0), atol=1e-9)


def test_the_residuals_of_a_closed_attachment_are_not_committed_and_its_model_is_freed():
    def body(fleet):
        state = State(step=0)

        @run(state, fleet=fleet)
        def trained(comm):
            thread_groups.renew(comm)
            model, sent = sharded(), []
            with fsdp.attach(model, ErrorFeedback(Quantized(min_bytes=0)), comm=comm):
                state.commit()
                sent.append(state.commits.sent_bytes)
            state.commit()
            sent.append(state.commits.sent_bytes)
            left = weakref.ref(model)
            del model
            until(lambda: gc.collect() is not None and left() is None)  # threads that end may hold it
            return sent

        return trained

    for before, after in results(run_fleet(ThreadJob(2), body)):
        assert before > 0
        assert after == 0


@pytest.mark.slow
def test_a_process_that_joins_receives_its_part():
    training = Training(CASES["AdamW"], job := ThreadJob(2, wanted=3), joins=2)
    results(training.run())
    assert {number: each[-1].size for number, each in training.records.items()} == {0: 3, 1: 3, 2: 3}
    assert not job.dead
    assert_restored(training.records[0], 2)
    assert_equal(undisturbed("AdamW").weights, training.records[2][-1].weights)


@pytest.mark.slow
def test_replicas_have_the_parts_of_a_rank_and_its_buddy():
    training = Training(CASES["replicas"], ThreadJob(4), [(0, 2), (1, 2)])
    ended = results(training.run())
    assert [each.size for each in ended] == [2, 2]
    assert_restored(training.records[3], 2)


@pytest.mark.slow
def test_with_spares_replicas_have_the_parts_of_a_rank_and_its_buddy():
    training = Training(CASES["replicas"], ThreadJob(6, wanted=4), [(0, 2), (1, 2)])
    ended = results(training.run())
    assert [each.size for each in ended] == [4] * 4
    assert_equal(undisturbed("replicas").weights, ended[0].weights)


@pytest.mark.parametrize("spares", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_without_a_rank_and_its_buddy_all_raise_an_error_that_names_what_is_lost(spares):
    outcomes = Training(CASES["AdamW"], ThreadJob(4 + spares, wanted=4), [(1, 2), (2, 2)]).run()
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    assert len(errors) == 2 + spares
    for error in errors:
        assert isinstance(error, RankFailed)
        assert "indices 2 to 3 of 7 along axis 0 of tree['registered']['model']['first.weight']" in str(error)
        assert "which ranks [1] held" in str(error)
        assert "start again, from a checkpoint" in str(error)


def damage(monkeypatch, number, rank):
    """Let process `number` damage its copy of the slabs of a rank, after each commit."""
    commit = Session.commit

    def damaging(session):
        commit(session)
        snapshots = session._newest.snapshots() if session._number == number else []
        for snapshot in (each for each in snapshots if each.header["rank"] == rank):
            for slab in slabs_of(snapshot.header, snapshot.arrays):
                slab.array.reshape(-1)[:1] = 7

    monkeypatch.setattr(Session, "commit", damaging)


@pytest.mark.slow
def test_a_damaged_copy_is_not_used(monkeypatch):
    """Process 0 has a damaged copy of its own slabs; its buddy has another one."""
    damage(monkeypatch, 0, 0)
    training = Training(CASES["AdamW"], ThreadJob(4), [(2, 2)])
    results(training.run())
    assert_restored(training.records[3], 2)


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
def test_where_the_only_copy_is_damaged_all_raise_an_error(monkeypatch, spares):
    damage(monkeypatch, 3, 2)
    outcomes = Training(CASES["AdamW"], ThreadJob(4 + spares, wanted=4), [(2, 2)]).run()
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    assert len(errors) == 3 + spares
    assert_all(errors, RankFailed, "nothing is left of indices 4 to 5 of 7", "['model']['first.weight']")


# What is refused, on all ranks ------------------------------------------------------------------------------


def outcomes_of(train, *, ranks=2, deaths=None):
    """The errors of `train(state, comm, entry)`, by process; process n dies after the commit of `deaths[n]`."""
    job = ThreadJob(ranks)

    def body(fleet):
        state, entries = State(step=0), []

        @run(state, fleet=fleet)
        def trained(comm):
            thread_groups.renew(comm)
            entries.append(comm.size)
            train(state, comm, len(entries))
            state.commit()
            comm.barrier()  # all have committed
            if deaths is not None and deaths.get(fleet.me) == len(entries):
                job.kill(fleet.me)
            comm.barrier()

        return trained

    return [outcome.get("error") for outcome in run_fleet(job, body)]


def sharded(rows=7, columns=5):
    return fully_shard(nn.Linear(columns, rows))


def assert_all(errors, kind, *texts):
    for error in errors:
        assert isinstance(error, kind), errors
        for text in texts:
            assert text in str(error)


def test_a_model_of_other_shapes_than_at_the_commit_is_refused_with_the_difference():
    errors = outcomes_of(
        lambda state, comm, entry: state.register(net=sharded(6 + entry)), ranks=3, deaths={1: 1}
    )
    texts = "net['weight'] was committed as float32[7, 5], sharded along axis 0", "but is float32[8, 5], sharded"
    assert errors[1] is None
    assert_all([errors[0], errors[2]], ArrayError, *texts)


def test_an_optimizer_of_another_class_than_at_the_commit_is_refused():
    def train(state, comm, entry):
        kind = torch.optim.AdamW if entry == 1 else torch.optim.SGD
        state.register(optimizer=kind(sharded().parameters()))

    errors = outcomes_of(train, ranks=3, deaths={1: 1})
    texts = "optimizer was saved from an optimizer with 'betas'", "but SGD has 'momentum'", "the same class again"
    assert_all([errors[0], errors[2]], ArrayError, *texts)


def test_a_model_that_is_not_sharded_any_more_is_refused():
    def train(state, comm, entry):
        state.register(net=sharded() if entry == 1 else nn.Linear(5, 7))

    errors = outcomes_of(train, ranks=3, deaths={1: 1})
    assert_all(
        [errors[0], errors[2]], ArrayError, "net['weight'] was committed as float32", "no sharded tensor now"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("step", "'step' is a part of the state already"),
        ("net", "'net' is a part of the state already"),
        ("commit", "'commit' cannot be the name of a part"),
    ],
)
def test_a_name_that_is_taken_is_refused(name, text):
    def train(state, comm, entry):
        state.register(net=sharded())
        state.register(**{name if comm.rank else "other": sharded()})

    assert_all(outcomes_of(train), ArrayError, text)


def test_the_commit_after_a_death_is_refused_while_an_object_is_not_registered_again():
    def train(state, comm, entry):
        model = sharded()
        state.commit()  # keeps all as it was
        state.register(net=model)
        if entry == 1:
            state.register(optimizer=torch.optim.AdamW(model.parameters()), count=[1])

    errors = outcomes_of(train, ranks=3, deaths={1: 1})
    texts = "has not restored count, optimizer of", "register it again in this function, as"
    assert_all([errors[0], errors[2]], ArrayError, *texts)


def test_ranks_that_register_different_objects_get_an_error():
    def train(state, comm, entry):
        state.register(**{f"net{comm.rank}": sharded()})

    assert_all(outcomes_of(train), ArrayError, "ranks give different objects, by rank: net0; net1")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sharded(8), "net['weight'], float32[8, 5], sharded along axis 0"),
        (lambda: sharded().double(), "net['weight'], float64[7, 5], sharded along axis 0"),
        (lambda: nn.Linear(5, 7), "nothing"),
    ],
)
def test_ranks_with_different_arrays_under_one_name_get_an_error_that_names_the_array(make, text):
    def train(state, comm, entry):
        state.register(first=sharded(), net=make() if comm.rank else sharded())

    assert_all(
        outcomes_of(train), ArrayError, f"by rank: net['weight'], float32[7, 5], sharded along axis 0; {text}"
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [(sharded, "net['weight'] was committed as float32[7, 5]"), (lambda: nn.Linear(5, 7), "torch.float32, but")],
)
def test_a_model_of_another_dtype_than_at_the_commit_is_refused(make, text):
    def train(state, comm, entry):
        state.register(net=make() if entry == 1 else make().double())

    errors = outcomes_of(train, ranks=3, deaths={1: 1})
    assert_all([errors[0], errors[2]], ArrayError, text, "net['weight'] was committed as", "float64")


def test_an_object_of_one_rank_that_cannot_be_saved_is_an_error_on_all():
    def train(state, comm, entry):
        state.register(net=object() if comm.rank else sharded())

    assert_all(outcomes_of(train), UnsupportedError, "rank 1: State: net cannot be kept")


def test_a_sharded_part_of_the_state_itself_is_refused_with_the_way_out():
    model = []

    def body(fleet):
        thread_groups.renew(SimpleNamespace(rank=0, size=1))
        model.append(sharded())
        run(State(model=model[0]), fleet=fleet)(lambda comm: None)

    (outcome,) = run_fleet(ThreadJob(1), body)
    assert_all([outcome["error"]], ArrayError, "['model']['weight'] is sharded", "State.register(...)")


def test_a_tensor_that_is_placed_in_another_way_is_refused():
    def train(state, comm, entry):
        mesh = init_device_mesh("cpu", (comm.size,))
        state.register(x=DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))

    assert_all(outcomes_of(train), UnsupportedError, "State: x cannot be kept", "expected one Shard")


def test_register_outside_of_training_is_an_error():
    with pytest.raises(CommError, match="there is no training"):
        State(step=0).register(net=nn.Linear(1, 1))


def test_what_is_not_registered_again_stays_in_the_commits():
    """The second entry registers nothing, and the third and the fourth have the weights of the first."""
    seen = []

    def train(state, comm, entry):
        model = sharded()
        if entry != 2:
            state.register(net=model)
            with torch.no_grad():
                seen.append(model.weight.to_local().sum().item())
                if entry == 1:
                    model.weight.to_local().fill_(comm.rank + 1)

    assert outcomes_of(train, ranks=4, deaths={1: 1, 2: 2, 3: 3}) == [None] * 4
    assert sorted(seen)[-3:] == [5 * (1 + 1 + 2 + 2), 5 * (3 + 3 + 4), 5 * 16]
