"""Threads that are kept, and none that another waits for."""

import gc
import threading
import weakref
from queue import SimpleQueue

import pytest

from graphpo_agent.net.workers import Workers

PATIENCE = 30.0


def test_functions_run_at_once_whatever_the_others_wait_for():
    workers, gates = Workers(), [threading.Event() for _ in range(20)]
    ended: SimpleQueue[bool] = SimpleQueue()

    def wait_for(i):
        ended.put(gates[i].wait(PATIENCE))
        gates[i - 1].set()  # all wait for the one that is started last

    for i in range(len(gates)):
        workers.start(lambda i=i: wait_for(i))
    gates[-1].set()
    assert all(ended.get(timeout=2 * PATIENCE) for _ in gates)
    workers.close()


def test_a_thread_that_is_done_is_taken_again_and_ends_when_all_is_over():
    workers, threads = Workers(), []
    for _ in range(50):
        done = threading.Event()
        workers.start(lambda done=done: (threads.append(threading.current_thread()), done.set()))
        assert done.wait(PATIENCE)
    # A thread that has only just set its event may not be idle yet.
    assert len(set(threads)) < 50
    workers.close()
    for thread in set(threads):
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_no_more_threads_than_allowed_take_functions_in_order():
    workers, gate, begun, threads = Workers(2), threading.Barrier(2), [], set()

    def work(number):
        begun.append(number)
        threads.add(threading.current_thread())
        gate.wait(PATIENCE)
        return number * number

    jobs = [workers.submit(lambda number=number: work(number)) for number in range(20)]
    assert [job.result(PATIENCE) for job in jobs] == [number * number for number in range(20)]
    assert len(threads) == 2
    assert all(abs(number - place) <= 1 for place, number in enumerate(begun))


def test_what_a_function_raises_is_raised_and_a_cancelled_one_is_not_begun():
    workers, gate, begun = Workers(1), threading.Event(), []
    failing = workers.submit(lambda: gate.wait(PATIENCE) and 1 / 0)
    cancelled = workers.submit(lambda: begun.append(1))
    last = workers.submit(lambda: 6 * 7)
    assert cancelled.cancel()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE)
    assert last.result(PATIENCE) == 42 and not begun


def test_threads_end_with_who_has_the_workers_and_hold_nothing_meanwhile():
    class Owner:
        def __init__(self):
            self.workers = Workers(1)

        def work(self):
            return threading.current_thread()

    owner = Owner()
    thread = owner.workers.submit(owner.work).result(PATIENCE)
    gone = weakref.ref(owner)
    del owner
    thread.join(PATIENCE)
    gc.collect()
    assert gone() is None and not thread.is_alive()
