import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ToolError
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.rollout.agent_memory import AgentMemory
from graphpo_agent.rollout.frozen_summary import FrozenSummary, written_path
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.types import Document, PathState, StateDescription, Task
from tests.net.servers import always, answer, serving
from tests.rollout.scripted import EOS, ScriptedPolicy, TokenContext, describe

SILENT = ScriptedPolicy(lambda context, seed: (EOS,))


def state_of(question="Who?", response="", found=None, facts=()):
    """Agent mode where documents are given, perhaps none; else segment mode."""
    memory = () if found is None else AgentMemory(documents_found=tuple(found), facts=facts)
    return PathState(
        task=Task(id="t", question=question, answers=("the accepted answer",)),
        context=TokenContext((1, 2)),
        depth=0,
        prompt_ids=(1, 2),
        response=response,
        answer=None,
        memory=memory,
    )


def said(content):
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def shown(request):
    """The path that a request shows, read back."""
    content = request.json()["messages"][0]["content"]
    return json.loads(content[content.index("\n{") :])


def echo(before, request):
    """Sums a path up as its question and what was written."""
    path = shown(request)
    return answer(said(f" {path['question']} {path['written']}\n"))


def test_the_frozen_model_sees_question_words_and_documents_and_no_answer():
    documents = (Document("9", '"B"\nborn 1987'), Document("12", '"A"\nüber'))
    states = [
        state_of(response="<search> a </search>", found=documents),
        state_of(response="1 + 2 = 3"),
    ]
    with serving(echo) as server:
        describer = FrozenSummary(OpenAIChat(server.url, "m"), max_summary_tokens=7)
        described = describe(describer, SILENT, states)
    assert described == [
        StateDescription(text="Who? <search> a </search>"),
        StateDescription(text="Who? 1 + 2 = 3"),
    ]
    paths = sorted(map(shown, server.requests), key=len, reverse=True)
    assert paths == [
        {
            "question": "Who?",
            "written": "<search> a </search>",
            "documents": ['"A"\nüber', '"B"\nborn 1987'],
        },
        {"question": "Who?", "written": "1 + 2 = 3"},
    ]
    assert {request.json()["max_tokens"] for request in server.requests} == {7}
    assert not any(b"the accepted answer" in request.body for request in server.requests)
    assert SILENT.requests == []


def test_the_order_in_which_documents_were_found_does_not_count():
    documents = [Document(str(i), f"T{i}\ntext") for i in range(5)]
    assert written_path(state_of(found=documents), 1000) == written_path(
        state_of(found=documents[::-1]), 1000
    )


def test_the_frozen_model_sees_what_programs_printed_in_any_order():
    oslo = Document("7", "Oslo")
    path = written_path(state_of(found=[oslo], facts=("43\n", "42\n")), 1000)
    assert json.loads(path)["documents"] == ["Oslo", "42\n", "43\n"]
    assert path == written_path(state_of(found=[oslo], facts=("42\n", "43\n")), 1000)


@given(
    st.text(max_size=300),
    st.none() | st.lists(st.text(max_size=200), max_size=5),
    st.integers(2, 400),
)
def test_a_path_keeps_its_end_and_fits(response, contents, limit):
    found = None if contents is None else [Document(str(i), c) for i, c in enumerate(contents)]
    path = json.loads(written_path(state_of(response=response, found=found), limit))
    assert response.endswith(path["written"])
    kept = path.get("documents", [])
    assert len(path["written"]) + sum(map(len, kept)) <= limit
    assert ("documents" in path) == (found is not None)
    for document, text in zip(contents or [], kept, strict=True):
        assert document.startswith(text)
    if len(response) <= limit // 2:
        assert path["written"] == response


def test_summaries_of_all_graphs_are_asked_for_together_and_equal_paths_once():
    gate = threading.Barrier(4)

    def script(before, request):
        gate.wait(10)  # four at once are needed to go on
        return echo(before, request)

    states = [[state_of(response=f"{i % 4}"), state_of(response="0")] for i in range(8)]
    with serving(script) as server:
        describer = FrozenSummary(OpenAIChat(server.url, "m"), concurrency=4)
        scheduler = PolicyScheduler(SILENT, overlap=True)
        found = scheduler.run([describer.describe(scheduler, pair) for pair in states])
    assert [[one.text for one in pair] for pair in found] == [
        [f"Who? {i % 4}", "Who? 0"] for i in range(8)
    ]
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "failure",
    [answer({}, 503), answer({}, 400), answer(said(None)), answer(said(" \n"))],
    ids=["outage", "refused", "no text", "blank"],
)
def test_failed_summary_is_no_description_and_counted(failure):
    def script(before, request):
        return failure if shown(request)["written"] == "bad" else echo(before, request)

    with serving(script) as server:
        describer = FrozenSummary(OpenAIChat(server.url, "m", tries=1))
        states = [state_of(response=text) for text in ("good", "bad", "bad")]
        described = describe(describer, SILENT, states)
    assert described == [StateDescription(text="Who? good"), StateDescription(), StateDescription()]
    assert describer.counts == {"summary/failed": 1}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer({"error": "too long"}, 400), "too long"),
        (answer(said(None)), "said nothing"),
        (answer(said("<think>let me see")), "state.max_summary_tokens"),
    ],
    ids=["refused", "no text", "cut off in its thoughts"],
)
def test_a_model_that_has_summed_nothing_up_yet_stops_the_run(reply, reason):
    with serving(lambda before, request: reply) as server:
        describer = FrozenSummary(OpenAIChat(server.url, "m"))
        with pytest.raises(ToolError, match=rf"no path could be summed up: .*{reason}"):
            describe(describer, SILENT, [state_of(), state_of(response="1 + 2")])


def test_thoughts_are_not_part_of_a_summary():
    with serving(always(said("<think>let me see</think>\n\nknown: 3"))) as server:
        described = describe(FrozenSummary(OpenAIChat(server.url, "m")), SILENT, [state_of()])
    assert described == [StateDescription(text="known: 3")]


def test_wrong_key_stops_the_run():
    with serving(always({"error": "bad key"}, 401)) as server:
        describer = FrozenSummary(OpenAIChat(server.url, "m"))
        with pytest.raises(ToolError, match="bad key"):
            describe(describer, SILENT, [state_of()])
