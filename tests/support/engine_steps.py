"""Steps of an engine, without PyTorch."""

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
