import re
from collections import Counter

import pytest

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_trace import TRACE_OPERATIONS, apply_wrapped, make_trace
from graphpo_agent.errors import ConfigError
from graphpo_agent.rewards.toy import trace_reward
from graphpo_agent.types import Outcome

SIZES = {"num_train": 300, "num_heldout": 100, "num_demonstrations": 200}
HABITS = {"-2": 1, "*3": 3}


def world(directory, **knobs):
    make_trace(directory, **{**SIZES, **knobs})
    return load_tasks(directory / "train.jsonl"), load_tasks(directory / "heldout.jsonl")


def stated(demonstration):
    """The start, and operation and result of every line."""
    start = int(demonstration.messages[0]["content"].split()[1])
    [piece] = demonstration.pieces
    assert re.fullmatch(r"( [+*-]\d = \d+ ;)* [+*-]\d = \d+", piece.text)
    lines = [line.split(" = ") for line in piece.text.split(" ;")]
    return start, [(operation.strip(), int(result)) for operation, result in lines]


def misses(demonstrations, limit):
    """By how much each line's result is wrong after the number before it, by operation."""
    counts = {operation: Counter() for operation in TRACE_OPERATIONS}
    for demonstration in demonstrations:
        number, lines = stated(demonstration)
        for operation, result in lines:
            counts[operation][(result - eval(f"{number} {operation}")) % limit] += 1
            number = result
    return counts


def rewards(train, demonstrations):
    tasks = {task.question: task for task in train}
    return [
        trace_reward(tasks[d.messages[0]["content"]], Outcome(d.pieces[0].text))
        for d in demonstrations
    ]


def response(task, miss):
    """A response in which each operation misses by a fixed amount."""
    number, limit, lines = task.metadata["start"], task.metadata["limit"], []
    for operation in task.metadata["operations"]:
        number = (eval(f"{number} {operation}") + miss.get(operation, 0)) % limit
        lines.append(f" {operation} = {number}")
    return Outcome(" ;".join(lines))


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        world(tmp_path / name, seed=seed)
    for file in ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def test_questions_are_different_and_their_answers_are_computed(tmp_path):
    train, heldout = world(tmp_path, num_lines=7, limit=30)
    assert (len(train), len(heldout)) == (300, 100)
    assert len({task.question for task in train + heldout}) == 400
    for task in train + heldout:
        operations = task.metadata["operations"]
        assert task.question == f"from {task.metadata['start']} : {' '.join(operations)}"
        number = task.metadata["start"]
        for operation in operations:
            number = eval(f"{number} {operation}") % 30
        assert task.answers == (str(number),) and len(operations) == 7
        assert trace_reward(task, response(task, {})) == 1.0


def test_the_habit_is_likelier_than_the_right_result_on_two_operations_only(tmp_path):
    world(tmp_path, num_demonstrations=2000)
    counts = misses(load_demonstrations(tmp_path / "demonstrations.jsonl"), 20)
    for operation, count in counts.items():
        shares = {miss: number / count.total() for miss, number in count.items()}
        habit = 0.55 if operation in HABITS else 0.0
        slips = dict.fromkeys((19, 1, 2), (1 - habit) * 0.03 / 3)
        expected = {0: (1 - habit) * 0.97, **slips}
        if habit:
            expected[HABITS[operation]] = habit + slips.get(HABITS[operation], 0.0)
        assert shares == pytest.approx(expected, abs=0.02)


def test_neither_the_demonstrator_nor_its_likeliest_response_is_right_more_than_rarely(tmp_path):
    train, heldout = world(tmp_path, num_heldout=1000, num_demonstrations=2000)
    shown = rewards(train, load_demonstrations(tmp_path / "demonstrations.jsonl"))
    assert 0.05 <= sum(shown) / len(shown) <= 0.15
    likeliest = [trace_reward(task, response(task, HABITS)) for task in heldout]
    assert sum(likeliest) / len(likeliest) <= 0.15


def test_a_demonstrator_without_habit_and_slips_is_always_right(tmp_path):
    train, _ = world(tmp_path, habit=0.0, slip=0.0, num_lines=5)
    demonstrations = load_demonstrations(tmp_path / "demonstrations.jsonl")
    assert set(rewards(train, demonstrations)) == {1.0}
    assert all(d.ends and len(stated(d)[1]) == 5 for d in demonstrations)


@pytest.mark.parametrize(
    ("number", "operation", "result"),
    [(19, "+1", 0), (18, "+3", 1), (15, "+7", 2), (1, "-2", 19), (10, "*2", 0), (8, "*3", 4)],
)
def test_numbers_wrap_around(number, operation, result):
    assert apply_wrapped(number, operation, 20) == result


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"limit": 5}, "limit must be in"),
        ({"limit": 5000}, "limit must be in"),
        ({"num_lines": 0}, "num_lines must be at least 1"),
        ({"num_lines": 1, "limit": 10}, "do not give 400 different questions"),
    ],
)
def test_impossible_worlds_are_refused_and_not_written(tmp_path, knobs, message):
    with pytest.raises(ConfigError, match=message):
        world(tmp_path / "world", **knobs)
    assert not (tmp_path / "world").exists()
