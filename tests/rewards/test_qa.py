from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.rewards.asearcher import ASearcherReward
from graphpo_agent.rewards.gaia import gaia_match
from graphpo_agent.rewards.judge import Judge
from graphpo_agent.rewards.math import MathReward
from graphpo_agent.rewards.qa import (
    Binarize,
    exact_match,
    normalize_answer,
    substring_match,
    token_f1,
)
from graphpo_agent.rewards.search_r1 import SearchR1Reward
from graphpo_agent.rewards.tree_grpo import TreeGrpoReward
from graphpo_agent.types import Outcome, Task

phrases = st.lists(st.sampled_from(["the", "Oak", "fir.", "1987", "yes", "a-b"]), max_size=5).map(
    " ".join
)


def judged(reward, answer, *golds):
    return reward(Task("t", "q", golds), Outcome(response="<answer>oak</answer>", answer=answer))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (" The Jean-Luc  Picard. ", "jeanluc picard"),
        ("a an the", ""),
        ("Theodore another", "theodore another"),
        ("l'été «1987»", "lété «1987»"),
        ("U.S.A.\n1,954", "usa 1954"),
    ],
)
def test_normal_form(text, normal):
    assert normalize_answer(text) == normal


def test_any_accepted_answer_matches_and_only_the_answer_counts():
    assert judged(exact_match, "the Oak!", "fir", "oak") == 1.0
    assert judged(exact_match, "1954 1987", "1987 1954") == 0.0
    assert judged(exact_match, None, "oak") == 0.0


def test_f1_of_known_cases():
    assert judged(token_f1, "born 1987", "1987") == pytest.approx(2 / 3)
    assert judged(token_f1, "oak oak fir", "oak pine", "oak oak") == pytest.approx(4 / 5)
    assert judged(token_f1, "yes indeed", "yes") == 0.0
    assert judged(token_f1, "noanswer", "oak noanswer") == 0.0
    assert judged(token_f1, None, "oak") == 0.0


@given(answer=phrases, golds=st.lists(phrases.filter(normalize_answer), min_size=1, max_size=3))
def test_f1_is_the_harmonic_mean_of_precision_and_recall(answer, golds):
    def slow(gold):
        got, want = normalize_answer(answer).split(), normalize_answer(gold).split()
        if got == want:
            return 1.0
        if any(words in (["yes"], ["no"], ["noanswer"]) for words in (got, want)):
            return 0.0
        common = sum(min(Counter(got)[word], Counter(want)[word]) for word in set(got))
        if common == 0:
            return 0.0
        precision, recall = common / len(got), common / len(want)
        return 2 * precision * recall / (precision + recall)

    expected = max(map(slow, golds))
    assert judged(token_f1, answer, *golds) == pytest.approx(expected)
    assert judged(exact_match, answer, *golds) <= judged(token_f1, answer, *golds)


def test_articles_go_where_other_punctuation_touches_them():
    assert normalize_answer("«the» oak—a fir") == "« » oak— fir"


def test_substring_match_of_known_cases():
    assert judged(substring_match, "It was in 1987, I think", "fir", "1987.") == 1.0
    assert judged(substring_match, "1987", "in 1987") == 0.0
    assert judged(substring_match, None, "oak") == 0.0


REWARDS = [exact_match, substring_match, token_f1, SearchR1Reward(), TreeGrpoReward()]


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize(
    ("answer", "golds", "worth"),
    [
        ("", ["The"], 0.0),
        (" ", ["The", ""], 0.0),
        ("...", ["The"], 0.0),
        ("A", ["The"], 0.0),
        ("Theodore", ["The", "..."], 0.0),
        ("oak", ["the", "..."], 0.0),
        ("!", ["..."], 0.0),
        ("the", ["The"], 1.0),
        ('"The."', ["oak", "The"], 1.0),
        (" + ", ["+"], 1.0),
    ],
)
def test_what_normalisation_leaves_nothing_of_is_compared_as_it_is(reward, answer, golds, worth):
    assert judged(reward, answer, *golds) == worth


@given(answer=phrases, golds=st.lists(phrases, min_size=1, max_size=3))
def test_what_equals_a_gold_contains_it(answer, golds):
    assert judged(exact_match, answer, *golds) <= judged(substring_match, answer, *golds)


def test_binarize_takes_the_threshold_in():
    halved = Binarize(token_f1, threshold=2 / 3)
    assert judged(halved, "born 1987", "1987") == 1.0
    assert judged(halved, "born in 1987", "1987") == 0.0
    assert judged(Binarize(halved, threshold=1.0), "1987", "1987") == 1.0


@pytest.mark.parametrize("threshold", [0, -0.5, 1.1, float("nan"), "5e-1"])
def test_binarize_refuses_a_threshold_outside_its_range(threshold):
    with pytest.raises(ConfigError, match="threshold must be"):
        Binarize(token_f1, threshold=threshold)


def test_binarize_shows_the_counts_of_what_it_wraps():
    class Counted:
        counts: Mapping[str, int] = {"judge/unjudged": 2}

        def __call__(self, task: Task, outcome: Outcome) -> float:
            return 0.0

    assert Binarize(Binarize(Counted(), 0.5), 0.5).counts == {"judge/unjudged": 2}
    assert Binarize(token_f1, 0.5).counts == {}


def test_binarize_refuses_what_is_no_reward():
    with pytest.raises(ConfigError, match="must be a reward function, found 'token_f1'"):
        Binarize("token_f1", threshold=0.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "reward",
    [
        exact_match,
        substring_match,
        token_f1,
        gaia_match,
        SearchR1Reward(),
        TreeGrpoReward(),
        ASearcherReward(),
        MathReward(),
        Judge(OpenAIChat("http://127.0.0.1:9/v1", "m")),
    ],
)
def test_a_task_without_an_answer_is_refused_where_anything_would_be_wrong(reward):
    for outcome in (Outcome("x", "x", ("<answer>x</answer>",)), Outcome("")):
        with pytest.raises(DataError, match="task t: has no answer to compare with"):
            reward(Task("t", "q?", ()), outcome)


def test_a_task_that_is_unanswerable_by_design_accepts_none():
    task = Task("t", "q?", (), {"unanswerable": True})
    assert exact_match(task, Outcome("x", "x")) == 0.0
