import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import DataError
from graphpo_agent.rewards.dapo_math import DapoMathReward, dapo_answer, dapo_equal
from graphpo_agent.types import Outcome, Task

PARTS = (
    *("Answer:", "answer :", "ANSWER: ", " ", "\n", "$", "\\boxed{", "}", "{", "34", "1,234"),
    *("x = ", "=", "\\text{and}", "\\text{", "an ", "a ", "square", "km", "\\frac", "12", "\\sqrt"),
    *("3", "^\\circ", "\\ ", ".$", "\\$", "{,}", '"', "[INVALID]", "\\overline{", "\\textbf{"),
    *(",", "\\ldots", "\\text{}^2", "mbox", "\\mathrm{th}", "x" * 90, "²", "\\dots", "5", "units"),
)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=9).map("".join)
GOLDS = st.sampled_from(["34", "1234", "\\frac{1}{2}", "[INVALID]", "5", "\\sqrt{3}", "12"]) | TEXTS


@pytest.mark.parametrize(
    ("response", "gold", "equal"),
    [
        ("So\nAnswer: 34", "34", True),
        ("answer :\n\n$34$", "34", True),
        ("Answer: $x = 1,234$ dollars", "1234", True),
        ("Answer: 4 = 5", "5", True),
        ("Answer: \\frac12", "\\frac{1}{2}", True),
        ("Answer: 90^\\circ", "90", True),
        ("Answer: 5\nAnswer: 34", "34", True),
        ("Answer: 34\nAnswer: 5", "34", False),
        ("Answer: 34.0", "34", False),
        ("Answer: 034", "34", False),
        ("**Answer:** 34", "34", False),
        ("Answer: 34" + " " * 300, "34", False),  # further than 300 characters from the end
        ("Answer: 34" + " " * 280, "34", True),
        ("It is 34", "34", False),
        ("", "[INVALID]", True),
    ],
)
def test_the_last_line_that_says_answer_is_compared_letter_by_letter(
    response: str, gold: str, equal: bool
) -> None:
    assert dapo_equal(response, (gold,), "0.9.0") == equal
    assert dapo_equal(response, (gold,), "0.9.1") == equal


def test_a_box_counts_from_0_9_1_on_and_only_without_a_line() -> None:
    assert not dapo_equal("\\boxed{34}", ("34",), "0.9.0")
    assert dapo_equal("\\boxed{3} \\boxed{\\frac{1}{2}}.", ("7", "\\frac{1}{2}"), "0.9.1")
    assert not dapo_equal("\\boxed{ 34}", ("34",), "0.9.1")  # nothing is taken away
    assert not dapo_equal("\\boxed{34}" + "." * 95, ("34",), "0.9.1")
    assert not dapo_equal("Answer: 5 \\boxed{34}", ("34",), "0.9.1")
    assert dapo_answer("\\boxed{34} \\boxed{", "0.9.1") is None
    assert dapo_answer("\\boxed{34}", "0.9.0") is None


def test_the_reward_is_1_or_0_for_any_accepted_answer() -> None:
    task = Task("a", "2 + 2?", ("5", "4"))
    assert DapoMathReward()(task, Outcome("Answer: $4$")) == 1.0
    assert DapoMathReward()(task, Outcome("\\boxed{4}")) == 0.0
    assert DapoMathReward(verl_version="0.9.1")(task, Outcome("\\boxed{4}")) == 1.0
    with pytest.raises(DataError, match="no answer"):
        DapoMathReward()(Task("a", "2 + 2?", ()), Outcome("Answer: 4"))


@pytest.mark.verl
@settings(max_examples=3000)
@given(TEXTS, GOLDS)
def test_verl_says_the_same(response: str, gold: str) -> None:
    from verl.utils.reward_score.math_dapo import compute_score, is_correct_minerva

    said, answer = compute_score(response, gold), dapo_answer(response, "0.9.1")
    assert dapo_equal(response, (gold,), "0.9.1") == said["acc"]
    assert ("[INVALID]" if answer is None else answer) == said["pred"]
    said, answer = is_correct_minerva(response[-300:], gold), dapo_answer(response, "0.9.0")
    assert dapo_equal(response, (gold,), "0.9.0") == said[0]  # all there was in 0.9.0
    assert ("[INVALID]" if answer is None else answer) == said[1]
