"""Live progress of a run: one line per step, and a bar where the output is a terminal.

What goes on inside a step stands beside the bar; elsewhere it is a line of its own once a minute.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from graphpo_agent.report.numbers import compact, duration, fixed, percent
from graphpo_agent.report.run_files import read_run

__all__ = ["BAR_SECONDS", "SILENT_SECONDS", "RunConsole", "TimeLeft"]

NAN = math.nan
ROWS_PER_HEADER = 25
BAR_SECONDS = 0.5
"""From one look at what goes on to the next, on a terminal."""
SILENT_SECONDS = 60.0
"""And elsewhere."""


def _whole(value: float) -> str:
    return fixed(value, 0)


def _decimal(value: float) -> str:
    return fixed(value, 3)


def _percent_or_blank(value: float) -> str:
    return "" if math.isnan(value) else percent(value)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    write: Callable[[float], str]
    metric: str
    rank: int
    """Columns with the highest rank are left out first where the terminal is narrow."""


COLUMNS = (
    _Column("step", 5, _whole, "step", 0),
    _Column("reward", 6, _decimal, "reward/mean", 1),
    _Column("held-out", 8, _percent_or_blank, "eval/accuracy", 2),
    _Column("length", 6, compact, "rollout/response_tokens", 5),
    _Column("entropy", 7, _decimal, "update/entropy", 6),
    _Column("merged", 6, percent, "rollout/merge_rate", 4),
    _Column("tokens", 6, compact, "tokens/total", 7),
    _Column("tok/s", 6, compact, "tokens/per_second", 8),
    _Column("left", 6, duration, "time/left", 3),
)
GAP = "  "


class TimeLeft:
    """Seconds until a run ends, from its pace since the first step that was seen.

    The first step itself is extrapolated from the run's beginning.

    Example: 10 % at 60 s; then 30 % at 100 s is 0.5 % a second, so 70 % takes 140 s more.

    >>> clock = TimeLeft()
    >>> clock.update(0.1, 60.0), clock.update(0.3, 100.0)
    (540.0, 140.0)
    """

    def __init__(self) -> None:
        self._since = (0.0, 0.0)
        self._seen = False

    def update(self, progress: float, seconds: float) -> float:
        """Seconds left; NaN while unknown.

        Args:
            progress: share of the run that is done, in [0, 1].
            seconds: time since the run began.
        """
        if not (math.isfinite(progress) and math.isfinite(seconds)):
            return NAN
        done, elapsed = progress - self._since[0], seconds - self._since[1]
        if not self._seen:
            self._since, self._seen = (progress, seconds), True
        return elapsed * (1 - progress) / done if done > 0 else NAN


class _Description(ProgressColumn):
    """A bar's description, cut where the share that is done and the time left need the room."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        text = Text(task.description)
        room = self._console.width - len(f" 100% {task.fields['left']}") - len(GAP)
        text.truncate(max(1, room), overflow="ellipsis")
        return text


