"""Statistics of pairs of states against hand-computed numbers, enumeration and slow oracles."""

from itertools import product
from math import comb, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.evals.pair_values import (
    difference_p_values,
    discoveries,
    jackknife,
    mean_values,
    sample_strata,
    squared_differences,
    upper_bound,
)

FIRST, SECOND = np.array([0]), np.array([1])


def fisher(a: int, b: int, n: int, m: int) -> float:
    """Two-sided: tables with the same margins whose shares differ at least as much."""
    ones = a + b

    def gap(k: int) -> float:
        return abs(k / n - (ones - k) / m)

    tables = range(max(0, ones - m), min(n, ones) + 1)
    ways = {k: comb(n, k) * comb(m, ones - k) for k in tables}
    extreme = sum(way for k, way in ways.items() if gap(k) >= gap(a) - 1e-12)
    return extreme / sum(ways.values())


def rows(*counts: tuple[int, int]) -> np.ndarray:
    """Rewards with ``ones`` ones of ``size`` each, padded with NaN."""
    width = max(size for _, size in counts)
    return np.array([[1.0] * k + [0.0] * (n - k) + [nan] * (width - n) for k, n in counts])


def test_means_and_their_variances_by_hand():
    rewards = np.array([[1, 0, 0, 1], [0.5, nan, nan, nan], [nan] * 4, [1, nan, 0, nan]])
    mean, noise = mean_values(rewards)
    np.testing.assert_allclose(mean, [0.5, 0.5, nan, 0.5])
    np.testing.assert_allclose(noise, [1 / 12, nan, nan, 1 / 4])


def test_squared_differences_by_hand():
    rewards = rows((2, 2), (0, 2), (1, 2))
    i, j = np.array([0, 0, 2]), np.array([1, 2, 2])
    np.testing.assert_allclose(squared_differences(rewards, i, j), [1.0, 0.25 - 0.25, -0.5])


@settings(max_examples=40, deadline=None)
@given(p=st.floats(0, 1), q=st.floats(0, 1), n=st.integers(2, 4), m=st.integers(2, 4))
def test_the_mean_over_all_outcomes_is_the_squared_difference_of_the_values(p, q, n, m):
    expected = 0.0
    for a, b in product(range(n + 1), range(m + 1)):
        chance = comb(n, a) * p**a * (1 - p) ** (n - a) * comb(m, b) * q**b * (1 - q) ** (m - b)
        expected += chance * squared_differences(rows((a, n), (b, m)), FIRST, SECOND)[0]
    assert expected == pytest.approx((p - q) ** 2, abs=1e-12)


@pytest.mark.parametrize("counts", [((1, 8), (7, 8)), ((3, 6), (0, 9)), ((2, 5), (2, 5))])
def test_p_values_of_zeros_and_ones_are_those_of_fishers_test(counts):
    (p,) = difference_p_values(rows(*counts), FIRST, SECOND, np.random.default_rng(0))
    (a, n), (b, m) = counts
    exact = fisher(a, b, n, m)
    assert p == pytest.approx(exact, abs=5 * (exact * (1 - exact) / 20_000) ** 0.5 + 1e-4)


def test_p_values_of_graded_rewards_count_shuffles():
    rewards = np.array([[0.9, 0.8, 0.7], [0.1, 0.2, 0.3]])
    (p,) = difference_p_values(rewards, FIRST, SECOND, np.random.default_rng(0))
    assert p == pytest.approx(2 / comb(6, 3), abs=0.01)


def test_pairs_of_all_sizes_are_tested_each_with_its_own_rewards():
    rewards = rows((0, 12), (12, 12), (0, 3), (12, 12))
    i, j = np.array([0, 1, 2, 0]), np.array([1, 3, 1, 2])
    p = difference_p_values(rewards, i, j, np.random.default_rng(0))
    assert p[0] < 0.001 and p[2] < 0.01
    assert p[1] == p[3] == 1.0


def slow_discoveries(p: list[float], rate: float) -> list[bool]:
    ranked = sorted(p)
    limits = [x for k, x in enumerate(ranked, 1) if x <= rate * k / len(p)]
    return [bool(limits) and x <= limits[-1] for x in p]


