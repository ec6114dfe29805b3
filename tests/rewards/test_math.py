import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError, DataError, ToolError
from graphpo_agent.named import callable_of, check_constructible
from graphpo_agent.rewards.math import MathReward, MathVerdict
from graphpo_agent.types import Outcome, Task

HEDGES = r"""
$5$ or 6
$5$, 6
6, $5$
$5$; 6
not $5$ but 6
$5$ and 6
$5$ (or 6)
$5$ 6
$5$ = 6
5 (or 6)
5 (and 6)
5 | 6
5=6
x=5=6
1=2=3=4=5=6
5...6
5 6
5...
5(6)
5, 6
5 & 6
5 or more
5 \mid 6
5 \\ 6
5 \lor 6
5 \to 6
5 \sim 6
5 \% 6
5 \approx 6
5 ≈ 6
5\text{ (or 6)}
5\text{ or 6}
5 \implies 6
5 \pm 1
5 \neq 6
5k, k \in \mathbb{Z}
5\ldots
5 \ldots 6
5 \text{ for } n=6
5 if n=6
6\text{ or less}
5 maybe 6
x = 5 6
5 ' 6
5 _ 6
x = 5 \approx 6
x = 5 \lor x = 6
x = 5 | x = 6
x = 5 \not= 6
x = 5 := 6
5 = x = 6
5 \equiv 6
"""
ENDLESS = "9^{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def reward():
    return MathReward(seconds=60.0)


