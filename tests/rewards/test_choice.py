import pytest

from graphpo_agent.errors import DataError
from graphpo_agent.rewards.choice import ChoiceReward, chosen_letter
from graphpo_agent.types import Outcome, Task


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("C. 5 mol", "C"),
        ("Answer: C", "C"),
        ("ANSWER: E)", "E"),
        ("**Answer: (C) 5 mol**", "C"),
        ("Answer: B because of it", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("The final answer is $\\boxed{\\mathrm{D}}$", "D"),
        ("\\boxed{B) 10^{-4} eV}", "B"),
        ("The correct answer is **C. 5 mol**.", "C"),
        ("So the answer is (B).", "B"),
        ("Option D is correct.", "D"),
        ("The correct option is C: 10 eV\nas I said", "C"),
        ("thus, the best choice would be B because it is.", "B"),
        ("The answer is (A). Wait, the answer is (B).", "B"),
        ("The answer is (A).\n\nAnswer: D", "D"),
        ("Therefore:\n\n**B**", "B"),
        ("<think>Answer: A</think>The answer is B.", "B"),
        ("Answer: A proton", None),
        ("Answer: Beta", None),
        ("Answer: 5 mol", None),
        ("The answer is a mixture", None),
        ("A beta decay happens.", None),
        ("I think so", None),
        ("A) 1\nB) 2", None),
        ("<think>The answer is B.</think>", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_ends_with(response: str, letter: str | None) -> None:
    assert chosen_letter(response) == letter


def test_the_reward_is_of_the_marked_answer_where_there_is_one() -> None:
    reward, task = ChoiceReward(), Task("a", "How many?\n\nA) 1\nB) 2", ("B",))
    assert reward(task, Outcome("The answer is (B).")) == 1.0
    assert reward(task, Outcome("The answer is (B).", "A")) == 0.0
    assert reward(task, Outcome("Neither.")) == 0.0
    assert reward.counts == {"choice/unanswered": 1}
    with pytest.raises(DataError, match="no answer"):
        reward(Task("a", "How many?", ()), Outcome("B"))


@pytest.mark.parametrize(
    "text",
    [
        "answer is" + " " * 10**6,
        "answer is (" * 10**5 + "*" * 10**6,
        "answer" + " a" * 10**6,
        "answer is A" + " *" * 10**6 + "x",
        "option \\text{" * 10**5,
    ],
)
def test_hostile_responses_take_time_in_proportion(text: str) -> None:
    assert chosen_letter(text) is None  # hours where it takes the square
