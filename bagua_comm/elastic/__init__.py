"""Training that continues when ranks die.

    state = State(model=model, optimizer=optimizer, step=0)

    @run(state, min_ranks=2)
    def train(comm):
        ...
        state.commit()

loop       hold a rendezvous, choose the trainers, restore the state, train
state      the parts of a training, as users give them
session    one process's part in a training: its snapshots and engines
roles      trainers, spares, buddies and their microbatches
changes    the changes of the ranks so far
fleet      the contract of a fleet: the processes, their rendezvous and communicators
start      the fleet that fits the launcher, and one whose processes may not die
mpi        a fleet over MPI that survives deaths
snapshot   snapshots of the state in memory: how they are committed and restored
"""

from .changes import Change
from .loop import history, run
from .roles import share
from .state import Commits, State

__all__ = ["Change", "Commits", "State", "history", "run", "share"]
