"""Graphs whose edges are cut, and rollouts of values only, with a real tiny policy."""

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import DataError
from graphpo_agent.graph.budget import Budget
from graphpo_agent.methods.growth import Branch, Plan
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import UNMERGED, training_sample
from graphpo_agent.methods.spo_chain import SpoChain
from graphpo_agent.methods.treerl import TreeRL
from graphpo_agent.rollout.branches import continuations, cut_edges, within_paths
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.types import Prefix, SamplingParams, Task
from tests.graph.test_samples import small_graph
from tests.graph.test_split import mixed
from tests.rollout.test_real_policy import make_policy

TASKS = [Task(f"t{i}", f"Who mentored number {i}?", ()) for i in range(3)]
METHODS = {
    "treerl": TreeRL(trees=2, forks=2, rounds=2, copies=1, select=None),
    "spo_chain": SpoChain(num_chains=2, rollouts=2, cut_interval=4, max_probability=0.99),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def grown(place, method, budget, segment_length):
    policy = LocalPolicy(load_model(str(place)), HfTokenizer.load(str(place)))
    grower = Grower(
        SegmentExpander(segment_length=segment_length, max_response_tokens=24),
        lambda task, outcome: len(outcome.response) % 2,
        overlap=False,
    )
    return grower.grow(policy, TASKS, method, SamplingParams(), (0,), budget), policy


@pytest.mark.parametrize("segment_length", [24, 7])
@pytest.mark.parametrize("name", METHODS)
def test_every_edge_follows_the_tokens_that_stand_before_it(
    directory,
    name,
    segment_length,
):
    rollouts, policy = grown(directory, METHODS[name], Budget(), segment_length)
    model = load_model(str(directory))
    cuts = 0
    for rollout in rollouts:
        graph = rollout.graph
        texts = [state.response for state in rollout.states]
        for v in range(1, graph.num_nodes):
            path = [0, *graph.path(v)]
            tokens = np.concatenate(
                [graph.token_ids[graph.offsets[u] : graph.offsets[u + 1]] for u in path]
            )
            own = graph.token_ids[graph.offsets[v] : graph.offsets[v + 1]]
            with torch.no_grad():
                logprobs = model(torch.tensor(tokens[None])).logits[0].log_softmax(-1)
            picked = logprobs[-len(own) - 1 : -1].gather(1, torch.tensor(own)[:, None])[:, 0]
            recorded = graph.logprobs[graph.offsets[v] : graph.offsets[v + 1]]
            np.testing.assert_allclose(recorded, picked.numpy(), atol=1e-4)
            response = tokens[len(graph.token_ids[: graph.offsets[1]]) :]
            assert texts[v] == policy.tokenizer.decode(response.tolist())
            assert rollout.states[v].response_tokens == len(response) <= 24
            cuts += graph.node_ids[v] > v
        assert rollout.ledger.generated_tokens == len(graph.token_ids) - graph.offsets[1]
    assert cuts > 5


def test_rollouts_of_values_are_not_trained_and_everything_else_is(directory):
    method = METHODS["spo_chain"]
    rollouts, _ = grown(directory, method, Budget(), 7)
    for rollout in rollouts:
        graph = rollout.graph
        estimates = {
            v for v in range(1, graph.num_nodes) if not graph.num_trained[graph.path(v)].all()
        }
        assert estimates and not graph.num_trained[list(estimates)].any()
        (credit,) = method.assign_credit([graph], [rollout.classes])
        sample = training_sample(graph, credit)
        chains = set(range(1, graph.num_nodes)) - estimates
        assert len(sample.parent) <= 1 + len(chains)


@pytest.mark.parametrize("tokens", [1, 20, 97, 300])
@pytest.mark.parametrize("name", METHODS)
def test_budgets_are_spent_to_the_token_where_edges_are_cut_too(directory, name, tokens):
    rollouts, _ = grown(directory, METHODS[name], Budget(tokens=tokens), 7)
    for rollout in rollouts:
        assert rollout.ledger.generated_tokens == tokens


def test_a_graph_with_cuts_is_the_same_again_and_does_not_depend_on_the_batch(directory):
    for method in METHODS.values():
        once, _ = grown(directory, method, Budget(), 7)
        again, _ = grown(directory, method, Budget(), 7)
        for a, b in zip(once, again, strict=True):
            np.testing.assert_array_equal(a.graph.token_ids, b.graph.token_ids)
            np.testing.assert_array_equal(a.graph.parent, b.graph.parent)


def test_a_prefix_is_the_roots_and_counts_as_the_beginning_of_the_answer(directory):
    policy = LocalPolicy(load_model(str(directory)), HfTokenizer.load(str(directory)))
    grower = Grower(
        SegmentExpander(segment_length=7, max_response_tokens=24), lambda task, outcome: 1.0
    )
    prefix = tuple(range(10, 20))
    begun = {"t1": Prefix(prefix)}
    rollouts = grower.grow(policy, TASKS, Grpo(2), SamplingParams(), (0,), prefixes=begun)
    plain, rollout, _ = rollouts
    root = rollout.graph.token_ids[: rollout.graph.offsets[1]].tolist()
    assert tuple(root[-10:]) == prefix and not rollout.graph.loss_mask[: len(root)].any()
    assert len(plain.graph.token_ids[: plain.graph.offsets[1]]) == len(root) - 10
    assert rollout.ledger.prefilled_tokens == len(root)
    start = policy.tokenizer.decode(prefix)
    for v in rollout.graph.terminals.tolist():
        own = rollout.graph.num_tokens[rollout.graph.path(v)].sum()
        assert own + 10 <= 24 and rollout.states[v].response.startswith(start.rstrip())
    policy.release()
    with pytest.raises(DataError, match="max_prefix_tokens"):
        grower.grow(
            policy, TASKS, Grpo(2), SamplingParams(), (0,), prefixes={"t1": Prefix((9,) * 24)}
        )


def test_what_continues_the_inside_of_an_edge_always_begins_a_path():
    (kept,) = within_paths(small_graph(), [Branch(3, count=3, offset=1)], room=2)
    assert kept.count == 2
    # From its end the first continuation goes on with the path, and only once.
    found = within_paths(mixed(), [Branch(1, 2), Branch(1, 2)], room=2)
    assert [branch.count for branch in found] == [2, 1]


def test_a_node_whose_own_edge_is_cut_too_is_continued_at_its_end():
    graph, branches, places = cut_edges(mixed(), [Branch(2, offset=1), Branch(2), Branch(1)])
    assert places == [(2, 1)]
    assert [(branch.node, branch.offset) for branch in branches] == [
        (2, None),
        (3, None),
        (1, None),
    ]
    assert graph.node_ids[[2, 3]].tolist() == [31, 9]


class CutsBesideOneThatWaits:
    """Cuts the first edge of four while the other paths wait."""

    name, merging, needs_states, whiten = "own", UNMERGED, False, "none"

    def __init__(self):
        self.seen = {}

    def plan(self, growth):
        graph = growth.graph
        active = [graph.token_ids[graph.span(v)].tolist() for v in growth.active]
        self.seen.setdefault(graph.id, []).append(active)
        if growth.layer == 1:
            return Plan([Branch(0, 4)])
        if growth.layer == 2:
            cuts = [Branch(1, offset=i) for i in range(1, graph.num_tokens[1])]
            return Plan(cuts, waiting=growth.active[growth.active > 1])
        return Plan([])


def test_what_waits_is_the_same_path_after_an_edge_was_cut(directory):
    method = CutsBesideOneThatWaits()
    rollouts, _ = grown(directory, method, Budget(), segment_length=6)
    for rollout in rollouts:
        _, before, after = method.seen[rollout.graph.id]
        waiting = before[-3:]
        assert len(before) == 4 and after[:3] == waiting, "they come before what is new"
        assert rollout.graph.num_nodes > 6, "the edge was cut more than once"


def test_a_seed_belongs_to_the_id_of_a_node():
    found = continuations(mixed(), [Branch(1, 2), Branch(1)], (5, "t"))
    assert [one.seed for one in found] == [derive_seed(5, "t", 30, i) for i in range(3)]


def test_seeds_are_told_apart_by_each_of_their_parts():
    places = [(0, 3, 1, 11), (0, 3, 11, 1), (0, 3, 111), (0, 31, 11), (3, 0, 1, 11), (0, 3, 1, 12)]
    assert len({derive_seed(*parts) for parts in places}) == len(places)
    # Of another one no run could be repeated.
    assert derive_seed(0, 3, "kb-1f0c", 2, 7, 1) == 4266704041524303160
