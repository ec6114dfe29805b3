"""What the runs of a comparison came to, and what can be said about the methods from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import RunError
from graphpo_agent.report.plots import confidence_half_width
from graphpo_agent.report.run_files import Metrics, read_run

__all__ = [
    "MEASURES",
    "Comparison",
    "Interval",
    "Outcome",
    "interval",
    "mean_of_curve",
    "paired_difference",
    "read_comparison",
    "read_outcome",
    "run_path",
]

MEASURES = {
    "final_accuracy": "held-out accuracy at the end, sampled as in training",
    "greedy_accuracy": "held-out accuracy at the end, temperature 0",
    "curve_accuracy": "mean held-out accuracy over the generated tokens, up to the budget that all "
    "runs reached",
    "tokens": "generated in training",
    "steps": "of training",
    "trajectories": "finished ones per prompt, mean over the steps",
    "response_tokens": "mean length of a held-out response at the end, observations not counted",
    "entropy": "of the policy on the tokens with a gradient in the last update, nats",
    "seconds": "of rollouts and updates, without evaluations",
}
"""What is measured of each run, by its name in compare.json; NaN where a run has no such number."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and half the width of its 95 % confidence interval.

    Example: of 0.2 and 0.4, ``Interval(0.3, 1.2706)``.

    Attributes:
        mean: NaN without values.
        half_width: Student's t; NaN with fewer than two values.
    """

    mean: float
    half_width: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished run.

    Example: ``Outcome(tokens=[0, 5e4], accuracy=[0.2, 0.6], measures={"steps": 4.0, …})``.

    Attributes:
        tokens: [num_evaluations] generated before each evaluation, rising.
        accuracy: [num_evaluations] held out, in [0, 1].
        measures: ``MEASURES`` but ``curve_accuracy``, which depends on the other runs too.
        outages: held-out trajectories that outages left unscored, of all evaluations.
    """

    tokens: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    measures: Mapping[str, float]
    outages: int = 0

    def __post_init__(self) -> None:
        """Check lengths."""
        if len(self.tokens) != len(self.accuracy) or not len(self.tokens):
            raise ValueError("an outcome has one accuracy for each evaluation, and at least one")

    @property
    def before(self) -> float:
        """Accuracy before training; NaN where it was not measured or outages left none of it."""
        return float(self.accuracy[0]) if self.tokens[0] == 0 else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """Finished runs of several methods with the same seeds.

    Attributes:
        outcomes: by label, then by seed; every label has the same seeds.
        limit: a token budget beyond which no curve counts; None: there is none.
    """

    outcomes: Mapping[str, Mapping[int, Outcome]]
    limit: int | None

    @property
    def budget(self) -> float:
        """Generated tokens up to which the curves are compared: every run got so far."""
        reached = [o.measures["tokens"] for runs in self.outcomes.values() for o in runs.values()]
        return float(min(reached if self.limit is None else [*reached, self.limit]))

    def values(self, label: str, measure: str) -> dict[int, float]:
        """A measure of a method's runs, by seed."""
        runs = self.outcomes[label]
        if measure != "curve_accuracy":
            return {seed: outcome.measures[measure] for seed, outcome in runs.items()}
        end = self.budget
        return {
            # A curve that begins later than the others is another quantity than theirs.
            seed: math.nan if math.isnan(o.before) else mean_of_curve(o.tokens, o.accuracy, end)
            for seed, o in runs.items()
        }

    def summary(self, label: str, measure: str) -> Interval:
        """A measure over a method's seeds."""
        return interval(list(self.values(label, measure).values()))

    def difference(self, label: str, other: str, measure: str) -> Interval:
        """How much more ``label`` has of a measure than ``other``, seed by seed."""
        return paired_difference(self.values(label, measure), self.values(other, measure))


