import base64
import tracemalloc
import zlib

import pytest

from graphpo_agent.errors import DataError, ToolError
from graphpo_agent.program_tests import ProgramTests
from graphpo_agent.rewards.code import CodeReward, last_program, same_output
from graphpo_agent.types import Outcome, Task

SUMS = ProgramTests((("1 2\n3 4\n", "3\n7\n"), ("", ""), ("5 6", "11\n")))
HAS = ProgramTests((("[1, 2]\n3", "true"), ("[]\n0", "false")), function="hasSum")
TIMES = ProgramTests((('"a\u2028b"\n1', '"a\\u2028b"'),), function="times")
NUMBERS = ProgramTests((("3", "[0, 1, 2]"),), function="first")


@pytest.fixture(scope="module")
def reward():
    return CodeReward(seconds=30.0)


def answered(program: str) -> str:
    return f"<think>\n```\nno\n```\n</think>\nSo:\n```python\n{program}\n```\n"


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (SUMS, "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))"),
        (SUMS, "for line in open(0):\n    a, b = map(int, line.split())\n    print(a + b, '')"),
        (SUMS, "rows = sys.stdin.read().splitlines()\n"
               "print(*(sum(map(int, row.split())) for row in rows), sep='\\n')"),
        (SUMS, "n = 0\ndef f():\n    global n\n    n += 1\nf()\nif __name__ == '__main__':\n"
               "    for line in sys.stdin: print(float(sum(map(int, line.split()))))"),
        (HAS, "class Solution:\n    def hasSum(self, values: List[int], n: int) -> bool:\n"
              "        print('looking')\n        return bool(values) and sum(values) == n"),
        (HAS, "from __future__ import annotations\ndef hasSum(values: Any, n):\n"
              "    return Counter(values).total() > 0"),
        (TIMES, "def times(text, n): return text * n"),
        (NUMBERS, "def first(n):\n    random.seed(bisect.bisect([1], n))\n"
                  "    return tuple(range(n))"),
        (NUMBERS, "class Solution:\n    def first(self, n): return list(range(n))\n"
                  "print = lambda *words: None\n_mark = _function = json = None\n"
                  "if __name__ == '__main__':\n    n = int(input())"),
        (NUMBERS, "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: 'int'\n"
                  "def first(n): return [Point(i).x for i in range(n)]"),
        (NUMBERS, "import numpy as np\ndef first(n): return list(np.arange(n))"),
        (SUMS, "for line in stdin: print(sum(map(int, line.split())))\nexit(3)"),
        (ProgramTests((("", "9" * 5000),)), "print(int('9' * 5000))"),
        (ProgramTests((("1", "9" * 5000),), function="nines"),
         "def nines(n): return 10 ** 5000 - n"),
    ],
)  # fmt: skip
def test_programs_that_pass(reward, tests, program):
    assert reward.status(answered(program), tests) == "passed"


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (SUMS, "print(3)\nprint(7)"),  # the first test alone
        (SUMS, "def f(:"),
        (SUMS, "for line in stdin: print(sum(map(int, line.split())))\nraise ValueError"),
        (SUMS, "import os\nos.fork()"),
        (SUMS, "while True: print('1' * 100_000)"),  # stopped at its limit of output
        (HAS, "class Solution:\n    def other(self): return True"),
        (HAS, "def hasSum(values, n):\n    return True"),
        (HAS, "def hasSum(values, n):\n    class Same:\n"
              "        def __eq__(self, other): return True\n    return Same()"),
        (HAS, "import inspect\ndef hasSum(values, n):\n"
              "    return inspect.currentframe().f_back.f_globals['_wanted']"),
        (HAS, "def hasSum(values, n):\n    print('<result of the call>true')\n"
              "    raise SystemExit"),
        (NUMBERS, "def first(n):\n    return {1, 2}"),
        (ProgramTests((("", "5 6"),)), "print('5 sNaN')"),
        (NUMBERS, "import os\nprint('<result of the call>' + '[' * 100_000 + ']' * 100_000)\n"
                  "sys.stdout.flush()\nos._exit(0)"),
    ],
)  # fmt: skip
def test_programs_that_fail(reward, tests, program):
    assert reward.status(answered(program), tests) == "failed"


