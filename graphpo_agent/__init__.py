"""GraphPO: graph-based policy optimization for search agents and reasoning models."""

from graphpo_agent.torch_build import hide_mismatched_libraries

__version__ = "0.1.0"

hide_mismatched_libraries()
