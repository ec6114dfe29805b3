"""States of the kb world's demonstrations, as the describers of a run would see them.

They are what the frozen models of ``benchmarks/calibration.py`` learn from: training questions
only, whose entities no held-out question names, and no graph and no state key of any run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphpo_agent.data.jsonl import read_rows
from graphpo_agent.data.tasks import load_demonstrations
from graphpo_agent.rollout.agent_memory import AgentMemory
from graphpo_agent.types import Demonstration, Document, PathState, Task

__all__ = ["DemonstratedState", "demonstrated_states", "facts_found"]

_ANSWER, _ANSWER_END = "<answer>", "</answer>"


@dataclass(frozen=True, slots=True)
class DemonstratedState:
    """Where a demonstration stands after some of its turns.

    Example: ``facts == "first Karo Venner mentor Lita Bosdal born ? . second Domi Wornal rival ?
    wed ? . answer ?"`` after one useful search.

    Attributes:
        demonstration: which one, from 0.
        path: as a run would hold it, but for its tokens.
        facts: what is known and what is open; see ``facts_found``.
    """

    demonstration: int
    path: PathState
    facts: str


@dataclass(frozen=True, slots=True)
class _NoTokens:
    """The context of a state that no policy is to continue."""

    num_tokens: int = 0


def demonstrated_states(world: Path) -> Iterator[DemonstratedState]:
    """Every state of every demonstration, the start left out, in order.

    Args:
        world: a directory of ``graphpo data toy kb``.
    """
    rows = read_rows(world / "corpus.jsonl")
    documents = [Document(row["id"], row["contents"]) for _, row in rows]
    by_text = {document.text: document for document in documents}
    for number, demonstration in enumerate(load_demonstrations(world / "demonstrations.jsonl")):
        yield from _states(number, demonstration, by_text)


def _states(
    number: int, demonstration: Demonstration, by_text: Mapping[str, Document]
) -> Iterator[DemonstratedState]:
    question = demonstration.messages[0]["content"]
    task = Task(demonstration.id, question, ())
    turns: list[str] = []
    found: dict[str, Document] = {}
    answer = None
    for k, piece in enumerate(demonstration.pieces):
        if piece.trained:
            turns.append(piece.text)
            if k + 1 < len(demonstration.pieces):
                continue
            answer = piece.text.partition(_ANSWER)[2].partition(_ANSWER_END)[0].strip()
        else:
            text = piece.text.partition('") ')[2].partition("</information>")[0]
            found[by_text[text].id] = by_text[text]
        memory = AgentMemory(tuple(turns), tuple(found.values()))
        path = PathState(task, _NoTokens(), len(turns), (), "".join(turns), answer, memory)
        facts = facts_found(question, memory.documents_found, answer)
        yield DemonstratedState(number, path, facts)


def facts_found(question: str, documents: Sequence[Document], answer: str | None) -> str:
    """What a reader of question and documents knows, in a fixed form.

    Each chain of the question is followed from document to document; what is not known is ``?``.

    Example: ``"first Karo Venner mentor Lita Bosdal born ? . answer ?"``
    """
    known = dict(document.text.split(" : ") for document in documents)
    chains = [_chain(part, known) for part in question.removeprefix("when: ").split(" , ")]
    return " . ".join([*chains, f"answer {answer or '?'}"])


def _chain(asked: str, known: Mapping[str, str]) -> str:
    """``first Karo Venner mentor born`` with what is known written after each relation."""
    mark, first_name, last_name, *relations = asked.split()
    entity = f"{first_name} {last_name}"
    written = [mark, entity]
    for relation in relations:
        entity = known.get(f"{entity} {relation}", "?")
        written += [relation, entity]
    return " ".join(written)
