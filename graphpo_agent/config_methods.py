"""The settings of each method, by its name; what they mean stands with the method.

See ``graphpo_agent/methods/``. Defaults are as released by the method's authors where
their code is public, but that ``dapo`` has no penalty on overlong answers; GraphPO's are those of
the paper.
"""

from typing import Annotated, Literal

from pydantic import Field

from graphpo_agent.config_base import (
    Fraction,
    Natural,
    NonNegative,
    Number,
    ObjectConfig,
    Positive,
    Schedule,
    Size,
    Strict,
    Whole,
)

__all__ = [
    "DapoMethod",
    "GraphPOMethod",
    "GrpoMethod",
    "MethodConfig",
    "OwnMethod",
    "PoolConfig",
    "PrmMethod",
    "ProsMethod",
    "SpoChainMethod",
    "SpoTreeMethod",
    "TreeGrpoMethod",
    "TreeMethod",
    "TreePOMethod",
    "TreeRLMethod",
    "TreeRpoMethod",
]

GroupSize = Annotated[Whole, Field(ge=2)]
Place = Literal["token", "edge"]
Singleton = Literal["raw", "zero"]
LoneEdge = Literal["zero", "inherit"]
Whiten = Literal["none", "batch"]


class _GraphMethod(Strict):
    schedule: Schedule
    """b_h per layer; layers beyond it continue with 1."""
    efficiency_weight: NonNegative = 0.2
    efficiency_combine: Literal["mean", "sum"] = "mean"
    singleton: LoneEdge = "zero"
    backup: Literal["leaf", "mean", "class"] = "leaf"
    normalize: Literal["std", "none", "rms"] = "std"
    trajectory_weight: NonNegative = 0.0
    objective: Literal["joint", "separate"] = "joint"


class GraphPOMethod(_GraphMethod):
    """GraphPO."""

    name: Literal["graphpo"]
    merge_threshold: Annotated[Number, Field(gt=0, le=1)] = 0.92
    merge_terminals: Literal["same_reward", "never"] = "same_reward"
    max_layer_gap: Natural | None = None
    guard: Literal["numbers", "none"] = "none"
    pool_weight: Fraction = 0.7
    reallocate: Literal["novel", "uncertain", "none"] = "novel"
    refill: Literal["prompt", "uncertain"] = "prompt"
    """Where the rest of a budget goes: to chains from the prompt, or to uncertain states."""


class TreeMethod(_GraphMethod):
    """GraphPO without merging."""

    name: Literal["tree"]


class GrpoMethod(Strict):
    """GRPO: independent trajectories, one advantage each."""

    name: Literal["grpo"]
    group_size: GroupSize
    normalize: Literal["std", "none"] = "std"
    singleton: Singleton = "raw"


class DapoMethod(Strict):
    """DAPO: GRPO without the groups that agree, and with a penalty on overlong answers."""

    name: Literal["dapo"]
    group_size: GroupSize = 16
    max_length: Positive | None = None
    overlong_buffer: Positive | None = None
    overlong_factor: NonNegative = 1.0
    singleton: Singleton = "raw"


class TreeRLMethod(Strict):
    """TreeRL: chains forked at unlikely tokens."""

    name: Literal["treerl"]
    trees: Positive = 6
    forks: Positive = 2
    rounds: Natural = 1
    copies: Positive = 2
    fork: Place = "token"
    select: Positive | None = 16
    weighting: Literal["sqrt", "uniform", "paper"] = "sqrt"


class SpoTreeMethod(Strict):
    """SPO-tree: nested means over a layered tree, each edge trained once."""

    name: Literal["spo_tree"]
    schedule: Schedule = (6, 6, 6)
    normalize: Literal["none", "std"] = "none"
    singleton: LoneEdge = "inherit"
    drop_zero: bool = True
    max_probability: Fraction | None = 0.9
    whiten: Whiten = "batch"


class SpoChainMethod(Strict):
    """SPO-chain: chains cut at unlikely tokens, whose values are estimated by rollouts."""

    name: Literal["spo_chain"]
    num_chains: Positive = 8
    rollouts: Positive = 9
    cut_interval: Positive = 5
    max_probability: Fraction = 0.9
    cut: Place = "token"
    whiten: Whiten = "batch"


class TreeGrpoMethod(Strict):
    """Tree-GRPO: chains forked at random nodes, compared in the tree and in the prompt."""

    name: Literal["tree_grpo"]
    trees: Positive = 2
    expansions: Positive = 2
    rounds: Natural = 1
    kept: Positive | None = None
    singleton: Singleton = "raw"


class TreePOMethod(Strict):
    """TreePO: a tree of segments as wide as allowed, compared in all its subtrees."""

    name: Literal["treepo"]
    width: Positive = 16
    divergence: Positive = 2
    aggregate: Literal["average", "group_size"] = "average"
    whiten: Whiten = "batch"


class TreeRpoMethod(Strict):
    """TreeRPO: a layered tree whose siblings are compared."""

    name: Literal["treerpo"]
    schedule: Schedule = (4, 4, 4)
    normalize: Literal["std", "none"] = "std"
    singleton: LoneEdge = "inherit"


class PrmMethod(Strict):
    """Chains whose rewards a process reward model has a say in."""

    name: Literal["prm"]
    scorer: ObjectConfig
    """A ``StepScorer``, e.g. ``{class: graphpo_agent.rewards.prm:VllmStepScorer, url: ...}``."""
    group_size: GroupSize = 6
    steps: Literal["response", "edges"] = "response"
    prm_weight: Fraction = 0.75


class PoolConfig(Strict):
    """PROS's pool of prefixes; see ``methods/prefix_pool.py``."""

    mean: Annotated[Number, Field(allow_inf_nan=False)] = 0.0
    spread: Size = 1.5
    child_spread: Size = 0.3
    decay: Annotated[Number, Field(gt=0, le=1)] = 0.99
    draws: Positive = 50
    burn_in: Natural = 10
    max_prefixes: Positive = 16
    max_prefix_tokens: Positive | None = None
    cut: Place = "token"


class ProsMethod(Strict):
    """PROS: GRPO that goes on from beginnings of earlier right answers."""

    name: Literal["pros"]
    group_size: GroupSize = 8
    pool: PoolConfig = PoolConfig()
    normalize: Literal["std", "none"] = "std"
    singleton: Singleton = "raw"


class OwnMethod(Strict):
    """A method of your own."""

    name: Literal["own"]
    object: ObjectConfig
    """A ``Method`` (``methods/method.py``), e.g. ``{class: mine:Median, group_size: 4}``."""
    width: Positive = 64
    """Paths of a prompt at most, for the estimate of memory where the run has no budget."""
    terms: Positive = 1
    """Advantages of an edge that are clipped apart, which verl has to know beforehand."""


MethodConfig = Annotated[
    GraphPOMethod
    | TreeMethod
    | GrpoMethod
    | DapoMethod
    | TreeRLMethod
    | SpoTreeMethod
    | SpoChainMethod
    | TreeGrpoMethod
    | TreePOMethod
    | TreeRpoMethod
    | PrmMethod
    | ProsMethod
    | OwnMethod,
    Field(discriminator="name"),
]
