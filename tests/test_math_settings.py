"""The configurations of full-size reasoners: the paper's numbers, and room for them."""

import pytest

from graphpo_agent.build import build_expander, check_named
from graphpo_agent.config import RunConfig, SegmentMode, VerlEngineConfig, VllmEngineConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.config_methods import GraphPOMethod
from graphpo_agent.named import callable_of
from graphpo_agent.types import Outcome, Task
from tests.worlds import ROOT


@pytest.mark.parametrize("name", ["qwen2.5-math-7b", "qwen2.5-math-7b-verl"])
def test_a_graph_has_the_tokens_of_64_chains(name: str) -> None:
    config = load_config(RunConfig, ROOT / f"configs/math/{name}.yaml")
    check_named(config)
    assert isinstance(config.mode, SegmentMode) and isinstance(config.method, GraphPOMethod)
    assert isinstance(config.engine, VllmEngineConfig | VerlEngineConfig)
    schedule, mode = config.method.schedule, config.mode
    assert schedule == (2, 5, 4, 2, 2) and build_expander(mode).max_layers == len(schedule)
    assert 512 <= mode.segment_length <= 2048
    edges, needed, left = 1, 0, mode.max_response_tokens
    for branches in schedule:
        edges *= branches
        needed += edges * min(mode.segment_length, left)
        left -= mode.segment_length
    assert config.budget.tokens == 64 * mode.max_response_tokens
    assert 0.75 * config.budget.tokens < needed <= config.budget.tokens
    assert config.engine.max_context_tokens == 4096 == mode.max_response_tokens + 1024
    assert (config.train.prompts_per_step, config.update.minibatch_graphs) == (512, 32)
    assert (config.train.steps, config.update.learning_rate) == (350, 1e-6)
    reward = callable_of(config.reward, "task", "outcome")
    assert reward(Task("t", "?", ("4",)), Outcome("So \\boxed{4}.")) == 1.0
