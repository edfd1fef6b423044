"""The tuner: what it may choose, how well it chooses, that ranks agree, and what it remembers."""

import json
import os
import warnings

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    BaguaError,
    ByteGrad,
    CommMismatch,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    Exact,
    Float16,
    GradientAllReduce,
    Hierarchical,
    Int4,
    LowPrecisionDecentralized,
    MinMaxUInt8,
    Plan,
    Point,
    QAdam,
    Quantized,
    TensorSpec,
    Tuner,
    UnsupportedError,
    after,
    every,
)
from bagua_comm.planning.tuner.grid import BLOCKS, BUCKET_BYTES, Grid, make_grid
from bagua_comm.planning.tuner.search import Search
from bagua_comm.testing import run_ranks

SPECS = [TensorSpec(f"layer{i}", (256,), "float32") for i in range(8)]  # 8 KiB
SIZES = [1024, 2048, 4096, 8192]


def grid_of(algorithm, *, bucket_bytes=SIZES, averages=None, blocks=None):
    return make_grid(algorithm, SPECS, 2048, bucket_bytes, averages, blocks)


# Choices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [GradientAllReduce(), Decentralized(), GradientAllReduce(Quantized(MinMaxUInt8.bagua())), DiLoCo()],
    ids=repr,
)
def test_only_bucket_sizes_are_searched_for_without_blocks(algorithm):
    grid = grid_of(algorithm)
    assert grid == Grid((1024, 2048, 4096, 8192), ((algorithm,),))


@pytest.mark.parametrize(
    ("algorithm", "of_block"),
    [
        (ByteGrad(), lambda codec: GradientAllReduce(Quantized(codec))),
        (LowPrecisionDecentralized(), LowPrecisionDecentralized),
        (QAdam(warmup_steps=7), lambda codec: QAdam(warmup_steps=7, average=Quantized(codec))),
        (
            GradientAllReduce(ErrorFeedback(residual_codec=MinMaxUInt8(9))),  # encodes nothing that is sent
            lambda codec: GradientAllReduce(ErrorFeedback(Quantized(codec), residual_codec=MinMaxUInt8(9))),
        ),
        (
            after(3, ByteGrad(), GradientAllReduce(Hierarchical(Quantized()))),
            lambda codec: after(3, ByteGrad(), GradientAllReduce(Hierarchical(Quantized(codec)))),
        ),
    ],
    ids=["bytegrad", "low-precision", "qadam", "error-feedback", "after"],
)
def test_blocks_are_searched_for_where_there_are_some(algorithm, of_block):
    (family,) = grid_of(algorithm).families
    assert family == tuple(of_block(MinMaxUInt8(block)) for block in BLOCKS)


def test_averages_are_chosen_from_those_given_and_the_algorithms_own():
    others = [Quantized(Float16()), Quantized(Int4())]
    grid = grid_of(GradientAllReduce(), averages=[*others, Exact(), Quantized()], blocks=[64])
    averages = [[algorithm.average for algorithm in family] for family in grid.families]
    of_blocks = [Quantized(MinMaxUInt8(64)), Quantized(MinMaxUInt8(512))]
    assert averages == [[Exact()], *([other] for other in others), of_blocks]


def test_sizes_that_make_the_same_buckets_count_as_one():
    assert grid_of(GradientAllReduce(), bucket_bytes=[1, 2000, 2**30]).bucket_bytes == (1, 2048, 2**30)
    assert make_grid(GradientAllReduce(), SPECS, 2**20, None, None, None).bucket_bytes == (2**20,)


@pytest.mark.parametrize(
    ("algorithm", "choices", "match"),
    [
        (Decentralized(), {"averages": [Quantized()]}, "has no average to replace"),
        (GradientAllReduce(), {"blocks": [64]}, "sends no blocks"),
        (GradientAllReduce(Hierarchical(ErrorFeedback())), {}, "cannot move to another"),
    ],
)
def test_a_setting_that_an_algorithm_lacks_cannot_be_chosen(algorithm, choices, match):
    with pytest.raises(ArrayError, match=match):
        grid_of(algorithm, **choices)


