"""Objects of `threading` in a simulation: they wait in virtual time, and behave as outside of it."""

import threading
import time

import pytest

from bagua_comm.testing import simulate


def test_a_timer_calls_its_function_in_virtual_time_unless_it_is_cancelled():
    def program(simulation):
        called = []
        timers = [threading.Timer(s, lambda s=s: called.append((s, simulation.now_s))) for s in (3600, 60, 1800)]
        for timer in timers:
            timer.start()
        simulation.sleep(100)
        timers[2].cancel()
        for timer in timers:
            timer.join()
        return called

    start_s = time.monotonic()
    called = simulate(program, seed=0)
    assert [s for s, _ in called] == [60, 3600]
    assert all(s <= at < s + 1 for s, at in called)
    assert time.monotonic() - start_s < 60


def test_a_bounded_semaphore_admits_so_many_threads_and_refuses_a_release_too_many():
    def program(simulation):
        semaphore, inside, most = threading.BoundedSemaphore(2), [], []

        def work():
            with semaphore:
                inside.append(1)
                most.append(len(inside))
                simulation.sleep(1)
                inside.pop()

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ValueError, match="released too many times"):
            semaphore.release()
        return max(most), simulation.now_s

    most, seconds = simulate(program, seed=3)
    assert most == 2
    assert 3 <= seconds < 3.5
