"""A fleet over MPI: membership, agreement, failure detection, and spawned processes."""
