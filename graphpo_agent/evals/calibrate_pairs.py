"""Which states could merge, which do at each threshold, and which pairs of them are measured.

Answers are left out: they merge only with equal rewards, so that nothing is to be found out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.evals.pair_values import sample_strata
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.equivalence import MergeOptions, find_classes_many
from graphpo_agent.graph.forest import join
from graphpo_agent.graph.merge_rules import codes_of, pair_rules
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = [
    "CandidatePairs",
    "ChoiceMerges",
    "PairSample",
    "candidate_pairs",
    "equal_keys",
    "merge_at",
    "plan_samples",
]


@dataclass(frozen=True, slots=True, eq=False)
class CandidatePairs:
    """Pairs of nodes that could merge if they were similar enough, of several graphs.

    Example: two graphs of three nodes, siblings below the root in each::

        i = [1, 4]    j = [2, 5]    graph_of = [0, 1]    num_graphs = 2

    Attributes:
        i: [pairs] positions in the graphs laid end to end.
        j: [pairs] positions, larger.
        graph_of: [pairs].
        num_graphs: all graphs, those without a pair too.
    """

    i: IntArray
    j: IntArray
    graph_of: IntArray
    num_graphs: int


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceMerges:
    """What one way to describe states merges at each threshold.

    Attributes:
        thresholds: kappas, ascending; only None where keys alone decide.
        classes: per threshold and graph [n], as ``find_classes`` names them.
        merged: [thresholds, pairs] whether a candidate pair is in one class.
    """

    thresholds: tuple[float | None, ...]
    classes: tuple[Sequence[IntArray], ...]
    merged: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class PairSample:
    """A sample of candidate pairs.

    Attributes:
        places: [sample] ascending places in ``CandidatePairs``.
        weights: [sample] how many candidate pairs each stands for.
    """

    places: IntArray
    weights: FloatArray


def candidate_pairs(
    graphs: Sequence[RolloutGraph], open_nodes: Sequence[BoolArray], options: MergeOptions
) -> CandidatePairs:
    """Pairs that the core would compare, keys and guards left out: those are choices' own.

    Args:
        graphs: as saved.
        open_nodes: per graph [n], nodes that can be continued.
        options: the layer gap counts, the threshold does not.
    """
    bare = [replace(g, keys=(None,) * g.num_nodes, states=(None,) * g.num_nodes) for g in graphs]
    forest = join(bare)
    rules = pair_rules(bare, forest, replace(options, guard="none"))
    left, right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start, is_open in zip(forest.starts.tolist(), open_nodes, strict=False):
        nodes = start + np.flatnonzero(is_open)
        a, b = np.triu_indices(len(nodes), 1)
        i, j = nodes[a], nodes[b]
        keep = rules.may_merge(i, j)
        left.append(i[keep])
        right.append(j[keep])
    i, j = np.concatenate(left), np.concatenate(right)
    return CandidatePairs(i, j, forest.graph_of[i], len(graphs))


def merge_at(
    graphs: Sequence[RolloutGraph],
    pairs: CandidatePairs,
    merging: MergeOptions,
    thresholds: Sequence[float],
) -> ChoiceMerges:
    """What the core merges at each threshold.

    Args:
        graphs: with the keys and embeddings of one choice.
        pairs: candidates.
        merging: the run's; its threshold is replaced, or kept where keys alone decide.
        thresholds: ascending.
    """
    keys_only = all(graph.embeddings is None for graph in graphs)
    tried = [merging.threshold] if keys_only else thresholds
    classes = [find_classes_many(graphs, replace(merging, threshold=kappa)) for kappa in tried]
    merged = np.zeros((len(tried), len(pairs.i)), np.bool_)
    for k, of_all in enumerate(classes):
        label = np.concatenate(of_all)  # both nodes of a pair are of one graph
        merged[k] = label[pairs.i] == label[pairs.j]
    return ChoiceMerges((None,) if keys_only else tuple(thresholds), tuple(classes), merged)


def plan_samples(
    merges: Mapping[str, ChoiceMerges],
    pairs: CandidatePairs,
    budget: int,
    rng: np.random.Generator,
) -> tuple[PairSample, dict[str, PairSample]]:
    """Which pairs to measure: any at random, and for each choice those that it merges.

    The latter are drawn from strata, by the number of thresholds at which a pair merges: pairs
    that merge everywhere, and those that only a low threshold merges, are known about as well.

    Args:
        merges: by the names of the choices.
        pairs: candidates.
        budget: pairs of each sample.
        rng: one number per pair for all samples, so that they have many pairs in common.
    """
    numbers = rng.random(len(pairs.i))
    samples: dict[str, PairSample] = {}
    for name, found in merges.items():
        depth = found.merged.sum(axis=0)
        places = np.flatnonzero(depth)
        chosen, weights = sample_strata(depth[places], budget, numbers[places])
        samples[name] = PairSample(places[chosen], weights)
    everything = np.zeros(len(pairs.i), np.int64)
    return PairSample(*sample_strata(everything, budget, numbers)), samples


def equal_keys(graphs: Sequence[RolloutGraph], pairs: CandidatePairs) -> BoolArray:
    """[pairs] whether both nodes have a key, and the same one."""
    code = codes_of([key for graph in graphs for key in graph.keys])
    return (code[pairs.i] == code[pairs.j]) & (code[pairs.i] >= 0)
