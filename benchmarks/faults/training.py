"""The program that is disturbed, on one process: it trains a small network on scikit-learn's digits.

`trial` starts it. A step uses the same images on any number of ranks, among which its microbatches are divided.
The process reports its progress to the harness: before and after a commit, before and after an engine is made,
after a step, and when a call fails.

After the last step every rank repeats the steps since its last entry, from the state that it had then, on another
engine and without commits. If a step depends on nothing but the restored state, it ends with the same bytes.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .events import EventWriter
from .means import obey
from .model import MICROBATCHES, Data, Model, Steps, digest_of

SAVE_EVERY = 3
"""Steps from one checkpoint to the next."""


# Steps and commits --------------------------------------------------------------------------------------------


def train(comm: Any, model: Model, state: Any, options: argparse.Namespace, send: EventWriter) -> dict[str, Any]:
    """Train to the last step, and return the result of this rank."""
    began = state.step
    model.make(comm, state)
    send("enter", rank=comm.rank, size=comm.size, step=began, digest=model.digest(), total=model.total())
    steps = model.connect(comm)
    send("constructed")
    checkpoints = Checkpoints(options.checkpoints, comm, send) if options.checkpoints else None
    restored = {}
    if options.replay:
        restored = {"model": copy.deepcopy(model.state_dict()), "engine": steps.engine.state_dict()}
    for step in range(began, options.steps):
        if options.until and comm.broadcast_object(time.monotonic() > options.until, root=0):
            break
        time.sleep(options.pause_s)
        steps.take(step)
        state.step += 1
        send("step", step=state.step)
        if state.step % options.commit_every == 0:
            commit(steps, model, state, send)
        if checkpoints is not None and state.step % SAVE_EVERY == 0:
            checkpoints.save(model, state.step)
    if checkpoints is not None:
        checkpoints.close()
    steps.close()
    model.average(comm)
    ended = {"rank": comm.rank, "size": comm.size, "began": began, "step": state.step, "digest": model.digest()}
    send("trained", **ended)
    if options.replay:
        ended["replayed"] = replay(comm, model, restored, range(began, state.step))
    return ended


def commit(steps: Steps, model: Model, state: Any, send: EventWriter) -> None:
    """Commit, and report it. Collective."""
    steps.settle()
    send("commit", step=state.step, digest=model.digest(), total=model.total())
    state.commit()
    send("committed", step=state.step)


class Checkpoints:
    """Saves the weights, and after a failure loads the newest checkpoint; reports both. Collective.

    Args:
        folder: The folder of the checkpoints.
        comm: The ranks.
        send: Reports.
    """

    def __init__(self, folder: Path, comm: Any, send: EventWriter) -> None:
        from bagua_comm import Checkpoints

        self._folder, self._send, self._checkpoints = folder, send, Checkpoints(folder, comm, keep=2)

    def save(self, model: Model, step: int) -> None:
        """Save a checkpoint, and load the newest one if that fails."""
        from bagua_comm import CheckpointError, Own

        self._send("save", step=step)
        try:
            self._checkpoints.save(step, {"weights": Own(list(model.weights()))}, wait=True)
        except CheckpointError as exc:
            self._send("unsaved", step=step, message=str(exc)[:1000])
            self._load()
        else:
            self._send("saved", step=step, digest=model.digest())

    def _load(self) -> None:
        loaded = self._checkpoints.load()
        names = sorted(path.name for path in self._folder.glob("step-*"))
        self._send("loaded", step=loaded.step, digest=digest_of(loaded.tree["weights"]), names=names)

    def close(self) -> None:
        """Load the newest checkpoint, and close."""
        self._load()
        self._checkpoints.close()


def replay(comm: Any, model: Model, restored: dict[str, Any], steps: range) -> str:
    """Repeat these steps from the restored state; return the digest of the weights. Collective."""
    model.load_state_dict(restored["model"])
    with comm.dup() as again:
        taken = model.connect(again, init_sync=False)
        taken.engine.load_state_dict(restored["engine"])
        for step in steps:
            taken.take(step)
        taken.close()
        model.average(again)
    return model.digest()


# The program ----------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Take part in a training; 0 if it finished."""
    options = parse_arguments(argv)
    send = EventWriter(options.pipe)
    send("hello", host=socket.gethostname())
    stacks = open(options.pipe.with_name(f"stacks-{os.getpid()}"), "w")  # noqa: SIM115 - open until the end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    obey()
    if not options.compiled:  # NumPy's kernels give the same bytes, and importing Numba takes seconds
        sys.modules["numba"] = None  # type: ignore[assignment]
    import bagua_comm
    from bagua_comm import elastic

    algorithm = eval(options.algorithm, vars(bagua_comm))
    model = make_model(options, algorithm)
    state = elastic.State(**model.parts(), step=0)

    def body(comm: Any) -> dict[str, Any]:
        faulthandler.cancel_dump_traceback_later()
        try:
            return train(comm, model, state, options, send)
        except bagua_comm.CommError as exc:
            send("failed", error=type(exc).__name__, message=str(exc)[:500])
            # Where it hangs, if it does. Not while it recovers: writing a stack that changes may end the process.
            faulthandler.dump_traceback_later(5 * options.timeout_s, file=stacks)
            raise

    run = elastic.run(state, min_ranks=options.min_ranks, timeout_s=options.timeout_s)
    send("run")
    try:
        ended = run(body)
    except bagua_comm.BaguaError as exc:
        send("ended", error=type(exc).__name__, message=str(exc)[:2000])
        raise
    send("stood by" if ended is None else "done", **(ended or {}))
    return 0


def make_model(options: argparse.Namespace, algorithm: Any) -> Model:
    """The model of the chosen framework."""
    data = Data(options.data, options.microbatches)
    if options.framework == "torch":
        from .torch_model import TorchModel

        extras = frozenset(filter(None, options.extras.split(",")))
        return TorchModel(data, algorithm, alike=options.alike, optimizer=options.optimizer, extras=extras)
    if options.framework == "sharded":
        from .sharded_model import ShardedModel

        return ShardedModel(data, algorithm, alike=options.alike)
    from .numpy_model import NumpyModel

    return NumpyModel(data, algorithm, alike=options.alike)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments, which `trial` makes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pipe", type=Path, required=True, help="where events go")
    parser.add_argument("--data", type=Path, required=True, help="an npz file with images and labels")
    parser.add_argument("--algorithm", required=True, help="in Python")
    parser.add_argument("--framework", choices=["numpy", "torch", "sharded"], default="numpy")
    parser.add_argument("--optimizer", default="sgd", help="one of `torch_model.OPTIMIZERS`")
    parser.add_argument("--extras", default="", help="in PyTorch; names with commas between, see `plans.Case`")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, help="of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds of rest before each step")
    parser.add_argument("--until", type=float, default=0.0, help="end at this time of time.monotonic()")
    parser.add_argument("--commit-every", type=int, default=1)
    parser.add_argument("--min-ranks", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=15.0)
    parser.add_argument("--checkpoints", type=Path, help="a folder to save the weights in")
    parser.add_argument("--alike", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--replay", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compiled", action="store_true", help="use Numba's kernels")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
