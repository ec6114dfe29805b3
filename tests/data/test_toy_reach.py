import re
from itertools import product

import pytest

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_reach import REACH_OPERATIONS, apply_operation, make_reach
from graphpo_agent.errors import ConfigError
from graphpo_agent.rewards.toy import reach_reward
from graphpo_agent.types import Outcome

SIZES = {"num_train": 300, "num_heldout": 100, "num_demonstrations": 200}


def world(directory, **knobs):
    make_reach(directory, **{**SIZES, **knobs})
    return load_tasks(directory / "train.jsonl"), load_tasks(directory / "heldout.jsonl")


def solved(directory, train):
    tasks = {task.question: task for task in train}
    demonstrations = load_demonstrations(directory / "demonstrations.jsonl")
    return [
        reach_reward(tasks[d.messages[0]["content"]], Outcome("".join(p.text for p in d.pieces)))
        for d in demonstrations
    ]


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        world(tmp_path / name, seed=seed)
    for file in ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def test_splits_share_no_pair_of_start_and_target(tmp_path):
    train, heldout = world(tmp_path, num_train=2000, num_heldout=400)
    pairs = [
        {(task.metadata["start"], task.metadata["target"]) for task in split}
        for split in (train, heldout)
    ]
    assert pairs[0].isdisjoint(pairs[1])
    assert len({task.question for task in train + heldout}) == 2400


def test_stated_distances_are_shortest_and_their_paths_are_rewarded(tmp_path):
    train, _ = world(tmp_path, num_train=40, min_distance=2, max_distance=4)
    for task in train:
        paths = shortest_paths(task)
        assert {len(path) for path in paths} == {task.metadata["distance"]}
        assert 2 <= task.metadata["distance"] <= 4
        for path in paths:
            assert reach_reward(task, Outcome(" ;".join(path))) == 1.0


def shortest_paths(task):
    """All shortest right responses, by trying every sequence of operations."""
    limit, target = task.metadata["limit"], task.metadata["target"]
    for length in range(1, 9):
        paths = []
        for sequence in product(task.metadata["operations"], repeat=length):
            number, lines = task.metadata["start"], []
            for operation in sequence:
                number = apply_operation(number, operation, limit)
                lines.append(f" {operation} = {number}")
                if number is None:
                    break
            if number == target:
                paths.append(lines)
        if paths:
            return paths
    raise AssertionError("no path")


def test_a_perfect_demonstrator_always_succeeds_by_the_shortest_path(tmp_path):
    train, _ = world(tmp_path, skill=1.0, slip=0.0, hurry=0.0)
    assert set(solved(tmp_path, train)) == {1.0}
    distances = {task.question: task.metadata["distance"] for task in train}
    for d in load_demonstrations(tmp_path / "demonstrations.jsonl"):
        assert d.ends and d.pieces[0].text.count("=") == distances[d.messages[0]["content"]]


def test_demonstrations_get_worse_with_less_skill_and_more_slips(tmp_path):
    settings = [(0.8, 0.0), (0.3, 0.0), (0.3, 0.2)]
    shares = []
    for row, (skill, slip) in enumerate(settings):
        train, _ = world(tmp_path / str(row), skill=skill, slip=slip, num_demonstrations=600)
        rewards = solved(tmp_path / str(row), train)
        shares.append(sum(rewards) / len(rewards))
    assert shares[0] > shares[1] + 0.1 > shares[2] + 0.15
    assert shares[2] > 0


def test_demonstrations_solve_training_questions_within_the_lines(tmp_path):
    train, _ = world(tmp_path, max_lines=7, skill=0.2)
    questions = {task.question for task in train}
    for d in load_demonstrations(tmp_path / "demonstrations.jsonl"):
        [piece] = d.pieces
        assert d.messages[0]["content"] in questions and piece.trained
        assert re.fullmatch(r"( [+*-]\d = \d+ ;){0,6} [+*-]\d = \d+", piece.text)


@pytest.mark.parametrize("operation", REACH_OPERATIONS)
def test_operations_are_arithmetic_within_the_limit(operation):
    for number in range(30):
        expected = eval(f"{number} {operation}")
        assert apply_operation(number, operation, 30) == (expected if 0 <= expected < 30 else None)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"limit": 5}, "limit must be at least 10"),
        ({"num_operations": 7}, "num_operations must be in"),
        ({"min_distance": 5, "max_distance": 4}, "needs 1 <= min_distance"),
        ({"max_lines": 3}, "needs 1 <= min_distance"),
        ({"num_train": 10**6}, "not 1000000"),
    ],
)
def test_impossible_worlds_are_refused_and_not_written(tmp_path, knobs, message):
    with pytest.raises(ConfigError, match=message):
        world(tmp_path / "world", **knobs)
    assert not (tmp_path / "world").exists()
