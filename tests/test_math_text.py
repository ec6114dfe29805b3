import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.math_text import final_answer, last_boxed


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{34}.", "34"),
        (r"First \boxed{4}, then finally \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} and then \boxed{7", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"} \boxed {3} {", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{ }", ""),
        ("Answer: 34", "34"),
        ("so\n**Answer:** $34$", "$34$"),
        ("## Final Answer: **34**", "34"),
        ("The final answer is: 34", "34"),
        ("Answer:\n\n  34  ", "34"),
        ("answer：34", "34"),
        (r"Answer: \boxed{34}", "34"),
        ("\\boxed{43}\nAnswer: 34", "34"),
        ("Answer: 43\nno, \\boxed{34}", "34"),
        ("Answer: 1\nAnswer: 2", "2"),
        (r"\boxed{1}</think>Answer: 2", "2"),
        (r"<think>\boxed{1}</think>I do not know.", None),
        ("Answer: 1</think>", None),
        ("I got the right answer: it took long", None),  # not where a line begins
        ("the answers: 3", None),
        ("Answer 34", None),
        ("Answer:\n\\[\n34\n\\]\n", "34"),
        ("Answer:\n$$\n34\n$$", "34"),
        ("Answer: \\(34\\)", "\\(34\\)"),
        ("\\boxed{5}\nAnswer: \\boxed{", "5"),
        (r"so $\boxed 2$.", "2"),
        (r"so $\boxed5$.", "5"),
        (r"\boxed{4} goes into \boxed and then", "4"),
        ("", None),
    ],
)
def test_where_a_response_states_its_answer(response, answer):
    assert final_answer(response) == answer


@given(
    st.text(st.sampled_from("ab{}\\ \n"), max_size=40), st.text(st.sampled_from("ab 1"), min_size=1)
)
def test_whatever_stands_before_the_last_box_is_the_answer_found(before, answer):
    text = before.rstrip("\\") + r"\boxed{" + answer + "}"
    assert last_boxed(text) == answer.strip()


@given(st.text(st.sampled_from("a{}\\"), max_size=30))
def test_the_content_of_a_box_is_balanced(inside):
    found = last_boxed(r"\boxed{" + inside + "}")
    if found is not None:
        bare = found.replace(r"\\", "").replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}")


def test_long_responses_take_no_long_time():
    assert last_boxed(r"\boxed{" * 200_000) is None
    assert last_boxed("{" * 200_000 + r"\boxed{5}") == "5"
    assert final_answer("answer " * 100_000) is None
    assert final_answer(" \t" * 200_000 + "\nAnswer: 5") == "5"