def test_a_state_that_cannot_move_to_other_buckets_leaves_the_block_to_be_searched_for():
    grid = grid_of(GradientAllReduce(Hierarchical(ErrorFeedback())), bucket_bytes=None, blocks=[64])
    assert (grid.bucket_bytes, len(grid.families[0])) == ((2048,), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket_bytes": [0]},
        {"blocks": [1.5]},
        {"averages": [Exact]},
        {"trials": 0},
        {"steps_per_trial": 0},
        {"warmup_steps": -1},
        {"seed": "0"},
    ],
    ids=repr,
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ArrayError, match=next(iter(wrong)).rstrip("s")):
        Tuner(**wrong)


# How well it chooses ----------------------------------------------------------------------------------------


def step_seconds(rng):
    """The time of a step, by cell of a grid: latency for every bucket, exposed time of the last, and codecs."""
    latency_s, bandwidth, compute_s = 10 ** rng.uniform((-4.5, 8, -2), (-2.5, 9.5, -0.5))
    nbytes = 10 ** rng.uniform(7.5, 8.7)

    def seconds(settings):
        b, codec = min(settings.bucket_bytes, nbytes), settings.algorithm.average.codec
        per_byte = (0.25 + 2 / codec.block) / bandwidth + 1e-10 * (1 + 60 / codec.block)
        return compute_s + max(0.0, nbytes * per_byte - 0.7 * compute_s) + b * per_byte + latency_s * nbytes / b

    return seconds


def search(grid, seconds, *, start, trials=15, seed=0, noise=0.0):
    """Search a grid in which a step takes `seconds[cell]`, with relative noise; (cells measured, best cell)."""
    rng = np.random.default_rng(seed)
    search = Search(grid, start, trials=trials, seed=seed)
    measured = []
    while search.cell is not None:
        measured.append(search.cell)
        search.tell(seconds[search.cell] * np.median(np.exp(noise * rng.standard_normal(5))))
    return measured, search.best


QUANTIZED = tuple(GradientAllReduce(Quantized(MinMaxUInt8(block))) for block in BLOCKS)
HIERARCHICAL = tuple(GradientAllReduce(Hierarchical(Quantized(MinMaxUInt8(block)))) for block in BLOCKS)


ONE_AVERAGE = Grid(BUCKET_BYTES, (QUANTIZED,))
THREE_AVERAGES = Grid(BUCKET_BYTES, ((GradientAllReduce(),), QUANTIZED, HIERARCHICAL))


def apart(a, b):
    """How many steps from neighbour to neighbour lie between two cells."""
    return abs(a[0] - b[0]) + (a[1] != b[1]) + abs(a[2] - b[2])


@pytest.mark.parametrize("seed", range(6))
def test_a_search_ends_close_to_the_best_of_all(seed):
    seconds_of = step_seconds(np.random.default_rng(seed))
    seconds = {cell: seconds_of(ONE_AVERAGE[cell]) for cell in ONE_AVERAGE}
    measured, best = search(ONE_AVERAGE, seconds, start=(3, 0, 2), seed=seed, noise=0.03)
    assert seconds[best] <= 1.05 * min(seconds.values())
    assert measured[0] == (3, 0, 2)
    assert len(set(measured[:15])) == 15
    assert len(measured) == 15 + 9


@pytest.mark.parametrize(
    ("grid", "on_average"), [(ONE_AVERAGE, 7), (THREE_AVERAGES, 10)], ids=["one average", "three averages"]
)
def test_the_best_of_a_grid_with_one_optimum_is_found_in_few_trials(grid, on_average):
    """Cells drawn at random need 19 and 40 trials."""
    cells, trials = list(grid), []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        optimum, slopes = cells[rng.integers(len(cells))], rng.uniform(0.02, 0.2, 3)
        away = {cell: np.abs(np.subtract(cell, optimum)) for cell in cells}
        seconds = {cell: 1 + slopes @ [i**1.3, float(j > 0), k**1.3] for cell, (i, j, k) in away.items()}
        measured, best = search(grid, seconds, start=(3, 0, 0), seed=seed)
        assert best == optimum == min(cells, key=seconds.__getitem__)
        trials.append(measured.index(optimum) + 1)
    assert np.mean(trials) < on_average


