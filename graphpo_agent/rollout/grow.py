"""The layer loop: how every graph is grown, in both modes and for every method.

Per layer: expand → observe → summarise → embed → merge → next budget (Algorithm 1, stage 1). The
expander makes edges, the method says where, the verifier judges ends. Every graph goes from layer
to layer on its own; the scheduler samples for all of them together.
"""

import math
from asyncio import gather
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import RewardError
from graphpo_agent.graph.budget import Allocation, Ledger
from graphpo_agent.graph.equivalence import find_classes
from graphpo_agent.graph.rollout_graph import NewNode, RolloutGraph
from graphpo_agent.methods.method import Method
from graphpo_agent.protocols import (
    Counting,
    Embedder,
    Expander,
    Policy,
    RewardFn,
    Scheduler,
    StateDescriber,
)
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.types import (
    PathState,
    SamplingParams,
    StateDescription,
    Step,
    StepStatus,
    Task,
)

__all__ = ["Grower", "Rollout"]


_TASKS_AT_ONCE = 256
"""The keys and values of their paths are kept until all of them are finished."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One task's graph, grown.

    Attributes:
        classes: [n] int64, the smallest member of each node's equivalence class.
        states: [n] where each path has got to.
        statuses: [n] what became of each edge; ``ok`` at the root.
    """

    task: Task
    graph: RolloutGraph
    classes: NDArray[np.int64]
    states: tuple[PathState, ...]
    statuses: tuple[StepStatus, ...]
    ledger: Ledger


@dataclass(slots=True)
class _Growing:
    """A graph under construction."""

    task: Task
    graph: RolloutGraph
    classes: NDArray[np.int64]
    states: list[PathState]
    statuses: list[StepStatus]
    active: NDArray[np.int64]
    ledger: Ledger
    carried: int = 0

    def finished(self) -> Rollout:
        return Rollout(
            self.task,
            self.graph,
            self.classes,
            tuple(self.states),
            tuple(self.statuses),
            self.ledger,
        )


