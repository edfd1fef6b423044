"""Checkpoints on disk: complete or absent, written in the background, loaded on any number of ranks.

trees         plain values and arrays as JSON and a list of arrays; per-rank values
slices        the division of shared arrays among the ranks that write them
slabs         arrays that are distributed over the ranks, in a file of all ranks
tensorfile    files in the safetensors format
folders       the folder of checkpoints, and when a checkpoint is complete
saving        one checkpoint, from the arrays of the ranks to the disk
loading       one checkpoint, from the disk to the ranks, also on another number of ranks
checkpoints   the public class
engines       the state of an engine's algorithm as a tree that loads on another number of ranks
"""

from .checkpoints import Checkpoints, Loaded
from .engines import load_engine, tree_of_engine
from .trees import Own

__all__ = ["Checkpoints", "Loaded", "Own", "load_engine", "tree_of_engine"]