@pytest.mark.parametrize("grid", [ONE_AVERAGE, THREE_AVERAGES], ids=["one average", "three averages"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_search_that_begins_in_a_local_optimum_leaves_it(grid, noise):
    """The first climb ends where it begins: only climbs that begin elsewhere find the best cell."""
    found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cells = list(grid)
        start = cells[rng.integers(len(cells))]
        far = [cell for cell in cells if apart(cell, start) >= 4]
        optimum = far[rng.integers(len(far))]
        seconds = {cell: min(1.5 + 0.2 * apart(cell, start), 1 + 0.2 * apart(cell, optimum)) for cell in cells}
        _, best = search(grid, seconds, start=start, trials=20, seed=seed, noise=noise)
        assert seconds[best] <= seconds[start]
        found += best == optimum
    assert found >= 16


def test_with_ties_and_noise_a_search_still_measures_every_cell_once_and_ends():
    grid = Grid(SIZES, (QUANTIZED,))
    for noise in (0.0, 1.0):
        measured, _ = search(grid, dict.fromkeys(grid, 1.0), start=(3, 0, 4), trials=1000, noise=noise)
        assert sorted(measured[:20]) == list(grid)
        assert len(measured) == 20 + 9
        assert len(set(measured[20:])) == 3


def test_a_search_is_the_same_for_the_same_seconds_and_another_for_another_seed():
    seconds = {cell: 1 + apart(cell, (3, 0, 2)) for cell in ONE_AVERAGE}
    orders = [search(ONE_AVERAGE, seconds, start=(3, 0, 2), seed=seed)[0] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_all_of_a_small_grid_is_measured_and_the_best_once_more():
    grid = Grid((1, 2, 4, 8), ((GradientAllReduce(),),))
    search = Search(grid, (2, 0, 0), trials=15, seed=0)
    measured = []
    while search.cell is not None:
        measured.append(search.cell)
        # Measured once, 4 looks best; side by side, 2 is.
        first = len(measured) <= 4
        search.tell({1: 9.0, 2: 2.0, 4: 1.0 if first else 3.0, 8: 4.0}[grid[search.cell].bucket_bytes])
    assert set(measured[:4]) == set(grid)
    assert [grid[cell].bucket_bytes for cell in measured[4:]] == [4, 2, 8] * 3
    assert grid[search.best].bucket_bytes == 2


# Among ranks ------------------------------------------------------------------------------------------------


def tune(comm, tuner, algorithm, seconds, *, steps=400):
    """Give a tuner the `seconds` of settings; what was trained with, step by step."""
    settings = tuner.start(comm, algorithm, SPECS, bucket_bytes=2048)
    used = []
    for _ in range(steps):
        if not tuner.searching:
            break
        used.append(settings)
        settings = tuner.step(seconds(settings, len(used))) or settings
    assert settings == tuner.best
    return used


def by_size(settings, step=0):
    """8192 is fastest."""
    return 1 / settings.bucket_bytes


def test_all_ranks_try_the_same_settings_in_the_same_steps_and_end_with_the_best():
    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=2, warmup_steps=3)
        used = tune(comm, tuner, GradientAllReduce(), lambda *_: by_size(*_) * (1 + 0.01 * comm.rank))
        return used, tuner.history, tuner.best

    (used, history, best), *others = run_ranks(3, body)
    assert others == [(used, history, best)] * 2
    assert best.bucket_bytes == 8192
    assert len(history) == 4 + 9
    # Warm-up, then k steps a trial, each but the first after a step that is not timed.
    assert len(used) == 3 + 2 + 12 * 3
    assert [settings.bucket_bytes for settings in used[:5]] == [2048] * 5
    assert history[0].seconds == pytest.approx(1.02 / 2048)


def test_the_slowest_rank_decides():
    """Large buckets are fast on rank 0, and slower on rank 1 than small ones anywhere."""

    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1)
        tune(
            comm, tuner, GradientAllReduce(), lambda s, _: 4 + s.bucket_bytes if comm.rank else 1 / s.bucket_bytes
        )
        return tuner.best.bucket_bytes

    assert run_ranks(2, body) == [1024, 1024]


def test_a_step_that_is_slow_by_chance_does_not_count():
    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=3)
        tune(comm, tuner, GradientAllReduce(), lambda s, step: 100.0 if step % 4 == 2 else by_size(s))
        return tuner.best.bucket_bytes, max(trial.seconds for trial in tuner.history)

    assert run_ranks(1, body) == [(8192, 1 / 1024)]


