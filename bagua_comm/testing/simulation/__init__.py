"""Simulations: a program of threads, run in an order that is drawn from a seed. See `simulate`."""
