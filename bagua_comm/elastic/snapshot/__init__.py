"""Snapshots of the training state in the memory of the ranks and their buddies."""
