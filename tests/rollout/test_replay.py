"""Saved graphs walked again: the states are the rollout's, and nothing that changed goes unseen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphpo_agent.build import build_grower, build_policy
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.errors import GraphError
from graphpo_agent.graph.budget import Budget
from graphpo_agent.graph.jsonl import graph_to_json
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.tree import tree
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.replay import Replay, reopen, replay
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.types import Outcome, SamplingParams, Task
from retrievers.bm25 import build_bm25
from tests.rollout.scripted import EOS, Library, ScriptedPolicy
from tests.rollout.walking import ANSWER, KARO, SEARCH_KARO, make, turns
from tests.worlds import run_arguments

TASK = Task("t-1", "3 > 7 ?", ("7",))
LIMITS = {"segment_length": 4, "max_response_tokens": 12}


def walk(grower: Grower, policy, graph: RolloutGraph, task: Task) -> Replay:
    scheduler = PolicyScheduler(policy, overlap=False)
    return scheduler.run([replay(scheduler, grower.expander, task, graph)])[0]


def babble(context, seed):
    """Letters drawn from the seed; about every sixth token ends the response."""
    rng = np.random.default_rng(seed)
    return [EOS if rng.random() < 1 / 6 else int(x) for x in rng.integers(97, 123, 50)]


def shout(task: Task, outcome: Outcome) -> float:
    return float("a" in outcome.response)


def segments(**limits: int) -> Grower:
    return Grower(SegmentExpander(**(LIMITS | limits)), shout)  # type: ignore[arg-type]


def grown(grower: Grower, policy, tasks, schedule=(4, 2, 1)) -> list[Rollout]:
    return grower.grow(policy, tasks, tree(schedule), SamplingParams(), ("test",))


def read_back(rollout: Rollout) -> RolloutGraph:
    """The graph as a file holds it."""
    return parse_graph(graph_to_json(rollout.graph, rollout.classes))


def assert_same_states(walked: Replay, rollout: Rollout) -> None:
    assert len(walked.states) == rollout.graph.num_nodes
    for state, original in zip(walked.states, rollout.states, strict=True):
        assert state.context.num_tokens == original.context.num_tokens
        assert replace(state, context=None) == replace(original, context=None)
    assert walked.ended.tolist() == [
        status in ("answered", "out_of_length", "out_of_turns") for status in rollout.statuses
    ]


def test_a_replayed_segment_graph_has_the_states_of_its_rollout():
    grower, policy = segments(), ScriptedPolicy(babble)
    tasks = [replace(TASK, id=f"t-{i}") for i in range(5)]
    for rollout in grown(grower, policy, tasks):
        asked = len(policy.requests)
        walked = walk(grower, policy, read_back(rollout), rollout.task)
        assert_same_states(walked, rollout)
        assert walked.ended.any() and not walked.ended.all()
        assert len(policy.requests) == asked  # the policy is told, not asked


def test_paths_at_a_limit_that_a_run_leaves_unjudged_have_ended_all_the_same():
    grower = replace(segments(), truncated="early_stopped")
    (rollout,) = grown(grower, ScriptedPolicy(babble), [TASK])
    cut = np.array([status == "out_of_length" for status in rollout.statuses])
    assert cut.any() and not rollout.graph.terminal[cut].any()
    walked = walk(grower, ScriptedPolicy(babble), read_back(rollout), TASK)
    assert walked.ended[cut].all()
    assert_same_states(walked, rollout)


def test_reopened_contexts_hold_the_tokens_of_their_paths():
    grower, policy = segments(), ScriptedPolicy(babble)
    (rollout,) = grown(grower, policy, [TASK])
    walked = walk(grower, policy, read_back(rollout), TASK)
    nodes = list(range(rollout.graph.num_nodes))[::-2]
    for v, state in zip(nodes, reopen(policy, walked, nodes), strict=True):
        assert state.context.token_ids == rollout.states[v].context.token_ids
        assert replace(state, context=None) == replace(rollout.states[v], context=None)


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"segment_length": 3}, r"node 1: 4 sampled tokens where the run's limits allow 1 to 3"),
        ({"max_response_tokens": 8}, r"node \d+: this configuration ends the path here \(out_of"),
    ],
)
def test_other_limits_than_the_rollouts_are_refused(limits, complaint):
    (rollout,) = grown(segments(), ScriptedPolicy(lambda c, s: [120] * 50), [TASK])
    with pytest.raises(GraphError, match=rf"graph 't-1': {complaint}"):
        walk(segments(**limits), ScriptedPolicy(babble), read_back(rollout), TASK)


def test_an_answer_that_the_configuration_would_continue_is_refused():
    policy = ScriptedPolicy(babble)
    root = RolloutGraph.root("t-1", token_ids=segments().expander.start(policy, TASK).prompt_ids)
    graph = root.append([NewNode(0, (120,) * 4, (1,) * 4, (-0.1,) * 4, True, 1.0)])
    with pytest.raises(GraphError, match="node 1: a finished answer in the graph, but this"):
        walk(segments(), policy, graph, TASK)


def test_a_graph_of_another_task_or_without_tokens_is_refused():
    (rollout,) = grown(segments(), ScriptedPolicy(babble), [TASK])
    graph = read_back(rollout)
    with pytest.raises(GraphError, match="node 0: its prompt is not the one of this config"):
        walk(segments(), ScriptedPolicy(babble), graph, replace(TASK, question="4 > 7 ?"))
    nodes = '[{"id":0,"parent":null,"terminal":false,"reward":null,"tokens":[1]},'
    nodes += '{"id":9,"parent":0,"terminal":false,"reward":null,"num_tokens":4}]'
    silent = parse_graph(f'{{"schema":"graphpo.graph/1","id":"g","nodes":{nodes}}}')
    with pytest.raises(GraphError, match="graph 'g': node 9: it has no tokens"):
        walk(segments(), ScriptedPolicy(babble), silent, TASK)


def test_an_observation_that_is_as_long_as_it_was_is_compared_too():
    policy = ScriptedPolicy(turns(SEARCH_KARO, ANSWER))
    (rollout,) = grown(Grower(make(), shout), policy, [TASK], schedule=(1,))
    graph = read_back(rollout)
    assert walk(Grower(make(), shout), policy, graph, TASK).ended.any()
    other = Library({"Karo": (replace(KARO, contents=KARO.contents.replace("Lita", "Lina")),)})
    with pytest.raises(GraphError, match=r"node 1: the observation was .*Lita.* is now .*Lina"):
        walk(Grower(make(other), shout), policy, graph, TASK)


# ---- agent mode, with the search index of a generated world


@pytest.fixture(scope="module")
def agent(kb: Path, tmp_path_factory):
    """A configuration's grower and policy over the kb world, as a function of overrides."""

    def build(*overrides: str):
        output = tmp_path_factory.mktemp("unused") / "run"
        path, *rest = run_arguments(kb, output, *overrides)
        config = load_config(RunConfig, path, rest)
        return build_grower(config), build_policy(config)

    return build