def interval(values: Sequence[float]) -> Interval:
    """Mean and Student-t interval of independent values; those that are not finite are left out.

    >>> interval([0.25, 0.5, 0.75, float("nan")]).mean
    0.5
    """
    known = np.array([value for value in values if math.isfinite(value)])
    if not len(known):
        return Interval(math.nan, math.nan)
    return Interval(float(known.mean()), float(confidence_half_width(known[:, None])[0]))


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> Interval:
    """Interval of ``values - others`` over the seeds that both have.

    >>> paired_difference({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5, 2: 0.9}).mean
    0.25
    """
    return interval([values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())])


def mean_of_curve(x: NDArray[np.float64], y: NDArray[np.float64], end: float) -> float:
    """Mean height of the line through the points, from the first one to ``end``.

    Args:
        x: [num_points] rising.
        y: [num_points].
        end: where to stop; behind the last point the line stays level.

    Returns:
        The area under the line over its width; the first height where the width is 0.

    Example, a rise from 0 to 1 and a level piece, (0.5 + 1) / 2:

    >>> mean_of_curve(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 2.0)
    0.75
    """
    if end <= x[0]:
        return float(y[0])
    inside = x < end
    xs = np.append(x[inside], end)
    ys = np.append(y[inside], np.interp(end, x, y))
    return float(np.sum(np.diff(xs) * (ys[1:] + ys[:-1]) / 2) / (end - x[0]))


def run_path(out: Path, label: str, seed: int) -> Path:
    """The directory of a run of a comparison."""
    return out / "runs" / label / f"seed-{seed}"


def read_comparison(
    out: Path, labels: Sequence[str], seeds: Sequence[int], limit: int | None
) -> Comparison:
    """The finished runs in a comparison's directory.

    Args:
        out: the directory.
        labels: of the methods; the first is what the others are compared with.
        seeds: of the runs of each method.
        limit: see ``Comparison``.

    Raises:
        RunError: a file cannot be read or parsed.
    """
    outcomes = {
        label: {seed: read_outcome(run_path(out, label, seed)) for seed in seeds}
        for label in labels
    }
    return Comparison(outcomes, limit)


def read_outcome(run_dir: Path) -> Outcome:
    """What a run directory's metrics say about its run.

    Raises:
        RunError: a file cannot be read or parsed, outages left no evaluation an accuracy, or a step
            does not say how many tokens were generated.
    """
    metrics = read_run(run_dir).metrics
    accuracy = metrics.columns.get("eval/accuracy", np.full(len(metrics.steps), np.nan))
    evaluated = np.isfinite(accuracy)
    if not evaluated.any():
        raise RunError(
            f"{run_dir}: none of its evaluations has an accuracy (eval/outages and "
            "eval/failed_calls in metrics.jsonl say what outages met); remove it and repeat the "
            "command"
        )
    nothing = np.full(len(metrics.steps), np.nan)
    tokens = np.where(metrics.steps == 0, 0.0, metrics.columns.get("tokens/total", nothing))
    unknown = metrics.steps[~np.isfinite(tokens)]
    if len(unknown):
        raise RunError(
            f"{run_dir / 'metrics.jsonl'}: step {unknown[0]:.0f} has no tokens/total; remove the "
            "run and repeat the command"
        )
    return Outcome(
        tokens[evaluated],
        accuracy[evaluated],
        {
            "final_accuracy": metrics.at_end("eval/accuracy"),
            "greedy_accuracy": metrics.at_end("eval/greedy_accuracy"),
            "tokens": metrics.last("tokens/total"),
            "steps": float(metrics.steps[-1]),
            "trajectories": _mean(metrics, "rollout/terminals"),
            "response_tokens": metrics.at_end("eval/response_tokens"),
            "entropy": metrics.last("update/entropy"),
            "seconds": _sum(metrics, "time/rollout") + _sum(metrics, "time/update"),
        },
        int(_sum(metrics, "eval/outages")),
    )


def _mean(metrics: Metrics, name: str) -> float:
    _, values = metrics.defined(name)
    return float(values.mean()) if len(values) else math.nan


def _sum(metrics: Metrics, name: str) -> float:
    return float(metrics.defined(name)[1].sum())
