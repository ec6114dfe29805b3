import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects.base import (
    FinalAnswer,
    InvalidAction,
    ToolCall,
    encode_observation,
)
from graphpo_agent.rollout.dialects.hermes import HermesDialect, ToolSignature
from graphpo_agent.types import Document, Finding, Task, ToolResult
from tests.rollout.scripted import END_OF_MESSAGE, EOS, START, ByteTokenizer
from tools.extract import Evidence

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOLS = {
    "search": ToolSignature("search", "Finds documents.", SCHEMA),
    "python": ToolSignature("python", "Runs code.", {"type": "object"}),
}
DIALECT = HermesDialect(TOOLS)
TOKENIZER = ByteTokenizer()
CALL = ToolCall("search", {"query": "q"})
TASK = Task(id="t", question="Who? {tools}", answers=())


def call(text):
    return f"<think> x </think>\n<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (
            call('{"name": "search", "arguments": {"query": ["a", "b"]}}'),
            ToolCall("search", {"query": ["a", "b"]}),
        ),
        (call('{"name": "search"}'), ToolCall("search", {})),
        (
            call('{"name": "python", "arguments": {}}\n<code>\nprint("</x>")\n</code>'),
            ToolCall("python", {"code": 'print("</x>")'}),
        ),
        (
            call('{"name": "search", "arguments": {"query": "the <code> tag"}}'),
            ToolCall("search", {"query": "the <code> tag"}),
        ),
        (
            call('{"name": "search", "arguments": {"query": "two\nlines"}}'),
            ToolCall("search", {"query": "two\nlines"}),
        ),
        ("</think>\n<answer>\n1987\n</answer>", FinalAnswer("1987")),
        (f"<answer>a</answer>{call('{}')}", FinalAnswer("a")),
        (
            f"{call(json.dumps({'name': 'search', 'arguments': {}}))}<answer>a</answer>",
            ToolCall("search", {}),
        ),
        (f"I write <tool_call> now {call(json.dumps({'name': 'search'}))}", ToolCall("search", {})),
        (
            call('{"name": "python", "arguments": {}}\n<code>\nsplit("</code>")\n</code>'),
            ToolCall("python", {"code": 'split("</code>")'}),
        ),
        (
            call('{"name": "python", "arguments": {"code": "\\"<answer>1</answer>\\""}}'),
            ToolCall("python", {"code": '"<answer>1</answer>"'}),
        ),
        (
            call('{"name": "python", "arguments": {}}\n<code>\n"<answer>1</answer>"\n</code>'),
            ToolCall("python", {"code": '"<answer>1</answer>"'}),
        ),
        ('<tool_call>{"name": "search"} <answer>a</answer>', FinalAnswer("a")),
        ('I write <tool_call> 3" high <answer>a</answer>', FinalAnswer("a")),
    ],
)
def test_calls_and_answers_are_found(text, action):
    assert DIALECT.parse(text) == action


@pytest.mark.parametrize(
    ("written", "action"),
    [
        (
            json.dumps({"name": "search", "arguments": json.dumps({"query": "a"})}),
            ToolCall("search", {"query": "a"}),
        ),
        (
            '{"name": "search", "arguments": "{\\"query\\": \\"a\\",}"}',
            ToolCall("search", {"query": "a"}),
        ),
        (
            '```json\n{"name": "search", "arguments": {"query": "```a```"}}\n```',
            ToolCall("search", {"query": "```a```"}),
        ),
        ('```\n{"name": "search"}\n```', ToolCall("search", {})),
        (
            '{"name": "search", "arguments": {"query": [",]", "b",\n],},}',
            ToolCall("search", {"query": [",]", "b"]}),
        ),
        (
            '{"name": "python", "arguments": {},}\n<code>\nx = "[1,]"\n</code>',
            ToolCall("python", {"code": 'x = "[1,]"'}),
        ),
    ],
)
def test_what_others_pass_over_in_a_call_is_passed_over(written, action):
    assert DIALECT.parse(call(written)) == action


