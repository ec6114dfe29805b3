"""A process that is interrupted while its tools have more to do than it can wait for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PATIENCE = 60.0
"""Seconds; a process that waits for its tools would take far longer."""


def status_after_interrupt(program: str, directory: Path) -> int:
    """The status of a program that gets SIGINT once it has printed a line.

    ``directory`` is where its temporary files are.
    """
    environment = os.environ | {"TMPDIR": str(directory)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.3)  # until its main thread waits: Python may lose a signal before
            process.send_signal(signal.SIGINT)
            return process.wait(_PATIENCE)
        finally:
            process.kill()
