"""The runs of a comparison, each in a process of its own, several at once.

A process ends with all the memory it held, so that the next run finds the machine as this one did;
vLLM and its GPU memory would not go otherwise. A process tells its parent about every step, and
notices with the next step when there is no parent any more.
"""

import multiprocessing
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NoReturn

import torch

from graphpo_agent.config import RunConfig
from graphpo_agent.errors import GraphPOError, RunError
from graphpo_agent.interrupt import held_back, raise_quietly
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.stderr_lines import warn_in_lines
from graphpo_agent.train_run import train_run

__all__ = ["Told", "train_apart"]

PATIENCE = 20.0
"""Seconds in which interrupted processes clean up."""


@dataclass(frozen=True, slots=True)
class Told:
    """What happened to a run.

    Attributes:
        name: of the run.
        what: its process begins, it wrote a row of metrics, or it is complete.
        row: of metrics; empty without one.
    """

    name: str
    what: Literal["begins", "row", "ends"]
    row: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _Running:
    name: str
    process: BaseProcess
    problem: Exception | None = None


def train_apart(configs: Mapping[str, RunConfig], jobs: int) -> Generator[Told, None, None]:
    """Train every run in a process of its own, so many of them at once, and tell how it goes.

    A run whose directory holds a checkpoint goes on from it. However this ends, closed early or
    with an error, no process is left; what was begun goes on from its newest checkpoint.

    Args:
        configs: the runs by name, checked; ``config.output`` is a run's directory.
        jobs: processes at once, at least 1.

    Raises:
        OSError: a full or forbidden disk.
        RunError: what stopped a run, with its name, in one line.
    """
    waiting = iter(configs.items())
    running: dict[Connection, _Running] = {}
    try:
        while True:
            for name, config in islice(waiting, jobs - len(running)):
                yield Told(name, "begins")
                _start(name, config, running)
            if not running:
                return
            for rows in wait(list(running)):
                assert isinstance(rows, Connection)
                told = _receive(rows, running)
                if told is not None:
                    yield told
    finally:
        _end([each.process for each in running.values()])


def _start(name: str, config: RunConfig, running: dict[Connection, _Running]) -> None:
    context = _context()
    rows, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(config, sender))
    resource_tracker.ensure_running()  # whose start lets interrupts through again
    with held_back():  # an interrupt is for the parent, which ends the process
        process.start()
        running[rows] = _Running(name, process)
    sender.close()


def _context() -> ForkServerContext | SpawnContext:
    """Where processes come from: one that has imported everything, or where there is a GPU none.

    Libraries may touch CUDA when they are imported, and no process forked after that can use it.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _receive(rows: Connection, running: dict[Connection, _Running]) -> Told | None:
    """What a process says; it closes its end when it ends."""
    run = running[rows]
    try:
        message = rows.recv()
    except EOFError:
        run.process.join()
        del running[rows]
        rows.close()
        _check_end(run)
        return Told(run.name, "ends")
    if isinstance(message, Exception):
        run.problem = message
        return None
    return Told(run.name, "row", message)


def _check_end(run: _Running) -> None:
    if isinstance(run.problem, GraphPOError):
        raise RunError(f"{run.name}: {run.problem}")
    if run.problem is not None:
        raise run.problem
    if run.process.exitcode:
        raise RunError(
            f"{run.name}: its process ended with status {run.process.exitcode}; the same command "
            "goes on from its last checkpoint"
        )


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


class _Sender(RunConsole):
    """Sends rows to the parent and shows nothing."""

    def __init__(self, sender: Connection) -> None:
        super().__init__()
        self._console.quiet = True
        self._sender = sender

    def _show(self, metrics: Mapping[str, float]) -> None:
        try:
            self._sender.send(dict(metrics))
        except BrokenPipeError:  # the parent is gone, and may be started again
            sys.exit(1)


def _train(config: RunConfig, sender: Connection) -> None:
    """What the process does."""
    signal.signal(signal.SIGTERM, _stop)
    warn_in_lines()
    directory = Path(config.output)
    begun = bool(RunDirectory(directory).checkpoints())
    try:
        train_run(config, directory if begun else None, _Sender(sender))
    except (GraphPOError, OSError) as error:
        sender.send(error)


def _stop(number: int, frame: object) -> NoReturn:
    """End with all clean-up."""
    raise_quietly(number, SystemExit(1))
