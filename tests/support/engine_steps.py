"""Steps of an engine, without PyTorch."""

from types import SimpleNamespace

from bagua_comm import Engine, GradientAllReduce, Plan, Point, TensorSpec


def exchange_in_three_steps(comm, size):
    """Average `size` float32 gradients in three steps of an engine. Collective."""
    plan = Plan.pack([TensorSpec("x", (size,), "float32")])
    with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
        for _ in range(3):
            engine.at(Point.FORWARD)
            engine.ready("x")
            engine.at(Point.BACKWARD)
            engine.at(Point.STEP)


def backward(engine, names):
    """A backward pass, in which these tensors become ready in this order. Collective."""
    for name in names:
        engine.ready(name)
    engine.at(Point.BACKWARD)


def give_times(engine, own_ms, waiting_ms=lambda step: 10):
    """Let the steps of an engine take as long as these functions say, in place of a clock."""
    now, waited, measured, ms = 0, 0, engine.health.step_ended, 1_000_000
    engine.health._flight = SimpleNamespace(waited_ns=0)

    def step_ended(*_):
        nonlocal now, waited
        began, step = now, engine.step - 1
        now += round((own_ms(step) + waiting_ms(step)) * ms)
        waited += round(waiting_ms(step) * ms)
        engine.health._flight.waited_ns = waited
        measured(step, began, now)

    engine._progress._ended = step_ended
