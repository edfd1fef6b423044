"""Trainings that lose a rank, under mpirun with ULFM; `python tests/random_kills.py --runs 50` tries more."""

import pytest
from random_kills import run_once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "victim", "after_s"),
    [
        ("ByteGrad()", 0, 0.4),
        pytest.param("Decentralized('one_peer_exponential')", 3, 0.3, marks=pytest.mark.slow),
        pytest.param("AsyncModelAverage(interval_s=0.01, warmup_steps=20)", 1, 0.2, marks=pytest.mark.slow),
    ],
)
def test_the_others_train_to_the_end(algorithm, victim, after_s):
    problem, text = run_once(algorithm, victim, after_s)
    assert problem is None, text
