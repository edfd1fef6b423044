"""The processes of an elastic job over MPI."""
