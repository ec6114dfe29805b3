"""Processes that are asked, and what becomes of them."""

import os
import signal
import time
from pathlib import Path

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.processes import ProcessPool
from graphpo_agent.rewards import math_worker

ANSWERING = Path(math_worker.__file__).parents[1] / "net" / "answering.py"
WORKER = f"""
import os, runpy, signal, time

set_timer, timers = signal.setitimer, []
signal.setitimer = lambda which, seconds: (timers.append(seconds), set_timer(which, seconds))

def answer(request):
    if request["do"] == "print":
        print("printed", flush=True)
    if request["do"] == "die":
        os._exit(3)
    if request["do"] == "fill":
        return {{"length": len(bytearray(2**32))}}
    time.sleep(request.get("sleep", 0))
    return {{"pid": os.getpid(), "said": request["do"], "timers": timers}}

runpy.run_path({str(ANSWERING)!r})["answer_requests"](answer)
"""


@pytest.fixture
def pool(tmp_path: Path) -> ProcessPool:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    return ProcessPool(worker, 1, purpose="nothing works", needs="something")


def said(pool: ProcessPool, do: str) -> int:
    answer = pool.ask({"do": do}, 60.0)
    assert answer is not None and answer["said"] == do
    return answer["pid"]


def test_one_process_answers_everything_and_what_is_printed_there_is_no_answer(
    pool: ProcessPool,
) -> None:
    first = said(pool, "a")
    assert said(pool, "print") == said(pool, "b") == first


@pytest.mark.parametrize("do", ["die", "fill"])
def test_a_process_that_breaks_is_replaced(pool: ProcessPool, do: str) -> None:
    first = said(pool, "a")
    assert pool.ask({"do": do}, 60.0) is None
    assert said(pool, "b") != first


def test_one_that_ends_within_its_answer_has_given_none(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import struct, sys\n"
        "print(end=struct.pack('>I', 2).decode() + '{}', flush=True)\n"
        "sys.stdin.buffer.read(4)\n"
        "print(end=struct.pack('>I', 99).decode() + '{', flush=True)\n"
    )
    pool = ProcessPool(worker, 1, purpose="nothing works", needs="something")
    assert pool.ask({}, 60.0) is None


def test_the_seconds_of_an_answer_do_not_go_on_behind_it(pool: ProcessPool) -> None:
    said(pool, "a")
    answer = pool.ask({"do": "b"}, 50.0)
    assert answer is not None and answer["timers"] == [60.0, 0, 50.0, 0]


def test_a_process_that_takes_too_long_is_killed(pool: ProcessPool) -> None:
    first = said(pool, "a")
    assert pool.ask({"do": "a", "sleep": 600.0}, 0.5) is None
    assert said(pool, "b") != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_one_that_was_killed_meanwhile_costs_no_answer(pool: ProcessPool) -> None:
    first = said(pool, "a")
    os.kill(first, signal.SIGKILL)
    while Path(f"/proc/{first}/stat").read_text().split(") ")[1][0] != "Z":
        time.sleep(0.01)
    assert said(pool, "b") != first


def test_an_interrupt_of_the_keyboard_does_not_reach_it(pool: ProcessPool) -> None:
    assert os.getpgid(said(pool, "a")) != os.getpgid(0)


def test_a_forked_child_asks_a_process_of_its_own_and_ends(pool: ProcessPool) -> None:
    first = said(pool, "a")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(said(pool, "b") == first)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert said(pool, "c") == first


def test_a_program_that_does_not_start_says_what_it_needs(tmp_path: Path) -> None:
    pool = ProcessPool(tmp_path / "none.py", 1, purpose="nothing works", needs="something")
    with pytest.raises(ToolError, match=r"^nothing works: .* does not start; .*install something$"):
        pool.ask({}, 1.0)
