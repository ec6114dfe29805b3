import os
import threading
import time

from graphpo_agent.net.alarm import alarm


def test_alarms_ring_in_the_order_of_their_moments_whatever_the_order_they_were_set_in() -> None:
    rung: list[float] = []
    over = threading.Event()

    def ring(number: float) -> None:
        rung.append(number)
        if len(rung) == 3:
            over.set()

    with (
        alarm(60.0, lambda: ring(60.0)),
        alarm(0.2, lambda: ring(0.2)),
        alarm(0.1, lambda: ring(0.1)),
        alarm(0.3, lambda: ring(0.3)),
    ):
        assert over.wait(60)
    assert rung == [0.1, 0.2, 0.3]


def test_an_alarm_does_not_ring_behind_its_block_nor_while_it_ends() -> None:
    ringing, rung = threading.Event(), []

    def ring() -> None:
        ringing.set()
        time.sleep(0.1)
        rung.append("first")

    with alarm(0.0, ring):
        ringing.wait()
    assert rung == ["first"]  # the block's end has waited for it
    with alarm(0.05, lambda: rung.append("called off")):
        pass
    later = threading.Event()
    with alarm(0.1, later.set):
        later.wait()
    assert rung == ["first"]


def test_all_alarms_share_one_thread() -> None:
    rang = threading.Event()
    for _ in range(20):
        with alarm(60.0, rang.set):
            pass
    assert [thread.name for thread in threading.enumerate()].count("alarms") == 1


def test_a_forked_child_has_alarms_of_its_own() -> None:
    with alarm(60.0, lambda: None):
        child = os.fork()
        if not child:
            rang = threading.Event()
            with alarm(0.0, rang.set):
                os._exit(0 if rang.wait(60) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
