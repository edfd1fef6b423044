"""Choosing what to train with: a model of step times, advice from it, and a tuner that measures."""
