"""The layer loop over a world without a model: a walk on the numbers, one token a step."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest

from graphpo_agent.errors import RewardError
from graphpo_agent.graph.budget import Budget
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.tree import tree
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import StepScorer
from graphpo_agent.rollout import grow as grow_module
from graphpo_agent.rollout.grow import UNLIMITED, Grower, Rollout
from graphpo_agent.rollout.step_scores import StepScoring
from graphpo_agent.rollout.summarize import KeyDescriber
from graphpo_agent.types import (
    NO_PREFIX,
    Outcome,
    PathState,
    Prefix,
    SamplingParams,
    Step,
    SteppedResponse,
    Task,
)
from tests.rollout.scripted import ByteTokenizer

GOAL = 3


@dataclass(frozen=True)
class Position:
    """A context that is a number of tokens only."""

    num_tokens: int


class NoPolicy:
    """The walk needs no model; the grower only asks its policy to forget."""

    released = 0

    def release(self) -> None:
        self.released += 1


class Walk:
    """Steps of +1 or -1 drawn from the seed; ends at GOAL or after ``max_layers`` steps."""

    def __init__(self, max_layers: int = 6, observed: int = 2) -> None:
        self.max_layers = max_layers
        self.edge_tokens = 1
        self.path_tokens = max_layers
        self.observed = observed
        self.seeds: list[int] = []

    def start(self, policy: Any, task: Task, prefix: Prefix = NO_PREFIX) -> PathState:
        return PathState(task, Position(3), 0, (1, 2, 3), "", None, memory=0)

    def tokens_left(self, policy: Any, state: PathState) -> int:
        return self.max_layers - state.depth

    def outcome(self, state: PathState) -> Outcome:
        return Outcome("", turns=("step",) * state.depth)

    async def expand(
        self,
        scheduler: Any,
        states: Sequence[PathState],
        seeds: Sequence[int],
        sampling: Any,
        limit: int | None = None,
    ) -> list[Step]:
        self.seeds += seeds
        return [self._step(state, seed) for state, seed in zip(states, seeds, strict=True)]

    def _step(self, state: PathState, seed: int) -> Step:
        at = state.memory + (1 if np.random.default_rng(seed).random() < 0.6 else -1)
        ended = at == GOAL
        cut = not ended and state.depth + 1 == self.max_layers
        length = 1 + self.observed
        after = replace(
            state,
            context=Position(state.context.num_tokens + length),
            depth=state.depth + 1,
            memory=at,
        )
        return Step(
            state=after,
            token_ids=(10 + at,) + (9,) * self.observed,
            loss_mask=(1,) + (0,) * self.observed,
            logprobs=(-0.5,) + (float("nan"),) * self.observed,
            terminal=ended or cut,
            status="answered" if ended else "out_of_turns" if cut else "ok",
            tool_calls=1,
        )


def at_goal(task: Task, outcome: Outcome) -> float:
    return 1.0 if len(outcome.turns) <= 5 else 0.25


def tasks(count: int) -> list[Task]:
    return [Task(f"walk-{i}", "walk to 3", ()) for i in range(count)]


def grower(expander: Walk | None = None, **settings: Any) -> Grower:
    describer = KeyDescriber(lambda state: str(state.memory))
    return Grower(expander or Walk(), at_goal, describer=describer, **settings)


def grow(
    method: Any,
    count: int = 4,
    one: Grower | None = None,
    seed: int = 0,
    budget: Budget = UNLIMITED,
) -> list[Rollout]:
    return (one or grower()).grow(
        NoPolicy(), tasks(count), method, SamplingParams(), (seed, "step"), budget
    )  # type: ignore[arg-type]


def children(rollout: Rollout) -> np.ndarray:
    return np.bincount(rollout.graph.parent[1:], minlength=rollout.graph.num_nodes)


def test_a_tree_gives_every_active_node_the_schedule_and_then_one() -> None:
    for rollout in grow(tree((3, 2))):
        graph = rollout.graph
        wanted = np.select([graph.depth == 0, graph.depth == 1], [3, 2], 1)
        assert np.array_equal(children(rollout), np.where(graph.terminal, 0, wanted))


def test_grpo_grows_independent_chains() -> None:
    for rollout in grow(Grpo(group_size=5)):
        counts = children(rollout)
        assert counts[0] == 5
        assert set(counts[1:].tolist()) <= {0, 1}
        assert len(rollout.graph.terminals) == 5
        assert np.array_equal(rollout.classes, np.arange(rollout.graph.num_nodes))


def test_equal_states_merge_and_the_redundant_give_up_half_their_budget() -> None:
    rollouts = grow(GraphPO(schedule=(6, 4, 2)))
    for rollout in rollouts:
        graph, classes = rollout.graph, rollout.classes
        first = np.flatnonzero(graph.depth == 1)
        # Positions +1 and -1 are the only states after one step: at most two classes.
        assert len(set(classes[first].tolist())) == len({graph.keys[v] for v in first})
        redundant = first[classes[first] != first]
        assert np.all(children(rollout)[redundant] == 2)
        assert children(rollout)[first].max() <= 8
    assert sum(r.ledger.saved for r in rollouts) >= sum(r.ledger.reallocated for r in rollouts) > 0


def test_a_graph_does_not_depend_on_what_else_is_in_the_batch() -> None:
    method = GraphPO(schedule=(4, 2, 2))
    together = {rollout.task.id: rollout for rollout in grow(method, 4)}
    one = grower()
    alone = one.grow(NoPolicy(), tasks(4)[2:3], method, SamplingParams(), (0, "step"))[0]  # type: ignore[arg-type]
    same = together["walk-2"]
    assert np.array_equal(alone.graph.parent, same.graph.parent)
    assert alone.graph.keys == same.graph.keys
    assert not np.array_equal(alone.graph.token_ids, together["walk-1"].graph.token_ids)


def test_every_continuation_has_a_seed_of_its_own_and_another_step_has_others() -> None:
    first, second = Walk(), Walk()
    grow(Grpo(4), one=grower(first))
    grow(Grpo(4), one=grower(second), seed=1)
    assert len(set(first.seeds)) == len(first.seeds)
    assert not set(first.seeds) & set(second.seeds)


def test_what_is_continued_in_several_layers_has_other_seeds_in_each() -> None:
    for method in (Grpo(4), GraphPO(schedule=(4, 2, 2))):
        walk = Walk()
        rollouts = grow(method, one=grower(walk), budget=Budget(tokens=90))
        assert max(children(rollout)[0] for rollout in rollouts) > 4
        assert len(set(walk.seeds)) == len(walk.seeds) == 4 * 90


def test_a_budget_of_tokens_is_spent_to_the_token() -> None:
    for method in (GraphPO(schedule=(4, 2, 2, 2)), tree((3, 3)), Grpo(4)):
        for tokens in (1, 3, 10, 57):
            for rollout in grow(method, budget=Budget(tokens=tokens)):
                assert rollout.ledger.generated_tokens == rollout.graph.num_trained.sum() == tokens


def test_a_budget_that_ends_inside_a_layer_leaves_paths_early_stopped() -> None:
    rollout = grow(GraphPO(schedule=(4, 2, 2, 2)), count=1, budget=Budget(tokens=10))[0]
    graph = rollout.graph
    open_leaves = ~graph.terminal & (children(rollout) == 0)
    assert open_leaves.any()
    assert np.isnan(graph.reward[open_leaves]).all()


def test_chains_begin_no_more_than_can_be_finished_but_the_last() -> None:
    for tokens in (20, 41, 100):
        for rollout in grow(Grpo(4), budget=Budget(tokens=tokens)):
            leaves = children(rollout) == 0
            assert (leaves & ~rollout.graph.terminal).sum() <= 1


def test_a_budget_of_tokens_holds_the_chains_that_one_after_another_would_fill_it() -> None:
    """All whole but the last, which is cut where the budget ends."""
    for tokens in (1, 5, 9, 23, 41, 100):
        for rollout in grow(Grpo(4), count=16, budget=Budget(tokens=tokens)):
            graph = rollout.graph
            leaves = sorted(graph.leaves.tolist(), key=lambda v: graph.path(v)[0])
            lengths = [len(graph.path(v)) for v in leaves]
            assert sum(lengths) == tokens
            assert graph.terminal[leaves[:-1]].all()


class Scripted(Walk):
    """The n-th path from the prompt ends after a given number of steps."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths = iter(lengths)

    def _step(self, state: PathState, seed: int) -> Step:
        length = next(self.lengths) if state.depth == 0 else state.memory
        step = super()._step(replace(state, memory=0), seed)
        ended = state.depth + 1 == length
        status = "answered" if ended else "ok"
        return replace(
            step, state=replace(step.state, memory=length), terminal=ended, status=status
        )


