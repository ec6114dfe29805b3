"""The toy world *kb* (agent mode): multi-hop questions over a corpus that the agent must search.

A question has one or two chains, ``when: first Karo Venner mentor born , second Lita Bosdal rival
wed``: who is the mentor of Karo Venner, and when was that person born; who is the rival of Lita
Bosdal, and when did that one wed. Every hop is one document of the corpus, found by the query
``Karo Venner mentor``; the answer is both years. The chains may be followed in any order, so many
orders of searching lead to the same facts found. Names are new pairs of known first and last names
in the held-out split, and facts lead from training entities to training entities only: nothing
learned by heart helps there.

A demonstrated turn thinks ``first Lita Bosdal born . second Domi Wornal rival`` and then searches
``Domi Wornal rival``: what the fact just found leads to, and then the plan. How turns and replies
are written is the dialect's (``SearchWriting``).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpo_agent.data.jsonl import write_rows
from graphpo_agent.data.tasks import write_demonstrations, write_tasks
from graphpo_agent.data.toy_search import MOST_NAMES, SearchWriting, another_name, draw_names
from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.types import Demonstration, Piece, Task
from retrievers.bm25 import Bm25Retriever, build_bm25

__all__ = ["kb_phrases", "make_kb"]

RELATIONS = ["mentor", "rival", "partner", "cousin", "neighbor", "teacher"]
ATTRIBUTES = ["born", "wed", "moved", "retired"]
DISTRACTORS = ["tailor", "banker", "lawyer", "baker", "driver", "painter", "gardener", "cook"]
YEARS = [str(year) for year in range(1970, 1990)]
CHAIN_MARKS = ("first", "second")
ASIDE = "aside"

Search = tuple[str, str]
"""What one document states and one search asks for: ``("Karo Venner", "mentor")``."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain of a question: the searches that answer it, in order, and what they lead to.

    Example: ``Chain(searches=(("Karo Venner", "mentor"), ("Lita Bosdal", "born")), year="1987")``
    is asked for as ``Karo Venner mentor born``.
    """

    searches: tuple[Search, ...]
    year: str

    def rest(self, found: int) -> str:
        """What remains to be asked once ``found`` facts are known; the year when nothing does."""
        if found == len(self.searches):
            return self.year
        relations = " ".join(relation for _, relation in self.searches[found:])
        return f"{self.searches[found][0]} {relations}"


@dataclass(frozen=True, slots=True)
class Solution:
    """What one demonstration thinks, searches and answers.

    A thought holds a note of the fact just found, if it helps, and then a plan::

        Solution(
            turns=(
                ("second Lita Bosdal rival", ("Lita Bosdal", "rival")),
                ("second Karo Zedkin wed . first Domi Wornal mentor", ("Domi Wornal", "mentor")),
            ),
            conclusion="first 1987 second 1954",
            years=("1987", "1954"),
        )
    """

    turns: tuple[tuple[str, Search], ...]
    conclusion: str
    years: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """How well the demonstrations are made.

    Attributes:
        noise: probability that a search is an aside, for a random fact about a known entity.
        slip: probability, per year, that the answer states another year than the one found.
        hurry: probability, per turn, of answering before all facts are found.
        max_turns: turns at most, the answer included.
    """

    noise: float
    slip: float
    hurry: float
    max_turns: int


def kb_phrases(writing: SearchWriting) -> tuple[str, ...]:
    """Strings of the transcript that a toy tokenizer makes one token each."""
    years = (f" {year}" for year in YEARS)
    answer = ("<answer>", "</answer>")
    return ("<think>", "</think>", *writing.phrases, *answer, 'Doc 1(Title: "', *years)


def make_kb(
    directory: Path,
    *,
    writing: SearchWriting,
    seed: int = 0,
    num_train: int = 4000,
    num_heldout: int = 400,
    num_demonstrations: int = 8000,
    num_entities: int = 1020,
    num_chains: int = 2,
    hops: int = 2,
    num_distractors: int = 0,
    noise: float = 0.25,
    slip: float = 0.18,
    hurry: float = 0.06,
    max_turns: int = 8,
) -> None:
    """Write a world: ``train.jsonl heldout.jsonl demonstrations.jsonl corpus.jsonl index/``.

    The same arguments give the same files. Each task's metadata holds ``gold_documents``, the ids
    of the documents on its chains. Demonstrations solve training questions only.

    Args:
        directory: where the files go; made where missing.
        writing: the dialect of the demonstrations, as the rollout writes it.
        seed: of all random choices.
        num_train: training questions, all different.
        num_heldout: held-out questions, about entities that no training question or fact names.
        num_demonstrations: demonstrations; more than one may solve the same question.
        num_entities: entities, a sixth of them held out.
        num_chains: 1 or 2 chains a question.
        hops: documents on each chain, at least 1.
        num_distractors: further relations, at most 8, which are in the corpus and in noisy
            searches, but in no question.
        noise: see ``Demonstrator``, as for ``slip`` and ``hurry``.
        slip: see ``noise``.
        hurry: see ``noise``.
        max_turns: turns of a demonstration at most, the answer included.

    Raises:
        ConfigError: a number out of its range, or more questions than there are.
        DataError: a file cannot be written.
    """
    _check(num_entities, num_chains, hops, num_distractors, max_turns)
    rng = random.Random(f"kb {seed}")
    train_names, heldout_names = draw_names(rng, num_entities)
    relations = (*RELATIONS, *DISTRACTORS[:num_distractors])
    facts = _draw_facts(rng, train_names, relations) | _draw_facts(rng, heldout_names, relations)
    ids = _write_corpus(directory, facts)

    train = _draw_questions(rng, train_names, facts, num_train, num_chains, hops)
    heldout = _draw_questions(rng, heldout_names, facts, num_heldout, num_chains, hops)
    write_tasks(directory / "train.jsonl", _tasks("kb-train", train, ids))
    write_tasks(directory / "heldout.jsonl", _tasks("kb-heldout", heldout, ids))

    demonstrator = Demonstrator(noise, slip, hurry, max_turns)
    solved = [rng.choice(train) for _ in range(num_demonstrations)]
    solutions = [_demonstrate(rng, chains, facts, relations, demonstrator) for chains in solved]
    demonstrations = _demonstrations(solved, solutions, writing, directory / "index")
    write_demonstrations(directory / "demonstrations.jsonl", demonstrations)


def _check(
    num_entities: int, num_chains: int, hops: int, num_distractors: int, max_turns: int
) -> None:
    if not 60 <= num_entities <= MOST_NAMES:
        raise ConfigError(
            f"kb world: num_entities must be in [60, {MOST_NAMES}], found {num_entities}"
        )
    if num_chains not in (1, 2):
        raise ConfigError(f"kb world: num_chains must be 1 or 2, found {num_chains}")
    fewest = num_entities // 6  # held-out ones; a question names each at most once
    if not 1 <= hops <= fewest // num_chains:
        raise ConfigError(
            f"kb world: hops must be in [1, {fewest // num_chains}] with num_entities "
            f"{num_entities} and num_chains {num_chains}, found {hops}"
        )
    if not 0 <= num_distractors <= len(DISTRACTORS):
        raise ConfigError(
            f"kb world: num_distractors must be in [0, {len(DISTRACTORS)}], found {num_distractors}"
        )
    if max_turns < 2:
        raise ConfigError(f"kb world: max_turns must be at least 2, found {max_turns}")


def _draw_facts(
    rng: random.Random, names: Sequence[str], relations: Sequence[str]
) -> dict[Search, str]:
    """All facts of some entities; relations lead from one of them to another one of them."""
    facts: dict[Search, str] = {}
    for name in names:
        for relation in relations:
            facts[name, relation] = another_name(rng, names, name)
        for attribute in ATTRIBUTES:
            facts[name, attribute] = rng.choice(YEARS)
    return facts


def _write_corpus(directory: Path, facts: Mapping[Search, str]) -> dict[Search, str]:
    """A document for each fact, and their index; returns the documents' ids."""
    ids = {fact: str(row) for row, fact in enumerate(facts)}
    write_rows(directory / "corpus.jsonl", _corpus(facts, ids))
    build_bm25(directory / "corpus.jsonl", directory / "index")
    return ids


