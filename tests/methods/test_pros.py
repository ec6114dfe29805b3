"""PROS: where continuations start, and how sure the pool is of their pass rates."""

import json
import math
import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError, GraphError
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.pass_rates import LogOddsPrior, pass_rates, polya_gamma
from graphpo_agent.methods.prefix_pool import Grown, PoolOptions, PrefixPool, valuable_prefix
from graphpo_agent.methods.pros import Pros
from graphpo_agent.types import Prefix, Task
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, plain_records

# The sampler and the posterior


@pytest.mark.parametrize("shape", [0.3, 1.0, 7.5])
@pytest.mark.parametrize("tilt", [0.0, 0.7, -2.0, 6.0])
def test_polya_gamma_has_the_known_moments(shape, tilt):
    n, c = 40_000, abs(tilt)
    rng = np.random.default_rng(3)
    drawn = polya_gamma(np.full(n, shape), np.full(n, tilt), rng)
    mean = shape / 4 if c == 0 else shape / (2 * c) * math.tanh(c / 2)
    variance = (
        shape / 24 if c == 0 else shape / (4 * c**3) * (math.sinh(c) - c) / math.cosh(c / 2) ** 2
    )
    assert (drawn > 0).all()
    assert drawn.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / n))
    assert drawn.var() == pytest.approx(variance, rel=0.06)


def test_polya_gamma_has_the_known_laplace_transform():
    # E exp(−ω t²/2) = (cosh(c/2) / cosh(√(c² + t²)/2))^b, for PG(b, c).
    drawn = polya_gamma(np.full(40_000, 2.5), np.full(40_000, 1.5), np.random.default_rng(4))
    for t in (0.5, 2.0, 5.0):
        expected = (math.cosh(0.75) / math.cosh(math.hypot(1.5, t) / 2)) ** 2.5
        assert np.exp(-drawn * t * t / 2).mean() == pytest.approx(expected, abs=4e-3)
    assert polya_gamma(np.zeros(3), np.ones(3), np.random.default_rng(0)).tolist() == [0.0] * 3


def by_quadrature(question, prefixes, mu, tau, sigma):
    """Posterior mean pass rates of (passes, trials) by sums over a grid."""
    grid = [i / 20 for i in range(-160, 161)]

    def rate(x):
        return 1 / (1 + math.exp(-x))

    def likelihood(passes, trials, x):
        return rate(x) ** passes * rate(-x) ** (trials - passes)

    def bell(x, y, width):
        return math.exp(-((x - y) ** 2) / (2 * width**2))

    whole, sums = 0.0, [0.0] * (1 + len(prefixes))
    for q in grid:
        weight, means = bell(q, mu, tau) * likelihood(*question, q), []
        for passes, trials in prefixes:
            terms = [(bell(x, q, sigma) * likelihood(passes, trials, x), rate(x)) for x in grid]
            total = math.fsum(w for w, _ in terms)
            means.append(math.fsum(w * r for w, r in terms) / total)
            weight *= total
        whole += weight
        for i, value in enumerate([rate(q), *means]):
            sums[i] += weight * value
    return [x / whole for x in sums]


@pytest.mark.parametrize(
    ("question", "prefixes", "mu", "tau", "sigma"),
    [
        ((3.0, 8.0), [(8.0, 8.0), (0.0, 0.0), (1.5, 6.4)], 0.0, 1.5, 0.3),
        ((0.0, 16.0), [(4.0, 8.0)], 0.0, 1.5, 1.0),
        ((0.0, 0.0), [(7.0, 8.0), (7.0, 8.0)], -1.0, 0.7, 0.5),
        ((1.0, 3.0), [(0.0, 0.0)], -2.0, 3.0, 0.3),
    ],
)
def test_gibbs_sampling_finds_the_posterior(question, prefixes, mu, tau, sigma):
    passes, trials = zip(question, *prefixes, strict=True)
    got = pass_rates(
        np.array([-1] + [0] * len(prefixes)),
        np.array(passes),
        np.array(trials),
        LogOddsPrior(mu, tau, sigma),
        draws=4000,
        burn_in=50,
        rng=np.random.default_rng(5),
    )
    assert got == pytest.approx(by_quadrature(question, prefixes, mu, tau, sigma), abs=0.01)


