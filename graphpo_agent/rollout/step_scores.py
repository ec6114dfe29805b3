"""What a process reward model says of grown graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np

from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.protocols import SteppedResponse, StepScorer, Tokenizer
from graphpo_agent.rollout.grow import Rollout

__all__ = ["StepScoring"]


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

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with scores; NaN where the model had no answer.

        All responses are asked for together. An edge of several trajectories has the score it got
        in the last of them.
        """
        asked = [self._responses(rollout) for rollout in rollouts]
        found = iter(self.scorer.score(list(chain.from_iterable(asked))))
        scored: list[Rollout] = []
        for rollout, responses in zip(rollouts, asked, strict=True):
            graph = rollout.graph
            scores = np.full(graph.num_nodes, np.nan)
            leaves = graph.terminals.tolist()
            for leaf, _ in zip(leaves, responses, strict=True):
                scores[self._edges(graph, leaf)] = next(found)
            scored.append(replace(rollout, graph=replace(graph, step_scores=scores)))
        return scored

    def _edges(self, graph: RolloutGraph, leaf: int) -> list[int]:
        """The nodes that a trajectory's scores stand on."""
        return graph.path(leaf) if self.steps == "edges" else [leaf]

    def _responses(self, rollout: Rollout) -> list[SteppedResponse]:
        graph, question = rollout.graph, rollout.task.question
        responses: list[SteppedResponse] = []
        for leaf in graph.terminals.tolist():
            steps = (rollout.states[leaf].response,)
            if self.steps == "edges":
                steps = tuple(self._own_words(graph, v) for v in graph.path(leaf))
            responses.append(SteppedResponse(question, steps))
        return responses

    def _own_words(self, graph: RolloutGraph, v: int) -> str:
        """The text that the policy sampled on an edge."""
        span = slice(graph.offsets[v], graph.offsets[v + 1])
        return self.tokenizer.decode(graph.token_ids[span][graph.loss_mask[span]].tolist())