def _corpus(facts: Mapping[Search, str], ids: Mapping[Search, str]) -> Iterator[dict[str, str]]:
    """The subject stands twice in a document and the object once: BM25 tells them apart."""
    for (subject, relation), value in facts.items():
        contents = f'"{subject}"\n{subject} {relation} : {value}'
        yield {"id": ids[subject, relation], "contents": contents}


def _draw_questions(
    rng: random.Random,
    names: Sequence[str],
    facts: Mapping[Search, str],
    num_questions: int,
    num_chains: int,
    hops: int,
) -> list[tuple[Chain, ...]]:
    """Different questions, whose chains have no entity and no year in common."""
    questions: dict[str, tuple[Chain, ...]] = {}
    for _ in range(20 * num_questions):
        if len(questions) == num_questions:
            return list(questions.values())
        chains = tuple(_draw_chain(rng, names, facts, hops) for _ in range(num_chains))
        entities = [entity for chain in chains for entity, _ in chain.searches]
        years = {chain.year for chain in chains}
        if len(set(entities)) == len(entities) and len(years) == num_chains:
            questions[_question(chains)] = chains
    raise ConfigError(
        f"kb world: {len(names)} entities do not give {num_questions} different questions; "
        "set fewer questions or hops, or more num_entities"
    )


