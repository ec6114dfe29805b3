"""One file per method: how it grows a graph and how it credits it."""

METHODS = ("graphpo", "tree", "grpo")
"""The names that configurations and ``graphpo score`` know."""
