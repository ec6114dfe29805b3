import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(
    file.relative_to(ROOT).with_suffix("")
    for package in ("graphpo_agent", "tools", "retrievers")
    for file in (ROOT / package).rglob("*.py")
    if "\n    >>> " in file.read_text("utf-8")
)


@pytest.mark.parametrize("file", EXAMPLES, ids=str)
def test_the_examples_in_docstrings_hold(file: Path) -> None:
    result = doctest.testmod(import_module(".".join(file.parts)))
    assert result.attempted and not result.failed
