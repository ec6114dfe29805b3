"""Saved graphs, walked once more: the path states of their nodes, as the rollout had them.

A graph file holds tokens. What a path has been shown, its key, the room it has left are made by
the expander, so the expander walks the edges again: the policy is told what to say, the tools
answer anew. A tool that answers otherwise than it did is a mistake that must not go unseen.
"""

from asyncio import gather
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import numpy as np

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import BoolArray, IntArray
from graphpo_agent.graph.forest import by_layer
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.protocols import Expander, Policy, Scheduler, Tokenizer, Tool
from graphpo_agent.types import (
    Completion,
    FinishReason,
    PathState,
    SampleRequest,
    SamplingParams,
    Step,
    Task,
    ToolResult,
)

__all__ = ["Replay", "reopen", "replay"]

S = TypeVar("S")
T = TypeVar("T")

_SHOWN = 60
"""Characters of an observation in an error message."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A saved graph and where each of its paths has got to.

    Example: a root, a turn that searched and an answer::

        states[1].memory.documents_found == (doc_7,)    ended = [F, F, T]

    Attributes:
        graph: as saved.
        states: [n]; their contexts live until the policy's next release (see ``reopen``).
        ended: [n] paths that the expander does not continue: answers, and paths at a limit.
    """

    graph: RolloutGraph
    states: tuple[PathState, ...]
    ended: BoolArray


async def replay(
    scheduler: Scheduler, expander: Expander, task: Task, graph: RolloutGraph
) -> Replay:
    """Walk the edges of a saved graph.

    Args:
        scheduler: runs the tools; its policy is asked to open and extend contexts only.
        expander: the run's own.
        task: the graph's.
        graph: with the tokens of every node, and the loss mask of every edge that holds an
            observation.

    Raises:
        GraphError: tokens are missing; the prompt, an observation or the end of a path is another
            one than in the graph; an edge is longer than the run allows.
    """
    silent = np.flatnonzero(~graph.has_tokens)
    if len(silent):
        raise _mistake(
            graph, silent[0], "it has no tokens; take a file that holds them, as rollout writes it"
        )
    estimates = np.flatnonzero(graph.num_trained[1:] == 0) + 1
    if len(estimates):
        raise _mistake(
            graph, estimates[0], "an estimate's rollout (spo_chain) cannot be walked again"
        )
    root = expander.start(scheduler.policy, task)
    if root.prompt_ids != _tokens(graph, 0):
        raise _mistake(
            graph, 0, "its prompt is not the one of this configuration, model and task file"
        )
    states: list[PathState] = [root] * graph.num_nodes
    ended = np.zeros(graph.num_nodes, np.bool_)
    inner = graph.num_children > 0
    for layer in by_layer(graph.depth)[1:]:
        walks = [_walk(scheduler, expander, states, graph, v) for v in layer.tolist()]
        for v, step in zip(layer.tolist(), await gather(*walks), strict=True):
            _check_end(graph, v, step, bool(inner[v]))
            states[v], ended[v] = step.state, step.terminal
    return Replay(graph, tuple(states), ended)


def reopen(policy: Policy, replayed: Replay, nodes: Sequence[int]) -> list[PathState]:
    """The states of some nodes with new contexts, which share their common prefixes."""
    graph = replayed.graph
    contexts = {0: policy.open(_tokens(graph, 0))}
    for v in nodes:
        for u in graph.path(v):
            if u not in contexts:
                before = contexts[int(graph.parent[u])]
                contexts[u] = policy.extend(before, _tokens(graph, u))
    return [replace(replayed.states[v], context=contexts[v]) for v in nodes]


async def _walk(
    scheduler: Scheduler,
    expander: Expander,
    states: Sequence[PathState],
    graph: RolloutGraph,
    v: int,
) -> Step:
    """The edge to a node, made again; GraphError where other tokens come out."""
    tokens, mask = _tokens(graph, v), _mask(graph, v)
    told = _Told(scheduler, graph, v)
    # A path that its budget cut ends with sampled tokens and no observation.
    cut = not graph.terminal[v] and not graph.num_children[v] and all(mask)
    limit = len(tokens) if cut else None
    before = states[graph.parent[v]]
    (step,) = await expander.expand(told, [before], [0], SamplingParams(), limit)
    if step.token_ids != tokens or step.loss_mask != mask:
        tokenizer = scheduler.policy.tokenizer
        recorded = _observation(tokenizer, tokens, mask)
        made = _observation(tokenizer, step.token_ids, step.loss_mask)
        raise _mistake(graph, v, _difference(recorded, made))
    return step