@pytest.mark.parametrize(
    ("text", "unfinished"),
    [
        ('<tool_call>{"name": "search", "arguments": {"query": "</answer>', True),
        ('<tool_call>\n```json\n{"name": "</answer>', True),
        ('<tool_call>{"name": "python"}\n<code>\n</answer>', True),
        ('<tool_call>{"name": "search"} </answer>', False),
        ('I write <tool_call> "</answer>', False),
        ('{"name": "</answer>', False),
        ("</answer>", False),
    ],
)
def test_a_text_that_ends_inside_a_call_is_unfinished(text, unfinished):
    action = DIALECT.parse(text)
    assert isinstance(action, InvalidAction) and action.unfinished == unfinished


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hm", "neither a tool call nor an answer"),
        ("<tool_call>{}", "neither a tool call nor an answer"),
        (call("{'name': 'search'}"), "not valid JSON"),
        (call("{" * 5000), "not valid JSON"),
        (call('{"a":' * 50_000), "not valid JSON"),
        (call('{"name": "search", "arguments": {"n": ' + "9" * 5000 + "}}"), "not valid JSON"),
        (call('{"name": "search"} or so'), "not valid JSON"),
        (call("[1]"), "needs the key name"),
        (call('{"name": 3}'), "needs the key name"),
        (call('{"name": "browse"}'), "no tool 'browse'. The tools are: search, python."),
        (call('{"name": "</answer>"}'), "no tool '‹/answer>'"),
        (call('{"name": "search", "arguments": "q"}'), "must hold a JSON object"),
        (call('{"name": "search", "arguments": "{} q"}'), "must hold a JSON object"),
        (call('{"name": "search", "arguments": "[1]"}'), "must hold a JSON object"),
        (call('{"name": "search", "arguments": {,}}'), "not valid JSON"),
        (call('{"name": "search"}\n```'), "not valid JSON"),
        (call(""), "not valid JSON"),
    ],
)
def test_what_cannot_be_done_is_said(text, said):
    action = DIALECT.parse(text)
    assert isinstance(action, InvalidAction) and said in action.reason
    observation = DIALECT.correction(action)
    assert observation.role == "user"
    assert observation.text == f"<tool_response>\n{action.reason}\n</tool_response>"


PARTS = ["<tool_call>", "</tool_call>", "<answer>", "</answer>", "<code>", "</code>"]
PARTS += ["{", "}", '"name"', '"search"', '"arguments"', ":", ",", "[", "]"]
PARTS += ["```", "```json", ",}"]
PARTS += ["1e999", "NaN", "\\", "\ud800", "\0", " x"]


def test_100k_fuzzed_turns_have_an_action():
    rng = random.Random(0)
    kinds = {ToolCall: 0, FinalAnswer: 0, InvalidAction: 0}
    head = ["<tool_call>", '{"name": "search"', ', "arguments": {', '"query": "x"}}</tool_call>']
    for _ in range(100_000):
        text = "".join(head[: rng.randrange(5)] + rng.choices(PARTS, k=rng.randrange(10)))
        kinds[type(DIALECT.parse(text))] += 1
    assert min(kinds.values()) > 100


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_has_an_action(text):
    assert isinstance(DIALECT.parse(call(text)), (ToolCall, InvalidAction, FinalAnswer))


@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "</tool_call>", "<answer>", "{", "[", "<code>", "<", '"', '\\"', ", ", "```"],
)
def test_megabytes_of_one_thing_are_read_at_once(unit):
    assert isinstance(DIALECT.parse(call(unit * 200_000)), InvalidAction)
    begun = '<tool_call>{"' + unit * 200_000 + "</answer>"
    assert not isinstance(DIALECT.parse(begun), ToolCall)


