"""One rollout graph as a picture: layers from left to right, equivalent states joined.

Node colour is the node score S(v), edge colour the advantage, shape what became of a path. The
SVG stands alone (it holds its styles, light and dark) and needs no script.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit
from graphpo_agent.report.layout import shallow_part, tree_rows
from graphpo_agent.report.numbers import fixed, signed
from graphpo_agent.report.render import render

__all__ = ["draw_graph", "node_facts"]

MAX_NODES = 100
ROW = 28.0
TOP, TOP_WITH_CLASSES = 104.0, 136.0
"""Below the legend and the names of the layers."""
MARGIN = 48.0
MIN_WIDTH = 820.0
"""The legend needs it."""
LONG_FACTS = ("key", "state", "text")
"""The facts of a node that may be long."""
MAX_TEXT = 600
"""Characters of a state that are shown."""


@dataclass(frozen=True, slots=True)
class _Node:
    x: float
    y: float
    shape: str
    """``right``, ``wrong``, ``partial``, ``stopped`` or ``inner``."""
    strength: float | None
    """Where S(v) lies on the scale of the legend, in [0, 1]; None where undefined."""
    score: str
    letter: str
    """Names an equivalence class of two or more; empty for a node on its own."""
    class_id: int
    index: int
    hidden: int
    """Nodes left out below it."""
    title: str


@dataclass(frozen=True, slots=True)
class _Edge:
    path: str
    strength: float
    """|advantage| / the largest one drawn, in [0, 1]."""
    sign: str
    """``positive``, ``negative``, ``zero`` or ``undefined``."""
    label: str
    """The advantage; empty where it is 0."""
    label_x: float
    label_y: float
    start: int
    end: int


def draw_graph(
    graph: RolloutGraph,
    credit: Credit,
    decode: Callable[[Sequence[int]], str] | None = None,
    max_nodes: int = MAX_NODES,
) -> Markup:
    """Draw a rollout graph with its classes, scores and advantages (paper, sections 3.2 to 3.4).

    Only direct edges are drawn. Of a graph with more than ``max_nodes`` nodes the part nearest the
    root is drawn, and its last nodes say how many are left out below them.

    Args:
        graph: the graph.
        credit: its classes and advantages; columns that the method lacks are left out.
        decode: token ids to text; None leaves the texts of the edges out.
        max_nodes: at least 1.

    Returns:
        An ``<svg>`` element with everything in it escaped.
    """
    shown = shallow_part(graph.depth, max_nodes)
    merged = bool(_class_letters(credit.classes, shown))
    top = TOP_WITH_CLASSES if merged else TOP
    xs, ys = _positions(graph, credit.classes, shown, top)
    scale = _score_scale(credit, shown)
    nodes = _nodes(graph, credit, shown, xs, ys, decode, scale)
    edges, largest = _edges(graph, credit, shown, xs, ys)
    columns = sorted({(node.x, int(graph.depth[node.index])) for node in nodes})
    return Markup(
        render(
            "graph.svg",
            width=max(columns[-1][0] + MARGIN + 30, MIN_WIDTH),
            height=max(node.y for node in nodes) + MARGIN / 2,
            top=top,
            graph_id=graph.id,
            columns=[(x, "prompt" if depth == 0 else f"layer {depth}") for x, depth in columns],
            edges=edges,
            nodes=nodes,
            links=_links(nodes),
            largest=fixed(largest, 2),
            scale=[_score(end, 0 if end in (0, 1) else 2) for end in scale]
            if "score" in credit.columns
            else [],
            shapes={node.shape for node in nodes},
        )
    )


def node_facts(
    graph: RolloutGraph,
    credit: Credit,
    node: int,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> list[tuple[str, str]]:
    """Everything worth telling about a node, as names and texts; undefined values are a dash."""
    facts = [
        ("node", str(graph.node_ids[node])),
        ("class", str(graph.node_ids[credit.classes[node]])),
    ]
    if graph.terminal[node]:
        facts.append(("reward", f"{graph.reward[node]:g}"))
    columns = {name: float(values[node]) for name, values in credit.columns.items()}
    if "score" in columns:
        facts.append(("score S", _score(columns["score"], 3)))
    if "correct" in columns and "total" in columns:
        facts.append(("right / all below", f"{columns['correct']:g} / {columns['total']:g}"))
    if node:
        facts += [
            (label, signed(columns[name], 3))
            for name, label in (
                ("step_reward", "step reward"),
                ("correctness_advantage", "correctness advantage"),
                ("efficiency_advantage", "efficiency advantage"),
                ("trajectory_advantage", "trajectory advantage"),
            )
            if name in columns
        ]
        facts.append(("advantage", signed(float(credit.advantages[:, node].sum()), 3)))
    facts.append(("tokens", str(graph.num_tokens[node])))
    tokens = graph.token_ids[graph.span(node)]
    text = decode(tokens.tolist()) if decode is not None and graph.has_tokens[node] else None
    texts = zip(LONG_FACTS, (graph.keys[node], graph.states[node], text), strict=True)
    return facts + [(name, _cut(value)) for name, value in texts if value is not None]


def _cut(text: str) -> str:
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)  # XML forbids controls
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _positions(
    graph: RolloutGraph, classes: NDArray[np.int64], shown: NDArray[np.bool_], top: float
) -> tuple[list[float], list[float]]:
    """Pixel coordinates of every node; those of nodes that are not shown mean nothing."""
    kept = np.flatnonzero(shown)
    place = np.cumsum(shown) - 1
    parent = np.where(kept == 0, -1, place[graph.parent[kept]])
    rows = np.zeros(graph.num_nodes)
    rows[kept] = tree_rows(parent, classes[kept])
    layers = max(1, int(graph.depth[kept].max()))
    column = min(220.0, max(104.0, (1100.0 - 2 * MARGIN) / layers))
    xs = np.round(MARGIN + column * graph.depth, 1)
    ys = np.round(top + ROW * (rows + 1), 1)
    return xs.tolist(), ys.tolist()


def _nodes(
    graph: RolloutGraph,
    credit: Credit,
    shown: NDArray[np.bool_],
    xs: Sequence[float],
    ys: Sequence[float],
    decode: Callable[[Sequence[int]], str] | None,
    scale: tuple[float, float],
) -> list[_Node]:
    letters = _class_letters(credit.classes, shown)
    hidden = _hidden_below(graph.parent, shown)
    no_score = np.full(graph.num_nodes, np.nan)
    scores = credit.columns.get("score", no_score).tolist()
    return [
        _Node(
            x=xs[v],
            y=ys[v],
            shape=_shape(graph, v),
            strength=(scores[v] - scale[0]) / (scale[1] - scale[0])
            if math.isfinite(scores[v])
            else None,
            score=_score(scores[v], 2) if "score" in credit.columns else "",
            letter=letters.get(int(credit.classes[v]), ""),
            class_id=int(credit.classes[v]),
            index=v,
            hidden=int(hidden[v]),
            title="\n".join(f"{k}: {text}" for k, text in node_facts(graph, credit, v, decode)),
        )
        for v in np.flatnonzero(shown).tolist()
    ]


def _score_scale(credit: Credit, shown: NDArray[np.bool_]) -> tuple[float, float]:
    """From 0 to 1, and as far beyond as the scores shown go: TreeRL's are less the root's value."""
    scores = credit.columns["score"][shown] if "score" in credit.columns else np.zeros(0)
    known = scores[np.isfinite(scores)].tolist()
    return min([0.0, *known]), max([1.0, *known])


def _score(value: float, digits: int) -> str:
    return fixed(value, digits).replace("-", "−")


def _edges(
    graph: RolloutGraph,
    credit: Credit,
    shown: NDArray[np.bool_],
    xs: Sequence[float],
    ys: Sequence[float],
) -> tuple[list[_Edge], float]:
    """The edges between shown nodes, and the largest advantage among them in size."""
    advantage = credit.advantages.sum(axis=0)
    largest = _largest(advantage[shown])
    parent = graph.parent.tolist()
    return [
        _edge(xs, ys, parent[v], v, float(advantage[v]), largest)
        for v in np.flatnonzero(shown).tolist()
        if v
    ], largest


def _largest(advantage: NDArray[np.float64]) -> float:
    known = np.abs(advantage[np.isfinite(advantage)])
    return float(known.max()) if len(known) else 0.0


def _class_letters(classes: NDArray[np.int64], shown: NDArray[np.bool_]) -> dict[int, str]:
    """A, B, …, Z, AA, … for every class with two or more nodes drawn.

    >>> _class_letters(np.array([0, 1, 1, 3, 4, 4]), np.ones(6, dtype=bool))
    {1: 'A', 4: 'B'}
    """
    ids, counts = np.unique(classes[shown], return_counts=True)
    return {int(q): _letters(i) for i, q in enumerate(ids[counts > 1])}


def _letters(index: int) -> str:
    head, tail = divmod(index, 26)
    return (_letters(head - 1) if head else "") + ascii_uppercase[tail]


def _hidden_below(parent: NDArray[np.int64], shown: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Nodes left out below each shown node, counted at the last shown node above them.

    >>> _hidden_below(np.array([-1, 0, 0, 1, 3]), np.array([True, True, True, False, False]))[:3]
    array([0, 2, 0])
    """
    hidden = np.zeros(len(parent), dtype=np.int64)
    for node in range(len(parent) - 1, 0, -1):
        if not shown[node]:
            hidden[parent[node]] += 1 + hidden[node]
    return hidden