@pytest.mark.parametrize(
    ("tokens", "lengths", "parents"),
    [
        # Two paths of at most 6 tokens are sure to be whole, and 2 tokens of a third one.
        (14, [6, 6, 6], [0, 0, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]),
        # A path that ends after one token, or two, leaves room for others beside the second.
        (13, [1, 6, 2, 6], [0, 0, 0, 2, 3, 4, 0, 6, 7, 8, 9, 10, 11]),
    ],
)
def test_chains_grow_together_as_far_as_the_budget_is_sure_to_hold_them(
    tokens: int, lengths: list[int], parents: list[int]
) -> None:
    one = grower(Scripted(lengths))
    (rollout,) = grow(Grpo(9), count=1, one=one, budget=Budget(tokens=tokens))
    assert rollout.graph.parent[1:].tolist() == parents


def test_a_budget_of_trajectories_is_a_number_of_paths() -> None:
    for method in (GraphPO(schedule=(4, 2, 2, 2)), tree((3, 3)), Grpo(4)):
        for trajectories in (1, 4, 11, 40):
            for rollout in grow(method, budget=Budget(trajectories=trajectories)):
                assert len(rollout.graph.leaves) == trajectories
                assert rollout.graph.terminal[rollout.graph.leaves].all()


def test_whichever_budget_ends_first_ends_the_graph() -> None:
    for rollout in grow(Grpo(4), budget=Budget(tokens=30, trajectories=3)):
        assert len(rollout.graph.leaves) == 3 and rollout.ledger.generated_tokens <= 18
    for rollout in grow(Grpo(4), budget=Budget(tokens=5, trajectories=30)):
        assert rollout.ledger.generated_tokens == 5