@pytest.mark.parametrize(
    ("algorithm", "first_timed", "period"),
    [
        (after(10, ByteGrad(), GradientAllReduce()), 10, 1),
        (QAdam(warmup_steps=12, average=Exact()), 12, 1),
        (every(4, Decentralized()), 3, 4),
        (DiLoCo(local_steps=5), 3, 5),
    ],
    ids=repr,
)
def test_warm_up_is_not_measured_and_a_sample_is_a_whole_interval(algorithm, first_timed, period):
    def body(comm):
        tuner = Tuner(bucket_bytes=[1024], steps_per_trial=2)
        tune(comm, tuner, algorithm, lambda _, step: float(step))
        return tuner.history[0].seconds

    steps = np.arange(first_timed + 1, first_timed + 1 + 2 * period)
    assert run_ranks(1, body) == [steps.mean()]


def test_the_trace_has_trials_and_decisions():
    def body(comm):
        tuner = Tuner(bucket_bytes=[1024], steps_per_trial=1)
        tune(comm, tuner, GradientAllReduce(), by_size)
        spans = [span for span in comm.tracer.spans() if span.name.startswith("tuner")]
        return [(span.name, span.args["bucket_bytes"]) for span in spans], len(tuner.history)

    spans, trials = run_ranks(1, body)[0]
    assert spans[0] == ("tuner: try", 2048)
    assert spans[-1] == ("tuner: stay with", 2048)
    assert [name for name, _ in spans].count("tuner: trial") == trials == 2 + 6


def test_different_choices_of_ranks_raise():
    def body(comm):
        Tuner(bucket_bytes=[1024 * (1 + comm.rank)]).start(comm, GradientAllReduce(), SPECS)

    with pytest.raises(CommMismatch, match="different choices"):
        run_ranks(2, body)


def test_algorithms_that_cannot_be_timed_or_carry_a_tensor_are_refused_before_training():
    doubles = [TensorSpec("x", (4,), "float64")]

    def body(comm):
        with pytest.raises(UnsupportedError, match="no step waits for"):
            Tuner().start(comm, AsyncModelAverage(), SPECS)
        with pytest.raises(UnsupportedError, match="'x'"):
            Tuner(averages=[Quantized()]).start(comm, GradientAllReduce(), doubles)
        tuner = Tuner()
        tuner.start(comm, GradientAllReduce(), SPECS)
        assert not tuner.searching  # one bucket, whatever its size
        with pytest.raises(ArrayError, match="serves one training"):
            tuner.start(comm, GradientAllReduce(), SPECS)

    run_ranks(2, body)


# With an engine ---------------------------------------------------------------------------------------------


def train(comm, algorithm, tuner=None, *, steps=24):
    """Train by the engine, with gradients that depend on weights, rank and step; the weights in the end."""
    settings = tuner.start(comm, algorithm, SPECS, bucket_bytes=2048) if tuner else None
    plan = Plan.pack(SPECS, bucket_bytes=2048, alignment=8 * comm.size)
    storage = {"grad": plan.allocate(), "weight": plan.allocate()}
    rng = np.random.default_rng(comm.rank)
    weights = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS}
    payload = algorithm.payload
    if payload == "weight":
        for view in plan.cut(storage["weight"]).values():
            view[...] = 1
    with Engine(comm, algorithm, plan, {payload: storage[payload]}) as engine:
        for _ in range(steps):
            engine.at(Point.FORWARD)
            views = engine.plan.cut([bucket.flat for bucket in engine.buckets])
            x = views if payload == "weight" else weights
            g = {name: (0.1 * x[name] + rng.standard_normal(256)).astype(np.float32) for name in x}
            if payload == "grad":
                for name, gradient in g.items():
                    views[name][...] = gradient
                    engine.ready(name)
            engine.at(Point.BACKWARD)
            for name in x:
                x[name] -= np.float32(0.1) * (views[name] if payload == "grad" else g[name])
            engine.at(Point.STEP)
            change = tuner.step(by_size(settings)) if tuner else None
            if change is not None:
                settings = change
                plan = Plan.pack(SPECS, bucket_bytes=change.bucket_bytes, alignment=8 * comm.size)
                engine.replan(plan, algorithm=change.algorithm)
                assert engine.algorithm == change.algorithm
        engine.settle()
        views = engine.plan.cut([bucket.flat for bucket in engine.buckets])
        x = views if payload == "weight" else weights
        return {name: value.copy() for name, value in x.items()}


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), Decentralized(), DiLoCo(local_steps=2)], ids=repr)
def test_training_of_an_exact_algorithm_is_the_same_to_the_bit(algorithm):
    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1)
        tuned = train(comm, algorithm, tuner)
        assert len({trial.settings for trial in tuner.history}) == 4
        plain = train(comm, algorithm)
        for name, value in plain.items():
            np.testing.assert_array_equal(tuned[name], value)

    run_ranks(2, body)