def _shape(graph: RolloutGraph, node: int) -> str:
    if not graph.terminal[node]:
        return "inner" if bool(np.any(graph.parent == node)) else "stopped"
    reward = float(graph.reward[node])
    return "right" if reward == 1 else "wrong" if reward == 0 else "partial"


def _edge(
    xs: Sequence[float], ys: Sequence[float], start: int, end: int, advantage: float, largest: float
) -> _Edge:
    x1, y1, x2, y2 = xs[start] + 11, ys[start], xs[end] - 12, ys[end]
    middle = (x1 + x2) / 2
    known = math.isfinite(advantage)
    size = abs(advantage) / largest if known and largest else 0.0
    return _Edge(
        path=f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}",
        strength=size,
        sign=("positive" if advantage > 0 else "negative" if size else "zero")
        if known
        else "undefined",
        label="" if known and not size else signed(advantage, 2),
        label_x=x2 - 5,
        label_y=y2 + (11.5 if y1 < y2 else -4.5),
        start=start,
        end=end,
    )


def _links(nodes: Sequence[_Node]) -> list[tuple[int, str]]:
    """Class id and SVG path between neighbouring members of every class of two or more."""
    members: dict[int, list[_Node]] = {}
    for node in sorted(nodes, key=lambda node: (node.y, node.x)):
        if node.letter:
            members.setdefault(node.class_id, []).append(node)
    return [
        (class_id, _link(upper, lower))
        for class_id, group in members.items()
        for upper, lower in pairwise(group)
    ]


def _link(upper: _Node, lower: _Node) -> str:
    """A curve that bulges to the right, clear of the edges that arrive from the left."""
    bulge = max(upper.x, lower.x) + 22 + min(64.0, 0.09 * (lower.y - upper.y))
    start, end = f"{upper.x:g} {upper.y:g}", f"{lower.x:g} {lower.y:g}"
    return f"M{start}C{bulge:g} {upper.y:g} {bulge:g} {lower.y:g} {end}"
