"""Which rank or link is slow, while training: rows of step times, change points, causes, and what is slow."""
