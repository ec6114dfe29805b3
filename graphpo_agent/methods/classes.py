"""The methods whose settings are the fields of their class, by name."""

from collections.abc import Callable, Mapping

from graphpo_agent.methods.dapo import Dapo
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method
from graphpo_agent.methods.prm import Prm
from graphpo_agent.methods.spo_chain import SpoChain
from graphpo_agent.methods.spo_tree import SpoTree
from graphpo_agent.methods.tree_grpo import TreeGrpo
from graphpo_agent.methods.treepo import TreePO
from graphpo_agent.methods.treerl import TreeRL
from graphpo_agent.methods.treerpo import TreeRpo

__all__ = ["CLASSES"]

CLASSES: Mapping[str, Callable[..., Method]] = {
    "grpo": Grpo,
    "dapo": Dapo,
    "treerl": TreeRL,
    "spo_tree": SpoTree,
    "spo_chain": SpoChain,
    "tree_grpo": TreeGrpo,
    "treepo": TreePO,
    "treerpo": TreeRpo,
    "prm": Prm,
}