def test_questions_beside_each_other_do_not_mix():
    # Question 0 always fails, question 2 always passes; their prefixes 1 and 3 were not tried.
    got = pass_rates(
        np.array([-1, 0, -1, 2]),
        np.array([0.0, 0.0, 40.0, 0.0]),
        np.array([40.0, 0.0, 40.0, 0.0]),
        LogOddsPrior(0.0, 1.5, 0.3),
        draws=200,
        burn_in=10,
        rng=np.random.default_rng(6),
    )
    assert got[0] < 0.1 and got[1] < 0.15 and got[2] > 0.9 and got[3] > 0.85


# Where a right answer is cut


def edge(parent, tokens, surprises, reward=None):
    """None among the surprises is an observation."""
    mask = [x is not None for x in surprises]
    logprobs = [math.nan if x is None else -x for x in surprises]
    return NewNode(parent, tokens, mask, logprobs, reward is not None, reward)


def graph_of_edges(*edges, prompt=(1, 2)):
    return RolloutGraph.root("g", token_ids=prompt).append(edges)


def test_a_prefix_ends_before_the_most_uncertain_token_of_the_middle_half():
    # T = 8: among the tokens 2 to 5, token 4; 9.0 lies before the range and 8.0 behind it.
    graph = graph_of_edges(
        edge(0, [10, 11, 12], [0.1, 9.0, 0.2]),
        edge(1, [13, 14, 15, 16, 17], [0.3, 2.0, 0.1, 8.0, 0.2], reward=1.0),
    )
    assert valuable_prefix(graph, 2).tolist() == [10, 11, 12, 13]


def test_of_equal_tokens_the_first_and_never_an_observation():
    graph = graph_of_edges(
        edge(0, [10, 11, 12, 13, 14, 15, 16, 17], [1, 1, None, 0.5, 0.5, None, 1, 1], reward=1.0)
    )
    assert valuable_prefix(graph, 1).tolist() == [10, 11, 12]
    observed = edge(0, [10, 11, 12, 13], [1, None, None, 1], reward=1.0)
    assert valuable_prefix(graph_of_edges(observed), 1).tolist() == []
    for tokens, expected in ([10], []), ([10, 11], [10]), ([10, 11, 12], [10]):
        short = graph_of_edges(edge(0, tokens, [1.0] * len(tokens), reward=1.0))
        assert valuable_prefix(short, 1).tolist() == expected


@given(st.integers(0, 2**32))
def test_the_cut_is_the_definition_s_on_random_chains(seed):
    rng = random.Random(seed)
    edges, tokens, surprises = [], [], []
    for parent in range(rng.randrange(1, 4)):
        count = rng.randrange(1, 6)
        own = [rng.choice([0.5, 0.5, rng.random(), None]) for _ in range(count)]
        edges.append((parent, list(range(len(tokens), len(tokens) + count)), own))
        tokens += edges[-1][1]
        surprises += own
    graph = graph_of_edges(*(edge(*e) for e in edges[:-1]), edge(*edges[-1], reward=1.0))
    total = len(tokens)
    allowed = [t for t in range(total) if total <= 4 * t < 3 * total and surprises[t] is not None]
    cut = max(allowed, key=lambda t: (np.float32(surprises[t]), -t)) if allowed else 0
    assert valuable_prefix(graph, len(edges)).tolist() == tokens[:cut]


def test_what_a_right_answer_lacks_is_one_line_that_names_the_field():
    unknown = graph_from([None, 0], [None, 1.0], logprobs=[None, [-1.0, -1.0]])
    with pytest.raises(GraphError, match=r"graph 'g', node 1: .*field `tokens`"):
        learn(PrefixPool(PoolOptions()), (task("a"), (), unknown))
    silent = graph_from([None, 0], [None, 1.0], tokens=[[1], [4, 5]])
    with pytest.raises(GraphError, match=r"graph 'g', node 1: .*field `logprobs`"):
        learn(PrefixPool(PoolOptions()), (task("a"), (), silent))
    wrong = graph_from([None, 0], [None, 0.0])
    learn(PrefixPool(PoolOptions()), (task("a"), (), wrong))


# The pool


def task(name):
    return Task(name, f"question {name}", ("x",))


def answers(*rewards, first=100, length=8):
    """Chains of distinct tokens whose most uncertain token of the middle half is the fourth."""
    edges = []
    for i, reward in enumerate(rewards):
        tokens = list(range(first + length * i, first + length * (i + 1)))
        edges.append(edge(0, tokens, [0.1] * 3 + [2.0] + [0.1] * (length - 4), reward=reward))
    return graph_of_edges(*edges)


def learn(pool, *grown, recall=lambda node: None):
    pool.update([Grown(of, Prefix(start), graph, recall) for of, start, graph in grown])


