"""What two paths are compared by: ``StateDescriber``s (paper, section 3.2).

A description tells the *state*, what is known and what is open, and never the history that led
there: two routes to one state could not merge otherwise.
"""

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from graphpo_agent.errors import ConfigError
from graphpo_agent.net.failures import FailureTally
from graphpo_agent.protocols import Scheduler
from graphpo_agent.rollout.agent_memory import AgentMemory
from graphpo_agent.types import PathState, SampleRequest, SamplingParams, StateDescription

__all__ = ["SUMMARY_REQUEST", "KeyDescriber", "PolicySummary", "TextDescriber", "documents_key"]

SUMMARY_REQUEST = """

Stop here and describe where the work stands, for somebody who takes over at this point: the facts \
and intermediate results that are established and still matter, the answer if there is one, and \
what remains to be found. Leave out how it was found, in which order, and what turned out useless.
Where the work stands: """
"""The default request for a summary, as the text that follows a path."""


def documents_key(state: PathState) -> str:
    """The canonical state of a search agent: question, what it found, candidate answer.

    Question and answer are compared without regard to case, spacing and Unicode form; what was
    found as a set of document ids and of tools' replies without documents, so the order of the
    calls, and calls that found nothing new, do not count.

    Example: ``'["capital of france?", ["12", "7"], null]'``; a reply stands in a list of its own.
    """
    memory: AgentMemory = state.memory
    answer = None if state.answer is None else _normalise(state.answer)
    documents = sorted({document.id for document in memory.documents_found})
    replies = [[fact] for fact in sorted(memory.facts)]
    found = [*documents, *replies]
    return json.dumps([_normalise(state.task.question), found, answer], ensure_ascii=False)


def _normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class KeyDescriber:
    """The state key that an environment gives; None where it knows none. Costs no tokens.

    Example: ``KeyDescriber(documents_key)`` for a search agent.
    """

    def __init__(self, key_fn: Callable[[PathState], str | None]) -> None:
        self._key_fn = key_fn

    async def describe(
        self, scheduler: Scheduler, states: Sequence[PathState]
    ) -> list[StateDescription]:
        """The key of each state.

        Raises:
            ConfigError: the function returned something else than a string or None.
        """
        return [StateDescription(key=self._key(state)) for state in states]

    def _key(self, state: PathState) -> str | None:
        key = self._key_fn(state)
        if key is not None and not isinstance(key, str):
            raise ConfigError(
                f"task {state.task.id}: the state key is {key!r:.60}, want a string or None"
            )
        return key


class TextDescriber:
    """The end of the path's own text, as the text to embed; the question where there is none yet.

    It tells how the path ends, not what state that is, so it serves to find near-exact
    duplicates only. Costs no tokens.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters

    async def describe(
        self, scheduler: Scheduler, states: Sequence[PathState]
    ) -> list[StateDescription]:
        """The last ``max_characters`` characters of each state's response."""
        texts = [state.response or state.task.question for state in states]
        return [StateDescription(text=text[-self._max_characters :]) for text in texts]


class PolicySummary:
    """A summary of the whole path by the policy itself (paper, section 3.2).

    The request is appended to the path's own context, so no prefix is computed twice, and the
    summary is sampled greedily; the path's context stays as it was. The root's summary is of the
    prompt alone. A path gets no description and is similar to nothing where its context has no
    room for request and summary (the first words alone may be those of any state), and where the
    policy writes nothing.
    """

    def __init__(self, *, max_summary_tokens: int, request: str = SUMMARY_REQUEST) -> None:
        self._max_summary_tokens = max_summary_tokens
        self._request = request
        self._tally = FailureTally()

    @property
    def counts(self) -> Mapping[str, int]:
        """States without a description so far."""
        return {"summary/failed": self._tally.failed}

    async def describe(
        self, scheduler: Scheduler, states: Sequence[PathState]
    ) -> list[StateDescription]:
        """The policy's summary of each state; the request does not count as summary tokens."""
        policy = scheduler.policy
        request_ids = policy.tokenizer.encode(self._request)
        longest = policy.max_context_tokens - len(request_ids)
        rooms = [longest - state.context.num_tokens for state in states]
        fitting = [i for i, room in enumerate(rooms) if room > 0]
        requests = [
            SampleRequest(
                policy.extend(states[i].context, request_ids),
                seed=0,
                max_new_tokens=min(self._max_summary_tokens, rooms[i]),
            )
            for i in fitting
        ]
        completions = await scheduler.sample(requests, SamplingParams(temperature=0.0))
        descriptions = [StateDescription()] * len(states)
        for i, completion in zip(fitting, completions, strict=True):
            text = policy.tokenizer.decode(completion.token_ids).strip()
            cut = completion.finish_reason == "length" and rooms[i] < self._max_summary_tokens
            descriptions[i] = StateDescription(
                text=None if cut or not text else text, summary_tokens=len(completion.token_ids)
            )
        blank = sum(description.text is None for description in descriptions)
        self._tally.fail("blank, or no room in the context", blank)
        return descriptions
