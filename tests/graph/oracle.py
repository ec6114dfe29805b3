"""A slow, plain second implementation of the graph core, written from the algorithm's text.

Works on the ``nodes`` of a graph record (dicts), by node id, with dicts, loops and networkx.
Shares no code with the package.
"""

import base64
import itertools
import math
import re
import struct
from statistics import mean, stdev

import networkx as nx

Undefined = None


class Graph:
    def __init__(self, nodes):
        self.node = {x["id"]: x for x in nodes}
        self.ids = [x["id"] for x in nodes]
        self.root = self.ids[0]
        self.parent = {x["id"]: x["parent"] for x in nodes}
        self.children = {v: [c for c in self.ids if self.parent[c] == v] for v in self.ids}
        self.depth = {}
        for v in self.ids:
            self.depth[v] = 0 if v == self.root else self.depth[self.parent[v]] + 1
        self.vector = {v: decode(self.node[v].get("embedding")) for v in self.ids}

    def key(self, v):
        return self.node[v].get("key")

    def terminal(self, v):
        return self.node[v]["terminal"]

    def reward(self, v):
        return self.node[v]["reward"]

    def edges(self):
        return [v for v in self.ids if v != self.root]

    def ancestors(self, v):
        """From v's parent up to the root."""
        out = []
        while v != self.root:
            v = self.parent[v]
            out.append(v)
        return out


def decode(embedding):
    if embedding is None or isinstance(embedding, list):
        return embedding
    data = base64.b64decode(embedding["f32"])
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def cosine(x, y):
    xx, yy = math.fsum(a * a for a in x), math.fsum(b * b for b in y)
    if xx == 0 or yy == 0:
        return 0.0
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(xx) / math.sqrt(yy)


def similarity(g, u, v):
    """None: the two cannot be compared."""
    if g.key(u) is not None and g.key(u) == g.key(v):
        return 1.0
    if g.vector[u] is not None and g.vector[v] is not None:
        return cosine(g.vector[u], g.vector[v])
    return None


def numbers(state):
    return sorted(re.findall(r"-?\d+(?:\.\d+)?", state))


def breaks_rule(g, u, v, *, max_layer_gap=None, guard="none"):
    """The rules that bind classes: key, layer gap and guard."""
    both_keyed = g.key(u) is not None and g.key(v) is not None
    if both_keyed and g.key(u) != g.key(v):
        return True
    if max_layer_gap is not None and abs(g.depth[u] - g.depth[v]) > max_layer_gap:
        return True
    if guard == "numbers" and not both_keyed:
        a, b = g.node[u].get("state"), g.node[v].get("state")
        return a is not None and b is not None and numbers(a) != numbers(b)
    return False


def candidate(g, u, v, *, merge_terminals="same_reward", max_layer_gap=None, guard="none"):
    if u == v or g.root in (u, v) or u in g.ancestors(v) or v in g.ancestors(u):
        return False
    if g.terminal(u) != g.terminal(v):
        return False
    if g.terminal(u) and (merge_terminals == "never" or g.reward(u) != g.reward(v)):
        return False
    return not breaks_rule(g, u, v, max_layer_gap=max_layer_gap, guard=guard)


def class_graph(g, name):
    """The direct edges with classes contracted."""
    out = nx.MultiDiGraph()
    out.add_nodes_from(name.values())
    out.add_edges_from((name[g.parent[v]], name[v]) for v in g.edges())
    return out


