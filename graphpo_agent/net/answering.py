"""The inside of a process that answers requests; asked, and perhaps killed, by ``net.processes``.

Nothing but the standard library: a worker runs as a file, without this package. It gets here by
``runpy.run_path``.

Protocol: each message, on stdin and stdout, is a length (4 bytes, big-endian) and that many bytes
of JSON. It begins with ``{}`` when it is ready; every request is an object with ``seconds``, a
float, and every answer an object. It ends with its stdin, and by SIGALRM when an answer takes
longer than ``seconds``, so that it cannot outlive who asked.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

__all__ = ["answer_requests"]

_MEMORY = 2 * 2**30


def answer_requests(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each request with ``answer(request)``, in at most 2 GiB, until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _write(answers, {})
    while header := requests.read(4):
        request = json.loads(requests.read(struct.unpack(">I", header)[0]))
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        found = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, found)


def _write(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    message = json.dumps(answer).encode()
    answers.write(struct.pack(">I", len(message)) + message)
    answers.flush()
