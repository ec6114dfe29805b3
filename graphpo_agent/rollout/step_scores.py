"""What a process reward model says of grown graphs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from graphpo_agent.errors import RewardError
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.protocols import Scheduler, StepScorer, Tokenizer
from graphpo_agent.rollout.counts import counts_of
from graphpo_agent.rollout.grow import Rollout
from graphpo_agent.types import SteppedResponse

__all__ = ["StepScoring"]

_RESPONSES_AT_ONCE = 256
"""More than a model computes together, so little is lost; scored graphs are not kept waiting."""


@dataclass(frozen=True, slots=True)
class StepScoring:
    """Puts scores on the edges of finished trajectories (``RolloutGraph.step_scores``).

    Attributes:
        scorer: the model.
        steps: ``response``: the whole response is one step, whose score stands on its terminal;
            ``edges``: every edge is one. Steps are the policy's own words.
        tokenizer: the policy's.
    """

    scorer: StepScorer
    steps: Literal["response", "edges"]
    tokenizer: Tokenizer

    @property
    def counts(self) -> Mapping[str, int]:
        """What the model's service has counted so far (``Counting``)."""
        return counts_of(self.scorer)

    async def __call__(self, scheduler: Scheduler, rollout: Rollout) -> Rollout:
        """The rollout with scores; NaN where the model had no answer.

        Its responses are asked for together, and with those of other graphs that ask at one moment.
        An edge of several trajectories has the score it got in the last of them.

        Raises:
            RewardError: the model said anything but a score in [0, 1] or NaN of each step.
        """
        graph = rollout.graph
        leaves = graph.terminals.tolist()
        responses = [self._response(rollout, leaf) for leaf in leaves]
        found = await scheduler.together(self.scorer.score, responses, _RESPONSES_AT_ONCE)
        scores = np.full(graph.num_nodes, np.nan)
        for leaf, of_steps in zip(leaves, found, strict=True):
            edges = self._edges(graph, leaf)
            if not _are_scores(of_steps, len(edges)):
                raise RewardError(
                    f"task {rollout.task.id}: the step scorer returned {of_steps!r:.60} for "
                    f"{len(edges)} steps, want a score in [0, 1] of each"
                )
            scores[edges] = of_steps
        return replace(rollout, graph=replace(graph, step_scores=scores))

    def _edges(self, graph: RolloutGraph, leaf: int) -> list[int]:
        """The nodes that a trajectory's scores stand on."""
        return graph.path(leaf) if self.steps == "edges" else [leaf]

    def _response(self, rollout: Rollout, leaf: int) -> SteppedResponse:
        graph = rollout.graph
        steps = (rollout.states[leaf].response,)
        if self.steps == "edges":
            steps = tuple(self._own_words(graph, v) for v in graph.path(leaf))
        return SteppedResponse(rollout.task.question, steps)

    def _own_words(self, graph: RolloutGraph, v: int) -> str:
        """The text that the policy sampled on an edge."""
        span = graph.span(v)
        return self.tokenizer.decode(graph.token_ids[span][graph.loss_mask[span]].tolist())


def _are_scores(found: Any, count: int) -> bool:
    """Whether these are so many scores in [0, 1] or NaN."""
    try:
        scores = np.asarray(found)
    except ValueError:  # lists of different lengths
        return False
    if scores.shape != (count,) or scores.dtype.kind not in "bfiu":
        return False
    return not np.any((scores < 0.0) | (scores > 1.0))
