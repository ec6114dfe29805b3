import doctest
from types import ModuleType

import pytest

from graphpo_agent.report import charts, console, drawing, layout, numbers, plots, run_files


@pytest.mark.parametrize("module", [charts, console, drawing, layout, numbers, plots, run_files])
def test_the_examples_in_docstrings_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
