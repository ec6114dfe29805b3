import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects.base import (
    FinalAnswer,
    InvalidAction,
    Observation,
    ToolCall,
    encode_observation,
)
from graphpo_agent.rollout.dialects.search_r1 import SEARCH_R1_PROMPT, SearchR1Dialect
from graphpo_agent.types import Document, Finding, Task, ToolResult
from tests.rollout.scripted import SPECIAL_SPELLING, ByteTokenizer

DIALECT = SearchR1Dialect()
TOKENIZER = ByteTokenizer()
TAGS = [
    f"<{slash}{name}>"
    for name in ("think", "search", "information", "answer")
    for slash in ("", "/")
]


CALL = ToolCall("search", {"query": "q"})
INVALID = DIALECT.parse("")


def search(query):
    return ToolCall("search", {"query": query})


def found(*documents):
    return ToolResult(findings=(Finding("q", documents),))


def observed(result):
    return DIALECT.observation(CALL, result)


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
        ("</answer> 7 <answer>", INVALID),
        ("<answer> 7", INVALID),
        ("<answer> 7 </search>", INVALID),
        ("<Answer>7</Answer>", INVALID),
        ("< answer>7</ answer>", INVALID),
        ("<answer >7</answer>", INVALID),
        ("<think> 7 </think>", INVALID),
        ("", INVALID),
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
    return INVALID


def test_parse_agrees_with_a_slow_reading_on_100k_adversarial_strings():
    rng = random.Random(0)
    alphabet = [*TAGS, "<", ">", "/", "<search", "answer>", " ", "\n", "x", "\0", "\ud800", "🙂"]
    kinds = {ToolCall: 0, FinalAnswer: 0, InvalidAction: 0}
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
    assert DIALECT.parse(text) == INVALID
    assert "<search" not in observed(ToolResult(text)).body


def test_prompt_holds_the_question_but_no_answer_that_a_scorer_could_take():
    (message,) = DIALECT.render(Task(id="t", question="Who? {x}", answers=()))
    assert message["role"] == "user" and message["content"].endswith("Question: Who? {x}\n")
    assert re.search(r"<answer>.*?</answer>", message["content"], re.DOTALL) is None
    assert DIALECT.parse(DIALECT.correction(INVALID).text) == INVALID
    assert all(tag in SEARCH_R1_PROMPT for tag in ("<think>", "</search>", "<information>"))


def test_prompt_template_needs_a_place_for_the_question():
    with pytest.raises(ConfigError, match=r"\{question\}"):
        SearchR1Dialect(prompt_template="Answer.")


def test_documents_are_numbered_and_titled_inside_information_tags():
    documents = (Document("1", '"Karo Venn"\nborn : 1987'), Document("2", "untitled"))
    assert observed(found(*documents)).text == (
        '\n\n<information>Doc 1(Title: "Karo Venn") born : 1987\n'
        "Doc 2(Title: untitled)</information>\n\n"
    )


def test_result_without_documents_shows_its_text():
    observation = observed(
        ToolResult("  search failed: <answer>no</answer>\n", failure="transient")
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
        for result in (ToolResult(text), found(Document("1", f"T\n{text}"))):
            body = observed(result).body
            assert "<" not in body and tag.replace("<", "‹") in body
            assert DIALECT.parse(body) == INVALID


def test_other_angle_brackets_stay():
    text = "a < b, <b>bold</b>, <searching>, <answers>, x</y>, << thinker"
    assert observed(ToolResult(text)).body == text


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
    observation = observed(found(*documents) if documents else ToolResult(text))
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
    observation = observed(ToolResult("ab"))
    token_ids, _ = encode_observation(TOKENIZER, observation, 100)
    assert list(token_ids) == TOKENIZER.encode(observation.text)


def test_cut_uses_the_room_it_has():
    observation = Observation("[", ("x" * 50,), "]")
    token_ids, _ = encode_observation(TOKENIZER, observation, 20)
    assert TOKENIZER.decode(token_ids) == "[" + "x" * 18 + "]"


class Pairs(ByteTokenizer):
    """Sixteen blanks are one token; adds up what it was given to encode."""

    seen = 0

    def encode(self, text):
        self.seen += len(text)
        return super().encode(text.replace(" " * 16, "\t"))

    def decode(self, token_ids):
        return super().decode(token_ids).replace("\t", " " * 16)


@pytest.mark.parametrize("body", ["x" * 10**6, " " * 10**6, "x" * 100 + " " * 10**6])
def test_of_a_long_page_no_more_is_encoded_than_its_beginning_takes(body):
    tokenizer = Pairs()
    token_ids, _ = encode_observation(tokenizer, Observation("[", (body,), "]"), 80)
    assert len(token_ids) == 80 and tokenizer.seen < 10_000
    assert body.startswith(tokenizer.decode(token_ids[1:-1]))


def test_a_page_of_long_tokens_is_shown_whole_where_it_fits():
    observation = Observation("[", (" " * 16 * 78,), "]")
    token_ids, shown = encode_observation(Pairs(), observation, 80)
    assert Pairs().decode(token_ids) == observation.text and shown == 1


@pytest.mark.parametrize("limit", range(4, 12))
def test_cut_never_splits_a_character(limit):
    observation = Observation("[", ("🙂é" * 9,), "]")
    token_ids, _ = encode_observation(TOKENIZER, observation, limit)
    assert "\ufffd" not in TOKENIZER.decode(token_ids) and len(token_ids) <= limit


def test_limit_below_the_tags_themselves_is_a_config_error():
    observation = observed(ToolResult("some text"))
    with pytest.raises(ConfigError, match=r"max_observation_tokens 5 .*\(6 tokens\)"):
        encode_observation(TOKENIZER, observation, 5)
    token_ids, shown = encode_observation(TOKENIZER, observation, 6)
    assert TOKENIZER.decode(token_ids) == "\n\n<information></information>\n\n" and shown == 0


def test_special_token_spellings_in_documents_stay_text():
    observation = observed(ToolResult(f"a {SPECIAL_SPELLING} b"))
    token_ids, _ = encode_observation(TOKENIZER, observation, 200)
    assert not TOKENIZER.eos_ids & set(token_ids)
    assert SPECIAL_SPELLING in TOKENIZER.decode(token_ids)


COMPAT = SearchR1Dialect(compat="search-r1")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<answer>a</answer> <search>b</search>", FinalAnswer("a")),
        ("<search>b <answer>a</answer> c</search>", search("b <answer>a</answer> c")),
        ("<search> x <search> b </search>", search("x <search> b")),
        ("</search><answer>a</answer>", INVALID),
        ("<answer>a</answer></search>", FinalAnswer("a")),
        ("<Search>b</Search>", INVALID),
        ("<search></search>", search("")),
        ("", INVALID),
    ],
)
def test_compat_cuts_after_the_first_search_and_takes_the_first_element(text, action):
    assert COMPAT.parse(text) == action