def demonstrated(kb: Path, grower: Grower, policy) -> tuple[RolloutGraph, Task]:
    """The longest demonstration as a graph: one path of real searches and an answer."""
    demos = load_demonstrations(kb / "demonstrations.jsonl")
    demo = max(demos, key=lambda each: len(each.pieces))
    task = Task(demo.id, demo.messages[-1]["content"], ())
    encode = policy.tokenizer.encode
    graph = RolloutGraph.root(demo.id, token_ids=grower.expander.start(policy, task).prompt_ids)
    edges: list[tuple[list[int], list[int]]] = []
    for piece in demo.pieces:
        if piece.trained:
            edges.append(([], []))
        tokens, mask = edges[-1]
        tokens += encode(piece.text)
        mask += [int(piece.trained)] * (len(tokens) - len(mask))
    for v, (tokens, mask) in enumerate(edges):
        answers = v + 1 == len(edges)
        graph = graph.append(
            [NewNode(v, tokens, mask, [-0.5] * len(mask), answers, 1.0 if answers else None)]
        )
    return graph, task


@pytest.fixture
def searched(kb: Path, agent):
    return demonstrated(kb, *agent())


def test_replayed_searches_find_what_they_found(agent, searched):
    graph, task = searched
    grower, policy = agent()
    walked = walk(grower, policy, graph, task)
    found = [len(state.memory.documents_found) for state in walked.states]
    assert found[0] == 0 and found[-1] >= 2 and found == sorted(found)
    assert walked.states[-1].memory.tool_calls == graph.num_edges - 1
    assert walked.states[-1].answer is not None
    assert walked.ended.tolist() == [False] * graph.num_edges + [True]


