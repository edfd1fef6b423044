"""The state of a wrapped module in state dicts and checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from bagua_comm import Algorithm, ArrayError, Communicator, GradientAllReduce, Tuner
from bagua_comm.algorithms.state import has_saved_state
from bagua_comm.checkpoint.engines import state_of_tree, tree_of_engine
from bagua_comm.codecs.base import codecs_in

from ..errors import MisuseError
from ..tensors import checks
from ..tensors.model_state import ModelState
from ..training.steps import TrainingSteps
from .comm_hook import HookAlgorithm

EXTRA_STATE = "_extra_state"
"""PyTorch's name in a state dict for the value of `get_extra_state`."""


class WrapperState(nn.Module):
    """Base of DistributedDataParallel: its state dict, and its part of a checkpoint."""

    module: nn.Module
    tuner: Tuner | None
    _model: ModelState
    _steps: TrainingSteps

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._steps.comm

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use; `switch` and `replan` change it."""
        return self._steps.engine.algorithm

    def replan(self, *, bucket_bytes: int | None = None, algorithm: Algorithm | None = None) -> None:
        """Continue with other buckets, or the same algorithm with other settings. Collective."""
        raise NotImplementedError

    def get_extra_state(self) -> dict[str, Any]:
        """The algorithm's state, for `state_dict()`."""
        self._steps.complete()
        return self._steps.engine.state_tensors()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of `get_extra_state`, as called by `load_state_dict()`. Collective."""
        mine, saved = self.algorithm, None
        if self.tuner is not None:
            names = self.comm.allgather_object(str(state.get("algorithm")) if isinstance(state, dict) else "")
            saved = self.tuner.algorithm_named(names[0]) if len(set(names)) == 1 else None
        if saved not in (None, mine):  # the algorithm that a tuner was trying
            self._steps.engine.expect_state()  # another plan compares weights that were loaded before
            self.replan(algorithm=saved)
        try:
            self._steps.engine.load_state_tensors(state)
        except ArrayError:  # on all ranks
            if self.algorithm != mine:
                self.replan(algorithm=mine)
            raise
        if self.algorithm != mine:
            self.replan(algorithm=mine)
        self._steps.forget()

    def tree_of_engine(self) -> dict[str, Any] | None:
        """The algorithm's state as a tree for `bagua_torch.Checkpoints`, for any number of ranks, or None.

        Exchanged weights are written back first.
        """
        self._steps.complete()
        self._steps.engine.settle()
        keeps_none = self.tuner is None and not self.keeps_state()
        return None if keeps_none else tree_of_engine(self._steps.engine)

    def load_tree(self, module: Mapping[str, Any], engine: dict[str, Any] | None) -> None:
        """Load the module's state dict and the result of `tree_of_engine`, on any number of ranks.

        Collective.

        Raises:
            ArrayError: The state of the algorithm was not saved, or was saved with another algorithm.
        """
        if engine is None:
            if self.tuner is None and self.keeps_state():
                raise ArrayError(
                    "load: the checkpoint is of an algorithm without state, but "
                    f"{self.algorithm} keeps state; to start from the saved weights alone, load into `.module`"
                )
            prefixed = OrderedDict((f"module.{name}", value) for name, value in module.items())
            self.load_state_dict(prefixed, strict=self.tuner is None)
            return
        state = state_of_tree(engine)
        self.module.load_state_dict(module)
        self.set_extra_state(state)  # replicas are made from the weights

    @property
    def ignored_names(self) -> set[str]:
        """Names of the parameters and buffers that belong to this rank alone."""
        return self._model.ignored

    @property
    def parts_stay(self) -> bool:
        """Whether the module has parts that stay on their rank, as experts of a MoE; the same on all ranks."""
        return checks.parts_stay(self.module)

    def keeps_state(self) -> bool:
        """Whether the algorithm has state, or counts steps.

        If so, `state_dict()` has the result of `get_extra_state`.
        """
        plain = isinstance(self.algorithm, (GradientAllReduce, HookAlgorithm))
        draws = any(codec.random_seed is not None for codec in codecs_in(self.algorithm))  # by the step
        return draws or not plain or any(has_saved_state(state) for state in self._steps.engine.states)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tuner is None and not self.keeps_state():  # a tuner may try an algorithm with state
            del destination[prefix + EXTRA_STATE]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the result of `state_dict()`. Collective.

        Raises:
            ArrayError: With `strict`, it is that of the plain module. A RuntimeError as well.
        """
        names = [name for name, _ in self.module.named_parameters()]
        if strict and all(name in state_dict and f"module.{name}" not in state_dict for name in names):
            raise MisuseError(
                "DistributedDataParallel.load_state_dict: these are the names of the plain module, such as "
                f"{names[0]!r}, expected 'module.{names[0]}'; use ddp.module.load_state_dict, or "
                "save ddp.state_dict()"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        key, missing = prefix + EXTRA_STATE, args[2]
        if key in missing and not self.keeps_state():
            missing.remove(key)
        if key not in state_dict:
            if self._steps.watch.unfinished:
                self._steps.engine.load_state_dict(self._steps.engine.state_dict())
            self._steps.forget()
