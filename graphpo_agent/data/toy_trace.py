"""The toy world *trace* (segment mode): a long computation in which every line is decisive.

``from 7 : +1 *2 -2`` is answered by ``+1 = 8 ; *2 = 16 ; -2 = 14``: the operations of the question
in its order, one a line, each with its result; numbers wrap around at ``limit``. The demonstrator
has a bad habit: on ``-2`` and ``*3`` it states the same wrong result more often than the right one,
so that the likeliest response is wrong too. There is one way to a right answer, and it is long.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphpo_agent.data.tasks import write_demonstrations, write_tasks
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import Demonstration, Piece, Task

__all__ = ["TRACE_OPERATIONS", "apply_wrapped", "make_trace", "trace_phrases"]

TRACE_OPERATIONS = ("+1", "+3", "+7", "-2", "*2", "*3")
HABITS = {"-2": 1, "*3": 3}
"""By how much the habit misses the right result of an operation."""
SLIPS = (-1, 1, 2)


def trace_phrases(limit: int = 20) -> tuple[str, ...]:
    """Operations and numbers, which a toy tokenizer makes one token each, so a line has four."""
    return (
        *(f" {operation}" for operation in TRACE_OPERATIONS),
        *(f" {number}" for number in range(limit)),
    )


@dataclass(frozen=True, slots=True)
class Question:
    """One computation to be made.

    Example: ``Question(start=7, operations=("+1", "*2", "-2"))``, whose result is 14.
    """

    start: int
    operations: tuple[str, ...]

    @property
    def text(self) -> str:
        """How the task words it."""
        return f"from {self.start} : {' '.join(self.operations)}"


def make_trace(
    directory: Path,
    *,
    seed: int = 0,
    num_train: int = 4000,
    num_heldout: int = 400,
    num_demonstrations: int = 20000,
    limit: int = 20,
    num_lines: int = 16,
    habit: float = 0.55,
    slip: float = 0.03,
) -> None:
    """Write a world: ``train.jsonl heldout.jsonl demonstrations.jsonl``.

    The same arguments give the same files. Demonstrations solve training questions only.

    Args:
        directory: where the files go; made where missing.
        seed: of all random choices.
        num_train: training questions, all different.
        num_heldout: held-out questions, none of them in training.
        num_demonstrations: demonstrations; more than one may solve the same question.
        limit: numbers are below it and wrap around.
        num_lines: operations of a question.
        habit: probability that a line with ``-2`` states one too many, one with ``*3`` three.
        slip: probability that any other line states a result that is wrong by 1 or 2.

    Raises:
        ConfigError: a number out of its range, or more questions than there are.
        DataError: a file cannot be written.
    """
    _check(limit, num_lines)
    rng = random.Random(f"trace {seed}")
    questions = _draw(rng, num_train + num_heldout, limit, num_lines)
    train, heldout = questions[:num_train], questions[num_train:]
    write_tasks(directory / "train.jsonl", _tasks("trace-train", train, limit))
    write_tasks(directory / "heldout.jsonl", _tasks("trace-heldout", heldout, limit))
    write_demonstrations(
        directory / "demonstrations.jsonl",
        (
            _demonstration(f"trace-demonstration-{row}", rng, rng.choice(train), limit, habit, slip)
            for row in range(num_demonstrations)
        ),
    )


def _check(limit: int, num_lines: int) -> None:
    if not 10 <= limit <= 1000:
        raise ConfigError(f"trace world: limit must be in [10, 1000], found {limit}")
    if num_lines < 1:
        raise ConfigError(f"trace world: num_lines must be at least 1, found {num_lines}")


def apply_wrapped(number: int, operation: str, limit: int) -> int:
    """The result, wrapped around at ``limit``.

    Example: ``apply_wrapped(8, "*3", 20)`` is 4, ``apply_wrapped(1, "-2", 20)`` is 19.
    """
    operand = int(operation[1:])
    results = {"+": number + operand, "-": number - operand, "*": number * operand}
    return results[operation[0]] % limit


def _draw(rng: random.Random, count: int, limit: int, num_lines: int) -> list[Question]:
    """Different questions."""
    questions: dict[Question, None] = {}
    for _ in range(20 * count):
        if len(questions) == count:
            return list(questions)
        operations = tuple(rng.choice(TRACE_OPERATIONS) for _ in range(num_lines))
        questions[Question(rng.randrange(limit), operations)] = None
    raise ConfigError(
        f"trace world: {num_lines} lines do not give {count} different questions; "
        "set fewer questions or more num_lines"
    )


def _tasks(prefix: str, questions: Sequence[Question], limit: int) -> Iterator[Task]:
    for row, question in enumerate(questions):
        result = question.start
        for operation in question.operations:
            result = apply_wrapped(result, operation, limit)
        metadata = {
            "world": "trace",
            "start": question.start,
            "operations": list(question.operations),
            "limit": limit,
        }
        yield Task(f"{prefix}-{row}", question.text, (str(result),), metadata)


def _demonstration(
    identifier: str, rng: random.Random, question: Question, limit: int, habit: float, slip: float
) -> Demonstration:
    number = question.start
    lines: list[str] = []
    for operation in question.operations:
        number = (
            apply_wrapped(number, operation, limit) + _miss(rng, operation, habit, slip)
        ) % limit
        lines.append(f" {operation} = {number}")
    messages = ({"role": "user", "content": question.text},)
    return Demonstration(identifier, messages, (Piece(" ;".join(lines), trained=True),), ends=True)


def _miss(rng: random.Random, operation: str, habit: float, slip: float) -> int:
    """By how much the result that the demonstrator states is wrong."""
    if operation in HABITS and rng.random() < habit:
        return HABITS[operation]
    return rng.choice(SLIPS) if rng.random() < slip else 0