@pytest.mark.parametrize("name", ["think", "tools", "tool_call", "tool_response", "code", "answer"])
def test_no_protocol_tag_survives_in_a_reply(name):
    for spelling in (f"<{name}>", f"</{name}>", f"< /{name.upper()} x>"):
        for result in (
            ToolResult(spelling),
            ToolResult(findings=(Finding(spelling, (Document("1", f"{spelling}\n{spelling}"),)),)),
        ):
            observation = DIALECT.observation(CALL, result)
            assert "<" not in observation.body


def test_the_prompt_lists_the_tools_and_leaves_the_question_alone():
    system, user = DIALECT.render(TASK)
    assert (system["role"], user["role"], user["content"]) == ("system", "user", "Who? {tools}")
    lines = system["content"].split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    functions = [json.loads(line)["function"] for line in lines]
    assert [function["name"] for function in functions] == ["search", "python"]
    assert functions[0]["parameters"] == SCHEMA


def test_own_prompts_may_hold_the_tools_anywhere_but_must_hold_them():
    dialect = HermesDialect(TOOLS, "Be brief.", "{tools}\n{question}")
    system, user = dialect.render(TASK)
    assert system["content"] == "Be brief." and user["content"].startswith('{"type": "function"')
    (message,) = HermesDialect(TOOLS, "").render(TASK)
    assert message["role"] == "user"
    with pytest.raises(ConfigError, match=r"has \{tools\}"):
        HermesDialect(TOOLS, "Be brief.")
    with pytest.raises(ConfigError, match=r"\{question\}"):
        HermesDialect(TOOLS, prompt_template="{tools}")


def test_search_results_are_listed_by_query_with_links():
    pages = (
        Document("u", '"T"\nx', url="https://a.org"),
        Document("v", "U\ny"),
    )
    result = ToolResult(findings=(Finding("a", pages), Finding("b", pages[1:]), Finding("c", ())))
    assert DIALECT.observation(CALL, result).body == (
        "A Google search for 'a' found 2 results:\n\n## Web Results\n1. [T](https://a.org)\n\nx\n\n"
        "2. U\n\ny\n=======\n"
        "A Google search for 'b' found 1 results:\n\n## Web Results\n1. U\n\ny\n=======\n"
        "No results found for 'c'. Another wording may find some."
    )
    nothing = DIALECT.observation(CALL, ToolResult(findings=(Finding("c", ()),))).body
    assert nothing == "No results found for 'c'. Another wording may find some."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Date published: 1 May 2025\nsnippet", "Date published: 1 May 2025\n\nsnippet"),
        ("Date published: x\nSource: BBC\nsnippet", "Date published: x\nSource: BBC\n\nsnippet"),
        ("Source: BBC\nDate published: x", "Source: BBC\n\nDate published: x"),
        ("a\nSource: BBC", "\na\nSource: BBC"),
        ("Date published: x", "Date published: x"),
        ("", ""),
    ],
)
def test_date_and_source_stand_before_the_blank_line(text, shown):
    result = ToolResult(findings=(Finding("a", (Document("u", f'"T"\n{text}', url="https://a"),)),))
    head = "A Google search for 'a' found 1 results:\n\n## Web Results\n1. [T](https://a)"
    assert DIALECT.observation(CALL, result).body == f"{head}\n{shown}".rstrip()


@pytest.mark.parametrize(
    ("line", "title"),
    [('"A ""b"""', 'A "b"'), ('"A" by B', '"A" by B'), ('about "A"', 'about "A"'), ('"', '"')],
)
def test_only_quotes_around_a_title_go(line, title):
    page = Document("u", f"{line}\nx", url="https://a")
    body = DIALECT.observation(CALL, ToolResult(findings=(Finding("a", (page,)),))).body
    assert f"1. [{title}](https://a)\n" in body


VISIT = ToolCall("read_page", {"url": ["https://a", "https://b"], "goal": " the age of oaks "})
EVIDENCE = Evidence("An oak lives 300 years.", "Oaks get old.")
PAGE = Document("page 1 for age", f'"T"\n{EVIDENCE.text}', url="https://a")
BLOCK = (
    "The useful information in https://a for user goal the age of oaks as follows: \n\n"
    "Evidence in page: \nAn oak lives 300 years.\n\nSummary: \nOaks get old."
)


