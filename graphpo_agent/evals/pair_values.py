"""What a few continuations say about pairs of states: statistics that know their own noise.

The value of a state is known from n rewards only, so two states of equal value have means that
differ. Everything here takes that noise out (``squared_differences``), or asks how often it alone
would do what was seen (``difference_p_values``). Undefined is NaN.
"""

from statistics import NormalDist

import numpy as np

from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray

__all__ = [
    "difference_p_values",
    "discoveries",
    "jackknife",
    "mean_values",
    "sample_strata",
    "squared_differences",
    "upper_bound",
]

_PERMUTATIONS = 20_000
_BLOCK = 256  # pairs whose permutations are computed at a time: 40 MB


def mean_values(rewards: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Means and the variances of these means.

    Example: rewards 1, 0, 0, 1 have the mean 1/2, whose variance is estimated as 1/12.

    Args:
        rewards: [n, continuations], NaN where there is none.

    Returns:
        [n] means, NaN without rewards, and [n] s²/count with ddof 1, NaN for fewer than two.
    """
    known = np.isfinite(rewards)
    count = known.sum(axis=1)
    total = np.where(known, rewards, 0.0).sum(axis=1)
    mean = np.divide(total, count, out=np.full(len(rewards), np.nan), where=count > 0)
    squares = (np.where(known, rewards - mean[:, None], 0.0) ** 2).sum(axis=1)
    freedom = count * (count - 1)
    return mean, np.divide(squares, freedom, out=np.full(len(rewards), np.nan), where=freedom > 0)


def squared_differences(rewards: FloatArray, i: IntArray, j: IntArray) -> FloatArray:
    """Unbiased estimates of (V_i − V_j)²: those of the means, less the variances of the means.

    One estimate may be negative; a mean over many is not, but for noise.

    Args:
        rewards: [n, continuations], NaN where there is none.
        i: [pairs] rows.
        j: [pairs] other rows.
    """
    mean, noise = mean_values(rewards)
    return (mean[i] - mean[j]) ** 2 - noise[i] - noise[j]


def difference_p_values(
    rewards: FloatArray, i: IntArray, j: IntArray, rng: np.random.Generator
) -> FloatArray:
    """Permutation tests of V_i = V_j: how often shuffled rewards differ as much in their means.

    Two-sided and, up to the number of permutations, exact for any rewards; for rewards 0 and 1 it
    is Fisher's test. Never below 1 / (permutations + 1).

    Args:
        rewards: [n, continuations], NaN where there is none.
        i: [pairs] rows with at least one reward.
        j: [pairs] other such rows.
        rng: shuffles.
    """
    last = np.sort(rewards, axis=1)  # puts what is missing last
    counts = np.isfinite(rewards).sum(axis=1)
    p = np.full(len(i), np.nan)
    sizes = np.stack([counts[i], counts[j]], axis=1)
    for a, b in np.unique(sizes, axis=0).tolist():
        same = np.flatnonzero((sizes == (a, b)).all(axis=1))
        weights = np.concatenate([np.full(a, 1 / a), np.full(b, -1 / b)])
        shuffled = rng.permuted(np.tile(weights, (_PERMUTATIONS, 1)), axis=1)
        for s in range(0, len(same), _BLOCK):
            rows = same[s : s + _BLOCK]
            both = np.concatenate([last[i[rows], :a], last[j[rows], :b]], axis=1)
            seen = np.abs(both @ weights)[:, None] - 1e-9
            as_far = (np.abs(both @ shuffled.T) >= seen).sum(axis=1)
            p[rows] = (1 + as_far) / (1 + _PERMUTATIONS)
    return p


def discoveries(p_values: FloatArray, rate: float) -> BoolArray:
    """Which hypotheses fall with a false discovery rate of at most ``rate`` (Benjamini-Hochberg).

    >>> discoveries(np.array([0.01, 0.04, 0.03, 0.9]), 0.05).tolist()
    [True, False, False, False]
    """
    order = np.argsort(p_values, kind="stable")
    steps = rate * np.arange(1, len(order) + 1) / max(1, len(order))
    below = np.flatnonzero(p_values[order] <= steps)
    found = np.zeros(len(order), np.bool_)
    if len(below):
        found[order[: below[-1] + 1]] = True
    return found


def sample_strata(
    strata: IntArray, budget: int, numbers: FloatArray
) -> tuple[IntArray, FloatArray]:
    """A stratified sample: from each stratum about as many as the square root of its size.

    That lies between equal shares, which know rare strata well, and proportional ones, which know
    the whole well. Within a stratum those with the smallest numbers are taken, so that two
    stratifications with the same numbers have many members in common.

    Args:
        strata: [population] the stratum of each.
        budget: most members of the sample; every stratum gives at least one all the same.
        numbers: [population] random, in [0, 1).

    Returns:
        [sample] ascending positions, and [sample] how many members of the population each stands
        for: size of its stratum over size of its sample.
    """
    _, stratum, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    shares = _root_shares(sizes, budget)
    order = np.lexsort((numbers, stratum))
    firsts = np.cumsum(sizes) - sizes
    rank = np.empty(len(strata), np.int64)
    rank[order] = np.arange(len(strata)) - firsts[stratum[order]]
    chosen = np.flatnonzero(rank < shares[stratum])
    return chosen, (sizes / np.maximum(shares, 1))[stratum[chosen]]


def _root_shares(sizes: IntArray, budget: int) -> IntArray:
    """[strata] shares proportional to the square root of the size, no larger than it."""

    def shares(scale: float) -> IntArray:
        wanted = np.floor(scale * np.sqrt(sizes)).astype(np.int64)
        return np.clip(wanted, 1, sizes)

    low, high = 0.0, float(np.sqrt(sizes.max(initial=1))) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle).sum() <= budget else (low, middle)
    return shares(low)


def jackknife(sums: FloatArray) -> tuple[float, float]:
    """The standard error and the skewness of (a/b) / (c/d) over clusters, each left out in turn.

    Both NaN where a ratio is undefined without one of the clusters, or for fewer than two.

    Args:
        sums: [4, clusters] what each cluster adds to a, b, c and d.

    Returns:
        The standard error, and the acceleration: a sixth of the skewness of the estimate.
    """
    clusters = sums.shape[1]
    a, b, c, d = sums.sum(axis=1, keepdims=True) - sums
    if clusters < 2 or not ((b > 0) & (c > 0) & (d > 0)).all():
        return float("nan"), float("nan")
    ratios = (a / b) / (c / d)
    influence = ratios.mean() - ratios
    square = float((influence**2).sum())
    acceleration = float((influence**3).sum()) / (6 * square**1.5) if square > 0 else 0.0
    return ((clusters - 1) / clusters * square) ** 0.5, acceleration


def upper_bound(estimate: float, error: float, acceleration: float, confidence: float) -> float:
    """The one-sided confidence bound of a skewed estimate (Johnson 1978); normal without skew."""
    z = NormalDist().inv_cdf(confidence)
    return estimate + error * (z + (2 * z**2 + 1) * acceleration)
