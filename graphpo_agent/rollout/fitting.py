"""Which tasks a model can begin at all: asked before its weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphpo_agent.errors import DataError
from graphpo_agent.look_over import refused
from graphpo_agent.protocols import Expander, Tokenizer
from graphpo_agent.types import Context, Task

__all__ = ["Fitting", "Prompts", "check_fitting", "fitting_tasks"]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A prompt of which only the length is kept."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """A model's prompts without its weights (``graphpo_agent.protocols.PromptOpener``).

    Example: ``Prompts(HfTokenizer.load("Qwen/Qwen3-4B"), max_context_tokens=8192)``.

    Attributes:
        tokenizer: the model's.
        max_context_tokens: what a context of its may hold.
    """

    tokenizer: Tokenizer
    max_context_tokens: int

    def open(self, token_ids: Sequence[int]) -> Context:
        """The length of a prompt."""
        return _Opened(len(token_ids))

    def extend(self, context: Context, token_ids: Sequence[int]) -> Context:
        """The length of a prompt with tokens behind it."""
        return _Opened(context.num_tokens + len(token_ids))


@dataclass(frozen=True, slots=True)
class Fitting:
    """What a model can begin of some tasks.

    Attributes:
        reasons: by the place of each task that does not fit, what is wrong with it.
        prompt_tokens: of the prompts that do, on average; 0 where none does.
    """

    reasons: dict[int, str]
    prompt_tokens: int


def fitting_tasks(expander: Expander, prompts: Prompts, tasks: Sequence[Task]) -> Fitting:
    """Which tasks' prompts leave room in a model's context."""
    tokens: list[int] = []

    def begin(task: Task) -> None:
        tokens.append(expander.start(prompts, task).prompt_tokens)

    reasons = refused(tasks, begin, "prompts", "task")
    return Fitting(reasons, -(-sum(tokens) // max(1, len(tokens))))


def check_fitting(expander: Expander, prompts: Prompts, tasks: Sequence[Task]) -> None:
    """Raise DataError where a task's prompt does not fit, before any other is begun."""
    reasons = list(fitting_tasks(expander, prompts, tasks).reasons.values())
    if reasons:
        more = f" ({len(reasons):,} such tasks of {len(tasks):,})" if len(reasons) > 1 else ""
        raise DataError(f"{reasons[0]}{more}")