def test_a_path_at_its_limit_is_judged_or_left_unscored_as_set() -> None:
    judged = grow(Grpo(8), one=grower(Walk(max_layers=3)))
    stopped = grow(Grpo(8), one=grower(Walk(max_layers=3), truncated="early_stopped"))
    for a, b in zip(judged, stopped, strict=True):
        cut = np.array([status == "out_of_turns" for status in a.statuses])
        assert cut.any()
        assert a.graph.terminal[cut].all() and not b.graph.terminal[cut].any()
        assert np.isnan(b.graph.reward[cut]).all()


class StormyWalk(Walk):
    """A step back meets an outage."""

    def _step(self, state: PathState, seed: int) -> Step:
        step = super()._step(state, seed)
        back = step.state.memory < state.memory
        return replace(step, state=replace(step.state, outages=state.outages + back))


def test_a_path_that_met_an_outage_is_left_unscored_or_judged_as_set() -> None:
    dropped = grow(Grpo(8), one=grower(StormyWalk()))
    scored = grow(Grpo(8), one=grower(StormyWalk(), outages="score"))
    assert any(rollout.graph.terminal.any() for rollout in dropped)
    for a, b in zip(dropped, scored, strict=True):
        hit = np.array([state.outages > 0 for state in a.states])
        assert (b.graph.terminal & hit).any()
        assert np.array_equal(a.graph.terminal, b.graph.terminal & ~hit)
        assert np.isnan(a.graph.reward[hit]).all()
        assert np.array_equal(children(a), children(b))


