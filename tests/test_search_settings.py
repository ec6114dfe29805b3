"""What the configurations of full-size search agents take from Tree-GRPO and Search-R1."""

from math import prod

import pytest

from graphpo_agent.config import AgentMode, RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.config_methods import GraphPOMethod
from graphpo_agent.named import callable_of
from graphpo_agent.types import Outcome, Task
from tests.worlds import ROOT


@pytest.mark.parametrize(
    ("name", "rounds"), [("qwen2.5-7b", 5), ("qwen2.5-7b-verl", 5), ("qwen2.5-7b-local", 4)]
)
def test_the_full_size_agents_have_upstream_s_rounds_and_a_turn_to_answer(
    name: str, rounds: int
) -> None:
    config = load_config(RunConfig, ROOT / f"configs/search/{name}.yaml")
    assert isinstance(config.mode, AgentMode) and isinstance(config.method, GraphPOMethod)
    assert config.mode.max_turns == len(config.method.schedule) == rounds + 1
    assert config.budget.trajectories == prod(config.method.schedule) == 8  # the paper's chains
    assert config.method.singleton == "inherit"  # most turns have no siblings
    if rounds == 5:  # Tree-GRPO's web agent
        assert config.sampling.top_p == 0.95
        reward = callable_of(config.reward, "task", "outcome")
        told = (
            "<think> a </think> <tool_call> {} </tool_call>",
            "<think> b </think> <answer> x</answer>",
        )
        task = Task("t", "?", ("Ola Brand",))
        assert reward(task, Outcome("", "Ola", told)) == pytest.approx(2 / 3)
        assert reward(task, Outcome("", "Ola", told[1:] * 2)) == pytest.approx(2 / 3 - 0.2)
