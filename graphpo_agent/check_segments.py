"""What is an agent's and of no use in segment mode, found before anything is loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from graphpo_agent.config import RunConfig
from graphpo_agent.config_state import DOCUMENTS_KEY, KeyState
from graphpo_agent.errors import ConfigError

__all__ = ["check_segments"]

_OF_ANSWERS = (
    "graphpo_agent.rewards.asearcher:ASearcherReward",
    "graphpo_agent.rewards.gaia:gaia_match",
    "graphpo_agent.rewards.judge:Judge",
    "graphpo_agent.rewards.qa:exact_match",
    "graphpo_agent.rewards.qa:substring_match",
    "graphpo_agent.rewards.qa:token_f1",
    "graphpo_agent.rewards.search_r1:SearchR1Reward",
    "graphpo_agent.rewards.tree_grpo:TreeGrpoReward",
)
"""Rewards of ``outcome.answer``, which segment mode does not mark."""


def check_segments(config: RunConfig) -> None:
    """Refuse a reward or a state key that looks at what only an agent's path has.

    Raises:
        ConfigError: the configuration names one.
    """
    for path in _strings(config.reward):
        if path in _OF_ANSWERS:
            raise ConfigError(
                f"reward: {path} compares the answer that agent mode marks; segment mode marks "
                "none, so every reward would be 0: name a verifier that reads outcome.response"
            )
    if isinstance(config.state, KeyState) and config.state.function == DOCUMENTS_KEY:
        raise ConfigError(
            f"state.function: {DOCUMENTS_KEY} tells what an agent has found; name a function of "
            "your own in segment mode, or choose another state.kind"
        )


def _strings(spec: Any) -> Iterator[str]:
    """All that a specification says, the import paths of nested objects among it."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, Mapping):
        yield from _strings(list(spec.values()))
    elif isinstance(spec, list):
        for value in spec:
            yield from _strings(value)
