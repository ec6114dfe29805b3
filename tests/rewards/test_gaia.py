import pytest

from graphpo_agent.rewards.gaia import gaia_equals, gaia_match
from graphpo_agent.types import Outcome, Task


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1234", "$ 1,234", True),
        ("17", "17.0", True),
        ("17", "17 %", True),
        ("17", "17 km", False),
        ("17", "seventeen", False),
        ("0.5", ".50", True),
        ("0.333", "0.3333", False),
        ("inf", "whatever", True),  # the leaderboard's own peculiarity
        ("Ada, 3", "ada;3.0", True),
        ("Ada, 3", "ada", False),
        ("Ada, 3", "3, Ada", False),
        ("Mr. Ada, 3", "Mr Ada, 3", False),  # punctuation counts in lists
        ("1,000", "1000", False),
        ("1,000", "1, 0", True),
        ("Mr. Ada Byron", "mr adabyron!", True),
        ("Ada", "the Ada", False),
        ("café", "cafe", False),
    ],
)
def test_the_leaderboard_s_rule(gold, answer, equal):
    assert gaia_equals(answer, gold) is equal


def test_the_reward_reads_the_marked_answer_and_takes_any_accepted_one():
    task = Task("t", "q", ("17", "Ada"))
    assert gaia_match(task, Outcome("17", answer="ADA")) == 1.0
    assert gaia_match(task, Outcome("17", answer="18")) == 0.0
    assert gaia_match(task, Outcome("17")) == 0.0
