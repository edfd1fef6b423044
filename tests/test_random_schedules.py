"""Programs in orders drawn from seeds; `python tests/random_schedules.py --seeds 10000` tries more."""

import pytest
from random_schedules import program_of, run_seed

SEEDS = range(18)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{program_of(seed)}-{seed}")
def test_what_must_hold_in_every_order(seed):
    run_seed(seed)
