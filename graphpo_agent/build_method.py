"""Configuration → method."""

from typing import get_args

from graphpo_agent.config_methods import (
    GraphPOMethod,
    MethodConfig,
    OwnMethod,
    PoolConfig,
    ProsMethod,
    SpoChainMethod,
    TreeMethod,
    TreeRLMethod,
)
from graphpo_agent.errors import ConfigError, errors_at
from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.methods.classes import CLASSES
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.method import Method, Whiten
from graphpo_agent.methods.prefix_pool import PoolOptions
from graphpo_agent.methods.pros import Pros
from graphpo_agent.methods.tree import tree
from graphpo_agent.named import constructed

__all__ = ["build_method", "check_whole_turns"]


def check_whole_turns(config: MethodConfig) -> None:
    """Check that a method can do with whole turns, as agent mode has them.

    Raises:
        ConfigError: it cuts or begins inside one.
    """
    match config:
        case TreeRLMethod(fork="token"):
            setting = "fork"
        case SpoChainMethod(cut="token"):
            setting = "cut"
        case ProsMethod(pool=PoolConfig(cut="token")):
            setting = "pool.cut"
        case _:
            return
    raise ConfigError(
        f"method.{setting} token cuts edges at tokens, and a turn of agent mode is whole: set "
        f"method.{setting}=edge, or use segment mode"
    )


def build_method(config: MethodConfig) -> Method:
    """The method of a run.

    Raises:
        ConfigError: settings that do not go together, or an own method that lacks a part.
    """
    if isinstance(config, ProsMethod):
        pool = PoolOptions(**config.pool.model_dump())
        return Pros(config.group_size, pool, config.normalize, config.singleton)
    if isinstance(config, OwnMethod):
        return _own(config)
    if not isinstance(config, GraphPOMethod | TreeMethod):
        return CLASSES[config.name](**config.model_dump(exclude={"name", "scorer"}))
    credit = CreditOptions(
        pool_weight=config.pool_weight if isinstance(config, GraphPOMethod) else 0.0,
        efficiency_weight=config.efficiency_weight,
        efficiency_combine=config.efficiency_combine,
        singleton=config.singleton,
        backup=config.backup,
        normalize=config.normalize,
        trajectory_weight=config.trajectory_weight,
    )
    if isinstance(config, TreeMethod):
        return tree(config.schedule, credit, config.objective)
    merging = MergeOptions(
        threshold=config.merge_threshold,
        merge_terminals=config.merge_terminals,
        max_layer_gap=config.max_layer_gap,
        guard=config.guard,
    )
    return GraphPO(
        schedule=config.schedule,
        merging=merging,
        reallocate=config.reallocate,
        credit=credit,
        objective=config.objective,
        refill=config.refill,
    )


def _own(config: OwnMethod) -> Method:
    parts = ("name", "merging", "needs_states", "whiten", "plan", "assign_credit")
    with errors_at("method.object"):
        method = constructed(config.object, parts)
        if not isinstance(method.merging, MergeOptions):
            raise ConfigError(f"merging is {method.merging!r:.40}, want MergeOptions, or UNMERGED")
        if method.whiten not in get_args(Whiten):
            known = " or ".join(get_args(Whiten))
            raise ConfigError(f"whiten is {method.whiten!r:.40}, want {known}")
    return method
