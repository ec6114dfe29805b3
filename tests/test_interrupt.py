"""Ctrl-C where Python itself would show a traceback or lose it."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from graphpo_agent import cli

def half_built(options):
    class Loop:
        def __init__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
            self.selector = None
        def __del__(self):
            self.selector.close()
    Loop()

def lost(options):
    class Object:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    Object()
    time.sleep(60)

def never_begun(options):
    async def work():
        pass
    begun = work()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def remade(options):
    try:
        half_built(options)
    except BaseException:
        raise OSError("a library's own error") from None

cli._run = globals()[sys.argv[1]]
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.parametrize("where", ["half_built", "lost", "never_begun", "remade"])
def test_an_interrupt_is_status_130_and_one_line(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (130, "graphpo: interrupted\n")
