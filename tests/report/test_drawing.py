import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpo_agent.graph.jsonl import read_graphs
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Credit
from graphpo_agent.report.drawing import _class_letters, draw_graph, node_facts
from tests.report.sample_run import kb_graph

SVG = "{http://www.w3.org/2000/svg}"


def _graph(tmp_path: Path, source: dict[str, Any]) -> RolloutGraph:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(source) + "\n")
    (graph,) = read_graphs(path)
    return graph


def _graphpo(graph: RolloutGraph) -> Credit:
    assert graph.given_classes is not None
    (credit,) = GraphPO().assign_credit([graph], [graph.given_classes])
    return credit


def _by_class(drawing: str, tag: str) -> dict[str, list[ElementTree.Element]]:
    found: dict[str, list[ElementTree.Element]] = {}
    for element in ElementTree.fromstring(drawing).iter(SVG + tag):
        for name in element.attrib.get("class", "").split():
            found.setdefault(name, []).append(element)
    return found


@pytest.fixture
def graph(tmp_path: Path) -> RolloutGraph:
    return _graph(tmp_path, kb_graph("kb-0004", seed=4))


def test_every_node_and_every_direct_edge_is_drawn_once(graph: RolloutGraph) -> None:
    drawing = draw_graph(graph, _graphpo(graph))
    nodes = [g for g in _by_class(drawing, "g")["g-node"] if "data-node" in g.attrib]
    edges = _by_class(drawing, "path")["g-edge"]

    assert sorted(int(n.attrib["data-node"]) for n in nodes) == list(range(graph.num_nodes))
    assert sorted((int(e.attrib["data-to"]), int(e.attrib["data-from"])) for e in edges) == [
        (v, int(graph.parent[v])) for v in range(1, graph.num_nodes)
    ]


def test_shape_tells_right_wrong_and_unfinished_paths_apart(tmp_path: Path) -> None:
    nodes = [
        {"id": 0, "parent": None, "terminal": False, "reward": None},
        {"id": 1, "parent": 0, "terminal": True, "reward": 1.0},
        {"id": 2, "parent": 0, "terminal": True, "reward": 0.0},
        {"id": 3, "parent": 0, "terminal": True, "reward": 0.4},
        {"id": 4, "parent": 0, "terminal": False, "reward": None},
    ]
    for node in nodes:
        node["class"] = node["id"]
    graph = _graph(tmp_path, {"schema": "graphpo.graph/1", "id": "g", "nodes": nodes})
    drawn = _by_class(draw_graph(graph, _graphpo(graph)), "g")
    shapes = {
        int(g.attrib["data-node"]): name
        for name in ("g-inner", "g-right", "g-wrong", "g-partial", "g-stopped")
        for g in drawn[name]
        if "data-node" in g.attrib
    }
    assert shapes == {0: "g-inner", 1: "g-right", 2: "g-wrong", 3: "g-partial", 4: "g-stopped"}
    unscored = [g.attrib["data-node"] for g in drawn["g-unscored"]]
    assert unscored == ["4"]
    unknown = replace(_graphpo(graph), advantages=np.full((1, 5), np.nan))
    numbers = _by_class(draw_graph(graph, unknown), "text")["g-number"]
    assert [number.text for number in numbers] == ["–"] * 4


def test_members_of_a_class_have_a_halo_the_same_letter_and_links(graph: RolloutGraph) -> None:
    credit = _graphpo(graph)
    sizes = Counter(credit.classes.tolist())
    drawing = draw_graph(graph, credit)
    nodes = [g for g in _by_class(drawing, "g")["g-node"] if "data-node" in g.attrib]
    letter_of: dict[str, str | None] = {}
    for node in nodes:
        halos = [c for c in node.iter(SVG + "circle") if c.attrib["class"] == "g-halo"]
        letters = [
            text.text
            for text in node.iter(SVG + "text")
            if text.attrib["class"] in ("g-letter", "g-side")
        ]
        merged = sizes[int(node.attrib["data-class"])] > 1
        assert len(halos) == len(letters) == int(merged)
        if merged:
            assert letter_of.setdefault(node.attrib["data-class"], letters[0]) == letters[0]
    assert len(set(letter_of.values())) == len(letter_of) > 1
    links = [p for p in _by_class(drawing, "path")["g-link"] if "data-class" in p.attrib]
    assert Counter(int(p.attrib["data-class"]) for p in links) == Counter(
        {q: size - 1 for q, size in sizes.items() if size > 1}
    )
    ends = [re.findall(r"[\d.]+", p.attrib["d"]) for p in links]
    assert all(float(numbers[1]) <= float(numbers[-1]) for numbers in ends)  # to the next below


