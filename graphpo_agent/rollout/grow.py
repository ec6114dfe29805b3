"""The layer loop: how every graph is grown, in both modes and for every method.

Per layer, over all prompts at once: expand → observe → summarise → embed → merge → next budget
(Algorithm 1, stage 1). The expander makes edges, the method says where, the verifier judges ends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import RewardError
from graphpo_agent.graph.budget import Allocation, Ledger
from graphpo_agent.graph.equivalence import find_classes_many
from graphpo_agent.graph.rollout_graph import NewNode, RolloutGraph
from graphpo_agent.methods.method import Method
from graphpo_agent.protocols import Embedder, Expander, Policy, RewardFn, StateDescriber
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.types import (
    Outcome,
    PathState,
    SamplingParams,
    StateDescription,
    Step,
    StepStatus,
    Task,
)

__all__ = ["Grower", "Rollout"]


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
    """One continuation to be made: of which node of which graph, with which seed."""

    growing: _Growing
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
    """

    expander: Expander
    reward_fn: RewardFn
    describer: StateDescriber | None = None
    embedder: Embedder | None = None
    truncated: Literal["terminal", "early_stopped"] = "terminal"
    _no_state: StateDescription = field(default=StateDescription(), init=False)

    def grow(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        method: Method,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Rollout]:
        """One graph per task.

        Args:
            policy: continues the prefixes; its contexts are released at the end.
            tasks: the prompts; a task may occur once only.
            method: its expansion policy and its merging.
            sampling: temperature and top-p.
            seed_parts: what names this batch, e.g. (run seed, step).
        """
        growing = self._start(policy, tasks, method)
        for layer in range(1, self.expander.max_layers + 1):
            branches = [
                branch
                for one in growing
                for branch in self._plan(one, method, layer, (*seed_parts, one.task.id))
            ]
            if not branches:
                break
            steps = self.expander.expand(
                policy,
                [branch.growing.states[branch.node] for branch in branches],
                [branch.seed for branch in branches],
                sampling,
            )
            self._attach(policy, method, branches, steps)
        policy.release()
        return [one.finished() for one in growing]

    def _start(self, policy: Policy, tasks: Sequence[Task], method: Method) -> list[_Growing]:
        states = [self.expander.start(policy, task) for task in tasks]
        descriptions, vectors, summary_tokens = self._describe(policy, method, states)
        growing: list[_Growing] = []
        for i, (task, state) in enumerate(zip(tasks, states, strict=True)):
            graph = RolloutGraph.root(
                task.id,
                token_ids=state.prompt_ids,
                key=descriptions[i].key,
                state=descriptions[i].text,
                embedding=vectors[i] if vectors is not None else None,
            )
            ledger = Ledger(prefilled_tokens=state.prompt_tokens, summary_tokens=summary_tokens[i])
            growing.append(
                _Growing(task, graph, np.zeros(1, np.int64), [state], ["ok"], np.array([0]), ledger)
            )
        return growing

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
            _Branch(one, node, derive_seed(*seed_parts, layer, node, sibling))
            for node, count in zip(
                one.active.tolist(), allocation.continuations.tolist(), strict=True
            )
            for sibling in range(count)
        ]

    def _attach(
        self,
        policy: Policy,
        method: Method,
        branches: Sequence[_Branch],
        steps: Sequence[Step],
    ) -> None:
        """Add a layer's edges to their graphs, then find what became equivalent."""
        descriptions, vectors, summary_tokens = self._describe(
            policy, method, [step.state for step in steps]
        )
        by_graph: dict[int, list[int]] = {}
        for i, branch in enumerate(branches):
            by_graph.setdefault(id(branch.growing), []).append(i)
        touched = [branches[indices[0]].growing for indices in by_graph.values()]
        for one, indices in zip(touched, by_graph.values(), strict=True):
            nodes = [
                self._new_node(
                    branches[i].node,
                    steps[i],
                    descriptions[i],
                    vectors[i] if vectors is not None else None,
                )
                for i in indices
            ]
            first = one.graph.num_nodes
            one.graph = one.graph.append(nodes)
            one.states.extend(steps[i].state for i in indices)
            one.statuses.extend(steps[i].status for i in indices)
            for i in indices:
                _enter(one.ledger, steps[i], summary_tokens[i])
            ended = np.array([steps[i].terminal for i in indices])
            one.active = first + np.flatnonzero(~ended)
        found = find_classes_many([one.graph for one in touched], method.merging)
        for one, classes in zip(touched, found, strict=True):
            one.classes = classes

    def _describe(
        self, policy: Policy, method: Method, states: Sequence[PathState]
    ) -> tuple[list[StateDescription], NDArray[np.float32] | None, list[int]]:
        """Descriptions, their embeddings [len(states), d] and the tokens each summary cost."""
        if self.describer is None or not method.needs_states:
            return [self._no_state] * len(states), None, [0] * len(states)
        descriptions = self.describer.describe(policy, states)
        summary_tokens = self.describer.take_summary_tokens()
        vectors = None
        if self.embedder is not None:
            vectors = self.embedder.embed([description.text or "" for description in descriptions])
        return descriptions, vectors, summary_tokens

    def _new_node(
        self,
        parent: int,
        step: Step,
        description: StateDescription,
        vector: NDArray[np.float32] | None,
    ) -> NewNode:
        truncated = step.status in ("out_of_length", "out_of_turns")
        terminal = step.terminal and not (truncated and self.truncated == "early_stopped")
        return NewNode(
            parent=parent,
            token_ids=step.token_ids,
            loss_mask=step.loss_mask,
            logprobs=step.logprobs,
            terminal=terminal,
            reward=self.judge(step.state) if terminal else None,
            key=description.key,
            state=description.text,
            embedding=vector,
        )

    def judge(self, state: PathState) -> float:
        """The verifier's reward of a finished path; RewardError unless it is in [0, 1]."""
        outcome = Outcome(state.response, state.answer, num_turns=state.depth)
        reward = float(self.reward_fn(state.task, outcome))
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
