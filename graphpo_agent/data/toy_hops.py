"""The toy world *hops* (agent mode): a chain of relations, and a search that may be out of date.

``who: Karo Venner mentor rival cousin`` asks for the cousin of the rival of the mentor of Karo
Venner. Every hop is one query, ``Karo Venner mentor``, whose answer is marked ``new`` or ``old``.
An old answer is wrong; asking again, ``not Lita Bosdal : Karo Venner mentor``, gives the new one
(``retrievers.stale``). The demonstrator often trusts old answers, and sometimes asks for something
else than the next hop without noticing it. Every demonstration has facts of its own, and in the
corpus facts lead from training entities to training entities only, and so for held-out ones:
nothing learned by heart helps.

How turns and replies are written is the dialect's (``SearchWriting``); turns have no thoughts.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from graphpo_agent.data.jsonl import write_rows
from graphpo_agent.data.tasks import write_demonstrations, write_tasks
from graphpo_agent.data.toy_search import MOST_NAMES, SearchWriting, another_name, draw_names
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import Demonstration, Document, Piece, Task

__all__ = ["hops_phrases", "make_hops"]

RELATIONS = ["mentor", "rival", "partner", "cousin", "neighbor", "teacher", "tailor", "banker"]

Search = tuple[str, str]
"""What is asked for: ``("Karo Venner", "mentor")``."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What the search knows about one relation of one entity.

    Example: ``Fact(value="Domi Wornal", outdated="Lita Bosdal")``; ``outdated`` is None where the
    first answer is the present one.
    """

    value: str
    outdated: str | None


@dataclass(frozen=True, slots=True)
class Question:
    """A chain to be followed; ``Question("Karo Venner", ("mentor", "rival", "cousin"))``."""

    start: str
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        """How the task words it."""
        return f"who: {self.start} {' '.join(self.relations)}"


@dataclass(frozen=True, slots=True)
class Turn:
    r"""One search of a demonstration and what it finds.

    Example: ``Turn("not Lita Bosdal : Karo Venner mentor", '"new"\nKaro Venner mentor : ...')``
    """

    query: str
    contents: str


@dataclass(frozen=True, slots=True)
class Follower:
    """How well the demonstrations are made.

    Attributes:
        trust: probability that an old answer is taken for true.
        slip: probability that a search is for another relation, or another entity met before.
        unnoticed: probability that the answer to such a search is taken for the next hop's.
        hurry: probability, per turn, of answering before the last hop.
        max_turns: turns at most, the answer included.
    """

    trust: float
    slip: float
    unnoticed: float
    hurry: float
    max_turns: int


def hops_phrases(writing: SearchWriting) -> tuple[str, ...]:
    """Strings of the transcript that a toy tokenizer makes one token each."""
    return (*writing.phrases, "<answer>", "</answer>", 'Doc 1(Title: "')


def make_hops(
    directory: Path,
    *,
    writing: SearchWriting,
    seed: int = 0,
    num_train: int = 4000,
    num_heldout: int = 400,
    num_demonstrations: int = 20000,
    num_entities: int = 1020,
    hops: int = 5,
    stale: float = 0.35,
    trust: float = 0.55,
    slip: float = 0.03,
    unnoticed: float = 0.5,
    hurry: float = 0.01,
    max_turns: int = 12,
) -> None:
    """Write a world: ``train.jsonl heldout.jsonl demonstrations.jsonl corpus.jsonl``.

    The same arguments give the same files. Each task's metadata holds ``gold_documents``, the ids
    of the present documents on its chain, and ``outdated``, the ids of the outdated ones, null for
    a hop without. Demonstrations are about training entities, in worlds of their own.

    Args:
        directory: where the files go; made where missing.
        writing: the dialect of the demonstrations, as the rollout writes it.
        seed: of all random choices.
        num_train: training questions, all different.
        num_heldout: held-out questions, about entities that no training question or fact names.
        num_demonstrations: demonstrations, each with a question and facts of its own.
        num_entities: entities, a sixth of them held out.
        hops: relations of a question, all different.
        stale: probability that the first answer about a fact is out of date.
        trust: see ``Follower``, as for ``slip``, ``unnoticed`` and ``hurry``.
        slip: see ``trust``.
        unnoticed: see ``trust``.
        hurry: see ``trust``.
        max_turns: turns of a demonstration at most, the answer included.

    Raises:
        ConfigError: a number out of its range, or more questions than there are.
        DataError: a file cannot be written.
    """
    _check(num_entities, hops, max_turns)
    rng = random.Random(f"hops {seed}")
    train_names, heldout_names = draw_names(rng, num_entities)
    facts = _draw_facts(rng, train_names, stale) | _draw_facts(rng, heldout_names, stale)
    documents = _write_corpus(directory, facts)

    train = _draw_questions(rng, train_names, num_train, hops)
    heldout = _draw_questions(rng, heldout_names, num_heldout, hops)
    write_tasks(directory / "train.jsonl", _tasks("hops-train", train, facts, documents))
    write_tasks(directory / "heldout.jsonl", _tasks("hops-heldout", heldout, facts, documents))

    follower = Follower(trust, slip, unnoticed, hurry, max_turns)
    demonstrations = (
        _demonstration(row, rng, train_names, hops, stale, follower, writing)
        for row in range(num_demonstrations)
    )
    write_demonstrations(directory / "demonstrations.jsonl", demonstrations)


def _check(num_entities: int, hops: int, max_turns: int) -> None:
    if not 60 <= num_entities <= MOST_NAMES:
        raise ConfigError(
            f"hops world: num_entities must be in [60, {MOST_NAMES}], found {num_entities}"
        )
    if not 1 <= hops <= len(RELATIONS):
        raise ConfigError(f"hops world: hops must be in [1, {len(RELATIONS)}], found {hops}")
    if max_turns < 2:
        raise ConfigError(f"hops world: max_turns must be at least 2, found {max_turns}")


def _draw_facts(rng: random.Random, names: Sequence[str], stale: float) -> dict[Search, Fact]:
    """All facts of some entities."""
    return {
        (name, relation): _draw_fact(rng, names, name, stale)
        for name in names
        for relation in RELATIONS
    }


def _draw_fact(rng: random.Random, names: Sequence[str], subject: str, stale: float) -> Fact:
    """A fact that leads from ``subject``, one of ``names``, to another one of them."""
    value = another_name(rng, names, subject)
    return Fact(value, another_name(rng, names, subject, value) if rng.random() < stale else None)


def _stated(search: Search, fact: Fact) -> list[str]:
    """The contents of the documents about a fact, as they are found; the last one is true."""
    outdated = [] if fact.outdated is None else [("old", fact.outdated)]
    marked = (*outdated, ("new", fact.value))
    return [f'"{mark}"\n{" ".join(search)} : {value}' for mark, value in marked]


def _write_corpus(directory: Path, facts: Mapping[Search, Fact]) -> dict[Search, list[Document]]:
    """A document for each answer of the search; returns those of each fact, the true one last."""
    documents: dict[Search, list[Document]] = {}
    number = count()
    for search, fact in facts.items():
        documents[search] = [Document(str(next(number)), text) for text in _stated(search, fact)]
    rows = ({"id": doc.id, "contents": doc.contents} for each in documents.values() for doc in each)
    write_rows(directory / "corpus.jsonl", rows)
    return documents


def _draw_question(rng: random.Random, names: Sequence[str], hops: int) -> Question:
    return Question(rng.choice(names), tuple(rng.sample(RELATIONS, hops)))


def _draw_questions(
    rng: random.Random, names: Sequence[str], num_questions: int, hops: int
) -> list[Question]:
    """Different questions."""
    questions: dict[Question, None] = {}
    for _ in range(20 * num_questions):
        if len(questions) == num_questions:
            return list(questions)
        questions[_draw_question(rng, names, hops)] = None
    raise ConfigError(
        f"hops world: {len(names)} entities do not give {num_questions} different questions; "
        "set fewer questions or more num_entities"
    )


def _chain(question: Question, facts: Mapping[Search, Fact]) -> list[Search]:
    """What has to be asked for, hop by hop."""
    searches: list[Search] = []
    entity = question.start
    for relation in question.relations:
        searches.append((entity, relation))
        entity = facts[entity, relation].value
    return searches


def _tasks(
    prefix: str,
    questions: Sequence[Question],
    facts: Mapping[Search, Fact],
    documents: Mapping[Search, Sequence[Document]],
) -> Iterator[Task]:
    for row, question in enumerate(questions):
        chain = _chain(question, facts)
        found = [documents[search] for search in chain]
        metadata: dict[str, Any] = {
            "world": "hops",
            "hops": len(chain),
            "gold_documents": [each[-1].id for each in found],
            "outdated": [each[0].id if len(each) == 2 else None for each in found],
        }
        yield Task(f"{prefix}-{row}", question.text, (facts[chain[-1]].value,), metadata)


def _follow(
    rng: random.Random,
    question: Question,
    fact_of: Callable[[Search], Fact],
    follower: Follower,
) -> tuple[list[Turn], str]:
    """The turns of one demonstration and its answer."""
    turns: list[Turn] = []
    entities = [question.start]
    while len(turns) < follower.max_turns - 1 and rng.random() >= follower.hurry:
        if len(entities) > len(question.relations):
            break
        right = (entities[-1], question.relations[len(entities) - 1])
        slipped = rng.random() < follower.slip
        search = _slip(rng, entities, right) if slipped else right
        fact = fact_of(search)
        first, *others = _stated(search, fact)
        turns.append(Turn(" ".join(search), first))
        if slipped and rng.random() >= follower.unnoticed:
            continue
        if fact.outdated is None:
            entities.append(fact.value)
        elif rng.random() < follower.trust or len(turns) == follower.max_turns - 1:
            entities.append(fact.outdated)
        else:
            turns.append(Turn(f"not {fact.outdated} : {' '.join(search)}", *others))
            entities.append(fact.value)
    return turns, entities[-1]


def _slip(rng: random.Random, entities: Sequence[str], right: Search) -> Search:
    """Another relation, or an entity that was met before; perhaps what was right, by chance."""
    entity, relation = right
    if rng.random() < 0.5:
        return rng.choice(entities), relation
    return entity, rng.choice(RELATIONS)


def _demonstration(
    row: int,
    rng: random.Random,
    names: Sequence[str],
    hops: int,
    stale: float,
    follower: Follower,
    writing: SearchWriting,
) -> Demonstration:
    facts: dict[Search, Fact] = {}

    def fact_of(search: Search) -> Fact:
        if search not in facts:
            facts[search] = _draw_fact(rng, names, search[0], stale)
        return facts[search]

    question = _draw_question(rng, names, hops)
    turns, answer = _follow(rng, question, fact_of, follower)
    pieces: list[Piece] = []
    for turn in turns:
        pieces.append(Piece(writing.write_search(turn.query), trained=True))
        pieces.append(writing.write_observation(turn.query, [Document("", turn.contents)]))
    pieces.append(Piece(f"<answer> {answer}</answer>", trained=True))
    messages = ({"role": "user", "content": question.text},)
    return Demonstration(f"hops-demonstration-{row}", messages, tuple(pieces), ends=False)