def test_there_are_letters_for_more_classes_than_the_alphabet_has() -> None:
    letters = list(_class_letters(np.repeat(np.arange(28), 2), np.ones(56, dtype=bool)).values())
    assert letters[24:] == ["Y", "Z", "AA", "AB"] and len(set(letters)) == 28


def test_edges_are_coloured_by_the_sign_and_size_of_their_advantage(graph: RolloutGraph) -> None:
    credit = _graphpo(graph)
    advantage = credit.advantages.sum(axis=0)
    drawn = _by_class(draw_graph(graph, credit), "path")
    for name, matches in (("g-positive", advantage > 0), ("g-negative", advantage < 0)):
        assert (
            sorted(int(e.attrib["data-to"]) for e in drawn[name])
            == np.flatnonzero(matches).tolist()
        )
    strongest = int(np.nanargmax(np.abs(advantage)))
    (edge,) = [e for e in drawn["g-edge"] if e.attrib["data-to"] == str(strongest)]
    assert edge.attrib["style"].startswith("--t:100%")


def test_hovering_tells_a_nodes_numbers(graph: RolloutGraph) -> None:
    credit = _graphpo(graph)
    node = int(np.flatnonzero(graph.terminal)[0])
    drawing = draw_graph(graph, credit)
    (drawn,) = [
        g for g in _by_class(drawing, "g")["g-node"] if g.attrib.get("data-node") == str(node)
    ]
    title = drawn.findtext(SVG + "title") or ""
    assert title.split("\n") == [
        f"{name}: {text}" for name, text in node_facts(graph, credit, node)
    ]
    facts = dict(node_facts(graph, credit, node))
    assert facts["reward"] == f"{graph.reward[node]:g}"
    assert facts["right / all below"] == f"{graph.reward[node]:g} / 1"
    assert facts["key"] == graph.keys[node]
    assert "advantage" not in dict(node_facts(graph, credit, 0))


def test_nodes_are_named_as_in_the_file_and_advantages_of_several_terms_are_summed(
    tmp_path: Path,
) -> None:
    source = kb_graph("g", seed=4)
    for node in source["nodes"]:
        node |= {"id": node["id"] + 100, "class": node["class"] + 100}
        node["parent"] = None if node["parent"] is None else node["parent"] + 100
    graph = _graph(tmp_path, source)
    terms = np.repeat([[0.25], [0.5]], graph.num_nodes, axis=1)
    credit = replace(_graphpo(graph), advantages=terms)
    for v, node in enumerate(source["nodes"]):
        facts = dict(node_facts(graph, credit, v))
        assert (facts["node"], facts["class"]) == (str(node["id"]), str(node["class"]))
        assert facts["tokens"] == str(node["num_tokens"])
        assert facts.get("advantage") == ("+0.750" if v else None)


def test_scores_below_0_are_told_apart_and_the_legend_says_how_far_they_go(
    graph: RolloutGraph,
) -> None:
    """TreeRL's are those of the root subtracted."""
    credit = _graphpo(graph)
    drawn = _by_class(draw_graph(graph, credit), "g")
    legend = {text.text for text in drawn["g-legend"][0].iter(SVG + "text")}
    assert {"0", "1"} <= legend
    scores = np.full(graph.num_nodes, 0.5)
    scores[1:3] = -0.25, 0.0
    drawing = draw_graph(graph, replace(credit, columns={**credit.columns, "score": scores}))
    drawn = _by_class(drawing, "g")
    styles = {
        int(g.attrib["data-node"]): g.attrib.get("style")
        for g in drawn["g-node"][-graph.num_nodes :]
    }
    assert (styles[0], styles[1], styles[2]) == ("--t:60%", "--t:0%", "--t:20%")
    legend = {text.text for text in drawn["g-legend"][0].iter(SVG + "text")}
    assert {"−0.25", "1"} <= legend and "−0.25" in {
        t.text for t in _by_class(drawing, "text")["g-score"]
    }


