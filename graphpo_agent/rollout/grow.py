"""The layer loop: how every graph is grown, in both modes and for every method.

Per layer: expand → observe → summarise → embed → merge and next budget (Algorithm 1, stage 1). The
expander makes edges, the method says where, merging what its budget asks for, the verifier judges
ends. Every graph goes from layer to layer on its own; the scheduler samples for all of them
together.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.budget import Budget, Ledger
from graphpo_agent.graph.equivalence import MergeOptions, find_classes
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth
from graphpo_agent.methods.method import Method, plan_of
from graphpo_agent.protocols import (
    Embedder,
    Expander,
    Policy,
    RewardFn,
    Scheduler,
    StateDescriber,
)
from graphpo_agent.rollout.branches import (
    Continuation,
    after_cuts,
    continuations,
    cut_edges,
    within_paths,
)
from graphpo_agent.rollout.counts import counts_of
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.rollout.verdict import verdict
from graphpo_agent.types import (
    NO_PREFIX,
    PathState,
    Prefix,
    SamplingParams,
    StateDescription,
    Step,
    StepStatus,
    Task,
)

__all__ = ["TASKS_AT_ONCE", "UNLIMITED", "Grower", "Rollout", "batches"]


UNLIMITED = Budget()
NO_PREFIXES: Mapping[str, Prefix] = {}

TASKS_AT_ONCE = 256
"""The keys and values of their paths are kept until all of them are finished."""


def batches(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """The tasks whose graphs grow together, one batch after the other."""
    for start in range(0, len(tasks), TASKS_AT_ONCE):
        yield tasks[start : start + TASKS_AT_ONCE]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One task's graph, grown.

    Attributes:
        classes: [n] int64, the smallest member of each node's equivalence class.
        states: [n] where each path has got to.
        statuses: [n] what became of each edge; ``ok`` at the root.
        left_out: [n] whether an outage keeps a path that ends there from counting.
    """

    task: Task
    graph: RolloutGraph
    classes: NDArray[np.int64]
    states: tuple[PathState, ...]
    statuses: tuple[StepStatus, ...]
    left_out: tuple[bool, ...]
    ledger: Ledger


@dataclass(slots=True)
class _Growing:
    """A graph under construction."""

    task: Task
    graph: RolloutGraph
    states: list[PathState]
    statuses: list[StepStatus]
    reached: NDArray[np.int64]
    active: NDArray[np.int64]
    ledger: Ledger
    memory: Any = None

    def finished(self, merging: MergeOptions, outages: Literal["drop", "score"]) -> Rollout:
        dropping = outages == "drop"
        return Rollout(
            self.task,
            self.graph,
            find_classes(self.graph, merging),
            tuple(self.states),
            tuple(self.statuses),
            tuple(state.unjudged or (dropping and state.outages > 0) for state in self.states),
            self.ledger,
        )