@pytest.mark.parametrize("outages", ["drop", "score"])
def test_a_path_whose_verifier_met_an_outage_is_left_unscored(outages: str) -> None:
    def storm(task: Task, outcome: Outcome) -> float:
        if len(outcome.turns) % 2:
            raise CallFailed("rate_limit", "come back later")
        return at_goal(task, outcome)

    calm = grow(Grpo(8), one=grower())
    stormy = grow(Grpo(8), one=replace(grower(outages=outages), reward_fn=storm))
    assert sum(rollout.graph.terminal.sum() for rollout in stormy)
    for a, b in zip(calm, stormy, strict=True):
        hit = a.graph.terminal & np.array([state.depth % 2 == 1 for state in a.states])
        assert hit.any() and np.array_equal(children(a), children(b))
        assert np.array_equal(b.graph.terminal, a.graph.terminal & ~hit)
        assert np.array_equal(b.graph.reward[~hit], a.graph.reward[~hit], equal_nan=True)
        assert [state.unjudged for state in b.states] == list(b.left_out) == hit.tolist()


def test_a_verifier_that_cannot_say_is_an_error() -> None:
    def refuse(task: Task, outcome: Outcome) -> float:
        raise CallFailed("bad_arguments", "no such field")

    with pytest.raises(RewardError, match="no verdict: no such field"):
        grow(Grpo(2), one=replace(grower(), reward_fn=refuse))


def test_the_ledger_is_the_sum_of_the_edges() -> None:
    for rollout in grow(GraphPO(schedule=(4, 2))):
        graph, ledger = rollout.graph, rollout.ledger
        assert ledger.generated_tokens == graph.num_edges == graph.num_trained.sum()
        assert ledger.tool_calls == graph.num_edges
        goes_on = np.count_nonzero(~graph.terminal[1:])
        assert ledger.prefilled_tokens == 3 + 2 * goes_on


def test_a_call_that_met_an_outage_is_booked_where_it_was_made() -> None:
    class Down(Walk):
        """Every second call is answered from what is known, every one by an outage."""

        def _step(self, state: PathState, seed: int) -> Step:
            step = super()._step(state, seed)
            return replace(step, status="tool_outage", tool_calls=step.state.depth % 2)

    for rollout in grow(Grpo(4), one=grower(Down())):
        made = np.count_nonzero(rollout.graph.depth % 2)
        assert made < rollout.graph.num_edges
        assert rollout.ledger.failed_calls == rollout.ledger.tool_calls == made


def test_states_are_not_described_where_no_method_looks() -> None:
    class Refuses:
        async def describe(self, scheduler: Any, states: Any) -> Any:
            raise AssertionError("described")

    one = Grower(Walk(), at_goal, describer=Refuses())
    assert all(key is None for r in grow(Grpo(3), one=one) for key in r.graph.keys)


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), float("inf")])
def test_a_reward_outside_the_unit_interval_names_the_task(value: float) -> None:
    one = Grower(Walk(), lambda task, outcome: value)
    with pytest.raises(RewardError, match=r"task walk-\d: .* outside \[0, 1\]"):
        grow(Grpo(2), one=one)


@pytest.mark.parametrize("value", [None, "good"])
def test_a_reward_that_is_no_number_names_the_task(value: Any) -> None:
    one = Grower(Walk(), lambda task, outcome: value)
    with pytest.raises(RewardError, match=rf"task walk-0: .* {value!r}, which is no number"):
        grow(Grpo(2), count=1, one=one)


def test_contexts_are_released_once_the_rollout_is_over() -> None:
    policy = NoPolicy()
    grower().grow(policy, tasks(2), Grpo(2), SamplingParams(), (0,))  # type: ignore[arg-type]
    assert policy.released == 1
    one = replace(grower(), reward_fn=lambda task, outcome: 2.0)
    with pytest.raises(RewardError):
        one.grow(policy, tasks(2), Grpo(2), SamplingParams(), (0,))  # type: ignore[arg-type]
    assert policy.released == 2


