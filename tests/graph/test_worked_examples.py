"""Small graphs worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.errors import ConfigError, GraphError
from graphpo_agent.graph.advantages import correctness_advantage, z_scores
from graphpo_agent.graph.budget import Budget, Ledger, allocate, branching_at, check_schedule
from graphpo_agent.graph.credit import CreditOptions, graph_credit, graph_credits
from graphpo_agent.graph.equivalence import MergeOptions, edge_similarity, find_classes, novelty
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph


def state(parent, key=None, *, at=None, tokens=1, text=None):
    """A state to be continued; ``at``: angle of its embedding in degrees."""
    return node(parent, key, None, at, tokens, text)


def answer(parent, reward, key=None, *, at=None, text=None):
    return node(parent, key, reward, at, 1, text)


def node(parent, key, reward, at, tokens, text):
    angle = None if at is None else math.radians(at)
    embedding = None if angle is None else np.array([math.cos(angle), math.sin(angle)], np.float32)
    return NewNode(
        parent=parent,
        token_ids=(7,) * tokens,
        loss_mask=(1,) * tokens,
        logprobs=(-0.5,) * tokens,
        terminal=reward is not None,
        reward=reward,
        key=key,
        state=text,
        embedding=embedding,
    )


def grow(*nodes, key=None):
    return RolloutGraph.root("hand", token_ids=[1, 2], key=key).append(nodes)


def test_crossed_merges_would_be_a_cycle():
    # 1→3 and 2→4 with 1~4 (key a) and 2~3 (key b). Layer 2 takes the pair (1, 4) first;
    # then 2 → {1, 4} → 3 is a path between 2 and 3.
    graph = grow(state(0, "a"), state(0, "b"), state(1, "b"), state(2, "a"))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 2, 3, 1]


def test_a_third_node_cannot_put_an_ancestor_and_its_descendant_together():
    # 1→3, and 2 is like both. (1, 2) is taken in layer 1; 3 then lies below {1, 2}.
    graph = grow(state(0, "a"), state(0, "a"), state(1, "a"))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 3]


def test_higher_similarity_goes_first():
    # Angles 0, 10, 21: cos 10° = 0.985, cos 11° = 0.982, cos 21° = 0.934: all at least 0.92.
    # 4 is a child of 1, so of the pairs {(2,3), (2,4), (3,1), ...} order decides who gets whom.
    graph = grow(state(0, at=0), state(0, at=10), state(0, at=90), state(3, at=21))
    # layer 1: (1, 2) merge. layer 2: (2, 4) at 11° joins 4 to {1, 2}; no path, so all three.
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 3, 1]
    # At 0.983 only (1, 2) is similar enough; 0.982 < 0.983.
    assert find_classes(graph, MergeOptions(threshold=0.983)).tolist() == [0, 1, 1, 3, 4]


def test_ties_go_by_lower_id():
    # 1→3 and 2→4; (1, 4) and (2, 3) both at 10°. (1, 4) first; (2, 3) would then be a cycle.
    graph = grow(state(0, at=0), state(0, at=90), state(1, at=100), state(2, at=10))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 2, 3, 1]


def test_a_union_puts_whole_branches_above_each_other():
    # 7→9, and layer 4 joins 9 to 1, whose child is 4: 4 now lies below 7. In layer 5, node 11 is
    # like 7 (18°) and like 4 (20°): it joins 7, and then cannot join 4, which lies below.
    graph = grow(
        *[state(0, "A"), state(0), state(0)],
        *[state(1, at=38), state(2), state(3)],
        *[state(5, at=0), state(6)],
        *[state(7, "A"), state(8)],
        state(10, at=18),
    )
    expected = [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 10, 7]
    assert find_classes(graph, MergeOptions()).tolist() == expected


def with_embeddings(graph, rows):
    return replace(graph, embeddings=rows, has_embedding=np.ones(len(rows), bool))


def test_only_terminals_with_equal_rewards_merge():
    graph = grow(answer(0, 1.0, "x"), answer(0, 1.0, "x"), answer(0, 0.0, "x"), state(0, "x"))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 3, 4]
    never = MergeOptions(merge_terminals="never")
    assert find_classes(graph, never).tolist() == [0, 1, 2, 3, 4]


def test_keys_bind_whole_classes():
    # 2 has no key and is like 1 (key a) and 3 (key b); cos 5° both. (1, 2) goes first.
    graph = grow(state(0, "a", at=0), state(0, at=5), state(0, "b", at=10))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 3]


def test_the_layer_gap_binds_whole_classes():
    # Depths 1, 2, 3 in three branches, all alike. Gap 1 allows {1, 2}; 3 is too far from depth 1.
    graph = grow(
        state(0, "a"), state(0, "p"), state(0, "q"), state(2, "a"), state(3, "r"), state(5, "a")
    )
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 2, 3, 1, 5, 1]
    gap = MergeOptions(max_layer_gap=1)
    assert find_classes(graph, gap).tolist() == [0, 1, 2, 3, 1, 5, 6]


def test_the_number_guard_binds_whole_classes_and_leaves_keyed_pairs_alone():
    graph = grow(state(0, at=0, text="x is 4"), state(0, at=1), state(0, at=2, text="x is 5"))
    guarded = MergeOptions(guard="numbers")
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 1]
    # cos 1° ties between (1, 2) and (2, 3): lower ids first; then 3 would meet 1's number 4.
    assert find_classes(graph, guarded).tolist() == [0, 1, 1, 3]
    keyed = grow(state(0, "k", text="x is 4"), state(0, "k", text="x is 5"))
    assert find_classes(keyed, guarded).tolist() == [0, 1, 1]
    assert novelty(keyed, np.array([1]), guarded).tolist() == [0.0]


def test_similarity_of_an_edge():
    graph = grow(state(0, "a", at=60), state(1, "b", at=0), state(1, "a", at=90), state(1), key="r")
    # root has no embedding: 0. cos 60° = 1/2 though the keys differ. Equal keys: 1. Nothing: 0.
    assert edge_similarity(graph) == pytest.approx([0, 0, 0.5, 1, 0], abs=1e-7)
    opposite = grow(state(0, at=0), state(1, at=180))  # max(0, −1)
    assert edge_similarity(opposite).tolist() == [0, 0, 0]


def test_novelty_ignores_what_cannot_merge():
    graph = grow(state(0, at=0), state(0, at=60), answer(0, 1.0, at=0), state(0), state(1, at=0))
    # 1: nearest is 2 (cos 60° = .5); the terminal and its own child do not count.
    # 2: both 1 and 5 at .5.   4: nothing to compare.   5: 2 at .5; 1 is its parent.
    found = novelty(graph, np.array([1, 2, 4, 5]), MergeOptions())
    assert found == pytest.approx([0.5, 0.5, 1.0, 0.5])


def test_pooled_scores_and_both_advantages():
    # 1 and 3 are the same state, reached in one and in two steps.
    #   0 → 1 → 4 (right)
    #     → 2 → 3 → 5 (wrong), 6 (right)
    graph = grow(
        state(0, "s"), state(0, "t"), state(2, "s"), answer(1, 1.0), answer(3, 0.0), answer(3, 1.0)
    )
    classes = find_classes(graph, MergeOptions(merge_terminals="never"))
    assert classes.tolist() == [0, 1, 2, 1, 4, 5, 6]
    credit = graph_credit(graph, classes, CreditOptions())
    # S(1) = (1 + .7·1) / (1 + .7·2) = 1.7/2.4;  S(3) = (1 + .7·1) / (2 + .7·1) = 1.7/2.7
    s1, s3, s0, s2 = 1.7 / 2.4, 1.7 / 2.7, 2 / 3, 1 / 2
    assert credit.score == pytest.approx([s0, s1, s2, s3, 1, 0, 1])
    assert credit.step_reward[1:] == pytest.approx([s1 - s0, s2 - s0, s3 - s2, 1 - s1, -s3, 1 - s3])
    # Group of the root: two edges, so ±1/√2. Group of 2: one edge, 0.
    # Group of {1, 3}: 1 − s1 = .2917, −s3 = −.6296, 1 − s3 = .3704; mean .0108, std .5557.
    rewards = [1 - s1, -s3, 1 - s3]
    mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    half = 1 / math.sqrt(2)
    assert credit.correctness_advantage[1:] == pytest.approx(
        [half, -half, 0, *((r - mean) / std for r in rewards)], abs=1e-4
    )
    # a_Q = root; ℓ = 1 and 2, mean 1.5, std 1/√2, so ±1/√2 times S̄ = (s1 + s3) / 2.
    gate = (s1 + s3) / 2
    assert credit.efficiency_advantage[1:] == pytest.approx(
        [gate * half, -gate * half, -gate * half, 0, 0, 0], abs=1e-5
    )
    assert credit.advantage[1:] == pytest.approx(
        credit.correctness_advantage[1:] + 0.2 * credit.efficiency_advantage[1:]
    )


def test_backups():
    # 0 → 1 → {3 right, 4 wrong, 5 wrong};  0 → 2 right;  0 → 6 early-stopped
    graph = grow(state(0), answer(0, 1.0), answer(1, 1.0), answer(1, 0.0), answer(1, 0.0), state(0))
    alone = np.arange(graph.num_nodes)
    third = pytest.approx([2 / 4, 1 / 3, 1, 1, 0, 0, math.nan], nan_ok=True)
    assert graph_credit(graph, alone, CreditOptions()).score == third
    # mean over children with a ratio: (1/3 + 1) / 2 = 2/3
    for backup in ("mean", "class"):
        score = graph_credit(graph, alone, CreditOptions(backup=backup)).score
        assert score == pytest.approx([2 / 3, 1 / 3, 1, 1, 0, 0, math.nan], nan_ok=True)


def test_class_backup_gives_members_one_score():
    # {1, 2} lead to a right answer, a wrong one and a state that was stopped: (1 + 0) / 2.
    graph = grow(state(0, "s"), state(0, "s"), answer(1, 1.0), answer(2, 0.0), state(2))
    classes = find_classes(graph, MergeOptions())
    score = graph_credit(graph, classes, CreditOptions(backup="class")).score
    assert score == pytest.approx([0.5, 0.5, 0.5, 1, 0, math.nan], nan_ok=True)


def test_class_backup_refuses_given_classes_with_a_cycle():
    graph = grow(state(0), state(1), answer(2, 1.0))
    with pytest.raises(GraphError, match=r"graph 'hand': backup 'class' needs classes without"):
        graph_credit(graph, np.array([0, 1, 1, 3]), CreditOptions(backup="class"))


def test_rms_divides_once_by_the_graph():
    # r = ±1/2 at the root's two edges and ±1/2 below each... 1: right and wrong; 2: right, right.
    graph = grow(state(0), state(0), answer(1, 1.0), answer(1, 0.0), answer(2, 1.0), answer(2, 1.0))
    credit = graph_credit(graph, np.arange(7), CreditOptions(normalize="rms"))
    # S: root 3/4, 1: 1/2, 2: 1. r: −1/4, 1/4 | 1/2, −1/2 | 0, 0; group means are 0.
    # RMS over six edges: √((2/16 + 2/4 + 0)/6) = √(.625/6)
    rms = math.sqrt(0.625 / 6)
    expected = [-0.25 / rms, 0.25 / rms, 0.5 / rms, -0.5 / rms, 0, 0]
    assert credit.advantage[1:] == pytest.approx(expected, abs=1e-4)


def test_trajectory_advantage():
    graph = grow(state(0), answer(0, 0.0), answer(1, 1.0), answer(1, 0.0), state(0))
    credit = graph_credit(graph, np.arange(6), CreditOptions(trajectory_weight=1.0))
    # Rewards 0, 1, 0: mean 1/3, std √(1/3). Below 1: 1/2. Below 5: nothing.
    std = math.sqrt(1 / 3)
    expected = [(1 / 2 - 1 / 3) / std, -1 / 3 / std, 2 / 3 / std, -1 / 3 / std, 0]
    assert credit.trajectory_advantage[1:] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("normalize", ["std", "none", "rms"])
def test_equal_step_rewards_give_exactly_no_advantage(normalize):
    # Six times 0.1 over 6 is not 0.1 in floating point; the spread of rounding noise is none.
    parent, zeros = np.array([-1, 0, 0, 0, 0, 0, 0]), np.zeros(7, np.int64)
    reward = np.array([np.nan] + [0.1] * 6)
    found = correctness_advantage(parent, np.arange(7), reward, zeros, normalize=normalize)
    assert found[1:].tolist() == [0] * 6


def test_grpo_scores():
    assert z_scores(np.array([1.0, 0.0])) == pytest.approx([0.70711, -0.70711], abs=1e-5)
    assert z_scores(np.array([1.0, 0.0]), normalize="none") == pytest.approx([0.5, -0.5])
    assert z_scores(np.array([1.0, 1.0])).tolist() == [0.0, 0.0]
    assert z_scores(np.array([0.6])) == pytest.approx([0.6], abs=1e-6)
    assert len(z_scores(np.zeros(0))) == 0


def test_budget_halves_redundant_states_and_spends_what_is_saved():
    # 1, 2 and 4 are one state: 2 is the shortest by tokens, 4 is deeper.
    graph = grow(state(0, "s", tokens=3), state(0, "s", tokens=2), state(0, "t"), state(3, "s"))
    classes = find_classes(graph, MergeOptions())
    assert classes.tolist() == [0, 1, 1, 3, 1]
    active = np.array([1, 2, 4])
    # b = 5: 1 and 4 get 5 // 2 = 2, which saves 6 (and 1 was carried); 2 takes up to 2·5: five.
    budget = allocate(graph, classes, active, 5, 1, options=MergeOptions())
    assert budget.continuations.tolist() == [2, 10, 2]
    assert (budget.saved, budget.saved_pool) == (6, 2)
    assert budget.order.tolist() == [1, 0, 2]
    none = allocate(graph, classes, active, 5, 1, options=MergeOptions(), reallocate="none")
    assert (none.continuations.tolist(), none.saved_pool) == ([2, 5, 2], 7)
    # b = 1: everybody keeps one continuation, nothing is saved.
    one = allocate(graph, classes, active, 1, 0, options=MergeOptions())
    assert (one.continuations.tolist(), one.saved) == ([1, 1, 1], 0)


def test_the_most_novel_and_the_most_uncertain_state_come_first():
    graph = grow(state(0, "s"), state(0, "s"), state(0, at=0), state(0, at=20), state(0, at=90))
    classes = find_classes(graph, MergeOptions(threshold=0.99))
    active = np.array([1, 2, 3, 4, 5])
    # 2 is redundant: 3 // 2 = 1 saves 2. Novelty: 1: 0 (2 is equal), 3: 1 − cos 20° = .06,
    # 4: the same, 5: 1 − cos 70° = .66.
    budget = allocate(graph, classes, active, 3, 0, options=MergeOptions())
    assert budget.continuations.tolist() == [3, 1, 4, 3, 4]
    # S(1 − S): 1: .25 (undefined), 3: 0, 4: .24, 5: .16
    scores = np.array([0.5, np.nan, np.nan, 1.0, 0.4, 0.2])
    budget = allocate(
        graph, classes, active, 3, 0, options=MergeOptions(), reallocate="uncertain", scores=scores
    )
    assert budget.continuations.tolist() == [4, 1, 3, 4, 3]


def test_schedule():
    assert [branching_at((2, 5, 4), h) for h in (1, 2, 3, 4, 9)] == [2, 5, 4, 1, 1]
    check_schedule([2, 5, 1])
    for schedule, message in (
        ([], "schedule is empty"),
        ([2, 0], "schedule: layer 2 has 0, want a whole number of at least 1"),
        ([True], "schedule: layer 1 has True"),
        ([2.0], "schedule: layer 1 has 2.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_schedule(schedule)


def test_ledgers_add_up():
    total = Ledger(generated_tokens=3, saved=1) + Ledger(generated_tokens=4, tool_calls=2)
    assert total == Ledger(generated_tokens=7, tool_calls=2, saved=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, r"merge threshold 0.0 is outside \(0, 1\]"),
        ({"threshold": 1.01}, "merge threshold 1.01"),
        ({"threshold": math.nan}, "merge threshold nan"),
        ({"merge": "always"}, "merge is 'always'"),
        ({"merge_terminals": "yes"}, "merge_terminals is 'yes'"),
        ({"max_layer_gap": -1}, "max_layer_gap -1 is negative"),
        ({"guard": "words"}, "guard is 'words'"),
    ],
)
def test_bad_merge_options(options, message):
    with pytest.raises(ConfigError, match=message):
        MergeOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_weight": 1.1}, r"pool_weight 1.1 is outside \[0, 1\]"),
        ({"efficiency_weight": -0.1}, "efficiency_weight -0.1"),
        ({"efficiency_weight": math.inf}, "efficiency_weight inf"),
        ({"trajectory_weight": math.nan}, "trajectory_weight nan"),
        ({"backup": "max"}, "backup is 'max', want one of leaf, mean, class"),
    ],
)
def test_bad_credit_options(options, message):
    with pytest.raises(ConfigError, match=message):
        CreditOptions(**options)


def test_only_similarity_1_comes_before_all_others():
    # 1→3 and 2→4; (1, 4) at 0.4° has .999976, (2, 3) at 0.1° .999998, which goes first.
    graph = grow(state(0, at=0), state(0, at=90), state(1, at=90.1), state(2, at=0.4))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 2, 2, 4]


def test_the_number_guard_holds_between_a_keyed_state_and_one_without_a_key():
    # 1 and 2 have one key, so their numbers do not matter; 3 names 1's number, but not 2's.
    graph = grow(
        state(0, "k", at=0, text="x is 4"),
        state(0, "k", at=90, text="x is 5"),
        state(0, at=1, text="x is 4"),
    )
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 1]
    assert find_classes(graph, MergeOptions(guard="numbers")).tolist() == [0, 1, 1, 3]


def test_the_graph_whose_given_classes_have_a_cycle_is_named():
    good = replace(grow(state(0), state(1), answer(2, 1.0)), id="good")
    own, cyclic = np.arange(4), np.array([0, 1, 1, 3])
    options = CreditOptions(backup="class")
    with pytest.raises(GraphError, match="graph 'bad'"):
        graph_credits([good, replace(good, id="bad")], [own, cyclic], options)


def test_scores_that_are_equally_far_from_one_half_tie():
    # 1/7 · (1 − 1/7) and 6/7 · (1 − 6/7) differ in the last bit.
    graph = grow(state(0, "s"), state(0, "s"), state(0, "t"), state(0, "u"))
    scores = np.array([0.5, 1.0, 1.0, 1 / 7, 6 / 7])
    budget = allocate(
        graph,
        find_classes(graph, MergeOptions()),
        np.array([1, 2, 3, 4]),
        2,
        0,
        options=MergeOptions(),
        reallocate="uncertain",
        scores=scores,
    )
    assert budget.continuations.tolist() == [2, 1, 3, 2]


def test_a_path_that_was_stopped_early_represents_nothing():
    # 1 was stopped early: neither active nor expanded; 3, the same state, is not redundant.
    graph = grow(state(0, "s"), state(0, "t"), state(2, "s"))
    classes = find_classes(graph, MergeOptions())
    assert classes.tolist() == [0, 1, 2, 1]
    assert allocate(graph, classes, np.array([3]), 4, 0, options=MergeOptions()).saved == 0


def test_of_equal_states_the_one_with_the_shortest_whole_path_represents_them():
    # 3 and 4 are one state, as deep; 4's own edge is longer, 3's whole path is.
    graph = grow(state(0, tokens=9), state(0), state(1, "s"), state(2, "s", tokens=2))
    classes = find_classes(graph, MergeOptions())
    budget = allocate(
        graph, classes, np.array([3, 4]), 4, 0, options=MergeOptions(), reallocate="none"
    )
    assert budget.continuations.tolist() == [2, 4]


def test_of_equal_states_the_shallower_represents_them_however_long_its_edges():
    graph = grow(state(0), state(0, "s", tokens=9), state(1, "s"))
    budget = allocate(
        graph,
        find_classes(graph, MergeOptions()),
        np.array([2, 3]),
        4,
        0,
        options=MergeOptions(),
        reallocate="none",
    )
    assert budget.continuations.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("spent", "edges", "limit"),
    [(0, 2, None), (2, 2, None), (3, 1, None), (6, 1, None), (7, 1, 3), (9, 1, 1), (10, 0, 0)],
)
def test_what_can_surely_be_paid_for(spent, edges, limit):
    ledger = Ledger(generated_tokens=spent)
    assert Budget(tokens=10).affordable(ledger, 4) == (edges, limit)
    assert Budget().affordable(ledger, 4) == (None, None)