def held(pool):
    """What a pool knows, with each question's own tokens."""
    record, token_ids = pool.state()
    rest = iter(token_ids.tolist())
    for question in record.values():
        lengths = question.pop("lengths")
        question["prefixes"] = [list(islice(rest, length)) for length in lengths]
    assert not list(rest)
    return record


def resume(pool, restored):
    """As a resumed run does, with what was written."""
    record, token_ids = pool.state()
    restored.restore(json.loads(json.dumps(record)), np.frombuffer(token_ids.tobytes(), "<i4"))


def choose(pool, *names, seed=0):
    chosen = pool.choose([task(x) for x in names], np.random.default_rng(seed))
    return [chosen[name].token_ids for name in names]


def test_a_task_without_a_right_answer_begins_at_its_prompt():
    pool = PrefixPool(PoolOptions())
    assert choose(pool, "a") == [()]
    learn(pool, (task("a"), (), answers(0.0, 0.5)))
    assert choose(pool, "a") == [()]
    assert held(pool)["a"] == {
        "prefixes": [[]],
        "memories": [None],
        "passes": [0.5],
        "trials": [2.0],
    }
    restored = PrefixPool(PoolOptions())
    resume(pool, restored)
    assert held(restored) == held(pool)


def test_a_hard_question_is_continued_from_its_one_right_answer_and_left_when_that_is_easy():
    pool = PrefixPool(PoolOptions(child_spread=1.0))
    learn(pool, (task("a"), (), answers(1.0, *[0.0] * 15)))
    prefix = (100, 101, 102)
    learn(pool, (task("a"), prefix, answers(*[0.0] * 4, *[0.5] * 8)))
    assert choose(pool, "a", "b") == [prefix, ()]
    easy = PrefixPool(PoolOptions(child_spread=1.0))
    learn(easy, (task("a"), (), answers(1.0, 0.0)))
    learn(easy, (task("a"), prefix, answers(*[0.5] * 2)))
    record, token_ids = easy.state()
    record["a"]["passes"][1] = record["a"]["trials"][1] = 40.0
    easy.restore(record, token_ids)
    assert choose(easy, "a") == [()]


def test_a_prefix_of_a_prefix_is_whole():
    pool = PrefixPool(PoolOptions())
    learn(pool, (task("a"), (), answers(1.0)))
    learn(pool, (task("a"), (100, 101, 102), answers(1.0, 0.0, first=500)))
    state = held(pool)["a"]
    assert state["prefixes"] == [[], [100, 101, 102], [100, 101, 102, 500, 501, 502]]
    assert state["passes"] == pytest.approx([0.99, 1.0, 0.0])
    assert state["trials"] == pytest.approx([0.99, 2.0, 0.0])


def test_counts_decay_before_every_update_whoever_is_updated():
    pool = PrefixPool(PoolOptions(decay=0.5))
    learn(pool, (task("a"), (), answers(0.0, 0.5)))
    learn(pool, (task("b"), (), answers(0.0)))
    learn(pool, (task("a"), (), answers(0.0)))
    state = held(pool)
    assert state["a"]["passes"] == [0.125] and state["a"]["trials"] == [1.5]
    assert state["b"]["trials"] == [0.5]


def test_early_stopped_paths_count_nowhere():
    graph = graph_of_edges(edge(0, [5], [1.0]), edge(0, [6, 7], [1.0, 1.0], reward=0.0))
    pool = PrefixPool(PoolOptions())
    learn(pool, (task("a"), (), graph))
    assert held(pool)["a"]["trials"] == [1.0]


def test_the_same_prefix_is_kept_once_and_one_too_long_not_at_all():
    pool = PrefixPool(PoolOptions(max_prefix_tokens=3))
    for _ in range(2):
        learn(pool, (task("a"), (), answers(1.0)))
    learn(pool, (task("a"), (100, 101, 102), answers(1.0)))
    assert held(pool)["a"]["prefixes"] == [[], [100, 101, 102]]