@pytest.mark.parametrize(("count", "releases"), [(6, 2), (7, 3)])
def test_many_tasks_are_grown_in_turn_and_each_as_if_alone(
    count: int, releases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, policy = GraphPO(schedule=(4, 2, 2)), NoPolicy()
    together = grow(method, count)
    monkeypatch.setattr(grow_module, "TASKS_AT_ONCE", 3)
    in_turn = grower().grow(policy, tasks(count), method, SamplingParams(), (0, "step"))  # type: ignore[arg-type]
    assert policy.released == releases
    for a, b in zip(together, in_turn, strict=True):
        assert a.task == b.task and np.array_equal(a.graph.token_ids, b.graph.token_ids)


def test_max_layer_gap_and_the_rest_of_merging_reach_the_loop() -> None:
    free = grow(GraphPO(schedule=(6, 2, 2, 1, 1)), count=8)
    gap = MergeOptions(max_layer_gap=0)
    tight = grow(GraphPO(schedule=(6, 2, 2, 1, 1), merging=gap), count=8)

    def crosses(rollout: Rollout) -> bool:
        depth = rollout.graph.depth
        return bool(np.any(depth[rollout.classes] != depth))

    assert any(crosses(rollout) for rollout in free)
    assert not any(crosses(rollout) for rollout in tight)


def test_what_is_saved_and_given_to_others_is_booked_apart():
    ledgers = [one.ledger for one in grow(GraphPO(schedule=(6, 4, 2), reallocate="none"))]
    assert all(ledger.saved > 0 == ledger.reallocated for ledger in ledgers)


def test_graphs_are_scored_while_others_grow() -> None:
    begun, went_on = threading.Event(), threading.Event()

    class Slow(Walk):
        async def expand(self, scheduler: Any, states: Sequence[PathState], *rest: Any) -> Any:
            if states[0].task.id == "walk-1":
                while not begun.is_set():
                    await asyncio.sleep(0.001)
                went_on.set()
            return await super().expand(scheduler, states, *rest)

    class Scorer:
        def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
            begun.set()
            assert went_on.wait(20), "the others wait for the scores"
            return [[0.5] * len(response.steps) for response in responses]

    finished: list[Rollout] = []
    found = grower(Slow()).grow(
        NoPolicy(),  # type: ignore[arg-type]
        tasks(3),
        Grpo(group_size=2),
        SamplingParams(),
        (0, "step"),
        finished=finished.append,
        scoring=StepScoring(Scorer(), "response", ByteTokenizer()),
    )
    assert {id(each) for each in finished} == {id(each) for each in found}
    assert [each.task.id for each in found] == ["walk-0", "walk-1", "walk-2"]
    assert all((each.graph.step_scores[each.graph.terminals] == 0.5).all() for each in found)


@pytest.mark.parametrize(
    "scores",
    [[1.5], [-0.1], [float("inf")], [], [0.5, 0.5], 0.5, None, [None], ["0.5"], [[0.5], []]],
)
def test_step_scores_that_are_none_name_the_task(scores: Any) -> None:
    class Scorer:
        def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
            return [scores for _ in responses]

    with pytest.raises(RewardError, match=r"task walk-0: the step scorer .* for 1 steps, want"):
        scored(Scorer(), "response")


def test_one_score_is_not_that_of_several_steps() -> None:
    class Scorer:
        def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
            return [[0.5] for _ in responses]

    with pytest.raises(RewardError, match=r"returned \[0.5\] for [2-9]\d* steps"):
        scored(Scorer(), "edges")


@pytest.mark.parametrize("steps", ["response", "edges"])
def test_the_steps_that_are_scored_are_the_policy_s_own_words(
    steps: Literal["response", "edges"],
) -> None:
    class Scorer:
        def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
            heard.extend(responses)
            return [[0.5] * len(response.steps) for response in responses]

    heard: list[SteppedResponse] = []
    (rollout,) = scored(Scorer(), steps)
    for response, leaf in zip(heard, rollout.graph.terminals.tolist(), strict=True):
        said = tuple(chr(10 + rollout.states[v].memory) for v in rollout.graph.path(leaf))
        assert response.steps == (said if steps == "edges" else ("",))
    asked = np.zeros(rollout.graph.num_nodes, bool)
    for leaf in rollout.graph.terminals.tolist():
        asked[rollout.graph.path(leaf) if steps == "edges" else leaf] = True
    assert np.array_equal(rollout.graph.step_scores, np.where(asked, 0.5, np.nan), equal_nan=True)


def scored(scorer: StepScorer, steps: Literal["response", "edges"]) -> list[Rollout]:
    """The walk of one task, with what a process reward model says of it."""
    return grower().grow(
        NoPolicy(),  # type: ignore[arg-type]
        tasks(1),
        Grpo(group_size=2),
        SamplingParams(),
        (0, "step"),
        scoring=StepScoring(scorer, steps, ByteTokenizer()),
    )
