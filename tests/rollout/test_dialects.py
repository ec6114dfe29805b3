import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects import (
    SEARCH_R1_PROMPT,
    FinalAnswer,
    Observation,
    SearchR1Dialect,
    ToolCall,
    encode_observation,
)
from graphpo_agent.types import Document, Task, ToolResult
from tests.rollout.scripted import SPECIAL_SPELLING, ByteTokenizer

DIALECT = SearchR1Dialect()
TOKENIZER = ByteTokenizer()
TAGS = [
    f"<{slash}{name}>"
    for name in ("think", "search", "information", "answer")
    for slash in ("", "/")
]


def search(query):
    return ToolCall("search", {"query": query})


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think> who? </think> <search> karo venn </search>", search("karo venn")),
        ("<search>\nline one\nline two\n</search>", search("line one\nline two")),
        ("<search></search>", search("")),
        ("<answer> 1987 </answer>", FinalAnswer("1987")),
        ("<answer></answer>", FinalAnswer("")),
        ("<answer>a</answer><search>b</search>", FinalAnswer("a")),
        ("<search>b</search><answer>a</answer>", search("b")),
        ("<search> b <answer>a</answer>", FinalAnswer("a")),
        ("I could <search> or not. <search> b </search>", search("b")),
        ("</search><search>b</search>", search("b")),
        ("</answer> 7 <answer>", None),
        ("<answer> 7", None),
        ("<answer> 7 </search>", None),
        ("<Answer>7</Answer>", None),
        ("< answer>7</ answer>", None),
        ("<answer >7</answer>", None),
        ("<think> 7 </think>", None),
        ("", None),
    ],
)
def test_first_complete_action_decides(text, action):
    assert DIALECT.parse(text) == action


def slow_parse(text):
    """The rule by scanning: the earliest close that has an opening of its kind before it."""
    for close in range(len(text)):
        for tag in ("search", "answer"):
            if text.startswith(f"</{tag}>", close):
                starts = [i for i in range(close) if text.startswith(f"<{tag}>", i)]
                if starts:
                    content = text[starts[-1] + len(tag) + 2 : close].strip()
                    return search(content) if tag == "search" else FinalAnswer(content)
    return None