def test_beyond_its_limit_a_question_loses_what_is_farthest_from_one_half():
    pool = PrefixPool(PoolOptions(max_prefixes=2, decay=1.0))
    learn(pool, (task("a"), (), answers(1.0, 1.0)))
    first, second, third = (100, 101, 102), (108, 109, 110), (116, 117, 118)
    learn(pool, (task("a"), second, answers(0.0, 0.0)))
    learn(pool, (task("a"), (), answers(0.0, 0.0, 1.0)))
    state = held(pool)["a"]
    assert state["prefixes"] == [[], list(first), list(third)]
    assert state["passes"] == [3.0, 0.0, 0.0] and state["trials"] == [5.0, 0.0, 0.0]
    # Of equals the oldest goes; what was told of a prefix that is gone counts nowhere.
    learn(pool, (task("a"), second, answers(0.0)), (task("a"), (), answers(1.0, first=900)))
    state = held(pool)["a"]
    assert state["prefixes"] == [[], list(third), [900, 901, 902]]
    assert state["trials"] == [6.0, 0.0, 0.0]


@given(st.integers(0, 2**32))
def test_counts_and_prefixes_are_the_definition_s_over_random_runs(seed):
    rng = random.Random(seed)
    pool = PrefixPool(PoolOptions(decay=0.9, max_prefixes=1000))
    passes, trials, prefixes = {}, {}, {"a": [()], "b": [()]}
    for step in range(rng.randrange(1, 6)):
        for key in trials:
            passes[key] *= 0.9
            trials[key] *= 0.9
        grown = []
        for name in rng.sample("ab", rng.randrange(1, 3)):
            start = rng.choice(prefixes[name])
            rewards = [rng.choice([0.0, 1.0, 0.75, 0.5]) for _ in range(rng.randrange(4))]
            first = 10_000 * step + 100 * rng.randrange(3)
            grown.append((task(name), start, answers(*rewards, first=first)))
            passes[name, start] = passes.get((name, start), 0.0) + sum(rewards)
            trials[name, start] = trials.get((name, start), 0.0) + len(rewards)
            for i, reward in enumerate(rewards):
                new = (*start, *range(first + 8 * i, first + 8 * i + 3))
                if reward > 0.5 and new not in prefixes[name]:
                    prefixes[name].append(new)
        learn(pool, *grown)
    for name, record in held(pool).items():
        assert [tuple(p) for p in record["prefixes"]] == prefixes[name]
        for i, p in enumerate(prefixes[name]):
            assert record["passes"][i] == pytest.approx(passes.get((name, p), 0.0))
            assert record["trials"][i] == pytest.approx(trials.get((name, p), 0.0))


def test_a_restored_pool_goes_on_as_if_nothing_had_happened():
    pool, names = PrefixPool(PoolOptions(draws=3, burn_in=0)), "abcdef"
    for step in range(4):
        chosen = choose(pool, *names, seed=step)
        grown = [answers(1.0, 0.0, first=1000 * step + i) for i in range(len(names))]
        learn(pool, *zip(map(task, names), chosen, grown, strict=True))
    restored = PrefixPool(PoolOptions(draws=3, burn_in=0))
    learn(restored, (task("z"), (), answers(1.0)))
    resume(pool, restored)
    assert held(restored) == held(pool)
    choices = [choose(pool, *names, seed=seed) for seed in range(20)]
    assert [choose(restored, *names, seed=seed) for seed in range(20)] == choices
    assert len({tuple(c) for c in choices}) > 1, "three draws leave the estimates uncertain"


def test_whole_edges_keep_what_the_expander_remembers_of_their_end():
    # T = 9. The most uncertain token of the middle half, 3 to 6, is number 5, inside the second
    # edge: the first one is kept. The second answer is uncertain in its first edge: nothing is.
    graph = graph_of_edges(
        edge(0, [10, 11, 12], [0.1, 0.1, 0.2]),
        edge(1, [13, 14, 15, 16, 17, 18], [0.3, 0.3, 2.0, None, None, 0.1], reward=1.0),
        edge(0, [20, 21, 22, 23, 24], [0.1, 0.1, 3.0, 0.1, 0.1], reward=1.0),
    )
    pool = PrefixPool(PoolOptions(cut="edge"))
    learn(pool, (task("a"), (7, 8), graph), recall=lambda node: {"node": node})
    assert held(pool)["a"]["prefixes"] == [[], [7, 8, 10, 11, 12]]
    assert held(pool)["a"]["memories"] == [None, {"node": 1}]
    restored = PrefixPool(PoolOptions(cut="edge"))
    resume(pool, restored)
    chosen = [restored.choose([task("a")], np.random.default_rng(seed))["a"] for seed in range(20)]
    assert Prefix((7, 8, 10, 11, 12), {"node": 1}) in chosen


