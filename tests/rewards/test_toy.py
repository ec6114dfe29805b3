import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import DataError
from graphpo_agent.rewards.toy import (
    ReachProgress,
    TraceProgress,
    facts_key,
    hops_key,
    reach_key,
    reach_progress,
    reach_reward,
    trace_key,
    trace_progress,
    trace_reward,
)
from graphpo_agent.types import Document, Outcome, PathState, Task

REACH = Task(
    "r",
    "from 7 to 23 with *2 +3 -4",
    ("23",),
    {"start": 7, "target": 23, "operations": ["*2", "+3", "-4"], "limit": 30},
)
TRACE = Task(
    "t",
    "from 7 : +1 *2 -2",
    ("14",),
    {"start": 7, "operations": ["+1", "*2", "-2"], "limit": 20},
)
FACTS = Task("k", "when: x", ("1987",), {"gold_documents": ["4", "12"]})
HOPS = Task(
    "h",
    "who: Karo Venner mentor rival",
    ("Domi Wornal",),
    {"gold_documents": ["5", "8"], "outdated": ["4", None]},
)


def reward(response):
    return reach_reward(REACH, Outcome(response))


def state(task, response="", answer=None, found=(), turns=()):
    documents = tuple(Document(id_, "") for id_ in found)
    memory = SimpleNamespace(documents_found=documents, turns=tuple(turns))
    return PathState(task, SimpleNamespace(num_tokens=0), 0, 0, response, answer, memory)


@pytest.mark.parametrize(
    "response",
    [
        " +3 = 10 ; *2 = 20 ; +3 = 23",
        "*2 = 14 ; +3 = 17 ; +3 = 20 ; +3 = 23",
        "  +3  =  10;*2 = 20 ;\n+3 = 23  ",
        " +3 = 10 ; +3 = 13 ; +3 = 16 ; +3 = 19 ; +3 = 22 ; +3 = 25 ; -4 = 21 ; -4 = 17"
        " ; +3 = 20 ; +3 = 23",
    ],
)
def test_a_right_path_of_any_length_is_rewarded(response):
    assert reward(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        " +3 = 10 ; *2 = 20",  # not on the target
        " +3 = 10 ; *2 = 20 ; +3 = 23 ;",  # not stopped
        " +3 = 10 ; *2 = 20 ; +3 = 23 ; +3",  # stopped in the middle
        " +3 = 10 ; *2 = 20 ; +3 = 23 ; -4 = 19",  # passed the target
        " +5 = 12 ; *2 = 24 ; -1 = 23",  # operations that are not offered
        " +3 = 11 ; *2 = 22 ; +3 = 23",  # wrong results
        " +3 = 10 ; *2 = 20 ; *2 = 40 ; -4 = 36 ; -4 = 32 ; -4 = 28 ; -4 = 24 ; -4 = 23",
        " +3 = 10 ; oh ; *2 = 20 ; +3 = 23",  # nonsense on the way
        " +3 = 10 ;; *2 = 20 ; +3 = 23",
        "+3 = 10 , *2 = 20 , +3 = 23",
        "23",
        " = 23",
        " +16 = 23",
        " +3 = 10 ; *2 = 20 ; +3 = 23 23",
        " +3 = 1٠ ; *2 = 20 ; +3 = 23",
    ],
)
def test_anything_else_is_not(response):
    assert reward(response) == 0.0


@given(st.text(max_size=60) | st.text("+-*23457; =", max_size=60))
def test_no_text_breaks_the_verifier(response):
    assert reward(response) in (0.0, 1.0)
    assert isinstance(reach_key(state(REACH, response)), str)


@given(
    lines=st.lists(
        st.sampled_from([" +3 = 10", " *2 = 20", " -4 = 3", " +3 = 9", " x", ""]), max_size=5
    ),
    cut=st.integers(0, 60),
)
def test_progress_agrees_with_following_the_lines_one_by_one(lines, cut):
    text = "".join(f"{line} ;" for line in lines)[:cut]
    number, legal = 7, True
    for line in text.split(";")[:-1]:
        words = line.split()
        well_formed = len(words) == 3 and words[1] == "="
        rule = {"+3": lambda x: x + 3, "*2": lambda x: 2 * x, "-4": lambda x: x - 4}
        legal = bool(
            legal and well_formed and number is not None and rule[words[0]](number) == int(words[2])
        )
        number = int(words[2]) if well_formed else None
    progress = reach_progress(REACH, text)
    assert progress == ReachProgress(number, legal, text.split(";")[-1].strip())