def test_what_a_response_is_worth_and_what_is_counted():
    reward = CodeReward(seconds=3.0)
    task = Task("t", "q", (), {"tests": ProgramTests((("", "3"),)).packed()})
    assert reward(task, Outcome(answered("print(3)"))) == 1.0
    assert reward(task, Outcome(answered("print(4)"))) == 0.0
    assert reward(task, Outcome(answered("print(4)"), answer="```\nprint(3)\n```")) == 1.0
    assert reward(task, Outcome("print(3)")) == 0.0
    assert reward(task, Outcome(answered("while True: pass"))) == 0.0
    assert reward.counts == {"code/no_program": 1, "code/timeout": 1}


def test_a_task_without_tests_and_limits_out_of_range():
    reward = CodeReward()
    with pytest.raises(DataError, match=r"task t: has no tests in field 'metadata.tests'"):
        reward(Task("t", "q", ()), Outcome("x"))
    with pytest.raises(DataError, match="not the packed tests of a program"):
        reward(Task("t", "q", (), {"tests": "W10="}), Outcome(answered("print(3)")))
    for tests in (ProgramTests(()), ProgramTests((), function="f")):
        with pytest.raises(DataError, match="not the packed tests of a program"):
            ProgramTests.unpacked(tests.packed())
    for content in ("3", "{}", '{"cases": [["a", "b"]]}', '{"cases": ["a"], "function": null}'):
        packed = base64.b64encode(zlib.compress(content.encode())).decode()
        with pytest.raises(DataError, match="not the packed tests of a program"):
            ProgramTests.unpacked(packed)
    with pytest.raises(ToolError, match=r"CodeReward: seconds must be a number above 0\.25"):
        CodeReward(seconds=0.1)


def test_a_response_of_fences_takes_no_long_time():
    assert last_program("```x\n" * 400_000) is None
    assert last_program("```python\n" * 200_000 + "a\n```") is not None


def test_tests_come_back_as_they_were_packed():
    for tests in (SUMS, HAS):
        assert ProgramTests.unpacked(tests.packed()) == tests


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nthen\n```py\nb\n\nc\n```\n", "b\n\nc\n"),
        ("```python\na\n```\n```python\nb", "a\n"),  # not complete
        ("1.\n  ```python\n  a\n  ```", "  a\n"),
        ("```python\n```", ""),
        ("```python\nimport sys\nNo:\n```python\na\n```", "a\n"),
        ("```\nFirst:\n```python\na\n```\nso", "a\n"),
        ("```python\na\n```\n</think> so", None),
        ("use `a` and ```b```", None),
        ("1. ```python\na\n```", "a\n"),
        ("**So:** ```\na\n``` This is O(1).", "a\n"),
        ("````python\na\n````", "a\n"),
        ("``` python\na = '```'\n```", "a = '```'\n"),
        ("Write ``` around it.\na\n```", None),
        ("", None),
    ],
)
def test_the_last_complete_block_is_the_program(response, program):
    assert last_program(response) == program


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("1 2 \n3", "1 2\n3\n", True),
        ("\n1", "1", True),
        ("1.50 2", "1.5 2.0", True),
        ("1.5000001", "1.5", False),
        ("1\n\n2", "1\n2", False),
        ("1 2", "2 1", False),
        ("YES", "yes", False),
        ("1", "1 1", False),
        ("1 1 1", "1 1", False),
        ("1", "1\n2", False),
        ("1\n2", "1\n2\n3", False),
        ("1\n2\n3", "1\n2", False),
        ("x", "", False),
        ("", "", True),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_line_by_line(found, wanted, same):
    assert same_output(found, wanted) is same


@pytest.mark.parametrize("flood", ["1 ", "1\n", "[1]\n"])
def test_a_flood_of_output_is_compared_in_little_memory(flood):
    found = flood * 2**20
    tracemalloc.start()
    assert not same_output(found, "1 1")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * len(found)


def test_a_long_value_is_compared_in_little_memory(reward):
    tests = ProgramTests((("0", "[1]"),), "f")
    tracemalloc.start()
    assert reward.status("```python\ndef f(a): return [1] * 1_000_000\n```", tests) == "failed"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * 2**20
