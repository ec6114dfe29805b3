"""Which chains go on within a budget."""

from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.methods.growth import steady_chains
from tests.methods.test_waves import graph_of, growth


@pytest.mark.parametrize(
    ("tokens", "behind", "goes_on", "begun"),
    [
        # Edges of up to 4 tokens, paths of up to 12; what is behind 1, 2 and 3.
        (10, [8], [1], 0),  # 2 tokens would not be sure to hold another edge.
        (12, [8], [1], 1),
        (3, [8], [1], 0),  # The first one goes on in any case.
        (10, [8, 8, 2], [1], 0),  # 2 waits, and its tokens are not 3's.
        (12, [8, 8, 2], [1, 2], 0),
        (18, [8, 8, 2], [1, 2, 3], 0),
    ],
)
def test_a_chain_goes_on_or_begins_where_its_next_edge_is_sure(tokens, behind, goes_on, begun):
    active = 1 + np.arange(len(behind))
    one = replace(
        growth(graph_of([(0, None)] * len(behind)), tokens=tokens),
        active=active,
        path_tokens=12,
        tokens_behind=lambda v: behind[v - 1],
    )
    plan = steady_chains(one, 0)
    counts = {branch.node: branch.count for branch in plan.branches}
    assert counts == dict.fromkeys(goes_on, 1) | ({0: begun} if begun else {})
    assert list(plan.waiting) == [v for v in active.tolist() if v not in goes_on]
