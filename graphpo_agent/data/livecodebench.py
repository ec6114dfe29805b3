"""LiveCodeBench: problems with tests, as ``code_generation_lite`` has them.

A row has ``question_content``, ``starter_code`` (empty: the program reads and prints),
``public_test_cases`` and ``private_test_cases``, lists of ``{"input", "output", "testtype"}`` as
JSON, the private ones perhaps compressed and pickled, and ``metadata``, JSON with ``func_name``.
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from datetime import date
from typing import Any

from graphpo_agent.data.source import SourceRow, first_of, text_field
from graphpo_agent.errors import DataError
from graphpo_agent.program_tests import ProgramTests

__all__ = ["find_question", "read_row"]

_TESTS = ("public_test_cases", "private_test_cases")
_FIELDS = ("input", "output", "testtype")
_MOST_BYTES = 2**30
_UNREADABLE = (
    *(ValueError, TypeError, AttributeError, LookupError, RecursionError, MemoryError, EOFError),
    *(OverflowError, zlib.error, pickle.UnpicklingError),
)
"""What wrong data make of decoding, decompressing and unpickling."""
_KEPT = {"difficulty": "level", "contest_date": "contest_date"}
_PROGRAM = (
    "Write a Python program that reads the input from standard input and prints the output, and "
    "nothing else."
)
_FUNCTION = "Complete this Python code:"
_FORM = "End with the whole program in one block that begins with ```python."


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One problem; all its tests are in ``metadata["tests"]`` (``ProgramTests.packed``).

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    tests = [test for name in _TESTS for test in _tests(place, row, name)]
    if not tests:
        raise DataError(f"{place}: holds no tests")
    called = {test["testtype"] for test in tests} == {"functional"}
    described = _json(place, row, "metadata") if called else None
    function = described.get("func_name") if isinstance(described, dict) else None
    if called and not isinstance(function, str):
        raise DataError(f"{place}: field 'metadata' must have func_name, as its tests call it")
    packed = ProgramTests(tuple((t["input"], t["output"]) for t in tests), function).packed()
    kept = {new: _text(row[name]) for name, new in _KEPT.items() if name in row}
    return SourceRow(
        question=find_question(place, row),
        answers=(),
        source=first_of(row, "platform"),
        source_id=first_of(row, "question_id"),
        metadata={**kept, "tests": packed},
    )


def find_question(place: str, row: Mapping[str, Any]) -> str:
    """The problem of a row and what is to be written, as ``read_row`` asks it.

    Raises:
        DataError: there is none.
    """
    starter = str(row.get("starter_code", "")).rstrip()
    asked = f"{_FUNCTION}\n\n```python\n{starter}\n```" if starter else _PROGRAM
    return "\n\n".join((text_field(place, row, "question_content"), asked, _FORM))


def _text(value: Any) -> str:
    """A date as its files of JSON have it, also where a column of times holds it."""
    return value.isoformat() if isinstance(value, date) else str(value)


def _tests(place: str, row: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    found = _json(place, row, name)
    for test in found if isinstance(found, list) else [None]:
        texts = [test.get(each) for each in _FIELDS] if isinstance(test, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{place}: field '{name}' must be a list of tests with input, output and testtype"
            )
    return found


def _json(place: str, row: Mapping[str, Any], name: str) -> Any:
    text = text_field(place, row, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_unpickled(base64.b64decode(text, validate=True)))
    except _UNREADABLE as error:
        raise DataError(f"{place}: field '{name}' cannot be read ({error})") from None


class _TextOnly(pickle.Unpickler):
    """Builds nothing that would need a class or a function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module_name}.{global_name}")


def _unpickled(data: bytes) -> Any:
    """A text that was pickled and compressed; nothing in it is run."""
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(data, _MOST_BYTES)
    if decompressor.unconsumed_tail:
        raise ValueError("more than 1 GiB")
    return _TextOnly(io.BytesIO(content)).load()
