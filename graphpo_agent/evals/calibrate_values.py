"""Monte-Carlo values of the states of saved graphs, and what each way to describe states says.

The value of a state is the expected reward of going on from it as the run samples. It is
estimated by independent continuations to the end, each node's own, whatever compares the nodes.
"""

from asyncio import gather
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.graph.arrays import FloatArray, IntArray
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.protocols import Embedder, Policy, Scheduler, StateDescriber
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.rollout.replay import Replay, reopen, replay
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.types import PathState, SamplingParams, Task

__all__ = ["StateChoice", "replay_graphs", "sample_rewards"]

_GRAPHS_AT_ONCE = 64
_CHAINS_AT_ONCE = 1024
"""Their keys and values are kept until all of them are finished."""


@dataclass(frozen=True, slots=True)
class StateChoice:
    """One way to tell states apart.

    Example: ``StateChoice(KeyDescriber(documents_key), embedder=None)``.

    Attributes:
        describer: says what a state is.
        embedder: turns descriptions into vectors; None where keys are all there is.
    """

    describer: StateDescriber
    embedder: Embedder | None


def replay_graphs(
    grower: Grower,
    policy: Policy,
    graphs: Sequence[RolloutGraph],
    tasks: Sequence[Task],
    choices: Mapping[str, StateChoice],
    finished: Callable[[], object] = lambda: None,
) -> tuple[list[Replay], dict[str, list[RolloutGraph]]]:
    """Walk saved graphs again and describe their states in several ways.

    Args:
        grower: its expander makes the edges.
        policy: writes the summaries that a choice asks for; released at the end.
        graphs: with tokens.
        tasks: one per graph.
        choices: by name.
        finished: called whenever a graph is done.

    Returns:
        The replays, and by the name of each choice the graphs with the keys, texts and embeddings
        of that choice in place of their own.

    Raises:
        GraphError: a graph that this configuration cannot have grown (``rollout.replay``).
    """

    async def one(
        scheduler: Scheduler, graph: RolloutGraph, task: Task
    ) -> tuple[Replay, list[RolloutGraph]]:
        walked = await replay(scheduler, grower.expander, task, graph)
        seen = await gather(*(_described(scheduler, walked, each) for each in choices.values()))
        finished()
        return walked, seen

    done: list[tuple[Replay, list[RolloutGraph]]] = []
    for start in range(0, len(graphs), _GRAPHS_AT_ONCE):
        batch = slice(start, start + _GRAPHS_AT_ONCE)
        scheduler = PolicyScheduler(policy, grower.overlap)
        pairs = zip(graphs[batch], tasks[batch], strict=True)
        try:
            done += scheduler.run([one(scheduler, graph, task) for graph, task in pairs])
        finally:
            policy.release()
    by_choice = {name: [seen[k] for _, seen in done] for k, name in enumerate(choices)}
    return [walked for walked, _ in done], by_choice


async def _described(scheduler: Scheduler, walked: Replay, choice: StateChoice) -> RolloutGraph:
    """The graph as one choice sees it: its keys, texts and embeddings, and no others."""
    descriptions = await choice.describer.describe(scheduler, walked.states)
    embeddings = None
    if choice.embedder is not None:
        texts = [description.text or "" for description in descriptions]
        embeddings = np.asarray(await scheduler.together(choice.embedder.embed, texts))
    return replace(
        walked.graph,
        keys=tuple(description.key for description in descriptions),
        states=tuple(description.text for description in descriptions),
        embeddings=embeddings,
        has_embedding=np.full(walked.graph.num_nodes, embeddings is not None),
        given_classes=None,
    )


def sample_rewards(
    grower: Grower,
    policy: Policy,
    replays: Sequence[Replay],
    nodes: Sequence[IntArray],
    continuations: int,
    sampling: SamplingParams,
    seed: int,
    finished: Callable[[], object] = lambda: None,
) -> list[FloatArray]:
    """Rewards of independent continuations of some nodes to the end.

    The random numbers depend on the seed, the graph and the node only.

    Args:
        grower: its expander makes the edges, its verifier judges.
        policy: goes on from the nodes; released at the end.
        replays: the graphs.
        nodes: per graph, positions of nodes that can be continued.
        continuations: per node.
        sampling: the run's.
        seed: the run's.
        finished: called whenever a continuation has ended.

    Returns:
        Per graph [n, continuations], NaN for all other nodes and where a path was left unjudged.
    """
    rewards = [np.full((r.graph.num_nodes, continuations), np.nan) for r in replays]

    async def one(
        scheduler: Scheduler, state: PathState, seed_parts: tuple[int | str, ...]
    ) -> float:
        reward = await _finish(scheduler, grower, state, sampling, seed_parts)
        finished()
        return reward

    for batch in _batches(nodes, max(1, _CHAINS_AT_ONCE // continuations)):
        scheduler = PolicyScheduler(policy, grower.overlap)
        chains = []
        for g, members in batch:
            graph_id = replays[g].graph.id
            for v, state in zip(members, reopen(policy, replays[g], members), strict=True):
                parts = [(seed, "calibrate", graph_id, v, k) for k in range(continuations)]
                chains += [one(scheduler, state, part) for part in parts]
        try:
            found = iter(np.reshape(scheduler.run(chains), (-1, continuations)))
        finally:
            policy.release()
        for g, members in batch:
            for v in members:
                rewards[g][v] = next(found)
    return rewards


def _batches(nodes: Sequence[IntArray], size: int) -> Iterator[list[tuple[int, list[int]]]]:
    """At most ``size`` nodes at a time, as (graph, its nodes)."""
    batch: list[tuple[int, list[int]]] = []
    room = size
    for g, own in enumerate(nodes):
        rest = own.tolist()
        while rest:
            batch.append((g, rest[:room]))
            room, rest = room - len(batch[-1][1]), rest[room:]
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


async def _finish(
    scheduler: Scheduler,
    grower: Grower,
    state: PathState,
    sampling: SamplingParams,
    seed_parts: tuple[int | str, ...],
) -> float:
    """The reward of one continuation to the end; NaN where the run leaves such an end unjudged."""
    while True:
        seed = derive_seed(*seed_parts, state.depth)
        (step,) = await grower.expander.expand(scheduler, [state], [seed], sampling)
        if step.terminal:
            break
        state = step.state
    if not grower.is_judged(step):
        return np.nan
    (reward,) = await scheduler.each(grower.judge, [step.state])
    return np.nan if reward is None else reward
