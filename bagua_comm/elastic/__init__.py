"""Training that goes on when ranks die.

fleet    the processes of a job: who lives, how they meet, how they become a communicator
sharing  how the microbatches of a step are dealt to the ranks that there are
"""

from .sharing import share

__all__ = ["share"]
