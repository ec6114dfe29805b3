"""What the tests of the sandbox share: which isolations this machine has, and who is running."""

import time
from pathlib import Path

from graphpo_agent.errors import ToolError
from tools.sandbox import Limits, Sandbox

LIMITS = Limits(deadline_s=60.0, memory_bytes=2**30, output_bytes=20_000)


def _works(isolation: str) -> bool:
    try:
        Sandbox(isolation, limits=LIMITS)
    except ToolError:
        return False
    return True


WORKING = [each for each in ("bubblewrap", "namespaces", "landlock") if _works(each)]


def is_running(marker: str) -> bool:
    """Whether any process of this machine has ``marker`` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def wait_until(condition, seconds: float = 60.0) -> bool:
    """Whether ``condition()`` becomes true; the time only ends a test that fails anyway."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
