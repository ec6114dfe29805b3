"""How much of what was sampled outages of the outside world met, and when that is too much."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphpo_agent.errors import ToolError
from graphpo_agent.rollout.grow import Rollout

__all__ = ["Outages", "outages_of"]


@dataclass(frozen=True, slots=True)
class Outages:
    """Counts that add up over rollouts.

    Attributes:
        trajectories: paths that ended.
        left_out: those that an outage of a tool or of the verifier left unscored.
        tool_calls: made.
        failed_calls: those that met an outage.
        told: what the first of these gave the policy to read; empty where none did.
    """

    trajectories: int = 0
    left_out: int = 0
    tool_calls: int = 0
    failed_calls: int = 0
    told: str = ""

    def __add__(self, other: "Outages") -> "Outages":
        return Outages(
            self.trajectories + other.trajectories,
            self.left_out + other.left_out,
            self.tool_calls + other.tool_calls,
            self.failed_calls + other.failed_calls,
            self.told or other.told,
        )

    def reaches(self, limit: float) -> bool:
        """Whether outages met a share of at least ``limit`` of the calls or of the paths.

        The calls count by themselves: a policy that searches seldom, while no search is answered,
        would be trained or measured on what it does without. One failed call may be chance.
        """
        if self.failed_calls > 1 and self.failed_calls >= limit * self.tool_calls:
            return True
        return self.left_out > 0 and self.left_out >= limit * self.trajectories

    def check(self, limit: float) -> None:
        """Raise ToolError where ``reaches(limit)``."""
        if self.reaches(limit):
            told = f"; the first call was told: {self.told}" if self.told else ""
            raise ToolError(
                f"outages met {self.failed_calls:,} of {self.tool_calls:,} tool calls and left "
                f"{self.left_out:,} of {self.trajectories:,} trajectories unscored "
                f"(outage_limit: {limit:g}); see that the tools and the verifier are there, then "
                f"try again{told}"
            )


def outages_of(rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> Outages:
    """Those of some rollouts."""
    return Outages(
        trajectories=sum(len(rollout.graph.leaves) for rollout in rollouts),
        left_out=sum(r.left_out[leaf] for r in rollouts for leaf in r.graph.leaves.tolist()),
        tool_calls=sum(rollout.ledger.tool_calls for rollout in rollouts),
        failed_calls=sum(rollout.ledger.failed_calls for rollout in rollouts),
        told=_told(rollouts, decode),
    )


def _told(rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> str:
    for rollout in rollouts:
        if "tool_outage" in rollout.statuses:
            graph, node = rollout.graph, rollout.statuses.index("tool_outage")
            edge = graph.span(node)
            observed = graph.token_ids[edge][~graph.loss_mask[edge]]
            return decode(observed.tolist())
    return ""