@given(st.lists(st.sampled_from([0.001, 0.01, 0.02, 0.03, 0.04, 0.05, 0.2, 1.0]), max_size=12))
def test_discoveries_against_the_definition(p):
    assert discoveries(np.array(p), 0.05).tolist() == slow_discoveries(p, 0.05)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    budget=st.integers(5, 80),
    seed=st.integers(0, 100),
)
def test_a_stratified_sample_stands_for_every_stratum(sizes, budget, seed):
    strata = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    numbers = np.random.default_rng(seed + 1).random(len(strata))
    chosen, weights = sample_strata(strata, budget, numbers)
    assert len(set(chosen.tolist())) == len(chosen) <= max(budget, len(sizes))
    assert chosen.tolist() == sorted(chosen.tolist())
    drawn = np.bincount(strata[chosen], minlength=len(sizes))
    assert drawn.min() >= 1
    np.testing.assert_allclose(np.bincount(strata[chosen], weights), sizes)
    for stratum in range(len(sizes)):
        inside = np.flatnonzero(strata == stratum)
        taken = np.isin(inside, chosen)
        if not taken.all():
            assert numbers[inside[taken]].max() < numbers[inside[~taken]].min()
    for a, b in product(range(len(sizes)), repeat=2):
        if sizes[a] > sizes[b]:
            assert drawn[a] >= drawn[b]


def test_a_budget_as_large_as_the_population_takes_everything():
    chosen, weights = sample_strata(np.array([3, 1, 3, 3]), 4, np.array([0.1, 0.2, 0.3, 0.4]))
    assert chosen.tolist() == [0, 1, 2, 3] and weights.tolist() == [1.0] * 4
    assert len(sample_strata(np.zeros(0, np.int64), 4, np.zeros(0))[0]) == 0


def test_the_jackknife_against_leaving_out_by_hand():
    sums = np.random.default_rng(0).random((4, 6)) + 0.2
    left_out = []
    for g in range(6):
        a, b, c, d = np.delete(sums, g, axis=1).sum(axis=1)
        left_out.append((a / b) / (c / d))
    error, acceleration = jackknife(sums)
    deviations = [np.mean(left_out) - x for x in left_out]
    squares = sum(x**2 for x in deviations)
    assert error == pytest.approx((5 / 6 * squares) ** 0.5)
    assert acceleration == pytest.approx(sum(x**3 for x in deviations) / 6 / squares**1.5)


def test_of_a_mean_the_jackknife_gives_the_textbook_error_and_skewness():
    values = np.random.default_rng(0).exponential(size=40)
    error, acceleration = jackknife(np.stack([values, *np.ones((3, 40))]))
    assert error == pytest.approx(values.std(ddof=1) / 40**0.5)
    skewness = ((values - values.mean()) ** 3).mean() / values.std() ** 3
    assert acceleration == pytest.approx(skewness / 6 / 40**0.5)


def test_the_bound_of_a_skewed_mean_holds_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = {"skewed": 0, "normal": 0}
    for values in rng.exponential(size=(2000, 30)):
        error, acceleration = jackknife(np.stack([values, *np.ones((3, 30))]))
        held["skewed"] += upper_bound(values.mean(), error, acceleration, 0.95) >= 1.0
        held["normal"] += upper_bound(values.mean(), error, 0.0, 0.95) >= 1.0
    assert held["normal"] < 0.91 * 2000 < held["skewed"] < 0.97 * 2000


def test_an_error_that_rests_on_one_cluster_is_undefined():
    sums = np.ones((4, 3))
    sums[:2, 1:] = 0.0  # merged pairs in the first graph only
    assert np.isnan(jackknife(sums)).all()
    assert np.isnan(jackknife(np.ones((4, 1)))).all()


def test_equal_clusters_leave_no_doubt():
    assert jackknife(np.ones((4, 3))) == (0.0, 0.0)


def test_the_upper_bound_without_skew_is_the_normal_one():
    assert upper_bound(1.0, 2.0, 0.0, 0.95) == pytest.approx(1 + 2 * 1.644854, abs=1e-5)
    assert np.isnan(upper_bound(1.0, nan, nan, 0.95))
