"""Launching jobs: hosts, mpirun, the supervisor of a job and its restarts, scripts for schedulers."""