def test_a_method_without_scores_is_drawn_without_them(graph: RolloutGraph) -> None:
    (credit,) = Grpo().assign_credit([graph], [np.arange(graph.num_nodes)])
    drawing = draw_graph(graph, credit)
    names = [text.text for text in _by_class(drawing, "text")["g-name"]]
    assert "Node: score S" not in names
    assert "g-halo" not in _by_class(drawing, "circle")
    assert set(dict(node_facts(graph, credit, 1))) <= {
        "node", "class", "reward", "advantage", "tokens", "key", "state"
    }  # fmt: skip


def test_of_a_large_graph_the_part_near_the_prompt_is_drawn(graph: RolloutGraph) -> None:
    drawing = draw_graph(graph, _graphpo(graph), max_nodes=20)
    nodes = [g for g in _by_class(drawing, "g")["g-node"] if "data-node" in g.attrib]
    assert len(nodes) == 20
    left_out = [int(t.text or "") for t in _by_class(drawing, "text")["g-more"]]
    assert sum(left_out) == graph.num_nodes - 20
    assert all(count > 0 for count in left_out)
    # The strongest edge that is drawn has the full colour, whatever those left out have.
    edges = [int(e.attrib["data-to"]) for e in _by_class(drawing, "path")["g-edge"]]
    advantages = np.full((1, graph.num_nodes), 50.0)
    advantages[0, edges], advantages[0, 0] = 1.0, np.nan
    credit = replace(_graphpo(graph), advantages=advantages)
    again = _by_class(draw_graph(graph, credit, max_nodes=20), "path")["g-edge"]
    assert all(edge.attrib["style"].startswith("--t:100%") for edge in again)


def test_a_prompt_alone_is_drawn(tmp_path: Path) -> None:
    root = {"id": 7, "parent": None, "terminal": False, "reward": None, "class": 7}
    graph = _graph(tmp_path, {"schema": "graphpo.graph/1", "id": "g", "nodes": [root]})
    drawing = draw_graph(graph, _graphpo(graph))
    assert "g-edge" not in _by_class(drawing, "path")
    assert dict(node_facts(graph, _graphpo(graph), 0))["node"] == "7"


def test_texts_of_tasks_and_models_are_escaped(tmp_path: Path) -> None:
    evil = '</title><script>alert("1")</script>&'
    source = kb_graph(evil, seed=4)
    for node in source["nodes"]:
        node |= {"key": f"{node['key']} {evil}", "state": evil, "tokens": [1], "num_tokens": 1}
        node |= {"loss_mask": [1], "logprobs": [-0.5]} if node["parent"] is not None else {}
    graph = _graph(tmp_path, source)
    drawing = draw_graph(graph, _graphpo(graph), decode=lambda ids: evil)
    assert "<script" not in drawing
    root = ElementTree.fromstring(drawing)
    assert root.attrib["aria-label"] == f"Rollout graph {evil}"
    assert f"text: {evil}" in (root.findtext(f".//{SVG}title") or "")


def test_long_texts_are_cut(tmp_path: Path) -> None:
    source = kb_graph("g", seed=4)
    source["nodes"][0]["state"] = "word\n" * 1000
    graph = _graph(tmp_path, source)
    state = dict(node_facts(graph, _graphpo(graph), 0))["state"]
    assert len(state) == 600
    assert state.startswith("word word word") and state.endswith("…")


def test_control_characters_of_sampled_text_do_not_break_the_picture() -> None:
    end = NewNode(0, (5,), (1,), (-0.1,), terminal=True, reward=1.0, state="a\x08b\x00c\x1b")
    graph = RolloutGraph.root("g", token_ids=(1, 2)).append([end])
    (credit,) = GraphPO().assign_credit([graph], [np.arange(2)])
    ElementTree.fromstring(draw_graph(graph, credit, decode=lambda ids: "d\x07"))
    facts = dict(node_facts(graph, credit, 1, decode=lambda ids: "d\x07"))
    assert (facts["state"], facts["text"]) == ("a\ufffdb\ufffdc\ufffd", "d\ufffd")
