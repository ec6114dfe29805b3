"""Threads that are kept, and none that another waits for."""

import threading
from queue import SimpleQueue

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
