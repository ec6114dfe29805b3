import pytest

from graphpo_agent.errors import DataError
from graphpo_agent.rollout.fitting import Prompts, check_fitting, fitting_tasks
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.types import Task
from tests.rollout.scripted import ScriptedPolicy

EXPANDER = SegmentExpander(segment_length=4, max_response_tokens=8)
TOKENIZER = ScriptedPolicy(lambda ids, seed: []).tokenizer


def tasks_of(*lengths):
    return [Task(f"t{i}", "q" * length, ()) for i, length in enumerate(lengths)]


def test_tasks_without_room_are_told_apart_and_the_others_measured():
    tasks = tasks_of(*(200 if i % 100 == 7 else 10 + i % 2 for i in range(1000)))
    fitting = fitting_tasks(EXPANDER, Prompts(TOKENIZER, 100), tasks)
    assert list(fitting.reasons) == list(range(7, 1000, 100))
    assert "'t7'" in fitting.reasons[7] and "'t907'" in fitting.reasons[907]
    shortest = len(TOKENIZER.render([{"role": "user", "content": "q" * 10}]))
    assert fitting.prompt_tokens == shortest + 1, "on average, rounded up"
    assert (
        fitting_tasks(EXPANDER, Prompts(TOKENIZER, 100), tasks_of(200, 10, 200)).prompt_tokens
        == shortest
    )
    nothing = fitting_tasks(EXPANDER, Prompts(TOKENIZER, 3), tasks)
    assert len(nothing.reasons) == 1000 and nothing.prompt_tokens == 0


def test_the_first_task_without_room_is_named_with_how_many_there_are():
    prompts = Prompts(TOKENIZER, 100)
    check_fitting(EXPANDER, prompts, tasks_of(10, 20))
    with pytest.raises(DataError, match=r"'t1'.* \(2 such tasks of 3\)"):
        check_fitting(EXPANDER, prompts, tasks_of(10, 200, 300))
