import os
import sys
import threading

import pytest

from graphpo_agent.net.deadline import Deadline, within
from graphpo_agent.net.failures import CallFailed

PATIENCE = 30.0


def fail():
    raise KeyError("oak")


def test_what_the_function_returns_or_raises():
    assert within(Deadline(PATIENCE), lambda: [1, 2]) == [1, 2]
    assert within(Deadline(PATIENCE), lambda: None) is None
    with pytest.raises(KeyError, match="oak"):
        within(Deadline(PATIENCE), fail)
    with pytest.raises(SystemExit):  # no exception like others: nobody may wait for it in vain
        within(Deadline(PATIENCE), sys.exit)


def test_a_function_that_takes_too_long_is_left_alone():
    gate, ended = threading.Event(), threading.Event()

    def hang():
        gate.wait(PATIENCE)
        ended.set()

    with pytest.raises(CallFailed, match=r"no answer within 0\.05 s") as caught:
        within(Deadline(0.05), hang)
    assert caught.value.kind == "transient" and not ended.is_set()
    assert within(Deadline(PATIENCE), lambda: 3) == 3
    gate.set()
    assert ended.wait(PATIENCE)


def test_nothing_is_begun_when_the_time_is_up():
    late, asked = Deadline(0.001), threading.Event()
    while not late.passed:
        threading.Event().wait(0.001)
    with pytest.raises(CallFailed):
        within(late, asked.set)
    assert not within(Deadline(PATIENCE), asked.is_set)


def test_threads_are_used_again():
    threads = {within(Deadline(PATIENCE), threading.get_ident) for _ in range(50)}
    assert len(threads) < 10


def test_a_forked_child_has_threads_of_its_own():
    within(Deadline(PATIENCE), lambda: None)
    child = os.fork()
    if child == 0:
        os._exit(within(Deadline(PATIENCE), lambda: 7))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