def test_the_state_of_an_algorithm_moves_to_other_blocks_and_averages():
    def body(comm):
        algorithm = GradientAllReduce(ErrorFeedback())
        plan = Plan.pack(SPECS, bucket_bytes=4096, alignment=8)
        with Engine(comm, algorithm, plan, plan.allocate()) as engine:
            for bucket in engine.buckets:
                bucket.flat[...] = np.random.default_rng(comm.rank).standard_normal(bucket.flat.size)
            for spec in SPECS:
                engine.ready(spec.name)
            engine.at(Point.BACKWARD)
            before = engine.plan.cut([state.average.residual for state in engine.states])
            finer = GradientAllReduce(ErrorFeedback(Quantized(MinMaxUInt8(64))))
            engine.replan(Plan.pack(SPECS, bucket_bytes=1024, alignment=8), algorithm=finer)
            after = engine.plan.cut([state.average.residual for state in engine.states])
            assert any(np.any(residual) for residual in before.values())
            for name, residual in before.items():
                np.testing.assert_array_equal(after[name], residual)
            with pytest.raises(ArrayError, match=r"expected GradientAllReduce.* with other settings"):
                engine.replan(plan, algorithm=Decentralized())
            assert engine.algorithm == finer

    run_ranks(2, body)


# Profiles ---------------------------------------------------------------------------------------------------


def test_a_profile_replaces_the_next_search(tmp_path):
    path = tmp_path / "profile.json"

    def body(comm, algorithm=None):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1, profile=path)
        tune(comm, tuner, algorithm or ByteGrad(), by_size)
        return tuner.best, len(tuner.history)

    best, trials = run_ranks(2, body)[0]
    assert trials == 15 + 9
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]

    assert run_ranks(2, body) == [(best, 0)] * 2

    with pytest.warns(UserWarning, match="is of another training; searching, and then it is replaced"):
        run_ranks(3, body)
    with pytest.warns(UserWarning, match="is of another training"):
        run_ranks(2, lambda comm: body(comm, GradientAllReduce()))
    assert run_ranks(2, lambda comm: body(comm, GradientAllReduce()))[0][1] == 0


@pytest.mark.parametrize(
    "content", ["", "[1, 2]", "{}", '{"format": "something else", "entries": {}}', "\x00\xff"], ids=repr
)
def test_a_file_that_is_no_profile_is_an_error_that_names_it_on_all_ranks(tmp_path, content):
    path = tmp_path / "precious.json"
    path.write_bytes(content.encode("latin-1"))

    def body(comm):
        with pytest.raises(ArrayError, match=r"precious\.json.* was not written by a Tuner"):
            Tuner(bucket_bytes=SIZES, profile=path).start(comm, GradientAllReduce(), SPECS)

    run_ranks(2, body)
    assert path.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize(
    "profile",
    ["brackets without end", "a path with a zero", "a folder", "a pipe", "a path that cannot be encoded"],
)
def test_a_profile_that_rank_0_cannot_read_is_an_error_that_names_it_on_all_ranks(tmp_path, profile):
    """Any error of rank 0: the others would wait for it."""
    path = tmp_path / "profile.json"
    match profile:
        case "brackets without end":
            path.write_text("[" * 100_000)
        case "a path with a zero":
            path = tmp_path / "profile.json\0x"
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a path that cannot be encoded":
            path = tmp_path / "profile.json\ud800"

    def body(comm):
        with pytest.raises(ArrayError, match=r"profile\.json") as caught:
            Tuner(bucket_bytes=SIZES, profile=path).start(comm, GradientAllReduce(), SPECS)
        return str(caught.value)

    assert len(set(run_ranks(2, body, timeout_s=5))) == 1


def test_an_error_of_the_search_on_rank_0_is_raised_on_all_ranks(monkeypatch):
    def broken(self, seconds):
        raise ZeroDivisionError("in the search")

    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1)
        tuner.start(comm, GradientAllReduce(), SPECS)
        with pytest.raises(BaguaError, match=r"rank 0 cannot go on: ZeroDivisionError: in the search"):
            all(tuner.step(1.0) is None for _ in range(10))

    monkeypatch.setattr(Search, "tell", broken)
    run_ranks(2, body, timeout_s=5)