def classes(
    g,
    *,
    merge="similarity",
    threshold=0.92,
    max_layer_gap=None,
    guard="none",
    last_layer=None,
    **terminals,
):
    """id -> smallest id of its class, once the pairs up to ``last_layer`` have been taken."""
    name = {v: v for v in g.ids}
    if merge == "none":
        return name
    rules = {"max_layer_gap": max_layer_gap, "guard": guard}
    for h in range(1, (last_layer or max(g.depth.values())) + 1):
        pairs = []
        for u, v in itertools.combinations(sorted(g.ids), 2):
            if max(g.depth[u], g.depth[v]) == h and candidate(g, u, v, **rules, **terminals):
                s = similarity(g, u, v)
                if s is not None and round(s, 6) >= threshold:
                    pairs.append((-round(s, 6), u, v))
        for _, u, v in sorted(pairs):
            a = [x for x in g.ids if name[x] == name[u]]
            b = [x for x in g.ids if name[x] == name[v]]
            contracted = class_graph(g, name)
            if name[u] == name[v]:
                continue
            if any(breaks_rule(g, x, y, **rules) for x in a for y in b):
                continue
            if nx.has_path(contracted, name[u], name[v]) or nx.has_path(
                contracted, name[v], name[u]
            ):
                continue
            for x in a + b:
                name[x] = min(a + b)
    return name


def novelty(g, v, **rules):
    best = Undefined
    for u in g.ids:
        if candidate(g, u, v, **rules):
            s = similarity(g, u, v)
            if s is not None:
                best = round(s, 6) if best is None else max(best, round(s, 6))
    return 1.0 if best is None else 1.0 - best


def path_tokens(g, v):
    return 0 if v == g.root else path_tokens(g, g.parent[v]) + g.node[v].get("num_tokens", 1)


