"""How far a command is that goes through many tasks."""

import sys
from typing import Any

from tqdm.auto import tqdm

from graphpo_agent.report.console import BAR_SECONDS, SILENT_SECONDS
from graphpo_agent.report.numbers import compact

__all__ = ["TaskBar"]


class TaskBar(tqdm):  # pyright: ignore[reportMissingTypeArgument] (it goes over nothing)
    """A bar on standard error with the tokens that were sampled so far.

    Where that is no terminal, it is shown once a minute, from the first minute's end on.

    Example::

        with TaskBar(total=64, unit="graph") as bar:
            bar.drawn(300)
            bar.update()
    """

    def __init__(self, **settings: Any) -> None:
        """Args: those of ``tqdm``."""
        seconds, delay = (BAR_SECONDS, 0.0) if sys.stderr.isatty() else (SILENT_SECONDS,) * 2
        super().__init__(mininterval=seconds, miniters=0, delay=delay, **settings)
        self._tokens = 0

    def drawn(self, num_tokens: int) -> None:
        """A continuation of so many tokens is there."""
        self._tokens += num_tokens
        self.set_postfix_str(f"{compact(self._tokens)} tokens", refresh=False)
        self.update(0)