class RunConsole:
    """What the train loop tells the person who watches.

    On a terminal the rows scroll above a progress bar; elsewhere every row is a plain line that is
    flushed at once. Call ``close`` however the run ends, so that it gives the terminal back.

    Args:
        stream: where to write; None is standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=sys.stdout if stream is None else stream, highlight=False)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._total_steps: int | None = None
        self._time_left = TimeLeft()
        self._rows = 0
        self._accuracies: list[float] = []
        self._told_of_outages = False
        self._followers: list[Callable[[], object]] = []
        self._description = "starting"
        self._shown = time.monotonic()

    def tell(self, lines: Sequence[str]) -> None:
        """Print what a reader should know of the run."""
        for line in lines:
            self._print(Text(line))

    def start(self, total_steps: int | None) -> None:
        """Show the bar of so many steps; None where a token budget ends the run."""
        self._total_steps = total_steps
        if self._console.is_terminal:
            self._progress = Progress(
                _Description(self._console),
                BarColumn(None, complete_style="cyan", finished_style="green"),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}", style="cyan"),
                console=self._console,
                expand=True,
            )
            self._bar = self._progress.add_task(self._description, total=1.0, left="")
            self._progress.start()

    def follow(self, told: Callable[[], object]) -> None:
        """Call something after each row from now on."""
        self._followers.append(told)

    def goes_on(self, run_dir: Path) -> None:
        """The run of a directory is resumed: its held-out accuracies so far are the first ones.

        Raises:
            RunError: as ``read_run``.
        """
        _, accuracies = read_run(run_dir).metrics.defined("eval/accuracy")
        self._accuracies = accuracies.tolist()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one row of metrics.jsonl; what it lacks is shown as a dash (held-out: blank)."""
        self._show(metrics)
        for told in self._followers:
            told()

    def _show(self, metrics: Mapping[str, float]) -> None:
        left = self._time_left.update(
            metrics.get("progress", NAN), metrics.get("time/seconds", NAN)
        )
        columns = _fitting_columns(self._console.width)
        if self._rows % ROWS_PER_HEADER == 0:
            self._print(Text(GAP.join(f"{c.title:>{c.width}}" for c in columns), style="bold"))
        self._rows += 1
        evaluated = "eval/accuracy" in metrics
        if evaluated:
            self._accuracies.append(metrics["eval/accuracy"])
        values = {**metrics, "time/left": left}
        row = GAP.join(f"{c.write(values.get(c.metric, NAN)):>{c.width}}" for c in columns)
        self._print(Text(row, style="green" if evaluated else ""))
        self._move_bar(metrics, left)
        self._tell_of_outages(metrics)

    def _tell_of_outages(self, metrics: Mapping[str, float]) -> None:
        """The first step of which outages left something out is told; the file has the others."""
        share = metrics.get("rollout/left_out", 0.0)
        if share > 0 and not self._told_of_outages:
            self._told_of_outages = True
            self.note(
                f"outages left {percent(share)} of this step's trajectories unscored; "
                "rollout/left_out in metrics.jsonl has that of every step"
            )

    def working(self, describe: Callable[[], str]) -> None:
        """Show what goes on inside a step; to be called as often as one likes.

        Args:
            describe: says it, in a few words; called where it is shown.
        """
        now = time.monotonic()
        if now - self._shown < (SILENT_SECONDS if self._progress is None else BAR_SECONDS):
            return
        self._shown = now
        if self._progress is None or self._bar is None:
            self.note(describe())
        else:
            self._progress.update(self._bar, description=f"{self._description} · {describe()}")

    def note(self, text: str) -> None:
        """A line between the rows, e.g. that a checkpoint was written."""
        self._print(Text(text, style="dim"))

    def close(self) -> None:
        """Take the bar away; further calls do nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._shown = time.monotonic()

    def _move_bar(self, metrics: Mapping[str, float], left: float) -> None:
        if self._progress is None or self._bar is None:
            return
        self._description = self._describe(metrics.get("step", NAN))
        self._progress.update(
            self._bar,
            completed=metrics.get("progress", 0.0),
            description=self._description,
            left="" if math.isnan(left) else f"{duration(left)} left",
        )

    def _describe(self, step: float) -> str:
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        text = f"step {fixed(step, 0)}{total}"
        if self._accuracies:
            first, last = percent(self._accuracies[0]), percent(self._accuracies[-1])
            text += f" · held-out {first}" + (f" → {last}" if len(self._accuracies) > 1 else "")
        return text


def _fitting_columns(width: int) -> list[_Column]:
    """The most important columns that fit side by side, in their usual order."""
    chosen: list[_Column] = []
    used = 0
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        used += column.width + (len(GAP) if chosen else 0)
        if used > width and chosen:
            break
        chosen.append(column)
    return [column for column in COLUMNS if column in chosen]