def task(*golds):
    return Task("t", "q", golds)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("34", "34"),
        ("34", "$34$."),
        ("34", "34.0"),
        ("025", "25"),
        ("-3", "\u22123"),
        ("1234", "1,234"),
        ("1{,}234", r"1\,234"),
        ("6", r"\$6"),
        ("34", "x = 34"),
        ("34", r"34\text{ units}"),
        ("90", r"90^\circ"),
        ("10000000", "10^{7}"),
        ("3/4", r"\frac{3}{4}"),
        ("0.75", r"\dfrac{3}{4}"),
        (r"-\frac{3}{4}", "-.75"),
        (r"\frac12", ".5"),
        (r"\frac{14}{3}", r"4\frac{2}{3}"),
        (r"11\sqrt2", r"\sqrt{242}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("2x+3", "y=2x+3"),
        (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\{1,2\}", "2, 1"),
        ("[0,1)", "[0, 1)"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{TFT}", "TFT"),
        (r"\text{June 20}", "June 20"),
        (r"10\text{:}30", "10:30"),
        ("12, 144", "12,144"),
        ("1,100", "1, 100"),
        (r"2\sqrt{3}", "2√3"),
        (r"(1,\sqrt{3})", "(1, √3)"),
        (r"\sqrt{x}", "√(x)"),
        ("x^2+1", "x² + 1"),
        ("x^3+1", "x³ + 1"),
        ("-34", "\u201334"),
        (r"(0,\infty)", "(0, ∞)"),
        (r"\text{(B)}", "B"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"10,\!080", "10080"),
        (r"11,\! 111,\! 111,\! 100", "11{,}111{,}111{,}100"),
        ("10080", r"10\text{,}080"),
        ("5", r"4\frac{2}{2}"),
        ("3.5", r"3\frac{1}{2}"),
        ("3,4", r"\(3\), \(4\)"),
        (r"\{3,4\}", "$3$ and $4$"),
        ("34", "the value is $34$"),
        (r"\(\sqrt{12}\)", r"\[2\sqrt{3}\]"),
        ("5", "the answer is 5"),
        ("5", "f(2) = 2 + 3 = 5"),
        ("55", r"\sum_{i=1}^{10} i = 10 + 45 = 55"),
        (r"\frac12", r"P(A|B) = \frac24 = \frac12"),
        (r"\frac12", r"P(X=3) = \frac24 = \frac12"),
        ("2", "e = 2"),
        ("5", r"5 \\"),
        ("30", "2 (3 + 12)"),
        (r"\sqrt{2}", r"\sqrt{2} \approx 1.41"),
        ("7, 8", "7 or 8"),
        ("55", r"\sum_{i=1}^{10} i"),
        (r"\frac{\pi^2}{6}", r"\sum_{n=1}^{\infty} \frac{1}{n^2}"),
        (r"\sqrt{6}+\sqrt{2}", r"2\sqrt{2+\sqrt{3}}"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{4^{49}}"),
        ("x+0.5", r"x+\frac12"),
        (r"(4\frac23, 1)", "(4 2/3, 1)"),
        ("(1,2)", "1,2"),
        (r"\{(1,2),(3,4)\}", "(1,2),(3,4)"),
        (r"(2,3)\cup\{1\}", r"\{1\}\cup(2,3)"),
        (r"1-\frac{1}{e}", r"1-\frac{1}{\mathrm{e}}"),
        ("52_8", "x = 52_{8}"),
        ("17", "17_{10}"),
        ("5", r"x = 5\%"),
        ("no", r"\text{No}"),
        (r"\text{no solution}", "No solution"),
        ("0.75", r"P = \frac{3}{4} = 0.75"),
        ("0.75", r"P(A) = 1 - \frac{1}{4} = 0.75"),
        (r"\frac{4}{5}", "4/5 = 0.8"),
        (r"\{0.5,0.25\}", r"x=\frac12=0.5,x=\frac14=0.25"),
        ("(1,2)", "y = 2, x = 1"),
        (r"(2,\sqrt{3})", r"n = \sqrt{3} \text{ and } m = 2"),
        ("4", "= 4"),
        (r"\frac35", r"P(\text{red}) = \frac{3}{5}"),
        ("5", r"5\ \mathrm{mol}\,\mathrm{L}^{-1}"),
        ("x^2+3", r"x^{2}\text{ }+3"),
        ("5,6", r"5 \text{ and } 6"),
        ("18", "x = 2(9) = 18"),
        ("6", r"A = \frac{1}{2}(3)(4) = 6"),
        (r"\frac{10}{3}", r"\frac{2(5)}{3}"),
        ("-3", "(-1)(3)"),
        ("2.5", r"2\frac12"),
        (r"\frac{14}{3}", r"\left(4\tfrac23\right)"),
        ("1", r"2(\frac{1}{2})"),
        ("6", r"2\binom{3}{1}"),
        (r"10\pi", r"2(5)\pi"),
        ("60", "60°"),
        ("60°", r"60\degree"),
        (r"60^\circ", "60^{o}"),
        ("60", "5 · 12 = 60"),
        ("x^{14}", "x¹⁴"),
        ("3.5", "3½"),
        (r"\emptyset", r"\varnothing"),
        (r"\{1,2\}", r"\left\lbrace 1,2\right\rbrace"),
        ("(1,2)", r"\bigl(1,2\bigr)"),
        ("7", "**7**."),
        ("7", "`7`"),
        ("5", "5 dollars"),
        ("18", "18 dollars per day"),
        ("1,200", "1,200 people"),
        ("5", r"\text{5 triangles}"),
    ],
)
def test_equal_answers(reward, gold, answer):
    assert reward.verdict(answer, (gold,)) == MathVerdict("correct", answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\text{TFT}", "TTF"),
        ("34", "35"),
        ("34", "3 4"),
        ("34", "-34"),
        ("11", r"11\sqrt2"),
        ("3", "$3$ and $4$"),
        ("7", "7 or 8"),
        ("1", "1, 2"),
        (r"\frac12", "12"),
        ("1/3", "0.33"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "[0,1]"),
        (r"\text{Evelyn}", "Bob"),
        ("x^2", "x^3"),
        ("5", "((((" * 500 + "5" + "))))" * 500),
        ("5", "}{"),
        ("14", r"4\frac{2}{3}"),
        ("1/23", r"\frac{1}{2}3"),
        ("3", r"\(3\) or \(4\)"),
        ("4", r"$3$; $4$"),
        ("1080", r"(1,\,080)"),
        ("0.3333333", "1/3"),
        (r"x+\frac13", "x+0.333333333333333333"),
        (r"\frac{\pi}{3}", r"0.333333333333333333\pi"),
        (r"(x,\frac13)", "(x,0.333333333333333333)"),
        (r"\sqrt2", "1.4142135623730950488"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        (r"\frac{1}{2^{98}}", "10^{-20}"),
        (r"\frac{1}{2^{98}}", "0"),
        ("0.3", r"0.\overline{3}"),
        ("31/2", "3 1/2"),
        ("3 1/2", "31/2"),
        ("east", "seat"),
        ("no", "on"),
        (r"\text{no solution}", "on solution"),
        (r"\{1,2\}", "(1,2)"),
        ("(1,2)", r"\left\{1,2\right\}"),
        (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
        (r"1-\frac{1}{\mathrm{x}}", r"1-\frac{1}{\mathrm{y}}"),
        ("52", "52_8"),
        ("52_8", "52"),
        ("52_8", "52_9"),
        ("1, 2", r"1, 2, \ldots"),
        ("0.76", r"P = \frac{3}{4} = 0.76"),
        ("0.75", r"\frac{3}{4} = 0.76"),
        ("(1,2)", "y = 1, x = 2"),
        ("(2,3)", "x = 1, x = 2, y = 3"),
        (r"\{1,4\}", "x = 4, y = 1"),
        (r"\frac35", r"P(\text{red}) = \frac{3}{5} = 0.7"),
        ("3", r"3\text{ hours }20\text{ minutes}"),
        ("3", r"3\,\mathrm{h}\,20\,\mathrm{min}"),
        ("5", r"5 \text{ cm} + 6 \text{ cm}"),
        ("5", r"5\text{, 6}"),
        ("5", r"5 \mathrm{~or~} \sqrt{6}"),
        ("5", r"5 \textbf{ or } \sqrt{6}"),
        ("6", r"5 \to x = 6"),
        ("5", "(2)(3)"),
        ("9", "V = (2)(3)(4)"),
        ("6", "2(3)+1"),
        ("2.5", r"2(\frac{1}{2})"),
        ("7", r"2 \text{ } 5"),
        ("5", r"5\pi"),
        ("5", "5 dozen"),
        ("5", "5 squared"),
        ("5", "5 books or more"),
        ("5", "5 theta"),
        ("2", "2 abc"),
    ],
)
def test_different_answers(reward, gold, answer):
    assert reward.verdict(answer, (gold,)) == MathVerdict("incorrect", answer)


@pytest.mark.parametrize(
    ("answer", "gold", "in_the_words"),
    [
        ("$12$ apples (3 boxes of 4)", "12", "4"),
        ("$5$ (for n = 3)", "5", "3"),
        ("$5$ (6 is too large)", "5", "6"),
        ("$x = 5$, since 6 is not prime", "5", "6"),
        ("$34$ in 2024", "34", "2024"),
        ("$C$ (choice 3)", "C", "3"),
        ("**$18$** dollars per day for 9 eggs", "18", "9"),
        ("It is $5$!", "5", "120"),
        ("If n = 3 then it is $x = 5$.", "5", "3"),
        ("-$5$", "-5", "5"),
        ("5 (n=3)", "5", "3"),
        ("17 (a prime)", "17", "1"),
        ("x = 5 (rejecting x = -2)", "5", "-2"),
        (r"5 \quad (n = 3)", "5", "3"),
        (r"5\text{ (for }n=3)", "5", "3"),
        (r"25\% (n = 3)", "0.25", "3"),
    ],
)
def test_words_beside_an_answer_are_no_answer(reward, answer, gold, in_the_words):
    assert reward.verdict(answer, (gold,)).status == "correct"
    assert reward.verdict(answer, (in_the_words,)).status == "incorrect"


@pytest.mark.parametrize("hedge", HEDGES.strip().split("\n"))
def test_a_hedge_is_right_for_no_number(reward, hedge):
    for gold in ("5", "6", "11"):
        assert reward.verdict(hedge, (gold,)).status == "incorrect", gold


@pytest.mark.parametrize(
    "percent", ["20%", r"20\%", r"x = 20\%", "20 percent", r"20\text{ percent}", "$20$%"]
)
def test_a_percent_sign_is_a_hundredth_or_does_not_count(reward, percent):
    for other in ("20", "0.2", r"\frac15", r"20\%", r"x = 20"):
        assert reward.verdict(percent, (other,)).status == "correct", other
        assert reward.verdict(other, (percent,)).status == "correct", other
    for other in ("2000%", "0.2%", "2", "0.002"):
        assert reward.verdict(percent, (other,)).status == "incorrect", other
        assert reward.verdict(other, (percent,)).status == "incorrect", other


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"3\text{ million}", "3,000,000"),
        ("$3$ Million", r"3\cdot 10^6"),
        (r"1.5\mathrm{ billion}", "1500000000"),
        (r"\$2.5\text{ trillion dollars}", r"2.5 \times 10^{12}"),
        (r"\frac{1}{2} \text{ thousand}", "500"),
    ],
)
def test_millions_are_part_of_the_number(reward, written, value):
    for gold, answer in ((written, value), (value, written)):
        assert reward.verdict(answer, (gold,)).status == "correct"
    for bare in ("3", "1.5", "2.5", "0.5"):
        assert reward.verdict(written, (bare,)).status == "incorrect"
        assert reward.verdict(bare, (written,)).status == "incorrect"


