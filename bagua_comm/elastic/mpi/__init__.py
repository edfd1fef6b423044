"""A fleet over MPI: membership, agreement, and failure detection."""
