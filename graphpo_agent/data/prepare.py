"""``graphpo data prepare``: public data files become tasks and demonstrations of this project."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from graphpo_agent.data.files import Row, read_data_file
from graphpo_agent.data.gpqa import without_choices
from graphpo_agent.data.source import SourceRow, Trajectory
from graphpo_agent.data.sources import SOURCES, Source
from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.math_notation import as_number, plain
from graphpo_agent.types import Demonstration, Message, Task

__all__ = ["Prepared", "Summary", "overlap_key", "prepare", "task_id"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of the rows: ``rows == tasks + repeated + sum(dropped) + sum(overlaps)``.

    Example::

        Summary(rows=10, tasks=6, repeated=1, dropped={"unanswerable": 2},
                overlaps={"gaia.jsonl": 1}, demonstrations=0)

    Attributes:
        rows: rows read.
        tasks: tasks made of them.
        repeated: rows whose question an earlier row asks; their answers are among its task's.
        dropped: rows left out, by reason: ``unanswerable``, ``no answer``, what their reader says,
            ``answers that contradict each other`` (of ``math`` and ``gpqa`` only).
        overlaps: rows left out because an evaluation file asks their question, by file; a
            question that several files ask is counted at the first.
        demonstrations: recorded trajectories of the tasks.
    """

    rows: int
    tasks: int
    repeated: int
    dropped: Mapping[str, int]
    overlaps: Mapping[str, int]
    demonstrations: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tasks, in the order of the files, the demonstrations, and what became of the rows.

    Attributes:
        prompts: by task id, those of the rows that came with one, for policies that write tags.
        tool_prompts: the same, for policies that call tools.
    """

    tasks: tuple[Task, ...]
    demonstrations: tuple[Demonstration, ...]
    summary: Summary
    prompts: Mapping[str, tuple[Message, ...]]
    tool_prompts: Mapping[str, tuple[Message, ...]]


def task_id(question: str) -> str:
    """An id that two rows share only if they ask the same question, word for word.

    White space and the mark at the end do not count; everything else does, upper and lower case
    too.

    Example: ``task_id("Who is Karo  Venn?")`` is ``task_id("Who is Karo Venn ")``.
    """
    words = " ".join(question.split())
    asked = words.rstrip("?？.。 ") or words
    return f"q-{hashlib.sha256(asked.encode()).hexdigest()[:20]}"


def overlap_key(question: str) -> str:
    """The form in which a training question is looked for among evaluation questions.

    Its letters and digits in compatible lower case forms, one space between runs of them; a
    question without any is left as it is.

    Example: ``overlap_key("Who's  “Karo Venn”?")`` is ``"who s karo venn"``.
    """
    folded = unicodedata.normalize("NFKC", question).casefold()
    return " ".join(re.findall(r"\w+", folded)) or question.strip()


def prepare(
    kind: str,
    files: Sequence[Path],
    *,
    exclude: Sequence[Path] = (),
    keep_unanswerable: bool = False,
    progress: bool = False,
) -> Prepared:
    """Read the files of one source as one data set.

    A task's metadata has ``source``, ``source_id`` and ``aug_answers`` where the first row that
    asks its question has them (aliases of all rows), ``unanswerable`` where kept on request, and
    ``level`` and ``canary`` of rows that have them. Rows that ask one question add their answers to
    each other's, but for ``math`` and ``gpqa``, where rows that answer a question differently are
    left out.

    Args:
        kind: a name of ``SOURCES``.
        files: JSON lines, JSON arrays, CSV or parquet.
        exclude: evaluation files, of the same kinds, with the question in one of the fields
            ``question``, ``Question``, ``problem``, ``query`` and ``prompt``, or as in
            Search-R1's and LiveCodeBench's files or, for ``math``, in files of mathematics. One
            with GPQA's choices below it is excluded without them, too.
        keep_unanswerable: keep the rows that are unanswerable by design, marked in the metadata.
        progress: show a bar where the output is a terminal.

    Raises:
        ConfigError: another kind.
        DataError: with file, row and field, for a row that cannot be used; or nothing is left.
    """
    if kind not in SOURCES:
        raise ConfigError(f"data prepare: {kind!r} is none of {', '.join(SOURCES)}")
    source = SOURCES[kind]
    excluded = _excluded_questions(exclude, source)
    tally = _Tally()
    entries: dict[str, _Entry] = {}
    for row in _source_rows(source.read_row, files, progress):
        tally.rows += 1
        overlap = excluded.get(overlap_key(source.asked(row.question))) if excluded else None
        if overlap is not None:
            tally.overlaps[overlap] += 1
        elif row.left_out is not None:
            tally.dropped[row.left_out] += 1
        elif row.unanswerable and not keep_unanswerable:
            tally.dropped["unanswerable"] += 1
        elif not (row.answers or row.unanswerable or "tests" in row.metadata):
            tally.dropped["no answer"] += 1
        else:
            identifier = task_id(row.question)
            entries.setdefault(identifier, _Entry(identifier, row)).add(row)
    if source.one_answer:
        for entry in [entry for entry in entries.values() if entry.contradicts]:
            tally.dropped["answers that contradict each other"] += entry.rows
            del entries[entry.identifier]
    tally.repeated = sum(entry.rows - 1 for entry in entries.values())
    if not entries:
        raise DataError(f"{', '.join(map(str, files))}: no task is left of {tally.rows_left_out()}")
    return _prepared(list(entries.values()), tally, exclude)


def _source_rows(
    read_row: Callable[[str, Row], SourceRow], files: Sequence[Path], progress: bool
) -> Iterator[SourceRow]:
    with tqdm(unit="row", disable=None if progress else True) as bar:
        for path in files:
            for place, row in read_data_file(path):
                yield read_row(place, row)
                bar.update()


def _excluded_questions(files: Iterable[Path], source: Source) -> dict[str, str]:
    """Overlap key → the first evaluation file that asks it."""
    found: dict[str, str] = {}
    for path in files:
        questions = [source.find_question(place, row) for place, row in read_data_file(path)]
        if not questions:
            raise DataError(f"{path}: holds no questions to exclude")
        for question in questions:
            for asked in (question, without_choices(question)):
                found.setdefault(overlap_key(asked), str(path))
    return found


class _Tally:
    """Counts of what became of the rows so far."""

    def __init__(self) -> None:
        self.rows = 0
        self.repeated = 0
        self.dropped: Counter[str] = Counter()
        self.overlaps: Counter[str] = Counter()

    def rows_left_out(self) -> str:
        """``8 rows (7 no answer, 1 asked in gaia.jsonl)``."""
        reasons = [f"{count} {reason}" for reason, count in self.dropped.items()]
        reasons += [f"{count} asked in {file}" for file, count in self.overlaps.items()]
        return f"{self.rows} rows" + (f" ({', '.join(reasons)})" if reasons else "")


class _Entry:
    """One question and all rows that ask it."""

    def __init__(self, identifier: str, first: SourceRow) -> None:
        self.identifier = identifier
        self.first = first
        self.rows = 0
        self.contradicts = False
        self.answers: dict[str, None] = {}
        self.aug_answers: dict[str, None] = {}
        self.unanswerable = True
        self.trajectories: list[Trajectory] = []

    def add(self, row: SourceRow) -> None:
        self.rows += 1
        self.contradicts |= _differ(row.answers, self.first.answers)
        self.answers |= dict.fromkeys(row.answers)
        self.aug_answers |= dict.fromkeys(row.aug_answers)
        self.unanswerable &= row.unanswerable
        if row.trajectory is not None:
            self.trajectories.append(row.trajectory)

    def task(self) -> Task:
        metadata: dict[str, Any] = {
            "source": self.first.source,
            "source_id": self.first.source_id,
            "aug_answers": list(self.aug_answers),
            "unanswerable": self.unanswerable,
        }
        told = {name: value for name, value in metadata.items() if value}
        told.update(self.first.metadata)
        return Task(self.identifier, self.first.question, tuple(self.answers), told)

    def demonstrations(self) -> Iterator[Demonstration]:
        for number, trajectory in enumerate(self.trajectories, start=1):
            identifier = f"{self.identifier}-{number}"
            yield Demonstration(identifier, trajectory.messages, trajectory.pieces)


def _differ(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether not the same answers are given, as numbers or else in one notation."""
    return set(some) != set(others) and set(map(_meant, some)) != set(map(_meant, others))


def _meant(answer: str) -> Fraction | str:
    text = plain(answer)
    value = as_number(text)
    return "".join(text.split()) if value is None else value


def _prepared(entries: Sequence[_Entry], tally: _Tally, exclude: Sequence[Path]) -> Prepared:
    demonstrations = tuple(one for entry in entries for one in entry.demonstrations())
    summary = Summary(
        rows=tally.rows,
        tasks=len(entries),
        repeated=tally.repeated,
        dropped=dict(tally.dropped),
        overlaps={str(path): tally.overlaps[str(path)] for path in exclude},
        demonstrations=len(demonstrations),
    )
    asked = {tools: _prompts(entries, tools) for tools in (False, True)}
    tasks = tuple(entry.task() for entry in entries)
    return Prepared(tasks, demonstrations, summary, asked[False], asked[True])


def _prompts(entries: Iterable[_Entry], tools: bool) -> dict[str, tuple[Message, ...]]:
    firsts = ((entry.identifier, entry.first) for entry in entries)
    return {
        name: row.prompt for name, row in firsts if row.prompt and row.prompt_has_tools == tools
    }
