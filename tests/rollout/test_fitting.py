import pytest

from graphpo_agent.errors import DataError
from graphpo_agent.rollout.fitting import check_fitting, fitting_tasks
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.types import Task
from tests.rollout.scripted import ScriptedPolicy

EXPANDER = SegmentExpander(segment_length=4, max_response_tokens=8)


class HoldingPolicy(ScriptedPolicy):
    """Counts the contexts that it holds."""

    held = most = 0

    def open(self, token_ids):
        self.held += 1
        self.most = max(self.most, self.held)
        return super().open(token_ids)

    def release(self):
        self.held = 0


def tasks_of(*lengths):
    return [Task(f"t{i}", "q" * length, ()) for i, length in enumerate(lengths)]


def test_tasks_without_room_are_told_apart_and_few_prompts_are_held():
    policy = HoldingPolicy(lambda ids, seed: [], max_context_tokens=100)
    tasks = tasks_of(*(200 if i % 100 == 7 else 10 for i in range(1000)))
    fitting, reasons = fitting_tasks(EXPANDER, policy, tasks)
    assert fitting == [task for i, task in enumerate(tasks) if i % 100 != 7]
    assert len(reasons) == 10 and "'t7'" in reasons[0] and "'t907'" in reasons[-1]
    assert 0 == policy.held < policy.most < 300


def test_the_first_task_without_room_is_named_with_how_many_there_are():
    policy = HoldingPolicy(lambda ids, seed: [], max_context_tokens=100)
    check_fitting(EXPANDER, policy, tasks_of(10, 20))
    with pytest.raises(DataError, match=r"'t1'.* \(2 such tasks of 3\)"):
        check_fitting(EXPANDER, policy, tasks_of(10, 200, 300))
