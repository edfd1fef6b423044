"""Checkpoints on disk: complete or not there, written beside training, loaded on any number of ranks.

trees         plain values and arrays as JSON and a list of arrays; what is a rank's own
slices        which rank writes what of the arrays that all ranks share
tensorfile    files in the safetensors format
folders       what makes a checkpoint complete
saving        one checkpoint, from the arrays of the ranks to the disk
loading       and back, also on another number of ranks
checkpoints   what users call
engines       what an engine's algorithm keeps, as a tree that loads on another number of ranks
"""

from .checkpoints import Checkpoints, Loaded
from .engines import load_engine, tree_of_engine
from .trees import Own

__all__ = ["Checkpoints", "Loaded", "Own", "load_engine", "tree_of_engine"]
