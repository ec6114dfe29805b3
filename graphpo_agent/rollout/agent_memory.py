"""What a path of agent mode remembers, and how it is kept for later runs of the policy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphpo_agent.types import Document, PathState

__all__ = ["AgentMemory", "recall", "recalled"]


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """What a path has been shown and has done; the ``memory`` of a ``PathState`` in agent mode.

    Example: after one search that found two documents and one turn without an action::

        AgentMemory(
            turns=("<search> karo </search>", "hm"),
            documents_found=(doc_7, doc_3),
            tool_calls=1,
            invalid_actions=1,
        )
    """

    turns: tuple[str, ...] = ()
    """The policy's own text of each turn."""
    documents_found: tuple[Document, ...] = ()
    """Each once, in order of first retrieval; a document that truncation cut away whole is not."""
    tool_calls: int = 0
    """Calls whose observation the path holds."""
    invalid_actions: int = 0
    """Turns that were answered by the invalid-action message."""
    facts: tuple[str, ...] = ()
    """What tools replied without naming documents, each once, such as a program's output."""


def recall(state: PathState) -> dict[str, Any]:
    """All of a state but its task, its tokens and its answer, as JSON values."""
    own = {"depth": state.depth, "response": state.response, "outages": state.outages}
    record = own | asdict(state.memory)
    for document in record["documents_found"]:
        if document["score"] is not None:
            document["score"] = float(document["score"])  # of a retriever that counts with numpy
    return record


def recalled(root: PathState, record: Mapping[str, Any]) -> PathState:
    """The state of which ``recall`` made a record.

    Args:
        root: the task's, with the state's tokens behind its prompt.
        record: also one that was written as JSON.
    """
    return replace(
        root,
        depth=record["depth"],
        response=record["response"],
        outages=record["outages"],
        memory=AgentMemory(
            turns=tuple(record["turns"]),
            documents_found=tuple(Document(**each) for each in record["documents_found"]),
            tool_calls=record["tool_calls"],
            invalid_actions=record["invalid_actions"],
            facts=tuple(record["facts"]),
        ),
    )