def test_a_word_that_begins_like_a_million_is_a_unit(reward):
    assert reward.verdict("3 millionaires", ("3000000",)).status == "incorrect"


whole = st.integers(-(10**6), 10**6)


@given(whole, st.integers(1, 40), st.integers(-2, 2))
def test_numbers_are_compared_exactly_however_they_are_written(n, d, slip):
    told = MathReward()  # starts no process: an expression that needs one would fail below
    told._pool = None  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    forms = [f"{n}", f" ${n:+}$", f"{n:,}.", f"{n}.00", f"{n * d}/{d}"]
    if n > 0:
        forms += [f"{n - 1} {d}/{d}", f"{n - 1}.\\overline{{9}}"]
    forms.append(f"{'-' if n < 0 else ''}\\frac{{{abs(n) * d}}}{{{d}}}")
    status = "incorrect" if slip else "correct"
    for form in forms:
        assert told.verdict(form, (f"{n + slip}",)).status == status


@pytest.mark.parametrize(
    ("hack", "worth"),
    [
        ("10^{40}+0.5-10^{40}", r"\frac{1}{2}"),
        ("10^{20}-10^{20.0}", "0"),
        ("0.1+10^{20}-10^{20}", "0.1"),
        (r"10^{40}\pi-10^{40}\pi\cdot 1.0", "0"),
        ("10^{400}-10^{400}", "0"),
        (r"\{10^{40}-10.0^{40},10^{40}-10.0^{40}+1\}", r"\{0,1\}"),
    ],
)
def test_no_answer_equals_every_number(reward, hack, worth):
    for gold in (
        "5",
        "-3",
        "999",
        "34",
        r"\frac{7}{3}",
        "0.75",
        "12.34",
        r"\frac{\pi}{4}",
        "(1,2)",
    ):
        assert reward.verdict(hack, (gold,)).status == "incorrect", gold
    assert reward.verdict(hack, (worth,)).status == "correct"