def _draw_chain(
    rng: random.Random, names: Sequence[str], facts: Mapping[Search, str], hops: int
) -> Chain:
    entity = rng.choice(names)
    searches: list[Search] = []
    for _ in range(hops - 1):
        searches.append((entity, rng.choice(RELATIONS)))
        entity = facts[searches[-1]]
    searches.append((entity, rng.choice(ATTRIBUTES)))
    return Chain(tuple(searches), facts[searches[-1]])


def _question(chains: Sequence[Chain]) -> str:
    marked = zip(CHAIN_MARKS, chains, strict=False)
    return "when: " + " , ".join(f"{mark} {chain.rest(0)}" for mark, chain in marked)


def _tasks(
    prefix: str, questions: Sequence[tuple[Chain, ...]], ids: Mapping[Search, str]
) -> Iterator[Task]:
    for row, chains in enumerate(questions):
        metadata: dict[str, Any] = {
            "world": "kb",
            "hops": len(chains[0].searches),
            "gold_documents": [ids[search] for chain in chains for search in chain.searches],
        }
        answer = " ".join(chain.year for chain in chains)
        yield Task(f"{prefix}-{row}", _question(chains), (answer,), metadata)


def _demonstrate(
    rng: random.Random,
    chains: Sequence[Chain],
    facts: Mapping[Search, str],
    relations: Sequence[str],
    demonstrator: Demonstrator,
) -> Solution:
    found = [0] * len(chains)
    turns: list[tuple[str, Search]] = []
    note = ""
    while len(turns) < demonstrator.max_turns - 1 and rng.random() >= demonstrator.hurry:
        open_chains = [row for row, chain in enumerate(chains) if found[row] < len(chain.searches)]
        if not open_chains:
            break
        row = rng.choice(open_chains)
        chain, mark = chains[row], CHAIN_MARKS[row]
        search = chain.searches[found[row]]
        aside = rng.random() < demonstrator.noise
        if aside:
            entity, _ = rng.choice(chain.searches[: found[row] + 1])
            search = (entity, rng.choice((*relations, *ATTRIBUTES)))
        turns.append((f"{note}{ASIDE if aside else mark} {' '.join(search)}", search))
        found[row] += not aside
        note = "" if aside else f"{mark} {chain.rest(found[row])} . "
    years = tuple(
        chain.year
        if found[row] == len(chain.searches) and rng.random() >= demonstrator.slip
        else rng.choice(YEARS)
        for row, chain in enumerate(chains)
    )
    conclusion = " ".join(f"{mark} {year}" for mark, year in zip(CHAIN_MARKS, years, strict=False))
    return Solution(tuple(turns), note + conclusion, years)


def _demonstrations(
    questions: Sequence[tuple[Chain, ...]],
    solutions: Sequence[Solution],
    writing: SearchWriting,
    index: Path,
) -> Iterator[Demonstration]:
    """Each solution of its question, with what the searches find in an index."""
    observe = _observations(index, solutions, writing)
    return (
        _demonstration(f"kb-demonstration-{row}", chains, solution, writing, observe)
        for row, (chains, solution) in enumerate(zip(questions, solutions, strict=True))
    )


def _observations(
    index: Path,
    solutions: Sequence[Solution],
    writing: SearchWriting,
) -> dict[Search, Piece]:
    """What the agent reads after each search that some demonstration makes."""
    searches = sorted({search for solution in solutions for _, search in solution.turns})
    found = Bm25Retriever(index).search([" ".join(search) for search in searches], topk=1)
    for (subject, relation), documents in zip(searches, found, strict=True):
        if not documents[0].text.startswith(f"{subject} {relation} :"):
            raise DataError(f"{index}: '{subject} {relation}' finds {documents[0].contents!r}")
    return {
        search: writing.write_observation(" ".join(search), documents)
        for search, documents in zip(searches, found, strict=True)
    }


def _demonstration(
    identifier: str,
    chains: Sequence[Chain],
    solution: Solution,
    writing: SearchWriting,
    observe: Mapping[Search, Piece],
) -> Demonstration:
    pieces: list[Piece] = []
    for thought, search in solution.turns:
        text = f"<think> {thought}</think>{writing.write_search(' '.join(search))}"
        pieces += [Piece(text, trained=True), observe[search]]
    text = f"<think> {solution.conclusion}</think><answer> {' '.join(solution.years)}</answer>"
    pieces.append(Piece(text, trained=True))
    messages = ({"role": "user", "content": _question(chains)},)
    return Demonstration(identifier, messages, tuple(pieces), ends=False)
