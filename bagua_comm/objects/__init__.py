"""Python objects that are no arrays: caches, `with` blocks that close, what is not pickled, and refusals."""
