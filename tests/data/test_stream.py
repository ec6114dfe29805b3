import pytest

from graphpo_agent.data.stream import TaskStream
from graphpo_agent.errors import DataError
from graphpo_agent.types import Task

TASKS = [Task(f"t{i}", "?", ()) for i in range(10)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_an_epoch_meets_every_task_once_and_the_next_in_another_order() -> None:
    stream = TaskStream(TASKS, seed=0)
    first, second = ids(stream.draw(10)), ids(stream.draw(10))
    assert sorted(first) == sorted(second) == sorted(ids(TASKS))
    assert first != second
    assert first != ids(TaskStream(TASKS, seed=1).draw(10))


def test_a_stream_resumed_at_its_position_goes_on_as_if_never_stopped() -> None:
    whole = TaskStream(TASKS, seed=3)
    expected = [ids(whole.draw(4)) for _ in range(8)]
    position, seen = 0, []
    for _ in range(8):
        stream = TaskStream(TASKS, seed=3, position=position)
        seen.append(ids(stream.draw(4)))
        position = stream.position
    assert seen == expected


def test_a_draw_never_repeats_a_task_even_across_epochs() -> None:
    stream = TaskStream(TASKS, seed=0)
    for _ in range(20):
        drawn = ids(stream.draw(7))
        assert len(set(drawn)) == 7


def test_excluded_tasks_are_passed_over() -> None:
    stream = TaskStream(TASKS, seed=0)
    excluded = frozenset(ids(TASKS[:6]))
    assert sorted(ids(stream.draw(4, excluded))) == sorted(ids(TASKS[6:]))
    with pytest.raises(DataError, match="11 different tasks but the file has 10"):
        stream.draw(5, excluded)
