"""Which merge threshold is right for which description of states? Pure, from sampled values.

Two nodes of a graph are the same state if the same is to be expected from going on: if their
values are equal. For every threshold the core's own merging says which nodes merge
(``find_classes``, acyclicity and all); a stratified sample of pairs says how much the values of
merged nodes differ, against the values of any two nodes of one graph that could have merged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.errors import ConfigError
from graphpo_agent.evals.calibrate_pairs import CandidatePairs, ChoiceMerges, PairSample
from graphpo_agent.evals.pair_values import (
    difference_p_values,
    discoveries,
    jackknife,
    mean_values,
    squared_differences,
    upper_bound,
)
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.credit import CreditOptions, graph_credits
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = [
    "FEWEST_PAIRS",
    "THRESHOLDS",
    "CalibrateOptions",
    "Calibration",
    "ChoiceCalibration",
    "ThresholdRow",
    "calibrate_choices",
]

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.995, 0.999, 1.0)
CONFIDENCE = 0.95
FALSE_DISCOVERIES = 0.05
FEWEST_PAIRS = 30
"""Measured pairs below which no threshold is recommended: a few may all be equal by chance."""


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What is measured and how exactly.

    Attributes:
        continuations: per measured state, at least 2.
        pairs: per choice; the states of all choices' pairs are continued once each.
        thresholds: kappas, each in (0, 1]; the run's own is added.
        tolerance: largest spread inside classes, as a share of that inside graphs, whose upper
            confidence bound a recommended threshold may have. With 0.3 the values of merged
            states differ about half as much, as a root mean square, as those of any two.
        reference: the choice whose keys say which states are the same; None: not known.

    Raises:
        ConfigError: a value outside its range.
    """

    continuations: int = 16
    pairs: int = 400
    thresholds: tuple[float, ...] = THRESHOLDS
    tolerance: float = 0.3
    reference: str | None = None

    def __post_init__(self) -> None:
        if self.continuations < 2:
            raise ConfigError("calibrate needs at least 2 continuations: one shows no spread")
        if self.pairs < 1:
            raise ConfigError(f"calibrate needs at least 1 pair, not {self.pairs}")
        if not self.thresholds or not all(0 < kappa <= 1 for kappa in self.thresholds):
            raise ConfigError(f"thresholds {list(self.thresholds)}: each must lie in (0, 1]")
        if not 0 < self.tolerance < math.inf:
            raise ConfigError(f"tolerance {self.tolerance} is not a positive number")


@dataclass(frozen=True, slots=True)
class ThresholdRow:
    """What merging at one threshold does. Shares are of pairs; NaN where nothing was measured.

    Attributes:
        threshold: kappa; None where keys alone decide, at every kappa alike.
        merged_pairs: pairs of states in one class, over all graphs.
        merged_states: states that share their class with another one.
        measured_pairs: merged pairs in the sample.
        right: share of merged pairs whose values are not shown to differ (permutation tests at a
            false discovery rate of 5 %).
        difference: root of the mean squared difference of values in merged pairs, noise removed.
        spread: mean squared difference in merged pairs over that of all candidate pairs: the
            variance inside classes as a share of the variance inside graphs. 0: merged states
            are worth the same; 1: one might as well merge at random.
        spread_upper: its one-sided 95 % confidence bound, graphs taken as the units; counted from
            0 where noise takes the spread below. Approximate: too low one time in eight rather
            than in twenty where it rests on some fifty pairs with few large differences.
        precision: share of merged pairs with equal reference keys; NaN without a reference.
        recall: share of candidate pairs with equal reference keys that merge.
        score_error: mean squared error of the node score S(v) against the sampled values, noise
            removed; over all measured states.
    """

    threshold: float | None
    merged_pairs: int
    merged_states: int
    measured_pairs: int
    right: float
    difference: float
    spread: float
    spread_upper: float
    precision: float
    recall: float
    score_error: float

    @property
    def is_known(self) -> bool:
        """Whether enough pairs were measured to recommend the threshold."""
        return self.measured_pairs >= FEWEST_PAIRS


