"""A node as it is given to a rollout graph, and what can be wrong with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import isfinite

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import BoolArray, Float32Array
from graphpo_agent.types import check_lengths

__all__ = ["NewNode", "check_new_node", "check_reward"]


@dataclass(frozen=True, slots=True)
class NewNode:
    """One edge to append and the state it reaches.

    Example, an answer that was right::

        NewNode(parent=3, token_ids=(12, 40), loss_mask=(1, 1), logprobs=(-0.1, -1.2),
                terminal=True, reward=1.0, key="karo|1987")

    Attributes:
        parent: position of the state it was generated from.
        token_ids: the tokens of the edge.
        loss_mask: 1 on tokens the policy sampled, 0 on observations.
        logprobs: behaviour log-probabilities (natural logarithm); NaN on observations.
        terminal: a finished answer; then ``reward`` is its verified reward in [0, 1].
        reward: None unless terminal.
        key: the canonical state key, where the environment knows its state.
        state: the text of the state.
        embedding: [d] float32, the embedded state.
        step_score: what a process reward model says of the edge, in [0, 1].
        tree: number of its tree; None: its parent's, and a new one below the root.
    """

    parent: int
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    terminal: bool
    reward: float | None
    key: str | None = None
    state: str | None = None
    embedding: Float32Array | None = None
    step_score: float | None = None
    tree: int | None = None

    def __post_init__(self) -> None:
        check_lengths(token_ids=self.token_ids, loss_mask=self.loss_mask, logprobs=self.logprobs)


def check_reward(terminal: bool, reward: float | None) -> str | None:
    """What is wrong with a node's reward; None when nothing is."""
    if not terminal:
        return None if reward is None else "reward on a node that is not terminal"
    if reward is None:
        return "terminal without a reward"
    return None if 0.0 <= reward <= 1.0 else f"reward {reward} is outside [0, 1]"


def check_new_node(v: int, node: NewNode, terminal: BoolArray) -> None:
    """Raise GraphError unless ``node`` can be appended as number ``v``.

    Args:
        v: the number of nodes before it.
        node: the new one.
        terminal: [v] which of those are finished answers.
    """
    if not 0 <= node.parent < v:
        raise GraphError(f"node {v}: parent {node.parent} does not come before it")
    if terminal[node.parent]:
        raise GraphError(f"node {v}: parent {node.parent} is terminal")
    mistake = check_reward(node.terminal, node.reward)
    if mistake:
        raise GraphError(f"node {v}: {mistake}")
    trained = compress(node.logprobs, node.loss_mask)
    if not all(map(isfinite, trained)):
        raise GraphError(f"node {v}: a trained token without a finite log-probability")