def test_a_visited_page_is_shown_with_its_goal_and_not_as_a_search():
    one = ToolResult(findings=(Finding("https://a", (PAGE,)),))
    observation = DIALECT.observation(VISIT, one)
    assert observation.body == BLOCK and observation.documents == (PAGE,)
    other = Document("page 2", '"U"\nthe text', url="https://b")
    both = ToolResult(
        text="https://c could not be read: 404",
        findings=(*one.findings, Finding("https://b", (other,))),
    )
    observation = DIALECT.observation(VISIT, both)
    assert observation.body == (
        f"{BLOCK}\n=======\n"
        "The useful information in https://b for user goal the age of oaks as follows: \n\n"
        'Evidence in page: \n"U"\nthe text\n=======\n'
        "https://c could not be read: 404"
    )
    assert observation.documents == (PAGE, other)


def test_a_visit_without_goal_or_page_says_what_there_is():
    page = ToolResult(findings=(Finding("https://b", (Document("p", '"U"\nthe text'),)),))
    body = DIALECT.observation(ToolCall("visit", {"url": "https://b"}), page).body
    head = "The useful information in https://b as follows: \n\nEvidence in page: \n"
    assert body == f'{head}"U"\nthe text'
    failed = ToolResult("https://b could not be read: 404", failure="no_result")
    assert DIALECT.observation(VISIT, failed).body == failed.text


def test_a_cut_reply_shows_only_documents_whose_own_text_has_begun():
    findings = tuple(Finding(f"query {n}", (Document(str(n), f"T\nx{n}"),)) for n in range(2))
    observation = DIALECT.observation(CALL, ToolResult(findings=findings))
    second = observation.text.rindex("1. T")
    assert _shown(observation, second) == 1
    assert _shown(observation, second + 1) == 2


def _shown(observation, length):
    """How many pieces show when the text up to ``length`` is kept and the closing tag."""
    around = TOKENIZER.turn_break("user")
    room = length + len(observation.closing) + len(around.opening) + len(around.closing)
    return encode_observation(TOKENIZER, observation, room)[1]


def test_a_long_query_leaves_room_for_what_it_found():
    found = Finding("q" * 5000, (Document("u", "T\nx"),))
    assert DIALECT.observation(CALL, ToolResult(findings=(found,))).body == (
        f"A Google search for '{'q' * 200}' found 1 results:\n\n## Web Results\n1. T\n\nx"
    )


def test_a_reply_is_a_message_of_its_own_and_does_not_repeat_the_end_of_the_turn():
    observation = DIALECT.observation(CALL, ToolResult("42"))
    inside = TOKENIZER.encode("user\n") + TOKENIZER.encode("<tool_response>\n42\n</tool_response>")
    token_ids, _ = encode_observation(TOKENIZER, observation, 100)
    assert list(token_ids) == [EOS, START, *inside, END_OF_MESSAGE, START]
    token_ids, _ = encode_observation(TOKENIZER, observation, 100, after_eos=EOS)
    assert list(token_ids) == [START, *inside, END_OF_MESSAGE, START]


def test_a_long_reply_is_cut_inside_its_tags_and_its_message():
    observation = DIALECT.observation(CALL, ToolResult("x" * 500))
    token_ids, shown = encode_observation(TOKENIZER, observation, 60)
    assert len(token_ids) == 60 and shown == 1
    assert token_ids[:2] == (EOS, START) and token_ids[-2:] == (END_OF_MESSAGE, START)
    text = TOKENIZER.decode(token_ids)
    assert text.startswith("user\n<tool_response>\nxxx") and text.endswith("x\n</tool_response>")
    with pytest.raises(ConfigError, match="max_observation_tokens 20 cannot hold"):
        encode_observation(TOKENIZER, observation, 20)
