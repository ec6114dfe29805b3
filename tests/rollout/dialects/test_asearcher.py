import random

import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects.asearcher import ASearcherDialect
from graphpo_agent.rollout.dialects.base import FinalAnswer, InvalidAction, ToolCall
from graphpo_agent.types import Document, Finding, Task, ToolResult

DIALECT = ASearcherDialect()
SEARCH = ToolCall("search", {"query": "q"})
ACCESS = ToolCall("access", {"url": "https://a.org/x"})
INVALID = DIALECT.parse("")


def found(*documents):
    return ToolResult(findings=(Finding("q", documents),))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("so. </think>\n<search> q </search>", SEARCH),
        ("</think><access>\nhttps://a.org/x\n</access>", ACCESS),
        ("</think><answer> 1987 </answer>", FinalAnswer("1987")),
        ("<answer>a</answer><search>q</search>", FinalAnswer("a")),
        ("<search>q</search><access>https://a.org/x</access>", SEARCH),
        ("<access>u <search>q</search>", SEARCH),
        ("<access>u", INVALID),
        ("<Access>u</Access>", INVALID),
    ],
)
def test_the_element_that_closes_first_decides(text, action):
    assert DIALECT.parse(text) == action


def test_an_access_shows_one_page_and_no_document_that_it_does_not_show():
    page, other = Document("a", "T\npage"), Document("b", "T\nother")
    observation = DIALECT.observation(ACCESS, found(page, other))
    assert observation.documents == (page,) and "other" not in observation.text


def test_100k_fuzzed_turns_agree_with_a_slow_reading():
    rng = random.Random(0)
    names = ("search", "access", "answer")
    parts = [f"<{slash}{name}>" for name in names for slash in ("", "/")] + [
        "<",
        " ",
        "x",
        "\ud800",
    ]
    kinds = {ToolCall: 0, FinalAnswer: 0, InvalidAction: 0}
    for _ in range(100_000):
        text = "".join(rng.choices(parts, k=rng.randrange(10)))
        action = DIALECT.parse(text)
        kinds[type(action)] += 1
        assert action == slow_parse(text, names), repr(text)
    assert min(kinds.values()) > 1000


def slow_parse(text, names):
    for close in range(len(text)):
        for name in names:
            if text.startswith(f"</{name}>", close):
                starts = [i for i in range(close) if text.startswith(f"<{name}>", i)]
                if starts:
                    content = text[starts[-1] + len(name) + 2 : close].strip()
                    if name == "answer":
                        return FinalAnswer(content)
                    return ToolCall(name, {"query" if name == "search" else "url": content})
    return INVALID


def test_the_prompt_is_plain_text_that_ends_inside_a_thought():
    prompt = DIALECT.render(Task(id="t", question="Who?", answers=()))
    assert isinstance(prompt, str) and prompt.endswith("User: Who?\n\nAssistant: \n<think>\n")
    with pytest.raises(ConfigError, match=r"\{question\}"):
        ASearcherDialect("Who?")


def test_documents_are_listed_with_their_addresses_and_cut():
    long = Document("2", "U\n" + "y" * 6000)
    observation = DIALECT.observation(SEARCH, found(Document("1", "T\nx", url="https://b"), long))
    assert observation.text == (
        "\n<information>\n[Doc 1](https://b):\nT\nx\n\n[Doc 2](2):\nU\n"
        + "y" * 4998
        + "\n</information>\n\n<think>\n"
    )
    nothing = DIALECT.observation(SEARCH, ToolResult(findings=(Finding("q", ()),)))
    assert nothing.body == "No search results are found."


def test_a_page_is_shown_in_numbered_parts():
    page = Document("u", "T\n" + "a" * 25_000 + "b" * 10)
    body = DIALECT.observation(ACCESS, found(page)).body
    assert body == f">>>> Page 1 >>>>\n\nT\n{'a' * 24_998}\n>>>> Page 2 >>>>\n\naa{'b' * 10}"
    line = DIALECT.observation(ACCESS, found(Document("u", "all of it in one line"))).body
    assert line == ">>>> Page 1 >>>>\n\nall of it in one line"
    failed = DIALECT.observation(ACCESS, ToolResult("404: not there", failure="no_result"))
    assert failed.body == "404: not there"


@pytest.mark.parametrize("name", ["think", "search", "access", "information", "answer"])
def test_no_protocol_tag_survives_in_an_observation(name):
    for tag in (f"<{name}>", f"</{name}>", f"< / {name.upper()} >"):
        for call in (SEARCH, ACCESS):
            for result in (ToolResult(tag), found(Document(tag, f"{tag}\n{tag}", url=tag))):
                assert "<" not in DIALECT.observation(call, result).body


def test_a_correction_is_followed_by_the_next_thought():
    assert isinstance(INVALID, InvalidAction)
    text = DIALECT.correction(INVALID).text
    assert text.startswith("\n<information>") and text.endswith("</information>\n\n<think>\n")
    assert DIALECT.parse(text) == INVALID