def upstream_reading(text):
    """Search-R1's two steps with the regular expression that its protocol page describes."""
    if "</search>" in text:
        text = text.split("</search>")[0] + "</search>"
    elif "</answer>" in text:
        text = text.split("</answer>")[0] + "</answer>"
    match = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    if match is None:
        return INVALID
    content = match[2].strip()
    return search(content) if match[1] == "search" else FinalAnswer(content)


def test_compat_agrees_with_the_regular_expression_on_adversarial_strings():
    rng = random.Random(1)
    alphabet = [*TAGS, "<", "</search", "x", " ", "\n"]
    for _ in range(20_000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        assert COMPAT.parse(text) == upstream_reading(text), repr(text)


def test_a_turn_that_ends_at_its_first_closing_tag_acts_as_search_r1_but_for_stray_answer_tags():
    assert COMPAT.stop == DIALECT.stop == ("</search>", "</answer>")
    rng = random.Random(2)
    differing = {True: 0, False: 0}
    for _ in range(20_000):
        whole = "".join(rng.choices([*TAGS, "x", " "], k=rng.randrange(14)))
        closing = re.search("</(search|answer)>", whole)
        before = whole if closing is None else whole[: closing.start()]
        sampled = whole if closing is None else whole[: closing.end()]
        stray = closing is not None and closing[1] == "answer"
        stray = stray and ("<search>" in before.split("<answer>")[0] or "<answer>" not in before)
        differing[stray] += COMPAT.parse(sampled) != upstream_reading(whole)
    assert differing[False] == 0 and differing[True] > 100


@pytest.mark.parametrize(
    ("question", "asked"), [(" Who ", "Who?"), ("Who?", "Who?"), ("Name it.", "Name it.?")]
)
def test_compat_asks_with_a_question_mark(question, asked):
    task = Task(id="t", question=question, answers=())
    assert COMPAT.render(task)[0]["content"].endswith(f"Question: {asked}\n")
    assert DIALECT.render(task)[0]["content"].endswith(f"Question: {question}\n")


def test_compat_cuts_the_closing_tag_of_a_long_observation_off():
    documents = (Document("1", "T\n" + "x" * 50), Document("2", "U\ny"))
    whole = COMPAT.observation(CALL, found(*documents))
    assert whole.text == observed(found(*documents)).text
    token_ids, shown = encode_observation(TOKENIZER, whole, 30)
    text = TOKENIZER.decode(token_ids)
    assert len(token_ids) == 30 and whole.text.startswith(text) and shown == 1
    assert "</information>" not in text


def test_verl_lists_documents_by_query_as_a_json_result():
    dialect = SearchR1Dialect(documents="verl")
    result = ToolResult(
        findings=(
            Finding("a", (Document("1", '"T"\nx "y"'), Document("2", "U\nz"))),
            Finding("none", ()),
            Finding("b", (Document("3", "V\né\0é"),)),
        )
    )
    text = dialect.observation(CALL, result).text
    inner = text.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
    first = 'Doc 1 (Title: "T")\nx "y"\n\nDoc 2 (Title: U)\nz'
    assert json.loads(inner) == {"result": f"{first}\n---\n\n---\nDoc 1 (Title: V)\né é"}
    nothing = dialect.observation(CALL, found()).body
    assert nothing == "" and '{"result": ""}' in dialect.observation(CALL, found()).text


@pytest.mark.parametrize("limit", range(22, 60))
def test_a_cut_json_result_stays_json(limit):
    dialect = SearchR1Dialect(documents="verl")
    result = found(Document("1", 'T"\n' + '\\"\n\t' * 20))
    token_ids, _ = encode_observation(TOKENIZER, dialect.observation(CALL, result), limit)
    text = TOKENIZER.decode(token_ids)
    inner = text.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
    assert len(token_ids) <= limit and set(json.loads(inner)) == {"result"}