def test_an_index_that_answers_otherwise_is_refused(agent, searched, kb, tmp_path):
    graph, task = searched
    corpus = (kb / "corpus.jsonl").read_text().replace(" : ", " = ")
    (tmp_path / "corpus.jsonl").write_text(corpus)
    build_bm25(tmp_path / "corpus.jsonl", tmp_path / "index")
    grower, policy = agent(f"mode.tools.search.retriever.directory={tmp_path / 'index'}")
    complaint = rf"graph '{graph.id}': node 1: the observation was '.* : .*' and is now '.* = .*'"
    with pytest.raises(GraphError, match=complaint) as error:
        walk(grower, policy, graph, task)
    assert "\n" not in str(error.value)


def test_a_graph_of_an_untrained_agent_has_the_states_of_its_rollout(agent, kb):
    grower, policy = agent()
    tasks = [Task(f"t-{i}", f"when: first {i}", (), {"gold_documents": []}) for i in range(2)]
    for rollout in grown(grower, policy, tasks, schedule=(2, 1)):
        assert_same_states(walk(grower, policy, read_back(rollout), rollout.task), rollout)


def test_paths_that_a_budget_cut_are_walked_to_where_it_cut_them(agent, kb):
    grower, policy = agent()
    tasks = load_tasks(kb / "train.jsonl")[:4]
    budget, cut = Budget(tokens=150), 0
    for rollout in grower.grow(policy, tasks, tree((3, 2)), SamplingParams(), (1,), budget):
        walked = walk(grower, policy, read_back(rollout), rollout.task)
        for v, status in enumerate(rollout.statuses):
            assert walked.ended[v] == (
                status in ("answered", "out_of_length", "out_of_turns", "out_of_budget")
            )
            cut += status == "out_of_budget"
    assert cut > 0


def test_a_segment_that_ended_with_its_delimiter_waits_and_one_that_was_cut_has_ended():
    expander = SegmentExpander(segment_length=3, max_response_tokens=40, delimiter="a")
    policy = ScriptedPolicy(lambda _, seed: np.random.default_rng(seed).integers(97, 101, 50))
    grower, tasks = Grower(expander, shout), [replace(TASK, id=f"t-{i}") for i in range(12)]
    waiting = cut = short = 0
    budget = Budget(tokens=30)
    for rollout in grower.grow(policy, tasks, tree((4, 2, 1)), SamplingParams(), (1,), budget):
        walked = walk(grower, policy, read_back(rollout), rollout.task)
        leaves = set(rollout.graph.leaves.tolist())
        for v, status in enumerate(rollout.statuses):
            edge = rollout.graph.token_ids[rollout.graph.span(v)].tolist()
            delimited = edge[-1] == ord("a")
            if v in leaves and status == "ok" and len(edge) > 2 and delimited:
                assert not walked.ended[v]
                waiting += 1
            if status == "out_of_budget":
                assert walked.ended[v]
                cut += 1
                short += len(edge) < 3 and delimited  # too early to end the segment
    assert waiting and cut and short


def test_rollouts_of_values_are_refused_in_one_line():
    grower, policy = segments(), ScriptedPolicy(babble)
    (rollout,) = grown(grower, policy, [TASK])
    graph = read_back(rollout)
    open_node = int(np.flatnonzero(~graph.terminal)[-1])
    estimate = graph.append([NewNode(open_node, (5,), (0,), (float("nan"),), False, None)])
    with pytest.raises(GraphError, match="cannot be walked again"):
        walk(grower, policy, estimate, TASK)
