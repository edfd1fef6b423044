"""Training that goes on when ranks die.

    state = State(model=model, optimizer=optimizer, step=0)

    @run(state, min_ranks=2)
    def train(comm):
        ...
        state.commit()

fleet        the processes of a job: who lives, how they meet, how they become a communicator
start        which fleet this process belongs to
loop         meet, agree on who trains, bring the state back, train
members      who trains in which place, and who keeps whose copy
state        what users hold; parts, what they put in
session      one process's part in a training: its copies, and the engines
slots        memory for copies that can tell whether it is whole
copies       what is in it
committing   how all ranks keep a copy together
restoring    and how it comes back
changes      what happened to the ranks
sharing      how the microbatches of a step are dealt to the ranks that there are
"""

from .changes import Change
from .loop import history, run
from .sharing import share
from .state import Commits, State

__all__ = ["Change", "Commits", "State", "history", "run", "share"]
