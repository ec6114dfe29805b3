"""What goes on inside a step or an evaluation, while it lasts."""

from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.numbers import compact, percent

__all__ = ["Watch"]


class Watch:
    """Counts what is done of a step or of an evaluation, and lets the console show it.

    Example::

        watch = Watch(console, "step 7")
        watch.growing(64)
        watch.drawn(300)      # "step 7: 300 tokens, 0 of 64 graphs"
        watch.finished(rollout)
        watch.learned(0.25)   # "step 7: update 25.0%"
    """

    def __init__(self, console: RunConsole, name: str) -> None:
        """Args: where it is shown, and what it is called there."""
        self._console = console
        self._name = name
        self._tokens = self._done = self._begun = 0

    def growing(self, num_graphs: int) -> None:
        """So many graphs more are begun."""
        self._begun += num_graphs

    def drawn(self, num_tokens: int) -> None:
        """A continuation of so many tokens is there."""
        self._tokens += num_tokens
        self._console.working(self._grown)

    def finished(self, rollout: object) -> None:
        """A graph is."""
        self._done += 1
        self._console.working(self._grown)

    def learned(self, share: float) -> None:
        """A share of the update is done."""
        self._console.working(lambda: f"{self._name}: update {percent(share)}")

    def _grown(self) -> str:
        tokens = compact(self._tokens)
        return f"{self._name}: {tokens} tokens, {self._done} of {self._begun} graphs"