@dataclass(frozen=True, slots=True)
class ChoiceCalibration:
    """All thresholds of one way to describe states.

    Attributes:
        rows: by rising threshold; one row where keys alone decide.
        recommended: the row of the smallest threshold whose ``spread_upper`` is within the
            tolerance and rests on ``FEWEST_PAIRS`` or more; None: there is none.
    """

    rows: tuple[ThresholdRow, ...]
    recommended: ThresholdRow | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that was found.

    Attributes:
        options: what was asked for.
        num_graphs: how many were given.
        choices: by name.
        difference: root of the mean squared difference of values over all candidate pairs, noise
            removed: what ``ThresholdRow.difference`` is to be compared with.
        score_error: ``ThresholdRow.score_error`` with nothing merged.
        candidate_pairs: how many there are.
        measured_states: states that were continued.
    """

    options: CalibrateOptions
    num_graphs: int
    choices: Mapping[str, ChoiceCalibration]
    difference: float
    score_error: float
    candidate_pairs: int
    measured_states: int


def calibrate_choices(
    graphs: Sequence[RolloutGraph],
    merges: Mapping[str, ChoiceMerges],
    pairs: CandidatePairs,
    random_sample: PairSample,
    samples: Mapping[str, PairSample],
    rewards: FloatArray,
    *,
    credit: CreditOptions,
    truth: BoolArray | None,
    options: CalibrateOptions,
    rng: np.random.Generator,
) -> Calibration:
    """What merging does at every threshold, for every choice.

    Args:
        graphs: as saved.
        merges: by the names of the choices.
        pairs: candidates.
        random_sample: of the candidates.
        samples: by the names of the choices.
        rewards: [n, continuations] of the graphs laid end to end; NaN where not measured.
        credit: the run's credit, for the node scores.
        truth: [pairs] which states are the same, as the reference says; None: not known.
        options: the tolerance counts; the rest is kept with the result.
        rng: of the permutation tests.
    """
    squares = _squares(random_sample, pairs, rewards)
    base = _sums(random_sample, pairs, squares, np.ones(len(pairs.i), np.bool_))
    scored = _Scored.of(graphs, credit, rewards)
    found: dict[str, ChoiceCalibration] = {}
    seed = int(rng.integers(2**63))
    for name, choice in merges.items():
        tests = np.random.default_rng(seed)  # the same for all, whichever others there are
        evidence = _Evidence.of(samples[name], pairs, rewards, base, tests)
        rows: list[ThresholdRow] = []
        for threshold, classes, merged in zip(
            choice.thresholds, choice.classes, choice.merged, strict=True
        ):
            row = _row(pairs, merged, evidence, truth)
            error = scored.error(graphs, classes, credit)
            rows.append(replace(row, threshold=threshold, score_error=error))
        within = [row for row in rows if row.is_known and row.spread_upper <= options.tolerance]
        found[name] = ChoiceCalibration(tuple(rows), within[0] if within else None)
    return Calibration(
        options=options,
        num_graphs=len(graphs),
        choices=found,
        difference=_root(_ratio(*base.sum(axis=1))),
        score_error=scored.unmerged_error,
        candidate_pairs=len(pairs.i),
        measured_states=int(np.isfinite(rewards).any(axis=1).sum()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Evidence:
    """What the continuations say about one sample of pairs.

    Attributes:
        sample: which pairs.
        squares: [sample] unbiased (V_i - V_j)^2, NaN where not measured.
        p_values: [sample] of V_i = V_j, NaN where not measured.
        base: [2, graphs] sums over all candidate pairs (``_sums``).
    """

    sample: PairSample
    squares: FloatArray
    p_values: FloatArray
    base: FloatArray

    @staticmethod
    def of(
        sample: PairSample,
        pairs: CandidatePairs,
        rewards: FloatArray,
        base: FloatArray,
        rng: np.random.Generator,
    ) -> "_Evidence":
        """The tests and squares of a sample."""
        squares = _squares(sample, pairs, rewards)
        known = np.flatnonzero(np.isfinite(squares))
        i, j = pairs.i[sample.places[known]], pairs.j[sample.places[known]]
        p_values = np.full(len(squares), np.nan)
        p_values[known] = difference_p_values(rewards, i, j, rng)
        return _Evidence(sample, squares, p_values, base)


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """The measured states whose node score is defined without any merging.

    Attributes:
        nodes: positions in the graphs laid end to end.
        values: [nodes] sampled values.
        noise: [nodes] variances of these.
        unmerged_error: mean squared error of the scores with nothing merged.
    """

    nodes: IntArray
    values: FloatArray
    noise: FloatArray
    unmerged_error: float

    @staticmethod
    def of(graphs: Sequence[RolloutGraph], credit: CreditOptions, rewards: FloatArray) -> "_Scored":
        alone = _scores(graphs, [np.arange(graph.num_nodes) for graph in graphs], credit)
        mean, noise = mean_values(rewards)
        nodes = np.flatnonzero(np.isfinite(alone) & np.isfinite(noise))
        error = _score_error(alone[nodes], mean[nodes], noise[nodes])
        return _Scored(nodes, mean[nodes], noise[nodes], error)

    def error(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[IntArray], credit: CreditOptions
    ) -> float:
        """The mean squared error with some classes."""
        return _score_error(_scores(graphs, classes, credit)[self.nodes], self.values, self.noise)


def _row(
    pairs: CandidatePairs, merged: BoolArray, evidence: _Evidence, truth: BoolArray | None
) -> ThresholdRow:
    """A row whose threshold and score error are still to be set."""
    sample = evidence.sample
    inside = merged[sample.places] & np.isfinite(evidence.squares)
    different = discoveries(evidence.p_values[inside], FALSE_DISCOVERIES)
    weights = sample.weights[inside]
    sums = _sums(sample, pairs, evidence.squares, merged)
    square, base = _ratio(*sums.sum(axis=1)), _ratio(*evidence.base.sum(axis=1))
    spread = _ratio(square, base)
    error, acceleration = jackknife(np.concatenate([sums, evidence.base]))
    above_zero = float(np.maximum(spread, 0.0))
    return ThresholdRow(
        threshold=None,
        merged_pairs=int(merged.sum()),
        merged_states=len(np.unique([pairs.i[merged], pairs.j[merged]])),
        measured_pairs=int(inside.sum()),
        right=_ratio(float(weights[~different].sum()), float(weights.sum())),
        difference=_root(square),
        spread=spread,
        spread_upper=upper_bound(above_zero, error, acceleration, CONFIDENCE),
        precision=np.nan if truth is None else _ratio((merged & truth).sum(), merged.sum()),
        recall=np.nan if truth is None else _ratio((merged & truth).sum(), truth.sum()),
        score_error=np.nan,
    )


def _squares(sample: PairSample, pairs: CandidatePairs, rewards: FloatArray) -> FloatArray:
    return squared_differences(rewards, pairs.i[sample.places], pairs.j[sample.places])


def _sums(
    sample: PairSample, pairs: CandidatePairs, squares: FloatArray, member: BoolArray
) -> FloatArray:
    """[2, graphs] of what belongs: the weighted squared differences, and the weights."""
    inside = member[sample.places] & np.isfinite(squares)
    graph_of = pairs.graph_of[sample.places[inside]]
    weights = sample.weights[inside]
    terms = (weights * squares[inside], weights)
    sums = [np.bincount(graph_of, term, pairs.num_graphs) for term in terms]
    return np.stack(sums).astype(np.float64)


def _scores(
    graphs: Sequence[RolloutGraph], classes: Sequence[IntArray], credit: CreditOptions
) -> FloatArray:
    return np.concatenate([each.score for each in graph_credits(graphs, classes, credit)])


def _score_error(scores: FloatArray, values: FloatArray, noise: FloatArray) -> float:
    if not len(scores):
        return float("nan")
    return float(((scores - values) ** 2 - noise).mean())


def _ratio(part: float, whole: float) -> float:
    """NaN unless the whole is positive."""
    return float(part / whole) if whole > 0 else float("nan")


def _root(square: float) -> float:
    """The root of an estimate of a square, which noise may have taken below 0."""
    return float(np.sqrt(np.maximum(square, 0.0)))
