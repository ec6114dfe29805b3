"""The toy world *reach* (segment mode): arithmetic paths to a number.

``from 7 to 23 with +3 *2 -4`` is answered by ``+3 = 10 ; *2 = 20 ; +3 = 23``: any number of lines,
each applying one of the offered operations to the number so far, until the target is reached. All
numbers lie in ``[0, limit)``. Many orders of the operations reach the same number. No pair of start
and target of the held-out split is in training.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

from graphpo_agent.data.tasks import write_demonstrations, write_tasks
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import Demonstration, Piece, Task

__all__ = ["REACH_OPERATIONS", "make_reach", "reach_phrases"]

REACH_OPERATIONS = ("+1", "+3", "+5", "-2", "-4", "*2")


def reach_phrases(limit: int = 30) -> tuple[str, ...]:
    """Operations and numbers, which a toy tokenizer makes one token each, so a line has four."""
    return (
        *(f" {operation}" for operation in REACH_OPERATIONS),
        *(f" {number}" for number in range(limit)),
    )


@dataclass(frozen=True, slots=True)
class Question:
    """One path to be found.

    Example: ``Question(start=7, target=23, operations=("*2", "+3", "-4"), distance=3)``: 23 is
    three operations away from 7.
    """

    start: int
    target: int
    operations: tuple[str, ...]
    distance: int

    @property
    def text(self) -> str:
        """How the task words it."""
        return f"from {self.start} to {self.target} with {' '.join(self.operations)}"


@dataclass(frozen=True, slots=True)
class Walker:
    """How well the demonstrations are made.

    Attributes:
        skill: probability that a line brings the number nearer to the target on purpose; other
            lines apply any operation that stays in range.
        slip: probability that a line states a result that is wrong by one.
        hurry: probability that a line is the last one though the target is not reached.
        max_lines: lines at most.
    """

    skill: float
    slip: float
    hurry: float
    max_lines: int


def make_reach(
    directory: Path,
    *,
    seed: int = 0,
    num_train: int = 4000,
    num_heldout: int = 400,
    num_demonstrations: int = 20000,
    limit: int = 30,
    num_operations: int = 3,
    min_distance: int = 4,
    max_distance: int = 6,
    skill: float = 0.5,
    slip: float = 0.03,
    hurry: float = 0.03,
    max_lines: int = 8,
) -> None:
    """Write a world: ``train.jsonl heldout.jsonl demonstrations.jsonl``.

    The same arguments give the same files. Demonstrations solve training questions only.

    Args:
        directory: where the files go; made where missing.
        seed: of all random choices.
        num_train: training questions, all different.
        num_heldout: held-out questions; no training question has a start and target of theirs.
        num_demonstrations: demonstrations; more than one may solve the same question.
        limit: numbers are below it.
        num_operations: operations that a question offers, out of the six.
        min_distance: lines that a question needs at least.
        max_distance: lines that suffice for every question.
        skill: see ``Walker``, as for ``slip`` and ``hurry``.
        slip: see ``skill``.
        hurry: see ``skill``.
        max_lines: lines of a demonstration at most.

    Raises:
        ConfigError: a number out of its range, or more questions than there are.
        DataError: a file cannot be written.
    """
    _check(limit, num_operations, min_distance, max_distance, max_lines)
    rng = random.Random(f"reach {seed}")
    questions = _all_questions(limit, num_operations, min_distance, max_distance)
    heldout_pairs = _draw_pairs(rng, questions)
    train = _draw(
        rng, [q for q in questions if (q.start, q.target) not in heldout_pairs], num_train
    )
    heldout = _draw(
        rng, [q for q in questions if (q.start, q.target) in heldout_pairs], num_heldout
    )
    write_tasks(directory / "train.jsonl", _tasks("reach-train", train, limit))
    write_tasks(directory / "heldout.jsonl", _tasks("reach-heldout", heldout, limit))
    walker = Walker(skill, slip, hurry, max_lines)
    write_demonstrations(
        directory / "demonstrations.jsonl",
        (
            _demonstration(f"reach-demonstration-{row}", rng, rng.choice(train), limit, walker)
            for row in range(num_demonstrations)
        ),
    )


def _check(
    limit: int, num_operations: int, min_distance: int, max_distance: int, max_lines: int
) -> None:
    if limit < 10:
        raise ConfigError(f"reach world: limit must be at least 10, found {limit}")
    if not 1 <= num_operations <= len(REACH_OPERATIONS):
        raise ConfigError(
            f"reach world: num_operations must be in [1, {len(REACH_OPERATIONS)}], "
            f"found {num_operations}"
        )
    if not 1 <= min_distance <= max_distance <= max_lines:
        raise ConfigError(
            "reach world: needs 1 <= min_distance <= max_distance <= max_lines, found "
            f"{min_distance}, {max_distance}, {max_lines}"
        )


def apply_operation(number: int, operation: str, limit: int) -> int | None:
    """The result, or None where it leaves ``[0, limit)``.

    Example: ``apply_operation(7, "*2", 30)`` is 14, ``apply_operation(3, "-4", 30)`` is None.
    """
    operand = int(operation[1:])
    result = {"+": number + operand, "-": number - operand, "*": number * operand}[operation[0]]
    return result if 0 <= result < limit else None


def _moves(number: int, operations: Sequence[str], limit: int) -> list[tuple[str, int]]:
    """The operations that stay in range, each with its result."""
    results = ((operation, apply_operation(number, operation, limit)) for operation in operations)
    return [(operation, result) for operation, result in results if result is not None]


@cache
def _distances(start: int, operations: tuple[str, ...], limit: int) -> dict[int, int]:
    """Lines that each reachable number needs from ``start`` at least (breadth first)."""
    distances = {start: 0}
    queue = [start]
    for number in queue:
        for _, result in _moves(number, operations, limit):
            if result not in distances:
                distances[result] = distances[number] + 1
                queue.append(result)
    return distances


def _all_questions(
    limit: int, num_operations: int, min_distance: int, max_distance: int
) -> list[Question]:
    return [
        Question(start, target, operations, distance)
        for operations in combinations(REACH_OPERATIONS, num_operations)
        for start in range(limit)
        for target, distance in _distances(start, operations, limit).items()
        if min_distance <= distance <= max_distance
    ]


def _draw_pairs(rng: random.Random, questions: Sequence[Question]) -> set[tuple[int, int]]:
    """A fifth of the pairs of start and target: those of the held-out split."""
    pairs = sorted({(question.start, question.target) for question in questions})
    return set(rng.sample(pairs, len(pairs) // 5))


def _draw(rng: random.Random, questions: Sequence[Question], count: int) -> list[Question]:
    if count > len(questions):
        raise ConfigError(
            f"reach world: there are {len(questions)} questions of these distances in this split, "
            f"not {count}; set fewer, or a larger limit or range of distances"
        )
    return rng.sample(questions, count)


def _tasks(prefix: str, questions: Sequence[Question], limit: int) -> Iterator[Task]:
    for row, question in enumerate(questions):
        metadata = {
            "world": "reach",
            "start": question.start,
            "target": question.target,
            "operations": list(question.operations),
            "limit": limit,
            "distance": question.distance,
        }
        yield Task(f"{prefix}-{row}", question.text, (str(question.target),), metadata)


def _demonstration(
    identifier: str, rng: random.Random, question: Question, limit: int, walker: Walker
) -> Demonstration:
    text = " ;".join(_walk(rng, question, limit, walker))
    messages = ({"role": "user", "content": question.text},)
    return Demonstration(identifier, messages, (Piece(text, trained=True),), ends=True)


def _walk(rng: random.Random, question: Question, limit: int, walker: Walker) -> Iterator[str]:
    """The lines of one demonstration; the number it goes on from is the one that it stated."""
    number = question.start
    for _ in range(walker.max_lines):
        moves = _moves(number, question.operations, limit)
        if not moves:
            return
        nearer = [move for move in moves if _is_nearer(move[1], number, question, limit)]
        operation, number = rng.choice(nearer if nearer and rng.random() < walker.skill else moves)
        if rng.random() < walker.slip:
            number = min(limit - 1, max(0, number + rng.choice((-1, 1))))
        yield f" {operation} = {number}"
        if number == question.target or rng.random() < walker.hurry:
            return


def _is_nearer(result: int, number: int, question: Question, limit: int) -> bool:
    """Whether ``result`` is nearer to the target than ``number``."""
    far = limit
    before = _distances(number, question.operations, limit).get(question.target, far)
    return _distances(result, question.operations, limit).get(question.target, far) < before
