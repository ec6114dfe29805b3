"""The public data sets that become tasks: how the rows of each are read, and what holds of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphpo_agent.data import (
    asearcher,
    benchmarks,
    gpqa,
    livecodebench,
    math,
    search_r1,
    webdancer,
)
from graphpo_agent.data.files import Row
from graphpo_agent.data.source import SourceRow, text_field

__all__ = ["SOURCES", "Source"]


def _evaluation_question(place: str, row: Row) -> str:
    if "question_content" in row:
        return livecodebench.find_question(place, row)
    name = benchmarks.question_field(row)
    if name is None or (name == "prompt" and not isinstance(row[name], str)):
        return search_r1.find_question(place, row)
    return text_field(place, benchmarks.decrypted(place, row), name)


def _mathematical_question(place: str, row: Row) -> str:
    return math.find_question(place, benchmarks.decrypted(place, row))


@dataclass(frozen=True, slots=True)
class Source:
    """One KIND of ``graphpo data prepare``. Its functions take a row and its place, for errors.

    Example: ``SOURCES["math"].read_row("math.jsonl, row 1", {"problem": "2 + 2?", "answer": "4"})``
    is ``SourceRow("2 + 2?", ("4",))``.
    """

    read_row: Callable[[str, Row], SourceRow]
    find_question: Callable[[str, Row], str] = _evaluation_question
    """The question of a row of an evaluation file, whose questions are not to be trained on."""
    asked: Callable[[str], str] = str
    """The part of a question by which another file asks the same one."""
    one_answer: bool = False
    """Rows that answer a question differently contradict each other; else all answers count."""
    for_agents: bool = True
    """Search agents answer the questions, and trainers of search agents have a format for them."""


SOURCES: Mapping[str, Source] = {
    "search-r1": Source(search_r1.read_row),
    "asearcher": Source(asearcher.read_row),
    "webdancer": Source(webdancer.read_row),
    "math": Source(math.read_row, _mathematical_question, one_answer=True, for_agents=False),
    "gpqa": Source(gpqa.read_row, asked=gpqa.without_choices, one_answer=True, for_agents=False),
    "livecodebench": Source(livecodebench.read_row, for_agents=False),
    "benchmark": Source(benchmarks.read_row),
}
