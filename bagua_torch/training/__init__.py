"""The training step of a wrapped module: its forward and backward passes, and the optimizers' step."""
