"""Signals where Python itself would show a traceback or lose them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graphpo_agent.interrupt import held_back, interruptible
from tests.worlds import run_arguments, start_command, wait_for

SCRIPT = """
import os, signal, sys, time
from graphpo_agent import cli, interrupt

number = signal.Signals[sys.argv[2]]

def half_built(options):
    class Loop:
        def __init__(self):
            os.kill(os.getpid(), number)
            time.sleep(60)
            self.selector = None
        def __del__(self):
            self.selector.close()
    Loop()

def lost(options):
    class Object:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
    Object()
    time.sleep(60)

def never_begun(options):
    async def work():
        pass
    begun = work()
    os.kill(os.getpid(), number)
    time.sleep(60)

def remade(options):
    try:
        half_built(options)
    except BaseException:
        raise OSError("a library's own error") from None

def main(work):
    if number == signal.SIGINT:
        cli._run = work
        return cli.main(["doctor"])
    signal.signal(number, lambda *_: interrupt.raise_quietly(number, SystemExit(1)))
    work(None)

sys.exit(main(globals()[sys.argv[1]]))
"""


def ended(where: str, number: str) -> tuple[int, str]:
    """Status and standard error of a process that gets the signal there."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where, number], capture_output=True, text=True, timeout=50
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("where", ["half_built", "lost", "never_begun", "remade"])
def test_an_interrupt_is_status_130_and_one_line(where: str) -> None:
    assert ended(where, "SIGINT") == (130, "graphpo: interrupted\n")


@pytest.mark.parametrize("where", ["half_built", "lost", "never_begun"])
def test_a_process_told_to_end_does_so_quietly(where: str) -> None:
    assert ended(where, "SIGTERM") == (1, "")


def test_who_handled_interrupts_before_does_so_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupted:
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before and not interrupted()


def test_an_interrupt_is_held_back_whichever_thread_it_reaches() -> None:
    begun, over = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (begun.set(), over.wait()))
    other.start()
    begun.wait()
    whole = False
    try:
        with interruptible() as interrupted, pytest.raises(KeyboardInterrupt), held_back():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # an interrupt would end it
            assert not interrupted()
            whole = True
        assert whole and interrupted()
    finally:
        over.set()
        other.join()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def prepares_processes(pid: int) -> bool:
    """Whether a child that runs Python, so that it can be interrupted, makes further processes."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_text()
        status = Path(f"/proc/{child}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if "forkserver" in command and caught >> (signal.SIGINT - 1) & 1:
            return True
    return False


def test_ctrl_c_while_a_comparison_prepares_its_processes(reach: Path, tmp_path: Path) -> None:
    config, _, *overrides = run_arguments(reach, tmp_path, "train.steps=5000")
    words = ["compare", config, *overrides, "--methods", "grpo", "--out", str(tmp_path / "out")]
    process = start_command(words, start_new_session=True)
    wait_for(lambda: prepares_processes(process.pid), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == "graphpo: interrupted\n"
