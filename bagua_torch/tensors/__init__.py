"""Tensors: broadcasts, the memory of buckets, and the tensors that users hold of it."""
