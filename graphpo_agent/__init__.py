"""GraphPO: graph-based policy optimization for search agents and reasoning models."""

__version__ = "0.1.0"