def test_an_edge_that_ends_where_the_prefix_does_is_whole():
    # T = 8: token 4 begins the second edge.
    graph = graph_of_edges(
        edge(0, [10, 11, 12, 13], [0.1] * 4), edge(1, [14, 15, 16, 17], [2, 1, 1, 1], reward=1.0)
    )
    pool = PrefixPool(PoolOptions(cut="edge"))
    learn(pool, (task("a"), (), graph))
    assert held(pool)["a"]["prefixes"] == [[], [10, 11, 12, 13]]


def test_what_is_chosen_is_nearest_to_one_half():
    pool = PrefixPool(PoolOptions(draws=400))
    rng = random.Random(0)
    prefixes = [[], [7], [8], [9]]
    passes = {name: [float(rng.randrange(9)) for _ in prefixes] for name in "abcd"}
    pool.restore(
        {
            name: {
                "lengths": [0, 1, 1, 1],
                "memories": [None] * 4,
                "passes": counts,
                "trials": [8.0] * 4,
            }
            for name, counts in passes.items()
        },
        np.array([7, 8, 9] * 4, np.int32),
    )
    for name, prefix in zip("abcd", choose(pool, *"abcd"), strict=True):
        counts = [(x, 8.0) for x in passes[name]]
        rates = by_quadrature(counts[0], counts[1:], 0.0, 1.5, 0.3)
        distance = [abs(rate - 0.5) for rate in rates]
        assert distance[prefixes.index(list(prefix))] <= min(distance) + 0.02


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mean": math.nan}, "mean nan is not a finite number"),
        ({"spread": 0.0}, "spread 0.0 is not a finite number above 0"),
        ({"child_spread": math.inf}, "child_spread inf"),
        ({"decay": 0.0}, "decay 0.0 is outside"),
        ({"draws": 0}, "draws 0 is less than 1"),
        ({"max_prefixes": 0}, "max_prefixes 0 is less than 1"),
        ({"max_prefix_tokens": 0}, "max_prefix_tokens 0 is less than 1"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, says):
    with pytest.raises(ConfigError, match=says):
        PoolOptions(**settings)


# The method


@given(plain_records())
def test_within_an_iteration_it_is_grpo(record):
    graph = graph_of(record)
    for pros, grpo in (Pros(), Grpo()), (Pros(singleton="zero"), Grpo(singleton="zero")):
        got, expected = credit_of(pros, graph), credit_of(grpo, graph)
        np.testing.assert_array_equal(got.advantages, expected.advantages)
        np.testing.assert_array_equal(got.rows, expected.rows)


def test_a_prefix_in_the_root_is_trained_by_nobody():
    # The same continuations of a bare prompt and of one that holds a prefix.
    edges = [edge(0, [5, 6], [1.0, 1.0], reward=1.0), edge(0, [7], [1.0], reward=0.0)]
    bare, longer = graph_of_edges(*edges), graph_of_edges(*edges, prompt=(1, 2, 10, 11, 12))
    a, b = credit_of(Pros(), bare), credit_of(Pros(), longer)
    np.testing.assert_array_equal(a.advantages, b.advantages)
    assert longer.num_trained.tolist() == [0, 2, 1] and not longer.loss_mask[:5].any()


def test_it_grows_chains():
    grown = grow(Pros(), World(ends_at(2)))
    assert grown.counts(1) == [(0, 8)] and len(grown.graph.terminals) == 8


@pytest.mark.parametrize(("draws", "burn_in"), [(1, 0), (3, 2)])
def test_the_mean_is_over_the_kept_sweeps_alone(draws, burn_in):
    sure = LogOddsPrior(mean=0.0, spread=1e-6, child_spread=1e-6)
    none = np.zeros(2)
    rng = np.random.default_rng(0)
    found = pass_rates(np.array([-1, 0]), none, none, sure, draws=draws, burn_in=burn_in, rng=rng)
    assert found == pytest.approx([0.5, 0.5], abs=1e-4)


def test_a_choice_takes_the_draws_and_the_burn_in_that_are_set():
    counts = {"draws": 2, "burn_in": 3}
    pool = PrefixPool(PoolOptions(**counts))
    learn(pool, (task("a"), (), answers(1.0)))
    rng, other = np.random.default_rng(0), np.random.default_rng(0)
    pool.choose([task("a")], rng)
    state = held(pool)["a"]
    pass_rates(
        np.array([-1, 0]),
        np.array(state["passes"]),
        np.array(state["trials"]),
        LogOddsPrior(0.0, 1.5, 0.3),
        rng=other,
        **counts,
    )
    assert rng.bit_generator.state == other.bit_generator.state
