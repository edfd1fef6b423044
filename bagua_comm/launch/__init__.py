"""Launching jobs: the plan of a start, the supervisor of a job and its restarts, scripts for schedulers."""
