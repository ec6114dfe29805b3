"""What two paths are compared by: ``StateDescriber``s (paper, section 3.2).

A description tells the *state*, what is known and what is open, and never the history that led
there: two routes to one state could not merge otherwise.
"""

import json
import unicodedata
from collections.abc import Callable, Sequence

from graphpo_agent.protocols import Policy
from graphpo_agent.rollout.agent import AgentMemory
from graphpo_agent.types import PathState, SampleRequest, SamplingParams, StateDescription

__all__ = ["SUMMARY_REQUEST", "KeyDescriber", "PolicySummary", "TextDescriber", "documents_key"]

SUMMARY_REQUEST = """

Stop here and describe where the work stands, for somebody who takes over at this point: the facts \
and intermediate results that are established and still matter, the answer if there is one, and \
what remains to be found. Leave out how it was found, in which order, and what turned out useless.
Where the work stands: """
"""The default request for a summary, as the text that follows a path."""


def documents_key(state: PathState) -> str:
    """The canonical state of a search agent: question, documents found, candidate answer.

    Question and answer are compared without regard to case, spacing and Unicode form; documents
    as a set of ids, so the order of the searches, and searches that found nothing new, do not
    count.

    Example: ``'["capital of france?", ["12", "7"], null]'``
    """
    memory: AgentMemory = state.memory
    answer = None if state.answer is None else _normalise(state.answer)
    found = sorted(document.id for document in memory.documents_found)
    return json.dumps([_normalise(state.task.question), found, answer], ensure_ascii=False)


def _normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class KeyDescriber:
    """The state key that an environment gives; None where it knows none. Costs no tokens.

    Example: ``KeyDescriber(documents_key)`` for a search agent.
    """

    def __init__(self, key_fn: Callable[[PathState], str | None]) -> None:
        self._key_fn = key_fn
        self._num_described = 0

    def describe(self, policy: Policy, states: Sequence[PathState]) -> list[StateDescription]:
        """The key of each state."""
        self._num_described = len(states)
        return [StateDescription(key=self._key_fn(state)) for state in states]

    def take_summary_tokens(self) -> list[int]:
        """A zero for each state of the last ``describe``."""
        return [0] * self._num_described


class TextDescriber:
    """The end of the path's own text, as the text to embed; the question where there is none yet.

    It tells how the path ends, not what state that is, so it serves to find near-exact
    duplicates only. Costs no tokens.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._num_described = 0

    def describe(self, policy: Policy, states: Sequence[PathState]) -> list[StateDescription]:
        """The last ``max_characters`` characters of each state's response."""
        self._num_described = len(states)
        texts = [state.response or state.task.question for state in states]
        return [StateDescription(text=text[-self._max_characters :]) for text in texts]

    def take_summary_tokens(self) -> list[int]:
        """A zero for each state of the last ``describe``."""
        return [0] * self._num_described


class PolicySummary:
    """A summary of the whole path by the policy itself (paper, section 3.2).

    The request is appended to the path's own context, so no prefix is computed twice, and the
    summary is sampled greedily; the path's context stays as it was. The root's summary is of the
    prompt alone. A path whose context has no room for request and summary gets no description.
    """

    def __init__(self, *, max_summary_tokens: int, request: str = SUMMARY_REQUEST) -> None:
        self._max_summary_tokens = max_summary_tokens
        self._request = request
        self._summary_tokens: list[int] = []

    def describe(self, policy: Policy, states: Sequence[PathState]) -> list[StateDescription]:
        """The policy's summary of each state, all sampled in one batch."""
        request_ids = policy.tokenizer.encode(self._request)
        rooms = [
            policy.max_context_tokens - state.context.num_tokens - len(request_ids)
            for state in states
        ]
        asked = [i for i, room in enumerate(rooms) if room > 0]
        completions = policy.sample(
            [
                SampleRequest(
                    policy.extend(states[i].context, request_ids),
                    seed=0,
                    max_new_tokens=min(self._max_summary_tokens, rooms[i]),
                )
                for i in asked
            ],
            SamplingParams(temperature=0.0),
        )
        descriptions = [StateDescription()] * len(states)
        self._summary_tokens = [0] * len(states)
        for i, completion in zip(asked, completions, strict=True):
            text = policy.tokenizer.decode(completion.token_ids).strip()
            descriptions[i] = StateDescription(text=text)
            self._summary_tokens[i] = len(completion.token_ids)
        return descriptions

    def take_summary_tokens(self) -> list[int]:
        """Tokens sampled for each state of the last ``describe``; the request is not counted."""
        return self._summary_tokens