@dataclass(frozen=True, slots=True)
class Grower:
    """Grows rollout graphs; the same for both modes and all methods.

    Attributes:
        expander: makes edges (segments or turns).
        describer: says what a state is; None where no method of the run looks at states.
        embedder: turns descriptions into vectors; None where keys are all there is.
        reward_fn: the verifier.
        truncated: what a path at its limit is, ``terminal`` (judged) or ``early_stopped``.
        outages: a finished path on which a tool call met an outage of the outside world is judged
            (``score``) or left unscored, as if it had been stopped early (``drop``). One that the
            verifier's own outage leaves without a reward is unscored either way.
        overlap: tools, embedders and verifiers run beside the sampling; off makes a run
            repeatable to the bit.
    """

    expander: Expander
    reward_fn: RewardFn
    describer: StateDescriber | None = None
    embedder: Embedder | None = None
    truncated: Literal["terminal", "early_stopped"] = "terminal"
    outages: Literal["drop", "score"] = "drop"
    overlap: bool = True

    @property
    def counts(self) -> Mapping[str, int]:
        """What its parts have counted so far (``Counting``)."""
        return counts_of(self.reward_fn, self.describer, self.embedder)

    def grow(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        method: Method,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        budget: Budget = UNLIMITED,
        finished: Callable[[Rollout], object] = lambda rollout: None,
        prefixes: Mapping[str, Prefix] = NO_PREFIXES,
        scoring: Callable[[Scheduler, Rollout], Awaitable[Rollout]] | None = None,
        drawn: Callable[[int], object] = lambda num_tokens: None,
    ) -> list[Rollout]:
        """One graph per task.

        Args:
            policy: continues the prefixes; its contexts are released at the end.
            tasks: the prompts; a task may occur once only.
            method: its expansion policy and its merging.
            sampling: temperature and top-p.
            seed_parts: what names this batch, e.g. (run seed, step).
            budget: of each prompt.
            finished: given each graph as soon as it is finished.
            prefixes: by task id, the beginning of an answer that belongs to the root.
            scoring: puts scores on a finished graph, beside the sampling of the others.
            drawn: told how many tokens each continuation has, as soon as it is there.
        """
        rollouts: list[Rollout] = []
        for batch in batches(tasks):
            scheduler = PolicyScheduler(policy, self.overlap, drawn)
            growing = [
                self._grow(
                    scheduler,
                    task,
                    prefixes.get(task.id, NO_PREFIX),
                    method,
                    sampling,
                    seed_parts,
                    budget,
                    finished,
                    scoring,
                )
                for task in batch
            ]
            try:
                rollouts += scheduler.run(growing)
            finally:
                policy.release()
        return rollouts

    async def _grow(
        self,
        scheduler: Scheduler,
        task: Task,
        prefix: Prefix,
        method: Method,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        budget: Budget,
        finished: Callable[[Rollout], object],
        scoring: Callable[[Scheduler, Rollout], Awaitable[Rollout]] | None,
    ) -> Rollout:
        """The graph of one task, layer by layer, until the method or the budget ends it."""
        one = await self._start(scheduler, task, prefix, method)
        for layer in count(1):
            parts = (*seed_parts, task.id, layer)
            planned = self._plan(one, scheduler.policy, method, layer, parts, budget)
            if not planned:
                break
            before = one.ledger.generated_tokens
            while planned:
                served, limit = budget.affordable(one.ledger, self.expander.edge_tokens)
                now, planned = planned[:served], planned[len(planned[:served]) :]
                if not now:
                    break
                await self._sample(one, scheduler, method, now, sampling, limit)
            if one.ledger.generated_tokens == before:  # nothing can be sampled any more
                break
        rollout = one.finished(method.merging, self.outages)
        if scoring is not None:
            rollout = await scoring(scheduler, rollout)
        finished(rollout)
        return rollout

    async def _start(
        self, scheduler: Scheduler, task: Task, prefix: Prefix, method: Method
    ) -> _Growing:
        state = self.expander.start(scheduler.policy, task, prefix)
        (description,), vectors = await self._describe(scheduler, method, [state])
        graph = RolloutGraph.root(
            task.id,
            token_ids=state.prompt_ids + prefix.token_ids,
            key=description.key,
            state=description.text,
            embedding=None if vectors is None else vectors[0],
        )
        ledger = Ledger(
            prefilled_tokens=state.prompt_tokens + len(prefix.token_ids),
            summary_tokens=description.summary_tokens,
        )
        root = np.zeros(1, np.int64)
        return _Growing(task, graph, [state], ["ok"], root, root, ledger)

    def _plan(
        self,
        one: _Growing,
        policy: Policy,
        method: Method,
        layer: int,
        seed_parts: tuple[int | str, ...],
        budget: Budget,
    ) -> list[Continuation]:
        """The next layer's continuations of one graph; none once it is finished or paid for."""
        tokens_left = budget.tokens_left(one.ledger)
        if tokens_left == 0:
            return []
        trajectories_left = budget.trajectories_left(one.graph)
        plan = plan_of(
            method,
            Growth(
                graph=one.graph,
                reached=one.reached,
                active=one.active,
                layer=layer,
                memory=one.memory,
                tokens_left=tokens_left,
                trajectories_left=trajectories_left,
                path_tokens=self.expander.path_tokens,
                edge_tokens=self.expander.edge_tokens,
                tokens_behind=lambda v: self.expander.tokens_left(policy, one.states[v]),
                seed=derive_seed(*seed_parts, "plan"),
                decode=lambda ids: policy.tokenizer.decode(ids),
            ),
        )
        one.memory = plan.memory
        one.reached = np.zeros(0, np.int64)
        one.ledger.saved += plan.saved
        one.ledger.reallocated += plan.reallocated

        before = one.graph
        branches = within_paths(before, plan.branches, trajectories_left)
        one.graph, branches, places = cut_edges(before, branches)
        one.active = np.array([after_cuts(v, places) for v in plan.waiting], np.int64)
        states = [
            self.expander.cut(policy, one.states[before.parent[v]], one.states[v], offset)
            for v, offset in places
        ]
        for j, (v, _) in enumerate(places):
            one.states.insert(v + j, states[j])
            one.statuses.insert(v + j, "ok")
        return continuations(one.graph, branches, seed_parts)

    async def _sample(
        self,
        one: _Growing,
        scheduler: Scheduler,
        method: Method,
        planned: Sequence[Continuation],
        sampling: SamplingParams,
        limit: int | None,
    ) -> None:
        """Sample edges and add them to the graph: expand, observe, describe, verify."""
        states = [one.states[each.node] for each in planned]
        seeds = [each.seed for each in planned]
        steps = await self.expander.expand(scheduler, states, seeds, sampling, limit)
        descriptions, vectors = await self._describe(scheduler, method, [s.state for s in steps])
        steps, rewards = await self._judge(scheduler, steps)
        nodes = [
            NewNode(
                parent=planned[i].node,
                token_ids=step.token_ids,
                loss_mask=(0,) * len(step.token_ids) if planned[i].value_only else step.loss_mask,
                logprobs=step.logprobs,
                terminal=rewards[i] is not None,
                reward=rewards[i],
                key=descriptions[i].key,
                state=descriptions[i].text,
                embedding=None if vectors is None else vectors[i],
                tree=planned[i].tree,
            )
            for i, step in enumerate(steps)
        ]
        new = one.graph.num_nodes + np.arange(len(nodes))
        one.graph = one.graph.append(nodes)
        one.states.extend(step.state for step in steps)
        one.statuses.extend(step.status for step in steps)
        one.reached = np.concatenate([one.reached, new])
        one.active = np.concatenate([one.active, new[[not step.terminal for step in steps]]])
        for step, description in zip(steps, descriptions, strict=True):
            _enter(one.ledger, step, description.summary_tokens)

    async def _describe(
        self, scheduler: Scheduler, method: Method, states: Sequence[PathState]
    ) -> tuple[list[StateDescription], NDArray[np.float32] | None]:
        """Descriptions and their embeddings [len(states), d]."""
        if self.describer is None or not method.needs_states:
            return [StateDescription()] * len(states), None
        descriptions = await self.describer.describe(scheduler, states)
        if self.embedder is None:
            return descriptions, None
        texts = [description.text or "" for description in descriptions]
        return descriptions, np.asarray(await scheduler.together(self.embedder.embed, texts))

    async def _judge(
        self, scheduler: Scheduler, steps: Sequence[Step]
    ) -> tuple[list[Step], list[float | None]]:
        """The reward of each step that ends its path; None where it goes on or is left unscored.

        The verifier's outages are marked in the steps that are given back.
        """
        judged = [i for i, step in enumerate(steps) if self.is_judged(step)]
        found = await scheduler.each(self.judge, [steps[i].state for i in judged])
        marked = list(steps)
        rewards: list[float | None] = [None] * len(steps)
        for i, reward in zip(judged, found, strict=True):
            rewards[i] = reward
            if reward is None:
                marked[i] = replace(steps[i], state=replace(steps[i].state, unjudged=True))
        return marked, rewards

    def is_judged(self, step: Step) -> bool:
        """Whether an edge ends its path and the verifier is asked about it."""
        cut = step.status in ("out_of_length", "out_of_turns")
        unscored = (
            step.status == "out_of_budget"
            or (cut and self.truncated == "early_stopped")
            or (step.state.outages > 0 and self.outages == "drop")
        )
        return step.terminal and not unscored

    def judge(self, state: PathState) -> float | None:
        """The verifier's reward of a finished path; None where it met an outage.

        Raises:
            RewardError: it is not in [0, 1], or cannot be had.
        """
        return verdict(self.reward_fn, state.task, self.expander.outcome(state))


def _enter(ledger: Ledger, step: Step, summary_tokens: int) -> None:
    """Book one edge. Its observation is prefilled when the path goes on."""
    generated = sum(step.loss_mask)
    ledger.generated_tokens += generated
    ledger.summary_tokens += summary_tokens
    ledger.tool_calls += step.tool_calls
    ledger.failed_calls += step.tool_calls if step.status == "tool_outage" else 0
    if not step.terminal:
        ledger.prefilled_tokens += len(step.token_ids) - generated
