"""When a server that has failed is asked again, by a clock that the test sets."""

import threading
from types import SimpleNamespace

import pytest

from retrievers import failover
from retrievers.failover import ServerPool
from tests.retrievers.canned import canned


@pytest.fixture
def clock(monkeypatch):
    """Its ``now`` is the time of the pool."""
    clock = SimpleNamespace(now=0.0)
    stand_in = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
    monkeypatch.setattr(failover, "time", stand_in)
    return clock


def pool_of(*servers):
    urls = [server.url for server in servers]
    return ServerPool("retriever", urls, "/", deadline_s=60, tries=4, concurrency=4)


def ask(pool, times=2):
    """Twice: it is every server's turn once."""
    for _ in range(times):
        pool.ask({}, lambda value, server: server)


def well(asked):
    return 200, {}


def test_rests_grow_with_failures_in_a_row_and_are_short_again_after_an_answer(clock):
    failing = threading.Event()
    failing.set()
    with (
        canned(lambda asked: (500 if failing.is_set() else 200, {})) as server,
        canned(well) as other,
    ):
        pool = pool_of(server, other)

        def asked_at(now):
            clock.now, before = now, len(server.asked)
            ask(pool)
            return len(server.asked) > before

        assert [asked_at(now) for now in (0, 0.9, 1)] == [True, False, True]
        assert [asked_at(now) for now in (2.9, 3, 6.9)] == [False, True, False]  # for 2 s, for 4 s
        failing.clear()
        assert [asked_at(now) for now in (7, 7.1)] == [True, True]
        failing.set()
        assert [asked_at(now) for now in (8, 8.9, 9)] == [True, False, True]


def test_one_question_tries_a_server_whose_rest_is_over(clock):
    hangs, begun, gate = threading.Event(), threading.Event(), threading.Event()

    def doubtful(asked):
        if not hangs.is_set():
            return 500, {}
        begun.set()
        gate.wait(20)
        return 200, {}

    with canned(doubtful) as server, canned(well) as other:
        pool = pool_of(server, other)
        ask(pool)
        hangs.set()
        clock.now = 1.0
        trying = threading.Thread(target=ask, args=(pool,))
        trying.start()
        assert begun.wait(20)
        before = len(other.asked)
        rest = threading.Thread(target=ask, args=(pool, 4), daemon=True)
        rest.start()
        rest.join(10)
        answered = len(other.asked) - before
        gate.set()
        trying.join()
    assert answered == 4
