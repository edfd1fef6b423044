"""The fleet of a communicator that does not survive deaths."""

from types import SimpleNamespace

import pytest

from bagua_comm.bootstrap.rank_exit import ExitHandler
from bagua_comm.bootstrap.rendezvous import JoinLog
from bagua_comm.elastic import start
from bagua_comm.flight.recorder import FlightRecorder


@pytest.mark.parametrize(("size", "ended", "advised"), [(2, False, True), (2, True, False), (1, False, False)])
def test_a_rank_that_dies_in_a_job_without_spares_gets_a_hint_to_them(
    tmp_path, capfd, monkeypatch, size, ended, advised
):
    """`bagua run -n 2 elastic.py`: mpirun ends the others, which said what had died, and not how to go on."""
    handler = ExitHandler()
    monkeypatch.setattr(start, "exit_handler", lambda: handler)
    handler.abort.prepare(None, JoinLog({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(size)}))
    handler._worlds.append(SimpleNamespace(flight=FlightRecorder(0, size, folder=tmp_path)))
    fleet = start.FixedFleet(SimpleNamespace(rank=0, size=size, timeout_s=1.0, close=lambda: None))
    if ended:
        fleet.end()
    handler._report_deaths({1: "rank 1 of 2 has died"})
    text = capfd.readouterr().err
    assert "rank 1 of 2 has died" in text
    assert (
        "to let the others continue next time: start it by `python -m bagua_comm run --ulfm`" in text
    ) == advised
