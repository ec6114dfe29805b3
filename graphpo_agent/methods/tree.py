"""The tree baseline: GraphPO on the same schedule with nothing merged."""

from typing import Literal

from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.method import UNMERGED

__all__ = ["tree"]


def tree(
    schedule: tuple[int, ...] = (2, 5, 4, 2, 2),
    credit: CreditOptions | None = None,
    objective: Literal["joint", "separate"] = "joint",
) -> GraphPO:
    """GraphPO with ``merge: none``: every class has one member, so nothing is pooled or saved."""
    return GraphPO(
        schedule=schedule,
        merging=UNMERGED,
        reallocate="none",
        credit=credit or CreditOptions(),
        objective=objective,
        name="tree",
    )
