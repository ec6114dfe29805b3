"""Hand-computed cases of the originals' rules, their quirks included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.rewards.transcripts import (
    FormatScores,
    search_r1_em,
    search_r1_em_format,
    tree_grpo_f1,
    verl_search_r1_em,
)

# As Search-R1's prompt: two answer elements and one information element of its own.
PROMPT = (
    "<|im_start|>user\nresults are between <information> and </information>; answer inside "
    "<answer> and </answer>, such as <answer> Beijing </answer>.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GOOD = (
    "<think> who? </think>\n<search> karo </search>\n\n<information>Doc 1: his mentor was Ola "
    "Brand.</information>\n\n<think> so </think> <answer> {} </answer>"
)
SCORES = FormatScores(structure=0.2, final_format=0.1, retrieval=0.3, format=0.05)


def test_the_last_of_at_least_two_answers():
    assert search_r1_em("<answer>oak</answer>", ["oak"], SCORES).score == 0.0
    assert search_r1_em("<answer>oak</answer>", ["oak"], SCORES).extracted is None
    two = search_r1_em("<answer>oak</answer> <answer> the Fir. </answer>", ["fir"], SCORES)
    assert (two.score, two.extracted) == (1.0, "the Fir.")
    assert search_r1_em("<answer>fir</answer><answer>oak</answer>", ["fir"], SCORES).score == 0.05
    assert search_r1_em("<answer>a</answer>" * 2, "oak", FormatScores()).score == 0.0


def test_an_unanswered_rollout_is_judged_by_the_example_in_the_prompt():
    judged = search_r1_em(PROMPT + "<think> hm", ["Beijing"], SCORES)
    assert (judged.score, judged.extracted) == (1.0, "Beijing")


def test_an_answer_in_retrieved_text_is_taken():
    text = PROMPT + "<information> <answer>oak</answer> </information>"
    assert search_r1_em(text, ["oak"], SCORES).score == 1.0


def test_an_element_runs_from_an_opening_tag_to_the_next_closing_one():
    text = "<answer>a</answer> <answer> b <answer> c </answer> </answer>"
    assert search_r1_em(text, ["x"], SCORES).extracted == "b <answer> c"
    assert search_r1_em("</answer><answer>a</answer><answer>b", ["a"], SCORES).extracted is None
    assert search_r1_em("<ANSWER>a</ANSWER>" * 2, ["a"], SCORES).extracted is None


@pytest.mark.parametrize(
    ("response", "gold", "em", "f1"),
    [
        (GOOD.format("Ola Brand"), "Ola Brand", 1.0, 1.0),
        (GOOD.format("Ola"), "Ola Brand", 0.5, 2 / 3),
        (GOOD.format("nobody"), "Ola Brand", 0.5, 0.5),
        (GOOD.format("nobody"), "Karo Venn", 0.2, 0.2),
        # Not well formed: text behind the answer.
        (GOOD.format("Ola Brand") + " done", "Ola Brand", 0.8, 0.8),
        (GOOD.format("Ola") + "<|im_end|>", "Ola Brand", 0.1, 2 / 3 - 0.2),
        (GOOD.format("nobody") + " done", "Ola Brand", 0.1, 0.0),
        # Two of eleven words: less than the structure is worth, so below 0.
        ("<answer> Ola 1 2 3 4 5 6 7 8 9 </answer>", "Ola Brand", 0.1, 2 / 12 - 0.2),
        ("<answer> yes, Ola </answer>", "yes", 0.1, 0.0),
    ],
)
def test_format_terms(response, gold, em, f1):
    assert search_r1_em_format(PROMPT + response, [gold], SCORES).score == pytest.approx(em)
    assert tree_grpo_f1(PROMPT + response, [gold], SCORES).score == pytest.approx(f1)


def test_no_answer_but_well_formed_is_worth_the_structure():
    prompt = "<|im_start|>assistant\n"  # without the examples a transcript has one answer only
    for rule in (search_r1_em_format, tree_grpo_f1):
        judged = rule(prompt + GOOD.format("Ola Brand"), ["Ola Brand"], SCORES)
        assert judged.extracted is None and judged.score == pytest.approx(0.5)
        assert rule(prompt + GOOD.format("x") + "y", ["x"], SCORES).score == 0.0


def test_other_chat_templates_are_never_well_formed():
    text = PROMPT.replace("<|im_start|>", "[INST]") + GOOD.format("Ola Brand")
    judged = search_r1_em_format(text, ["Ola Brand"], SCORES)
    assert judged.score == 0.8 and judged.detail["well_formed"] is False


def test_the_first_assistant_marker_begins_the_judged_part():
    text = PROMPT + "<|im_start|>assistant\n" + GOOD.format("Ola Brand")
    assert search_r1_em_format(text, ["Ola Brand"], SCORES).score == 0.8


def test_the_prompt_s_own_information_counts_as_retrieved():
    wrong = PROMPT + "<think>a</think><answer>b</answer>"
    assert search_r1_em_format(wrong, ["and"], SCORES).score == pytest.approx(0.5)
    assert search_r1_em_format(wrong, ["Ola"], SCORES).score == pytest.approx(0.2)


def test_a_string_is_looked_for_in_documents_character_by_character():
    wrong = PROMPT + GOOD.format("nobody")
    assert search_r1_em_format(wrong, "Zoë D.", SCORES).score == pytest.approx(0.5)
    assert search_r1_em_format(wrong, ["Zoë D."], SCORES).score == pytest.approx(0.2)
    assert search_r1_em_format(PROMPT + GOOD.format("Ola Brand"), "Ola Brand", SCORES).score == 1.0


def test_f1_of_nothing_is_nothing():
    empty = PROMPT + "<answer> the </answer>"
    assert tree_grpo_f1(empty, ["a"], SCORES).score == 0.0
    assert search_r1_em_format(empty, ["a"], SCORES).score == 0.8


def test_truncated_information_breaks_the_form():
    response = GOOD.replace("</information>", "").format("Ola Brand")
    assert search_r1_em_format(PROMPT + response, ["Ola Brand"], SCORES).score == 0.8


def test_verl_takes_one_answer_and_quarters_a_right_one_among_many_tags():
    assert verl_search_r1_em("<answer>oak</answer>", ["oak"], SCORES).score == 1.0
    assert verl_search_r1_em("<answer>fir</answer>", ["oak"], SCORES).score == 0.05
    assert verl_search_r1_em("oak", ["oak"], SCORES).score == 0.0
    assert verl_search_r1_em("<answer>oak</answer>" * 10, ["oak"], SCORES).score == 1.0
    assert verl_search_r1_em("<answer>oak</answer>" * 11, ["oak"], SCORES).score == 0.25
    assert verl_search_r1_em("<answer>fir</answer>" * 11, ["oak"], SCORES).score == 0.05
    assert verl_search_r1_em("<answer>oak" + "</answer>" * 11, ["oak"], SCORES).score == 0.25


pieces = st.lists(
    st.sampled_from(
        [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in "/"]
        + ["<think>", "<search>", "<information>", "<answer>", "text", " \n"]
    ),
    max_size=8,
)
openings = ["<think>", "a", "</think>"]
rounds = ["<search>", "b", "</search>", " ", "<information>", "c", "</information>", *openings]
nearly = st.builds(
    lambda count, cut, extra: (openings + rounds * count + ["<answer>", "d", "</answer>"] + extra)[
        cut:
    ],
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 1]),
    pieces.map(lambda many: many[:1]),
)


@given(parts=pieces | nearly)
def test_the_form_is_a_walk_from_tag_to_tag(parts):
    allowed = {
        "start": {"<think>"},
        "<think>": {"</think>", "text"},
        "</think>": {"<search>", "<answer>"},
        "<search>": {"</search>", "text"},
        "</search>": {"<information>"},
        "<information>": {"</information>", "text"},
        "</information>": {"<think>"},
        "<answer>": {"</answer>", "text"},
        "</answer>": set(),
    }
    at, walked = "start", True
    for part in parts:
        if part.strip():
            kind = part if part.startswith("<") else "text"
            walked = walked and kind in allowed[at]
            at = at if kind == "text" else kind
    judged = search_r1_em_format("<|im_start|>assistant" + "".join(parts), ["x"], SCORES)
    assert judged.detail["well_formed"] == (walked and at == "</answer>")
