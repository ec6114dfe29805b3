"""One run of a comparison, in a process of its own.

A process ends with all the memory it held, so that the next run finds the machine as this one did;
vLLM and its GPU memory would not go otherwise. The process tells its parent about every step, and
notices with the next step when there is no parent any more.
"""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from graphpo_agent.config import RunConfig
from graphpo_agent.errors import GraphPOError, RunError
from graphpo_agent.report.console import RunConsole
from graphpo_agent.train_run import train_run

__all__ = ["run_apart"]

PATIENCE = 20.0
"""Seconds in which an interrupted process cleans up."""
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def run_apart(
    config: RunConfig, resume: bool, on_row: Callable[[Mapping[str, float]], None]
) -> None:
    """Train in a process of its own; returns when the run is complete.

    However this ends, the process has ended; the run goes on from its newest checkpoint.

    Args:
        config: the run, checked; ``config.output`` is its directory.
        resume: whether the directory holds a checkpoint to go on from.
        on_row: called with every row of metrics as it is written.

    Raises:
        GraphPOError: what stopped the run, in one line.
        OSError: a full or forbidden disk.
        RunError: the process died.
    """
    rows, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_train, args=(config, resume, sender))
    # Blocked there for good: an interrupt is for the parent, which ends the process.
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
        sender.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
        problem = _listen(rows, on_row)
        process.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
        _end(process)
        rows.close()
    if problem is not None:
        raise problem
    if process.exitcode:
        raise RunError(
            f"the process of {config.output} ended with status {process.exitcode}; the same "
            "command goes on from its last checkpoint"
        )


def _listen(rows: Connection, on_row: Callable[[Mapping[str, float]], None]) -> Exception | None:
    """Pass rows on until the process closes its end; what stopped it, if it says so."""
    problem: Exception | None = None
    while True:
        try:
            message = rows.recv()
        except EOFError:
            return problem
        if isinstance(message, Exception):
            problem = message
        else:
            on_row(message)


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()
        process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()


class _Told(RunConsole):
    """Sends rows to the parent and shows nothing."""

    def __init__(self, sender: Connection) -> None:
        super().__init__()
        self._sender = sender

    def start(self, total_steps: int | None, header: Sequence[str]) -> None:
        pass

    def step(self, metrics: Mapping[str, float]) -> None:
        try:
            self._sender.send(dict(metrics))
        except BrokenPipeError:  # the parent is gone, and may be started again
            sys.exit(1)


def _train(config: RunConfig, resume: bool, sender: Connection) -> None:
    """What the process does."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        train_run(config, Path(config.output) if resume else None, _Told(sender))
    except (GraphPOError, OSError) as error:
        sender.send(error)


def _stop(number: int, frame: object) -> NoReturn:
    """End with all clean-up."""
    raise SystemExit(1)