class _Told:
    """A ``Scheduler`` whose policy says what one edge recorded; all else is done anew."""

    def __init__(self, scheduler: Scheduler, graph: RolloutGraph, v: int) -> None:
        self.policy = scheduler.policy
        self._scheduler = scheduler
        self._graph = graph
        self._v = v

    async def sample(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingParams,
        drawn: Callable[[int, Completion], object] | None = None,
    ) -> list[Completion]:
        """The tokens that the policy sampled on this edge."""
        completions = [self._sampled(request) for request in requests]
        if drawn is not None:
            for place, completion in enumerate(completions):
                drawn(place, completion)
        return completions

    def _sampled(self, request: SampleRequest) -> Completion:
        graph, v = self._graph, self._v
        span = graph.span(v)
        sampled = graph.loss_mask[span]
        tokens = tuple(graph.token_ids[span][sampled].tolist())
        if not 1 <= len(tokens) <= request.max_new_tokens:
            raise _mistake(
                graph,
                v,
                f"{len(tokens)} sampled tokens where the run's limits allow 1 to "
                f"{request.max_new_tokens}; use the configuration that grew the graph",
            )
        reason: FinishReason = "stop"
        if tokens[-1] in self.policy.tokenizer.eos_ids:
            reason = "eos"
        elif len(tokens) == request.max_new_tokens and not self._stops(request, tokens):
            reason = "length"
        logprobs = tuple(graph.logprobs[span][sampled].tolist())
        return Completion(tokens, logprobs, reason, self.policy.extend(request.context, tokens))

    def _stops(self, request: SampleRequest, tokens: tuple[int, ...]) -> bool:
        """Whether the last token completes a stop string."""
        if len(tokens) < request.min_new_tokens:
            return False
        whole, before = (self.policy.tokenizer.decode(t) for t in (tokens, tokens[:-1]))
        return any(whole.count(stop) > before.count(stop) for stop in request.stop)

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[Awaitable[ToolResult], bool]:
        """A tool's result, as of now."""
        return self._scheduler.call(tool, arguments)

    async def together(
        self, function: Callable[[list[Any]], Any], items: Sequence[Any], most: float = inf
    ) -> Sequence[Any]:
        """As the scheduler behind does it."""
        return await self._scheduler.together(function, items, most)

    async def each(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """As the scheduler behind does it."""
        return await self._scheduler.each(function, items)


def _check_end(graph: RolloutGraph, v: int, step: Step, continued: bool) -> None:
    if graph.terminal[v] and not step.terminal:
        raise _mistake(
            graph,
            v,
            "a finished answer in the graph, but this configuration goes on from it "
            f"({step.status}); use the configuration that grew the graph",
        )
    if continued and step.terminal:
        raise _mistake(
            graph,
            v,
            f"this configuration ends the path here ({step.status}), the graph goes on; "
            "use the configuration that grew the graph",
        )


def _mistake(graph: RolloutGraph, v: int | np.int64, what: str) -> GraphError:
    return GraphError(f"graph {graph.id!r}: node {graph.node_ids[v]}: {what}")


def _tokens(graph: RolloutGraph, v: int) -> tuple[int, ...]:
    return tuple(graph.token_ids[graph.span(v)].tolist())


def _mask(graph: RolloutGraph, v: int) -> tuple[int, ...]:
    mask: IntArray = graph.loss_mask[graph.span(v)].astype(np.int64)
    return tuple(mask.tolist())


def _observation(tokenizer: Tokenizer, token_ids: Sequence[int], mask: Sequence[int]) -> str:
    return tokenizer.decode([t for t, sampled in zip(token_ids, mask, strict=True) if not sampled])


def _difference(recorded: str, made: str) -> str:
    """What two observations differ in, around the first character that does."""
    if recorded == made:
        return "its tokens or its loss mask are not those of this model and configuration"
    pairs = zip(recorded, made, strict=False)
    length = min(len(recorded), len(made))
    first = next((k for k, (a, b) in enumerate(pairs) if a != b), length)
    start = max(0, first - _SHOWN // 2)
    was, now = (text[start : start + _SHOWN] for text in (recorded, made))
    return (
        f"the observation was {was!r} and is now {now!r} (from character {start}): "
        "the tools, their index or their settings have changed"
    )
