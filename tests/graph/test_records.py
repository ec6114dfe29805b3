"""Graph files: what is read back, what is refused, and with which words."""

import base64
import copy
import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.jsonl import graph_to_json, read_graphs
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph

from .strategies import graph_of, records

FIELDS = (
    "node_ids",
    "parent",
    "depth",
    "terminal",
    "reward",
    "has_embedding",
    "step_scores",
    "tree",
)
TOKEN_FIELDS = ("offsets", "token_ids", "loss_mask", "logprobs", "has_tokens", "num_tokens")


def assert_equal_graphs(a, b):
    assert (a.id, a.keys, a.states) == (b.id, b.keys, b.states)
    for field in (*FIELDS, *TOKEN_FIELDS, "num_trained", "embeddings", "given_classes"):
        x, y = getattr(a, field), getattr(b, field)
        assert (x is None) == (y is None), field
        if x is not None:
            assert x.dtype == y.dtype, field
            np.testing.assert_array_equal(x, y, err_msg=field)


def f32(values):
    return {"f32": base64.b64encode(np.array(values, "<f4").tobytes()).decode()}


@settings(max_examples=150, deadline=None)
@given(records(), st.integers(0, 2**32))
def test_round_trip(record, seed):
    rng = np.random.default_rng(seed)
    for node in record["nodes"]:
        length, kind = node["num_tokens"], rng.integers(4)
        if kind == 0:
            del node["num_tokens"]
        if kind in (1, 2):
            node["tokens"] = rng.integers(0, 9, length).tolist()
            node["logprobs"] = (-rng.random(length).astype(np.float32)).tolist()
        if kind in (2, 3):
            node["loss_mask"] = rng.integers(0, 2, length).tolist()
        node["class"] = int(rng.integers(3))
        if kind > 1:
            node["step_score"] = float(rng.integers(3)) / 2
    graph = graph_of(record)
    again = parse_graph(graph_to_json(graph, graph.given_classes))
    assert_equal_graphs(graph, again)


def test_a_grown_graph_is_written_and_read(tmp_path):
    nan = float("nan")
    graph = RolloutGraph.root("grown", token_ids=[1, 2], embedding=np.ones(2, np.float32))
    graph = graph.append(
        [
            NewNode(0, (3, 4), (1, 0), (-0.1, nan), False, None, "k", "text", np.zeros(2, "f4")),
            NewNode(0, (5,), (1,), (-2.5,), True, 0.5),
        ]
    )
    file = tmp_path / "graphs.jsonl"
    file.write_text(graph_to_json(graph) + "\n\n  \n")
    (again,) = read_graphs(file)
    assert_equal_graphs(graph, again)
    assert again.num_trained.tolist() == [0, 1, 1]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_a_logprob_is_written_with_nine_digits_and_read_as_what_it_was(values):
    tokens = tuple(range(len(values)))
    node = NewNode(0, tokens, (1,) * len(values), tuple(values), True, 1.0)
    line = graph_to_json(RolloutGraph.root("g", token_ids=[1]).append([node]))
    again = parse_graph(line).logprobs[1:]
    assert again.tobytes() == np.array(values, np.float32).tobytes()
    for text in json.loads(line, parse_float=str)["nodes"][1]["logprobs"]:
        if 1e-12 < abs(float(text)) < 1e9:
            assert len(Decimal(text).normalize().as_tuple().digits) <= 9


def test_a_node_that_is_added_has_an_id_of_its_own():
    grown = parse_graph(json.dumps(GOOD)).append([NewNode(1, (5,), (1,), (-1.0,), False, None)])
    assert grown.node_ids.tolist() == [0, 3, 7, 8]