def test_any_accepted_answer_will_do_and_what_is_missing_is_no_answer(reward):
    assert reward(task("3", "4"), Outcome(r"\boxed{4}")) == 1.0
    assert reward(task("3", "4"), Outcome(r"\boxed{5}")) == 0.0
    before = dict(reward.counts)
    assert reward(task("4"), Outcome("four")) == 0.0
    assert reward(task("4"), Outcome(r"\boxed{}")) == 0.0
    assert reward.counts == {**before, "math/unanswered": before["math/unanswered"] + 2}
    with pytest.raises(DataError, match="task t: has no answer to compare with"):
        reward(task(), Outcome("4"))


def test_an_agent_s_marked_answer_counts_alone(reward):
    assert reward(task("4"), Outcome(r"\boxed{4}", answer="5")) == 0.0
    assert reward(task("4"), Outcome(r"\boxed{5}", answer=" 4 ")) == 1.0
    assert reward(task("4"), Outcome(r"\boxed{5}", answer=r"it is \boxed{4}, not 5")) == 1.0


def test_an_endless_answer_is_given_up_while_others_are_judged():
    reward = MathReward(seconds=3.0, processes=2)
    reward.verdict("x", ("2x",))  # the process is there
    found = []
    thread = threading.Thread(
        target=lambda: found.append(reward(task("5"), Outcome(rf"\boxed{{{ENDLESS}}}")))
    )
    thread.start()
    meanwhile = 0
    while thread.is_alive():
        assert reward(task(r"2\sqrt{3}"), Outcome(r"\boxed{\sqrt{12}}")) == 1.0
        meanwhile += 1
    thread.join()
    assert found == [0.0] and meanwhile > 0
    assert reward.counts == {"math/unanswered": 0, "math/timeout": 1}
    assert reward.verdict(ENDLESS, ("5", ENDLESS)).status == "correct"  # the same words


def test_it_is_named_in_a_configuration_and_its_limits_are_checked():
    spec = {"class": "graphpo_agent.rewards.math:MathReward", "seconds": 2.5}
    assert callable_of(spec, "task", "outcome")(task("4"), Outcome("Answer: 4")) == 1.0
    for wrong in ({"seconds": 0}, {"processes": 0}, {"timeout": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            check_constructible({**spec, **wrong})
    with pytest.raises(ToolError, match="MathReward: seconds must be a number above 0"):
        MathReward(seconds=0)


@pytest.mark.verl
@settings(deadline=None)
@given(whole, whole, st.sampled_from(["Answer: {}", "Answer: ${}$", "Answer: \\boxed{{{}}}"]))
def test_whole_numbers_are_judged_as_verl_judges_them(reward, gold, answer, form):
    from verl.utils.reward_score.math_dapo import compute_score

    response = "Let us see.\n" + form.format(answer)
    theirs = compute_score(response, str(gold))["acc"]
    assert reward(task(str(gold)), Outcome(response)) == float(theirs)
    assert reward(task(str(answer)), Outcome(response)) == 1.0
    assert compute_score(response, str(answer))["acc"]
