"""The part of an engine that checkpoints hold: the state of its algorithm, and the numbers of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithms.base import Algorithm, Payload, State
from ..algorithms.state import Saved, StateHeader
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.public_methods import public_method
from ..objects.closing import Closing
from ..objects.pickling import Live
from .exchanges import Exchanges
from .progress import Progress
from .replaced import Replacements
from .restore import check_state_dict, load_states, make_state_dict, save_states
from .schedule import ExchangeSchedule
from .weights import EngineWeights


class EngineState(Live, Closing):
    """Base of `Engine`: its state in checkpoints."""

    algorithm: Algorithm
    buckets: list[Bucket]
    states: list[State]
    _comm: Communicator
    _buckets: dict[Payload, list[Bucket]]
    _phase: Algorithm
    _drifts: bool
    _training: str
    _exchanges: Exchanges
    _schedule: ExchangeSchedule
    _progress: Progress
    _weights: EngineWeights
    _replacements: Replacements

    @property
    def step(self) -> int:
        """Number of training steps that have ended."""
        return self._exchanges.step

    def state_dict(self) -> dict[str, Any]:
        """A copy of the algorithm's state on this rank: arrays and numbers by tensor name.

        Call it between steps, and before the weights are copied: exchanges since the last step are written back
        to them first.
        """
        self._follow_weights()
        self._schedule.before_saving(phase_ends=self.algorithm.phase(self.step) != self._phase)
        steps = self.step, repr(self._phase), self._exchanges.began
        header = StateHeader(repr(self.algorithm), *steps, self._comm.rank, self._comm.size)
        return make_state_dict(header, self._training, self.algorithm, self._saved())

    @public_method("Engine.load_state_dict")
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`, also under another plan.

        Collective. Load the weights that belong to it, too, before the next step. All ranks load what was saved
        together, in one step of one training. Some algorithms keep arrays that differ between ranks: replicas of
        neighbours' weights (LowPrecisionDecentralized, LowPrecisionOnePeer) or residuals (ErrorFeedback). Then
        every rank loads what it saved itself, on the same number of ranks, and on the same nodes if it keeps
        parts of buckets (by_node, Hierarchical(ErrorFeedback)). All other algorithms keep nothing, or the same on
        all ranks, which loads on any rank of any number.

        Exchanges under way are finished, but not written back.

        Raises:
            ArrayError: On all ranks alike, and the engine stays as it was. A rank's state was saved with another
                algorithm, for other tensors, by an earlier version, or by another rank or on other nodes if that
                matters; it is damaged; or the ranks' states were not saved together.
        """
        self._schedule.before_loading()  # the lane must be idle before its communicator is used here
        names = [name for bucket in self.buckets for name in bucket.views]
        loaded = check_state_dict(self._comm, self.algorithm, self._buckets, names, saved)
        self._training = loaded.training
        self._exchanges.set_step(loaded.header.step)
        self._progress.restart()
        self._begin_phase(loaded.header.phase_began, loaded.states)
        self._weights.load(differ=self._drifts and loaded.continues)
        self._replacements.belong()
        if loaded.continues:
            self._load(loaded.tensors)

    def begin_anew(self) -> None:
        """Begin the algorithm with a new state, and with the mean of the weights if it needs equal ones.

        Collective.
        """
        self._weights.differ = True
        self._make_equal(self._phase)
        self._begin_phase(self._exchanges.began)
        self._weights.differ = True  # those that the storage lacks are averaged when the next step ends

    def _saved(self) -> Saved:
        return save_states(self._comm, self.buckets, self.states)

    def _load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        load_states(self._comm, self.buckets, self.states, saved)

    def _begin_phase(self, began: int, states: list[State] | None = None) -> None:
        """Set up the algorithm of step `began`, with new states unless some are given."""
        raise NotImplementedError

    def _make_equal(self, following: Algorithm | None = None) -> None:
        """Average the weights if they differ between ranks, and the next step needs equal ones."""
        raise NotImplementedError

    def _follow_weights(self, *, known: bool = False) -> None:
        """Begin anew from the weights in the buckets if the program has replaced them; `known`: it says so."""
        raise NotImplementedError