def test_orders_that_reach_the_same_number_have_the_same_key():
    one = reach_key(state(REACH, " +3 = 10 ; +3 = 13 ; *2 = 26 ; -4 = 22 ;"))
    other = reach_key(state(REACH, " *2 = 14 ; +3 = 17 ; +3 = 20 ; +3 = 23 ; +3 = 26 ; -4 = 22 ;"))
    assert one == other == "22 legal"


def test_keys_tell_apart_what_cannot_be_continued_alike():
    texts = [
        "",
        " +3",
        " +3 =",
        " +3 = 10",
        " +3 = 10 ;",
        " +3 = 11 ;",
        " *2 = 10 ;",
        " oh ;",
        " +3 = 10 ; -4",
    ]
    keys = [reach_key(state(REACH, text)) for text in texts]
    assert keys == [
        "7 legal",
        "7 legal +3",
        "7 legal +3 =",
        "10 legal .",
        "10 legal",
        "11 illegal",
        "10 illegal",
        "None illegal",
        "10 legal -4",
    ]


def test_answers_with_the_same_last_number_have_the_same_key():
    short = reach_key(state(REACH, " +3 = 10 ; *2 = 20 ; +3 = 23"))
    assert (
        short == reach_key(state(REACH, " *2 = 14 ; +3 = 17 ; +3 = 20 ; +3 = 23")) == "23 legal ."
    )


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (" +1 = 8 ; *2 = 16 ; -2 = 14", 1.0),
        ("+1 = 8;*2 = 16 ;\n-2  =  14  ", 1.0),
        (" +1 = 9 ; *2 = 18 ; -2 = 14", 1.0),  # the wrong results cancel each other
        (" +1 = 8 ; *2 = 16 ; -2 = 15", 0.0),
        (" +1 = 8 ; *2 = 16 ; -2 = 14 ;", 0.0),  # not stopped
        (" +1 = 8 ; *2 = 14", 0.0),  # a line is missing
        (" +1 = 8 ; *2 = 16 ; -2 = 14 ; -2 = 14", 0.0),  # one too many
        (" *2 = 14 ; +1 = 15 ; -2 = 14", 0.0),  # another order
        (" +3 = 8 ; *2 = 16 ; -2 = 14", 0.0),
        (" +1 = 8 ; oh ; -2 = 14", 0.0),
        (" +1 = 8 ; *2 = 20 ; -2 = 14", 0.0),  # numbers are below 20
        (" +1 = 8 ; *2 = 16 ; -2", 0.0),
        (" +1 = 8 ; *2 = 16 ; -2 = 14 14", 0.0),
        ("14", 0.0),
        ("", 0.0),
    ],
)
def test_a_trace_is_right_with_all_its_lines_and_the_right_last_number(response, right):
    assert trace_reward(TRACE, Outcome(response)) == right


@given(
    lines=st.lists(
        st.sampled_from([" +1 = 8", " *2 = 16", " -2 = 14", " +1 = 9", " *2 = 20", " x", ""]),
        max_size=5,
    ),
    cut=st.integers(0, 60),
)
def test_trace_progress_agrees_with_following_the_lines_one_by_one(lines, cut):
    text = "".join(f"{line} ;" for line in lines)[:cut]
    *finished, pending = text.split(";")
    number = 7
    for row, line in enumerate(finished):
        words = line.split()
        asked = dict(enumerate(["+1", "*2", "-2"])).get(row)
        fits = len(words) == 3 and words[0] == asked and words[2] in map(str, range(20))
        number = int(words[2]) if fits and number is not None else None
    assert trace_progress(TRACE, text) == TraceProgress(len(finished), number, pending.strip())


@given(st.text(max_size=60) | st.text("+-*123478; =", max_size=60))
def test_no_text_breaks_the_trace_verifier(response):
    assert trace_reward(TRACE, Outcome(response)) in (0.0, 1.0)
    assert isinstance(trace_key(state(TRACE, response)), str)


def test_trace_keys_are_the_line_and_the_number_however_it_came_about():
    texts = [
        "",
        " +1",
        " +1 = 8",
        " +1 = 8 ;",
        " +1 = 9 ;",
        " +1 = 9 ; *2 = 16 ;",  # a wrong line that comes back to the right number
        " +1 = 8 ; *2 = 16 ;",
        " +1 = 8 ; *2 = 16 ; -2",
        " +1 = 8 ; *2 = 16 ; -2 = 14",
        " oh ; *2 = 16 ;",
        " *2 = 14 ;",
    ]
    assert [trace_key(state(TRACE, text)) for text in texts] == [
        "0 7",
        "0 7 +1",
        "1 8 .",
        "1 8",
        "1 9",
        "2 16",
        "2 16",
        "2 16 -2",
        "3 14 .",
        "2 None",
        "1 None",
    ]