def test_a_byte_order_mark_says_nothing(tmp_path):
    lines = [json.dumps({**GOOD, "id": name}) for name in ("first", "second")]
    (tmp_path / "graphs.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    assert [graph.id for graph in read_graphs(tmp_path / "graphs.jsonl")] == ["first", "second"]


def test_what_is_absent():
    root = {"id": 9, "parent": None, "terminal": False}
    graph = graph_of({"schema": "graphpo.graph/1", "id": "alone", "nodes": [root]})
    assert graph.node_ids.tolist() == [9]
    assert graph.embeddings is None and graph.given_classes is None
    assert graph.keys == (None,) and not graph.has_tokens.any()
    assert (graph.leaves.tolist(), graph.path(0)) == ([0], [])


def test_a_count_alone_costs_no_memory():
    record = changed(1, num_tokens=2**39)
    assert graph_of(record).num_trained[1] == 2**39


def test_trees_stay_unknown_where_the_file_does_not_say():
    nodes = [
        {"id": v, "parent": p, "terminal": False, "reward": None}
        for v, p in enumerate([None, 0, 0, 1])
    ]
    record = {"schema": "graphpo.graph/1", "id": "g", "nodes": nodes}
    assert graph_of(record).tree.tolist() == [-1, -1, -1, -1]
    nodes[1]["tree"] = 4
    assert graph_of(record).tree.tolist() == [-1, 4, -1, -1]
    assert parse_graph(graph_to_json(graph_of(record))).tree.tolist() == [-1, 4, -1, -1]


def test_given_classes_are_named_by_their_smallest_id():
    nodes = [
        {"id": v, "parent": p, "terminal": False, "reward": None, "class": c}
        for v, p, c in [(5, None, 0), (8, 5, 77), (2, 5, 77), (9, 5, 3)]
    ]
    record = {"schema": "graphpo.graph/1", "id": "g", "nodes": nodes}
    graph = graph_of(record)
    assert graph.node_ids[graph.given_classes].tolist() == [5, 2, 2, 9]
    del nodes[3]["class"]
    assert graph_of(record).given_classes is None


def test_embeddings_keep_their_precision():
    nodes = [
        {"id": v, "parent": None if v == 0 else 0, "terminal": False, "reward": None}
        for v in range(3)
    ]
    record = {"schema": "graphpo.graph/1", "id": "g", "nodes": nodes}
    nodes[1]["embedding"] = f32([0.5, 1 / 3])
    assert graph_of(record).embeddings.dtype == np.float32
    nodes[2]["embedding"] = [0.5, 1 / 3]
    graph = graph_of(record)
    assert graph.embeddings[2].tolist() == [0.5, 1 / 3]
    assert graph.has_embedding.tolist() == [False, True, True]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_graph_does_not_grow_by_an_embedding_that_is_not_finite(number):
    def nodes(*rows):
        return [NewNode(0, (), (), (), False, None, embedding=np.array(row, "f4")) for row in rows]

    graph = RolloutGraph.root("g", token_ids=[1], embedding=np.ones(2, np.float32))
    with pytest.raises(GraphError, match="node 2: embedding holds a number that is not finite"):
        graph.append(nodes([1.0, 0.0], [1.0, number]))
    with pytest.raises(GraphError, match="node 0: embedding holds a number that is not finite"):
        RolloutGraph.root("g", token_ids=[1], embedding=np.array([number, 0.0], "f4"))


GOOD = {
    "schema": "graphpo.graph/1",
    "id": "g",
    "nodes": [
        {"id": 0, "parent": None, "terminal": False, "reward": None, "embedding": [1.0, 0.0]},
        {"id": 3, "parent": 0, "terminal": False, "reward": None, "embedding": [0.0, 1.0]},
        {"id": 7, "parent": 3, "terminal": True, "reward": 1.0, "tokens": [5, 6]},
    ],
}


def changed(v, **fields):
    record = copy.deepcopy(GOOD)
    record["nodes"][v].update(fields)
    return record


def without(v, field):
    record = copy.deepcopy(GOOD)
    del record["nodes"][v][field]
    return record


MALFORMED = {
    "reward above": (changed(2, reward=1.2), "node 7: reward 1.2 is outside [0, 1]"),
    "reward below": (changed(2, reward=-1), "node 7: reward -1.0 is outside [0, 1]"),
    "reward overflow": (
        json.dumps(GOOD).replace('1.0, "tokens"', '1e999, "tokens"'),
        "node 7: reward holds a number that is not finite",
    ),
    "reward huge": (
        changed(2, reward=10**400),
        "node 7: reward holds a number that is not finite",
    ),
    "reward bool": (changed(2, reward=True), "node 7: reward True is not a number"),
    "reward text": (changed(2, reward="1"), "node 7: reward '1' is not a number"),
    "reward missing": (changed(2, reward=None), "node 7: terminal without a reward"),
    "reward early": (changed(1, reward=0.0), "node 3: reward on a node that is not terminal"),
    "step score above": (changed(2, step_score=1.2), "node 7: step_score 1.2 is outside [0, 1]"),
    "step score below": (changed(1, step_score=-0.1), "node 3: step_score -0.1 is outside [0, 1]"),
    "step score text": (changed(2, step_score="1"), "node 7: step_score is not a list of numbers"),
    "NaN": (json.dumps(changed(2, reward=float("nan"))), "NaN is not a number in JSON"),
    "Infinity": (
        json.dumps(changed(1, embedding=[0.0, float("inf")])),
        "Infinity is not a number in JSON",
    ),
    "terminal parent": (changed(1, terminal=True, reward=0), "node 7: parent 3 is terminal"),
    "terminal number": (changed(2, terminal=1), "node 7: terminal is missing or not true or false"),
    "terminal missing": (without(1, "terminal"), "node 3: terminal is missing or not true or"),
    "id twice": (changed(2, id=3), "node 3: id occurs twice"),
    "id bool": (changed(2, id=True), "nodes[2]: id True is not a non-negative integer"),
    "id float": (changed(2, id=7.0), "nodes[2]: id 7.0 is not a non-negative integer"),
    "id negative": (changed(2, id=-7), "nodes[2]: id -7 is not a non-negative integer"),
    "id huge": (changed(2, id=2**63), "is too large, want less than 2**63"),
    "id missing": (without(2, "id"), "nodes[2]: id is missing"),
    "parent missing": (without(1, "parent"), "node 3: parent is missing"),
    "parent unknown": (changed(2, parent=4), "node 7: parent 4 does not come before it"),
    "parent later": (changed(1, parent=7), "node 3: parent 7 does not come before it"),
    "parent self": (changed(2, parent=7), "node 7: parent 7 does not come before it"),
    "second root": (changed(1, parent=None), "node 3: a second root, its parent is null"),
    "root with parent": (changed(0, parent=0), "node 0: the first node is the root"),
    "tokens and count": (
        changed(2, num_tokens=3),
        "node 7: lengths disagree: num_tokens 3, tokens 2",
    ),
    "tokens and mask": (changed(2, loss_mask=[1]), "node 7: lengths disagree: tokens 2, loss_mask"),
    "tokens and logprobs": (changed(2, logprobs=[-1.0]), "node 7: lengths disagree: tokens 2, log"),
    "mask and logprobs": (
        changed(1, logprobs=[-1.0], loss_mask=[1, 1]),
        "node 3: lengths disagree: loss_mask 2, logprobs 1",
    ),
    "mask of 2": (changed(2, loss_mask=[1, 2]), "node 7: loss_mask is not a list of 0 and 1"),
    "mask of bools": (changed(2, loss_mask=[1, True]), "node 7: loss_mask is not a list of 0 and"),
    "token negative": (changed(2, tokens=[5, -6]), "node 7: tokens is not a list of token ids"),
    "token float": (changed(2, tokens=[5, 6.0]), "node 7: tokens is not a list of token ids"),
    "token huge": (changed(2, tokens=[5, 2**70]), "is too large"),
    "tokens text": (changed(2, tokens="56"), "node 7: tokens is not a list"),
    "logprob null": (
        changed(2, logprobs=[-1.0, None]),
        "node 7: logprobs is not a list of numbers",
    ),
    "logprob huge": (
        changed(2, logprobs=[-1.0, -1e300]),
        "node 7: logprobs holds a number that is too large for 32 bits",
    ),
    "num_tokens huge": (
        changed(1, num_tokens=2**40),
        "node 3: num_tokens 1099511627776 is too large, want less than 2**40",
    ),
    "num_tokens": (
        changed(1, num_tokens=-1),
        "node 3: num_tokens -1 is not a non-negative integer",
    ),
    "embedding short": (
        changed(1, embedding=[1.0]),
        "node 3: embedding has 1 numbers, earlier ones 2",
    ),
    "embedding empty": (changed(1, embedding=[]), "node 3: embedding is empty"),
    "embedding bool": (changed(1, embedding=[True, 1.0]), "node 3: embedding is not a list of num"),
    "embedding nested": (changed(1, embedding=[[1.0], 1.0]), "node 3: embedding is not a list of"),
    "embedding text": (changed(1, embedding="abc"), "node 3: embedding is not a list"),
    "embedding f64": (changed(1, embedding={"f64": "AAAA"}), "node 3: embedding is neither a list"),
    "base64": (changed(1, embedding={"f32": "A*A="}), "node 3: embedding is not base64"),
    "base64 accents": (changed(1, embedding={"f32": "é"}), "node 3: embedding is not base64"),
    "base64 bytes": (changed(1, embedding={"f32": "AAAA"}), "node 3: embedding has 3 bytes, not"),
    "base64 empty": (changed(1, embedding={"f32": ""}), "node 3: embedding has 0 bytes, not"),
    "base64 NaN": (
        changed(1, embedding=f32([float("nan"), 0.0])),
        "node 3: embedding holds a number that is not finite",
    ),
    "key": (changed(1, key=3), "node 3: key is not a string"),
    "state": (changed(1, state=["x"]), "node 3: state is not a string"),
    "tree": (changed(1, tree=-1), "node 3: tree -1 is not a non-negative integer"),
    "class": (changed(1, **{"class": 0.5}), "node 3: class 0.5 is not a non-negative integer"),
    "node": ({**GOOD, "nodes": [3]}, "nodes[0] is not an object"),
    "no nodes": ({**GOOD, "nodes": []}, "nodes is missing, empty or not a list"),
    "nodes object": ({**GOOD, "nodes": {}}, "nodes is missing, empty or not a list"),
    "graph id": ({**GOOD, "id": 3}, "the graph's id is missing or not a string"),
    "schema": ({**GOOD, "schema": "graphpo.graph/2"}, "schema is 'graphpo.graph/2', want 'graphpo"),
    "no schema": ({"id": "g"}, "schema is missing, want 'graphpo.graph/1'"),
    "not an object": ([1], "not a JSON object"),
    "not JSON": ('{"id": ', "not JSON: Expecting value at column 7"),
    "cut short": ('{"id": "g', "not JSON: Unterminated string starting at column 8"),
    "two objects": ("{} {}", "not JSON: Extra data at column 4"),
    "deep": ("[" * 100_000, "JSON is nested too deeply"),
    "digits": ('{"id": ' + "9" * 5000 + "}", "not JSON that can be read"),
    "key twice": ('{"id": "g", "id": "h"}', "key 'id' occurs twice in one object"),
    "key twice in a node": (
        json.dumps(GOOD).replace('"id": 7,', '"id": 7, "id": 7,'),
        "key 'id' occurs twice in one object",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lines(case, tmp_path):
    line, message = MALFORMED[case]
    good = json.dumps({**GOOD, "id": "first"})
    file = tmp_path / "graphs.jsonl"
    file.write_text(f"{good}\n\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(GraphError) as caught:
        list(read_graphs(file))
    told = str(caught.value)
    assert told.startswith(f"{file}:3: ") and message in told
    assert "\n" not in told and "sys." not in told and len(told) < len(str(file)) + 200


def test_malformed_files(tmp_path):
    file = tmp_path / "graphs.jsonl"
    for content, message in (
        (b"", "no graph in it"),
        (b"\n \n", "no graph in it"),
        (json.dumps(GOOD).encode() + b"\n\xff\n", ":2: not UTF-8 at byte 0"),
        (
            (json.dumps(GOOD) + "\n\n" + json.dumps(GOOD)).encode(),
            ":3: graph id 'g' occurs twice, first in line 1",
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(GraphError, match=message):
            list(read_graphs(file))
    with pytest.raises(GraphError, match=r"nowhere.jsonl: No such file"):
        list(read_graphs(tmp_path / "nowhere.jsonl"))
    with pytest.raises(GraphError, match="Is a directory"):
        list(read_graphs(tmp_path))


def test_a_log_may_be_empty_and_its_last_line_unfinished(tmp_path):
    file, line = tmp_path / "graphs.jsonl", json.dumps(GOOD)
    for content, count in (("", 0), (line[:50], 0), (f"{line}\n", 1), (f"{line}\n{line}", 1)):
        file.write_text(content)
        assert len(list(read_graphs(file, log=True))) == count
