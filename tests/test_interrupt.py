"""Signals where Python itself would show a traceback or lose them."""

import subprocess
import sys

import pytest

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
