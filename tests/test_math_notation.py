from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.math_notation import as_number, plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("025", Fraction(25)),
        ("1,234.5", Fraction(2469, 2)),
        (r"-\frac12", Fraction(-1, 2)),
        (r"\tfrac{1}2", Fraction(1, 2)),
        ("31/2", Fraction(31, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"-3\ 1/2", Fraction(-7, 2)),
        (r"4\dfrac{2}{3}", Fraction(14, 3)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r".\overline{3}", Fraction(1, 3)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        ("34。", Fraction(34)),
        (r"-2.\bar{12}", Fraction(-70, 33)),
        (r"75\%", Fraction(3, 4)),
        (r"33\frac13\%", Fraction(1, 3)),
        (r"25\% \text{ increase}", Fraction(1, 4)),
        ("1/0", None),
        (r"\frac{1}{2}3", None),
        ("3 4", None),
        ("52_8", None),
        ("2x", None),
        ("", None),
    ],
)
def test_the_number_that_an_answer_is(text, value):
    assert as_number(plain(text)) == value


@given(st.text(st.sampled_from("5a$,.% ()/\\_{}="), max_size=30))
def test_the_notation_is_total_and_its_own_form(text):
    assert as_number(plain(text)) is None or as_number(plain(plain(text))) == as_number(plain(text))


@pytest.mark.parametrize("part", [r"\text{((", " (", "$", "1 ", r"\frac", "0.", "5%", "**$"])
def test_long_texts_take_no_long_time(part):
    assert plain(part * (512 // len(part))) is not None