def test_facts_are_a_set_of_gold_documents_and_a_normalised_answer():
    key = facts_key(state(FACTS, found=("12", "99", "4")))
    assert key == facts_key(state(FACTS, found=("4", "12"))) == '["when: x", ["12", "4"], null]'
    assert facts_key(state(FACTS, found=("12",))) != key
    answered = facts_key(state(FACTS, answer=" 1987. ", found=("4",)))
    assert answered == '["when: x", ["4"], "1987"]'
    assert answered != facts_key(state(FACTS, answer="", found=("4",)))


def test_a_hop_is_known_by_its_present_document_once_those_before_it_are_known():
    def key(found, turns=("<search> q</search>",)):
        question, known, asked, last = json.loads(hops_key(state(HOPS, found=found, turns=turns)))
        assert question == HOPS.question
        return known, asked, last

    search = "<search> q</search>"
    assert key((), ()) == (0, False, None)
    assert key(()) == (0, False, search)
    assert key(("4",)) == (0, True, search)  # outdated
    assert key(("4", "5")) == key(("99", "5")) == (1, False, search)
    assert key(("8",)) == (0, False, search)  # by luck, before the first hop
    assert key(("8", "5", "4")) == key(("5", "8")) == (2, False, search)
    answered = key(("5", "8"), (search, " <answer> Domi Wornal</answer>"))
    assert answered == (2, False, "<answer> Domi Wornal</answer>")


def test_tasks_of_another_world_are_refused_by_name():
    with pytest.raises(DataError, match=r"task k: field 'metadata.start' is missing"):
        reach_reward(FACTS, Outcome(""))
    with pytest.raises(DataError, match=r"task r: field 'metadata.gold_documents' is missing"):
        facts_key(state(REACH))
    with pytest.raises(DataError, match=r"task k: field 'metadata.outdated' is missing"):
        hops_key(state(FACTS))
    with pytest.raises(DataError, match=r"task k: field 'metadata.start' is missing"):
        trace_key(state(FACTS))


LINE = "+1 = 8 ; +1"


@pytest.mark.parametrize(
    ("look", "task", "field", "value", "kind"),
    [
        (trace_progress, TRACE, "limit", "20", "a whole number"),
        (trace_progress, TRACE, "start", None, "a whole number"),
        (trace_progress, TRACE, "operations", 3, "a list of strings"),
        (trace_progress, TRACE, "operations", "+1 *2 -2", "a list of strings"),
        (trace_progress, TRACE, "operations", [1, 2], "a list of strings"),
        (reach_progress, REACH, "start", "7", "a whole number"),
        (reach_progress, REACH, "limit", True, "a whole number"),
        (reach_progress, REACH, "operations", None, "a list of strings"),
        (lambda task, text: reach_reward(task, Outcome(text)), REACH, "target", "23", "a whole"),
        (lambda task, _: facts_key(state(task)), FACTS, "gold_documents", [["4"]], "a list of st"),
        (lambda task, _: facts_key(state(task)), FACTS, "gold_documents", 4, "a list of strings"),
        (lambda task, _: hops_key(state(task)), HOPS, "outdated", [{}, None], "a list of strings"),
        (lambda task, _: hops_key(state(task)), HOPS, "outdated", None, "a list of strings and"),
    ],
)
def test_metadata_of_another_type_is_refused_by_task_and_field(look, task, field, value, kind):
    wrong = replace(task, metadata={**task.metadata, field: value})
    says = rf"task {task.id}: field 'metadata.{field}' must be {kind}.*, found "
    with pytest.raises(DataError, match=says) as caught:
        look(wrong, LINE)
    assert "\n" not in str(caught.value)


def test_an_outdated_document_is_told_for_each_hop():
    wrong = replace(HOPS, metadata={**HOPS.metadata, "outdated": ["4"]})
    with pytest.raises(DataError, match=r"task h: .*each of the 2 gold_documents, found 1"):
        hops_key(state(wrong, found=("5",)))


@pytest.mark.parametrize("answers", [(), ("four",), ("",)])
def test_a_trace_without_a_number_to_come_to_is_refused(answers):
    right = Outcome(" +1 = 8 ; *2 = 16 ; -2 = 14")
    with pytest.raises(DataError, match=r"task t: field 'answers' must hold a whole number, found"):
        trace_reward(replace(TRACE, answers=answers), right)
