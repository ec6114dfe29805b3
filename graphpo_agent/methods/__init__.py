"""One file per method: how it grows a graph and how it credits it."""

METHODS = (
    "graphpo",
    "tree",
    "grpo",
    "dapo",
    "treerl",
    "spo_tree",
    "spo_chain",
    "tree_grpo",
    "treepo",
    "treerpo",
    "pros",
    "prm",
)
"""The names that configurations and ``graphpo score`` know."""
