import pytest

import bagua_comm


@pytest.fixture(scope="session")
def comm():
    with bagua_comm.connect(timeout_s=30) as comm:
        yield comm
