"""Pass rates of questions and of continuations of them, from a few past rewards (PROS, section 4).

A question's log-odds ψ_q ~ N(μ, τ²); those of each prefix of it ψ_i ~ N(ψ_q, σ²); each reward of
either ~ Bernoulli(sigmoid ψ). Pólya-Gamma variables make every full conditional normal (Polson,
Scott and Windle 2013), so that Gibbs sampling draws from the posterior. A sweep draws each
question's ψ before its prefixes' from their joint conditional, which mixes faster than the paper's
turn of full conditionals and has the same posterior.
"""

from dataclasses import dataclass

import numpy as np

from graphpo_agent.graph.arrays import FloatArray, IntArray

__all__ = ["LogOddsPrior", "pass_rates", "polya_gamma"]

_TERMS = 32
"""Of the series; with the mean of the rest added, the variance is short by a millionth."""


@dataclass(frozen=True, slots=True)
class LogOddsPrior:
    """What is believed of pass rates before any reward, as log-odds.

    Attributes:
        mean: μ of a question.
        spread: τ of questions, above 0; 1.5 with mean 0 makes all rates nearly equally likely.
        child_spread: σ of a question's prefixes around it, above 0.
    """

    mean: float
    spread: float
    child_spread: float


def pass_rates(
    parent: IntArray,
    passes: FloatArray,
    trials: FloatArray,
    prior: LogOddsPrior,
    *,
    draws: int,
    burn_in: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Posterior mean pass rates.

    Example: a question with one prefix is ``parent = [-1, 0]``.

    Args:
        parent: [n] position of a prefix's question, -1 for a question.
        passes: [n] sum of the rewards seen, each in [0, 1].
        trials: [n] how many; may be fractions, where old ones count less.
        prior: see there.
        draws: kept sweeps, at least 1.
        burn_in: sweeps before them, at least 0.
        rng: of all draws.

    Returns:
        [n] mean of sigmoid(ψ) over the kept sweeps.
    """
    n = len(parent)
    child = np.flatnonzero(parent >= 0)
    question = np.flatnonzero(parent < 0)
    owner = parent[child]
    of_questions, of_children = prior.spread**-2, prior.child_spread**-2
    surplus = passes - trials / 2
    psi = np.full(n, prior.mean, np.float64)
    rates = np.zeros(n)
    for sweep in range(burn_in + draws):
        omega = polya_gamma(trials, psi, rng)
        noise = rng.standard_normal(n)
        # What the prefixes say of their question, their own log-odds integrated out.
        share = 1 / (1 + omega[child] / of_children)
        precision = of_questions + omega + np.bincount(owner, omega[child] * share, n)
        pull = of_questions * prior.mean + surplus + np.bincount(owner, surplus[child] * share, n)
        psi[question] = (pull / precision + noise / np.sqrt(precision))[question]
        precision = of_children + omega[child]
        pull = of_children * psi[owner] + surplus[child]
        psi[child] = pull / precision + noise[child] / np.sqrt(precision)
        if sweep >= burn_in:
            rates += 1 / (1 + np.exp(-psi))
    return rates / draws


def polya_gamma(shape: FloatArray, tilt: FloatArray, rng: np.random.Generator) -> FloatArray:
    """[n] draws from PG(b, c), by the first terms of its series and the mean of the others.

    PG(b, c) = 1/(2π²) Σ_k g_k / ((k − ½)² + c²/(4π²)) with g_k ~ Gamma(b, 1) (Polson, Scott and
    Windle 2013, Eq. 1), which holds for every b > 0, whole or not; b = 0 gives 0.

    Args:
        shape: [n] b, at least 0.
        tilt: [n] c.
        rng: of the draws.
    """
    half_odd = np.arange(_TERMS) + 0.5
    weight = 1 / (2 * np.pi**2 * (half_odd**2 + (tilt[:, None] / (2 * np.pi)) ** 2))
    drawn = rng.standard_gamma(shape[:, None], (len(shape), _TERMS))
    c = np.maximum(np.abs(tilt), 1e-6)  # below, the mean is that of c = 0 to 12 digits
    mean = np.tanh(c / 2) / (2 * c)
    return (weight * drawn).sum(axis=1) + shape * (mean - weight.sum(axis=1))