@dataclass(frozen=True, slots=True)
class _Branch:
    """One continuation to be made: of which node, with which seed."""

    node: int
    seed: int


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
            (``score``) or left unscored, as if it had been stopped early (``drop``).
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
        parts = (self.reward_fn, self.describer, self.embedder)
        counting = [part.counts for part in parts if isinstance(part, Counting)]
        return {name: count for counts in counting for name, count in counts.items()}

    def grow(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        method: Method,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        finished: Callable[[], object] = lambda: None,
    ) -> list[Rollout]:
        """One graph per task.

        Args:
            policy: continues the prefixes; its contexts are released at the end.
            tasks: the prompts; a task may occur once only.
            method: its expansion policy and its merging.
            sampling: temperature and top-p.
            seed_parts: what names this batch, e.g. (run seed, step).
            finished: called whenever a graph is finished.
        """
        rollouts: list[Rollout] = []
        for start in range(0, len(tasks), _TASKS_AT_ONCE):
            scheduler = PolicyScheduler(policy, self.overlap)
            batch = tasks[start : start + _TASKS_AT_ONCE]
            growing = [
                self._grow(scheduler, task, method, sampling, seed_parts, finished)
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
        method: Method,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        finished: Callable[[], object],
    ) -> Rollout:
        """The graph of one task: expand, describe, merge, layer by layer."""
        one = await self._start(scheduler, task, method)
        for layer in range(1, self.expander.max_layers + 1):
            branches = self._plan(one, method, layer, (*seed_parts, task.id))
            if not branches:
                break
            steps = await gather(
                *(
                    self.expander.expand(scheduler, one.states[branch.node], branch.seed, sampling)
                    for branch in branches
                )
            )
            described = await self._describe(scheduler, method, [step.state for step in steps])
            rewards = await self._judge(scheduler, steps)
            self._attach(one, method, branches, steps, rewards, *described)
        finished()
        return one.finished()

    async def _start(self, scheduler: Scheduler, task: Task, method: Method) -> _Growing:
        state = self.expander.start(scheduler.policy, task)
        (description,), vectors = await self._describe(scheduler, method, [state])
        graph = RolloutGraph.root(
            task.id,
            token_ids=state.prompt_ids,
            key=description.key,
            state=description.text,
            embedding=None if vectors is None else vectors[0],
        )
        ledger = Ledger(
            prefilled_tokens=state.prompt_tokens, summary_tokens=description.summary_tokens
        )
        root = np.zeros(1, np.int64)
        return _Growing(task, graph, root, [state], ["ok"], root, ledger)

    def _plan(
        self, one: _Growing, method: Method, layer: int, seed_parts: tuple[int | str, ...]
    ) -> list[_Branch]:
        """The next layer's continuations of one graph; none once its token budget is spent."""
        spent = method.max_tokens is not None and one.ledger.generated_tokens >= method.max_tokens
        if spent or not len(one.active):
            return []
        allocation: Allocation = method.allocate(
            one.graph, one.classes, one.active, layer, one.carried
        )
        one.carried = allocation.saved_pool
        one.ledger.saved += allocation.saved
        one.ledger.reallocated += allocation.reallocated
        return [
            _Branch(node, derive_seed(*seed_parts, layer, node, sibling))
            for node, count in zip(
                one.active.tolist(), allocation.continuations.tolist(), strict=True
            )
            for sibling in range(count)
        ]

    def _attach(
        self,
        one: _Growing,
        method: Method,
        branches: Sequence[_Branch],
        steps: Sequence[Step],
        rewards: Sequence[float | None],
        descriptions: Sequence[StateDescription],
        vectors: NDArray[np.float32] | None,
    ) -> None:
        """Add a layer's edges to the graph, then find what became equivalent."""
        nodes = [
            NewNode(
                parent=branch.node,
                token_ids=step.token_ids,
                loss_mask=step.loss_mask,
                logprobs=step.logprobs,
                terminal=reward is not None,
                reward=reward,
                key=description.key,
                state=description.text,
                embedding=None if vectors is None else vectors[i],
            )
            for i, (branch, step, reward, description) in enumerate(
                zip(branches, steps, rewards, descriptions, strict=True)
            )
        ]
        first = one.graph.num_nodes
        one.graph = one.graph.append(nodes)
        one.states.extend(step.state for step in steps)
        one.statuses.extend(step.status for step in steps)
        for step, description in zip(steps, descriptions, strict=True):
            _enter(one.ledger, step, description.summary_tokens)
        one.active = first + np.flatnonzero([not step.terminal for step in steps])
        one.classes = find_classes(one.graph, method.merging)

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

    async def _judge(self, scheduler: Scheduler, steps: Sequence[Step]) -> list[float | None]:
        """The reward of each step that ends its path; None where it goes on or is left unscored."""
        judged = [i for i, step in enumerate(steps) if self.is_judged(step)]
        found = await gather(*(scheduler.beside(self.judge, steps[i].state) for i in judged))
        rewards: list[float | None] = [None] * len(steps)
        for i, reward in zip(judged, found, strict=True):
            rewards[i] = reward
        return rewards

    def is_judged(self, step: Step) -> bool:
        """Whether an edge ends its path and the verifier is asked about it."""
        cut = step.status in ("out_of_length", "out_of_turns")
        unscored = (cut and self.truncated == "early_stopped") or (
            step.state.outages > 0 and self.outages == "drop"
        )
        return step.terminal and not unscored

    def judge(self, state: PathState) -> float:
        """The verifier's reward of a finished path; RewardError unless it is in [0, 1]."""
        reward = float(self.reward_fn(state.task, self.expander.outcome(state)))
        if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
            raise RewardError(
                f"task {state.task.id}: the verifier returned {reward}, which is outside [0, 1]; "
                "rescale or binarise it"
            )
        return reward


def _enter(ledger: Ledger, step: Step, summary_tokens: int) -> None:
    """Book one edge. Its observation is prefilled when the path goes on."""
    generated = sum(step.loss_mask)
    ledger.generated_tokens += generated
    ledger.summary_tokens += summary_tokens
    ledger.tool_calls += step.tool_calls
    if not step.terminal:
        ledger.prefilled_tokens += len(step.token_ids) - generated