def test_parse_agrees_with_a_slow_reading_on_100k_adversarial_strings():
    rng = random.Random(0)
    alphabet = [*TAGS, "<", ">", "/", "<search", "answer>", " ", "\n", "x", "\0", "\ud800", "🙂"]
    kinds = {ToolCall: 0, FinalAnswer: 0, type(None): 0}
    for _ in range(100_000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        action = DIALECT.parse(text)
        assert action == slow_parse(text), repr(text)
        kinds[type(action)] += 1
    assert min(kinds.values()) > 1000  # every outcome was met


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_parse_is_total_on_any_text(text):
    assert DIALECT.parse(text) == slow_parse(text)


@pytest.mark.parametrize("unit", ["<search>", "</search>", "<answer><search>", "<", "< ", "</ "])
def test_parse_and_neutralising_cope_with_megabytes_of_one_thing(unit):
    text = unit * 300_000
    assert DIALECT.parse(text) is None
    assert "<search" not in DIALECT.observation(ToolResult(text)).body


def test_prompt_holds_the_question_but_no_answer_that_a_scorer_could_take():
    (message,) = DIALECT.render(Task(id="t", question="Who? {x}", answers=()))
    assert message["role"] == "user" and message["content"].endswith("Question: Who? {x}\n")
    assert re.search(r"<answer>.*?</answer>", message["content"], re.DOTALL) is None
    assert DIALECT.parse(DIALECT.invalid_action.text) is None
    assert all(tag in SEARCH_R1_PROMPT for tag in ("<think>", "</search>", "<information>"))


def test_prompt_template_needs_a_place_for_the_question():
    with pytest.raises(ConfigError, match=r"\{question\}"):
        SearchR1Dialect(prompt_template="Answer.")


def test_documents_are_numbered_and_titled_inside_information_tags():
    documents = (Document("1", '"Karo Venn"\nborn : 1987'), Document("2", "untitled"))
    assert DIALECT.observation(ToolResult("ignored", documents)).text == (
        '\n\n<information>Doc 1(Title: "Karo Venn") born : 1987\n'
        "Doc 2(Title: untitled)</information>\n\n"
    )


def test_result_without_documents_shows_its_text():
    observation = DIALECT.observation(
        ToolResult("  search failed: <answer>no</answer>\n", error="x")
    )
    assert observation.body == "search failed: ‹answer>no‹/answer>"


@pytest.mark.parametrize("name", ["think", "search", "information", "answer"])
@pytest.mark.parametrize(
    "spelling", ["<{}>", "</{}>", "< {}>", "</ {} >", "<\t/\n{}>", "<{} class='x'>", "<{}/>", "<{}"]
)
def test_no_protocol_tag_survives_in_retrieved_text(name, spelling):
    for case in (name, name.upper(), name.title()):
        tag = spelling.format(case)
        text = f"before {tag} after"
        for result in (ToolResult(text), ToolResult("", (Document("1", f"T\n{text}"),))):
            body = DIALECT.observation(result).body
            assert "<" not in body and tag.replace("<", "‹") in body
            assert DIALECT.parse(body) is None


def test_other_angle_brackets_stay():
    text = "a < b, <b>bold</b>, <searching>, <answers>, x</y>, << thinker"
    assert DIALECT.observation(ToolResult(text)).body == text


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([*TAGS, "<", "/", " ", "é", "🙂", "\ufffd", "ab", "Doc "]), max_size=30
    ),
    num_documents=st.integers(0, 3),
    max_tokens=st.integers(4, 60),
)
def test_cut_observation_fits_keeps_its_tags_and_shows_a_prefix(parts, num_documents, max_tokens):
    text = "".join(parts)
    documents = tuple(Document(str(i), f"T\n{text}") for i in range(num_documents))
    observation = DIALECT.observation(ToolResult(text, documents))
    token_ids, shown = encode_observation(TOKENIZER, observation, max_tokens + 4)
    assert len(token_ids) <= max_tokens + 4
    decoded = TOKENIZER.decode(token_ids)
    assert decoded.startswith("\n\n<information>") and decoded.endswith("</information>\n\n")
    body = decoded.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
    assert observation.body.startswith(body)
    assert decoded.count("</information>") == decoded.count("<information>") == 1
    starts = [len("".join(observation.pieces[:i])) for i in range(len(observation.pieces))]
    cut = body != observation.body
    assert shown == (sum(s < len(body) for s in starts) if cut else len(observation.pieces))


def test_uncut_observation_is_encoded_as_one_text():
    observation = DIALECT.observation(ToolResult("ab"))
    token_ids, _ = encode_observation(TOKENIZER, observation, 100)
    assert list(token_ids) == TOKENIZER.encode(observation.text)


def test_cut_uses_the_room_it_has():
    observation = Observation("[", ("x" * 50,), "]")
    token_ids, _ = encode_observation(TOKENIZER, observation, 20)
    assert TOKENIZER.decode(token_ids) == "[" + "x" * 18 + "]"


@pytest.mark.parametrize("limit", range(4, 12))
def test_cut_never_splits_a_character(limit):
    observation = Observation("[", ("🙂é" * 9,), "]")
    token_ids, _ = encode_observation(TOKENIZER, observation, limit)
    assert "\ufffd" not in TOKENIZER.decode(token_ids) and len(token_ids) <= limit


def test_limit_below_the_tags_themselves_is_a_config_error():
    observation = DIALECT.observation(ToolResult("some text"))
    with pytest.raises(ConfigError, match=r"max_observation_tokens 5 .*\(6 tokens\)"):
        encode_observation(TOKENIZER, observation, 5)
    token_ids, shown = encode_observation(TOKENIZER, observation, 6)
    assert TOKENIZER.decode(token_ids) == "\n\n<information></information>\n\n" and shown == 0


def test_special_token_spellings_in_documents_stay_text():
    observation = DIALECT.observation(ToolResult(f"a {SPECIAL_SPELLING} b"))
    token_ids, _ = encode_observation(TOKENIZER, observation, 200)
    assert not TOKENIZER.eos_ids & set(token_ids)
    assert SPECIAL_SPELLING in TOKENIZER.decode(token_ids)
