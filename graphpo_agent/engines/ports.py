"""Ports at which the processes of a run meet, where neither Ray nor Linux takes any.

Ray's end at 19,999, and from 32,768 on Linux gives them to connections: one that was free there may
be another process's before those who are to meet have started.
"""

from random import SystemRandom

__all__ = ["PORTS", "own_port"]

PORTS = range(20_000, 32_768)


def own_port() -> int:
    """One at random, from which a free one is looked for upwards."""
    return SystemRandom().choice(PORTS)