def test_a_profile_that_is_a_link_is_replaced_and_its_target_stays(tmp_path):
    path, precious = tmp_path / "profile.json", tmp_path / "precious"
    (tmp_path / f"profile.json.{os.getpid()}").symlink_to(precious)  # a name that could be guessed

    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1, profile=path)
        tune(comm, tuner, GradientAllReduce(), by_size)

    run_ranks(1, body)
    assert not precious.exists()
    assert json.loads(path.read_text())["format"] == "bagua_comm.tuner 1"


@pytest.mark.parametrize("profile", [3, b"profile.json", ["profile.json"]])
def test_a_profile_that_is_no_path_is_refused(profile):
    with pytest.raises(ArrayError, match="expected the path of a file"):
        Tuner(profile=profile)


def test_damaged_profiles_are_refused_alike_on_all_ranks_or_used(tmp_path):
    path = tmp_path / "profile.json"

    def search(comm):
        tune(comm, Tuner(bucket_bytes=SIZES, steps_per_trial=1, profile=path), GradientAllReduce(), by_size)

    run_ranks(2, search)
    whole = path.read_bytes()
    rng = np.random.default_rng(2026)

    def body(comm):
        outcomes = []
        for _ in range(100):
            if comm.rank == 0:
                path.write_bytes(damaged(whole, rng))
            tuner = Tuner(bucket_bytes=SIZES, profile=path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    outcomes.append(tuner.start(comm, GradientAllReduce(), SPECS))
                except ArrayError as exc:
                    outcomes.append(str(exc))
        return outcomes

    first, second = run_ranks(2, body, timeout_s=10)
    assert first == second
    errors = [outcome for outcome in first if isinstance(outcome, str)]
    assert errors
    assert all("profile.json" in error for error in errors)


def damaged(text, rng):
    """Bytes of a file cut, changed, doubled, or with another value in its JSON."""
    text = bytearray(text)
    where = int(rng.integers(len(text)))
    match rng.integers(5):
        case 0:
            return bytes(text[:where])
        case 1:
            return bytes(rng.integers(0, 256, where % 200, dtype=np.uint8))
        case 2:
            text[where] = rng.integers(256)
        case 3:
            text[where:where] = text[where // 2 : where]
        case 4:
            junk = [None, [], {}, "", -1, 1e999, "x", [[]], {"best": 3}, {"best": {"bucket_bytes": []}}, True]
            return json.dumps(replaced(json.loads(bytes(text)), junk[rng.integers(len(junk))], rng)).encode()
    return bytes(text)


def replaced(value, by, rng):
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = list(value)[rng.integers(len(value))]
        return {**value, key: replaced(value[key], by, rng)}
    return by


def test_an_entry_that_is_none_of_the_choices_is_an_error(tmp_path):
    path = tmp_path / "profile.json"

    def body(comm):
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1, profile=path)
        tune(comm, tuner, GradientAllReduce(), by_size)

    run_ranks(1, body)
    path.write_text(path.read_text().replace('"bucket_bytes": 8192', '"bucket_bytes": 8000'))
    with pytest.raises(ArrayError, match="are not among the choices"):
        run_ranks(1, body)


def test_a_profile_that_cannot_be_written_raises_before_the_search_or_warns_after_it(tmp_path):
    with pytest.raises(ArrayError, match="its folder does not exist"):
        run_ranks(
            2,
            lambda comm: Tuner(bucket_bytes=SIZES, profile=tmp_path / "no" / "p").start(comm, ByteGrad(), SPECS),
        )

    def body(comm):
        path = tmp_path / "profile.json"
        tuner = Tuner(bucket_bytes=SIZES, steps_per_trial=1, profile=path)
        tuner.start(comm, GradientAllReduce(), SPECS)
        if comm.rank == 0:
            path.write_text("somebody else's")
        while tuner.searching:
            tuner.step(1.0)
        return tuner.best.bucket_bytes

    with pytest.warns(UserWarning, match="was not written"):
        assert len(set(run_ranks(2, body))) == 1
    assert (tmp_path / "profile.json").read_text() == "somebody else's"