def allocate(
    g, name, active, branching, carried, *, elsewhere=(), reallocate="novel", scores=None, **rules
):
    """(id -> continuations, pool left)"""
    some = {*active, *elsewhere}
    given, redundant = {}, set()
    for q in set(name.values()):
        members = [v for v in g.ids if name[v] == q and (v in some or g.children[v])]
        if members:
            members.sort(key=lambda v: (g.depth[v], path_tokens(g, v), v))
            redundant |= set(members[1:]) & set(active)
    for v in active:
        given[v] = max(1, branching // 2) if v in redundant else branching
    pool = carried + sum(branching - x for x in given.values())

    def urgency(v):
        if reallocate == "novel":
            return novelty(g, v, **rules)
        return 0.25 if scores[v] is None else round(scores[v] * (1 - scores[v]), 9)

    takers = [] if reallocate == "none" else [v for v in active if v not in redundant]
    takers.sort(key=lambda v: (-urgency(v), v))
    while pool and any(given[v] < 2 * branching for v in takers):
        for v in takers:
            if pool and given[v] < 2 * branching:
                given[v] += 1
                pool -= 1
    return given, pool


def own_counts(g, backup="leaf"):
    correct, total = {}, {}
    for v in reversed(g.ids):
        if g.terminal(v):
            correct[v], total[v] = g.reward(v), 1
            continue
        total[v] = sum(total[c] for c in g.children[v])
        if backup == "mean":
            ratios = [correct[c] / total[c] for c in g.children[v] if total[c]]
            correct[v] = total[v] * mean(ratios) if ratios else 0.0
        else:
            correct[v] = sum(correct[c] for c in g.children[v])
    return correct, total


def scores(g, name, pool_weight=0.7, backup="leaf"):
    if backup == "class":
        return class_scores(g, name)
    correct, total = own_counts(g, backup)
    out = {}
    for v in g.ids:
        others = [q for q in g.ids if name[q] == name[v] and q != v]
        c = correct[v] + pool_weight * sum(correct[q] for q in others)
        t = total[v] + pool_weight * sum(total[q] for q in others)
        out[v] = c / t if t else Undefined
    return out


def class_scores(g, name):
    score = {}
    for q in reversed(list(nx.topological_sort(nx.DiGraph(class_graph(g, name))))):
        reached = []
        for v in g.edges():
            if name[g.parent[v]] == q:
                s = g.reward(v) if g.terminal(v) else score[name[v]]
                if s is not None:
                    reached.append(s)
        score[q] = mean(reached) if reached else Undefined
    return {v: g.reward(v) if g.terminal(v) else score[name[v]] for v in g.ids}


def step_rewards(g, score):
    out = {}
    for v in g.edges():
        u = g.parent[v]
        eta = similarity(g, u, v)
        gate = 1 - max(0.0, 0.0 if eta is None else eta)
        both = score[u] is not None and score[v] is not None
        out[v] = (score[v] - score[u]) * gate if both else Undefined
    return out


def groups(g, name):
    """class -> the direct edges that leave any of its members."""
    return {q: [v for v in g.edges() if name[g.parent[v]] == q] for q in set(name.values())}


def correctness(g, name, reward, singleton="zero", normalize="std"):
    out = dict.fromkeys(g.edges(), 0.0)
    scored = {q: [v for v in e if reward[v] is not None] for q, e in groups(g, name).items()}
    deviations = [
        reward[v] - mean(reward[x] for x in e) for e in scored.values() if len(e) > 1 for v in e
    ]
    rms = math.sqrt(mean(d * d for d in deviations)) if deviations else 0.0
    lone = set()
    for e in scored.values():
        if len(e) < 2:
            lone |= set(e)
            continue
        values = [reward[v] for v in e]
        std = stdev(values)
        if std <= 1e-12:
            continue
        divisor = {"std": std + 1e-6, "none": 1.0, "rms": rms + 1e-6}[normalize]
        for v in e:
            out[v] = (reward[v] - mean(values)) / divisor
    if singleton == "inherit":
        for v in sorted(lone, key=lambda v: g.depth[v]):
            out[v] = out.get(g.parent[v], 0.0)
    return out


def common_ancestor(g, members):
    chains = [[v, *g.ancestors(v)] for v in members]
    return next(u for u in chains[0] if all(u in chain for chain in chains))


def efficiency(g, name, score, combine="mean"):
    received = {v: [] for v in g.edges()}
    for q in set(name.values()):
        members = [v for v in g.ids if name[v] == q]
        defined = [score[v] for v in members if score[v] is not None]
        if len(members) < 2 or not defined:
            continue
        a = common_ancestor(g, members)
        length = {v: g.depth[v] - g.depth[a] for v in members}
        std = stdev(length.values())
        if std == 0:
            continue
        for v in members:
            value = mean(defined) * (mean(length.values()) - length[v]) / (std + 1e-6)
            while v != a:
                received[v].append(value)
                v = g.parent[v]
    if combine == "sum":
        return {v: sum(x) for v, x in received.items()}
    return {v: mean(x) if x else 0.0 for v, x in received.items()}


def trajectory(g):
    rewards = [g.reward(v) for v in g.ids if g.terminal(v)]
    std = stdev(rewards) if len(rewards) > 1 else 0.0
    correct, total = own_counts(g)
    out = dict.fromkeys(g.edges(), 0.0)
    for v in out:
        if total[v] and std > 1e-12:
            out[v] = (correct[v] / total[v] - mean(rewards)) / (std + 1e-6)
    return out


def credit(
    g,
    name,
    *,
    pool_weight=0.7,
    efficiency_weight=0.2,
    efficiency_combine="mean",
    singleton="zero",
    backup="leaf",
    normalize="std",
    trajectory_weight=0.0,
):
    correct, total = own_counts(g, "mean" if backup == "mean" else "leaf")
    score = scores(g, name, pool_weight, backup)
    reward = step_rewards(g, score)
    cor = correctness(g, name, reward, singleton, normalize)
    eff = efficiency(g, name, score, efficiency_combine)
    traj = trajectory(g)
    return {
        "correct": correct,
        "total": total,
        "score": score,
        "step_reward": reward,
        "correctness_advantage": cor,
        "efficiency_advantage": eff,
        "trajectory_advantage": traj,
        "advantage": {
            v: cor[v] + efficiency_weight * eff[v] + trajectory_weight * traj[v] for v in cor
        },
        "unscored": {v: reward[v] is None for v in cor},
    }
