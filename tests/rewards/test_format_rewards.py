"""Search-R1's, Tree-GRPO's and ASearcher's rewards on the policy's own turns."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.rewards.asearcher import ASearcherReward, is_well_formed_turn, set_f1
from graphpo_agent.rewards.search_r1 import SearchR1Reward, is_well_formed
from graphpo_agent.rewards.tree_grpo import TreeGrpoReward
from graphpo_agent.types import Document, Outcome, Task

SEARCH = "<think> who? </think>\n<search> karo venn </search>"
ANSWER = "<think> so </think> <answer> Ola Brand </answer>"
PLANTED = Document("7", '"Karo Venn"\nhis mentor was the Ola Brand <answer> Ola Brand </answer>')
TASK = Task("t", "mentor of Karo Venn?", ("Ola Brand",))


def outcome(answer, *turns, documents=()):
    return Outcome("\n".join(turns), answer, turns, documents)


@pytest.mark.parametrize(
    ("turns", "well_formed"),
    [
        ((ANSWER,), True),
        ((SEARCH, SEARCH, ANSWER), True),
        ((), False),
        ((SEARCH,), False),
        ((ANSWER, ANSWER), False),
        ((SEARCH, "<think> so </think>"), False),
        (("<think> who? </think>", "<search> k </search>", ANSWER), False),
        ((SEARCH + " hm", ANSWER), False),
        ((SEARCH + "<information> mine </information>", ANSWER), False),
        (("<search> k </search>", ANSWER), False),
        (("<think> <think> a </think> </think>" + ANSWER,), False),
        (("<think></think><answer></answer>",), True),
        ((ANSWER.upper(),), False),
    ],
)
def test_well_formed_turns(turns, well_formed):
    assert is_well_formed(turns) is well_formed


def call(content):
    return f"<think> who? </think>\n<tool_call>\n{content}\n</tool_call>"


CALL = call('{"name": "search"}')


@pytest.mark.parametrize(
    ("turns", "well_formed"),
    [
        ((ANSWER,), True),
        ((CALL, CALL, ANSWER), True),
        ((CALL,), False),
        ((SEARCH, ANSWER), False),
        ((CALL + " hm", ANSWER), False),
        ((CALL + "<tool_response> mine </tool_response>", ANSWER), False),
        (("<tool_call> {} </tool_call>", ANSWER), False),
        (("<think> is it <search>? </think> <tool_call> {} </tool_call>", ANSWER), True),
        (
            (
                call('{"name": "python", "arguments": {"code": "print(\\"<answer></answer>\\")"}}'),
                ANSWER,
            ),
            True,
        ),
        ((call('```json\n{"name": "</think>"}\n```'), ANSWER), True),
        ((call('{"name": "python"}\n<code>\n# </answer> <tool_response>\n</code>'), ANSWER), True),
        ((call('{"name": "python"} <answer>'), ANSWER), False),
        ((call('"<answer>"'), ANSWER), False),
        ((call('{"name": "<tool_call>"}'), ANSWER), False),
    ],
)
def test_well_formed_turns_of_the_hermes_dialect(turns, well_formed):
    assert is_well_formed(turns, "tool_call") is well_formed
    result = outcome("Ola", *turns)
    taken = 0.0 if well_formed else 0.2
    f1 = TreeGrpoReward(0.2, call_tag="tool_call")(TASK, result)
    assert f1 == pytest.approx(2 / 3 - taken)
    assert SearchR1Reward(0.2, 0.1, call_tag="tool_call")(TASK, result) == (
        0.2 if well_formed else 0.1
    )


def test_another_call_tag_is_refused():
    for reward in (SearchR1Reward, TreeGrpoReward):
        with pytest.raises(ConfigError, match="call_tag must be search or tool_call, found 'act'"):
            reward(call_tag="act")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("result", "em", "f1"),
    [
        (outcome("Ola Brand", SEARCH, ANSWER), 1.0, 1.0),
        (outcome("Ola Brand", "<answer> Ola Brand </answer>"), 0.8, 0.8),
        (outcome("Ola", SEARCH, ANSWER), 0.2, 2 / 3),
        (outcome("Ola", "<answer> Ola </answer>"), 0.1, 2 / 3 - 0.2),
        (outcome("Ola or five", "<answer>"), 0.1, 2 / 5 - 0.2),
        (outcome("Ola " + "oak " * 9, "<answer>"), 0.1, 0.0),
        (outcome("nobody", SEARCH, ANSWER), 0.2, 0.2),
        (outcome("nobody", SEARCH, ANSWER, documents=(PLANTED,)), 0.5, 0.5),
        (outcome("nobody", "<answer>", documents=(PLANTED,)), 0.1, 0.0),
        (outcome(None, SEARCH, documents=(PLANTED,)), 0.0, 0.0),
    ],
)
def test_format_terms(result, em, f1):
    assert SearchR1Reward(0.2, 0.1, 0.3)(TASK, result) == pytest.approx(em)
    assert TreeGrpoReward(0.2, 0.3)(TASK, result) == pytest.approx(f1)


def test_an_answer_in_a_document_or_the_question_earns_nothing():
    task = Task("t", "say <answer> Ola Brand </answer>", ("Ola Brand",))
    unanswered = outcome(None, SEARCH, "<think> hm </think>", documents=(PLANTED,))
    for reward in (SearchR1Reward(0.2, 0.1, 0.3), TreeGrpoReward(0.2, 0.3), ASearcherReward()):
        assert reward(task, unanswered) == 0.0


def test_a_gold_without_words_is_not_in_every_document():
    task = Task("t", "?", ("the",))
    shown = outcome("nobody", SEARCH, ANSWER, documents=(PLANTED,))
    assert SearchR1Reward(0.2, 0.1, 0.3)(task, shown) == 0.2


@pytest.mark.parametrize(
    "terms", [(-0.1, 0.0), (0.5, 1.1), (float("nan"), 0.0), (0.6, 0.5), ("2e-1", 0)]
)
def test_terms_that_leave_the_range_are_refused(terms):
    structure, retrieval = terms
    with pytest.raises(ConfigError, match=r"must be a number in \[0, 1\]"):
        SearchR1Reward(structure, 0.0, retrieval)
    with pytest.raises(ConfigError, match=r"must be a number in \[0, 1\]"):
        TreeGrpoReward(structure, retrieval)


def test_set_f1_of_known_cases():
    assert set_f1("oak oak fir", "Oak, pine") == 0.5
    assert set_f1("jeanluc", "Jean-Luc") == 0.0
    assert set_f1("the oak", "oak") == pytest.approx(2 / 3)
    assert set_f1("!", "!") == 0.0
    assert set_f1("二零一九年5月", "2019年5月") == pytest.approx(2 * 3 / (7 + 4))
    assert set_f1("北京 市", "北京市") == 1.0
    assert set_f1("北京市", "Beijing") == 0.0


words = st.lists(st.sampled_from(["oak", "Fir,", "1987", "-", "pine"]), max_size=5).map(" ".join)


@given(answer=words, gold=words)
def test_set_f1_is_the_harmonic_mean_over_sets(answer, gold):
    def bag(text):
        return {w.lower() for w in text.replace(",", " ").replace("-", " ").split()}

    common = len(bag(answer) & bag(gold))
    expected = 0.0
    if common:
        precision, recall = common / len(bag(answer)), common / len(bag(gold))
        expected = 2 * precision * recall / (precision + recall)
    assert set_f1(answer, gold) == pytest.approx(expected)


def asearcher(answer, golds, *turns, metric: Literal["f1", "em"] = "f1", **metadata):
    return ASearcherReward(metric)(Task("t", "?", golds, metadata), outcome(answer, *turns))


def test_aliases_are_worth_three_tenths():
    assert asearcher("Lyon", ("Paris",), aug_answers=["Lyon"]) == pytest.approx(0.3)
    assert asearcher("Paris", ("Paris",), aug_answers=["Lyon"]) == pytest.approx(1.0)
    assert asearcher("in Lyon", ("Lyon",), aug_answers=["in Lyon"]) == pytest.approx(
        0.7 * 2 / 3 + 0.3
    )
    assert asearcher("Lyon", ("Paris",), aug_answers=[]) == 0.0


def test_exact_match_and_truth_values():
    assert asearcher("the Oak.", ("oak",), metric="em") == 1.0
    assert asearcher("oak tree", ("oak",), metric="em") == 0.0
    assert asearcher("True", ("Yes",)) == asearcher("no", ("False",), metric="em") == 1.0


@pytest.mark.parametrize(
    "turn",
    [
        "<search> a </search> <search> b </search>",
        "<search> a </search> <answer> b </answer>",
        "<search> a",
        "a </access>",
        "</think> </think>",
        "as an assistant",
        "Assistant:",
    ],
)
def test_one_bad_turn_takes_all(turn):
    assert not is_well_formed_turn(turn)
    assert asearcher("oak", ("oak",), "<think> a </think> <search> b </search>", turn) == 0.0


def test_good_turns_keep_the_score():
    assert asearcher("oak", ("oak",), "a </think> <access> u </access>", "<answer>oak</answer>")


@pytest.mark.parametrize("word", ["question", "invalid", "appropriate", "valid"])
def test_calling_a_question_invalid_is_worth_nothing(word):
    assert asearcher(f"oak, {word}", ("oak",)) == 0.0
    assert asearcher(f"oak, {word}", ("oak",), unanswerable=True) > 0
    assert asearcher(f"oak, {word}", (f"oak, {word}",)) == 1.0
    assert asearcher(f"the {word}", (f"The {word.capitalize()}",)) == 1.0
    assert asearcher(f"the {word}", ("oak",), aug_answers=[f"The {word.upper()}"]) > 0.29


def test_asearcher_refuses_another_metric_and_broken_aliases():
    with pytest.raises(ConfigError, match="metric must be f1 or em, found 'bleu'"):
        ASearcherReward("bleu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"task t: field 'metadata[.]aug_answers'"):
        asearcher("oak", ("oak",), aug_answers="oak")
